"""The file of a sweep: read, and checked as far as its trials can be before one starts."""

import collections
import itertools
import os
import random
import runpy
from collections.abc import Mapping

from fp8jax import hub
from fp8jax.config import files as config_files
from fp8jax.config import named, precision, registry, resolve
from fp8jax.config.needs import TRAINING, Needs
from fp8jax.errors import ConfigError, ConfigErrors, UserError, inside
from fp8jax.kernels import choose
from fp8jax.sweeps import spec

TRAINS = {"train": TRAINING}

# Trials of a sweep at most: a grid of more has a key too many.
MOST = 10_000


def load(
  path: str, here: int | None = 1, device: choose.Device | None = None,
  needs: Mapping[str, Needs] = TRAINS,
) -> spec.Sweep:  # fmt: skip
  """The SWEEP of a file, whose trials can start.

  Args:
    here: devices of a trial on this machine; None where trials run on others.
    device: what they are; None: that of this process.
    needs: of the jobs that trials may be of.

  Raises:
    UserError: with what is wrong with it, or with the configurations of its trials.
  """
  if not os.path.isfile(path):
    raise UserError(f"--sweep={path!r}: there is no such file; see experiments/sweeps")
  with named.of_user(path):
    sweep = runpy.run_path(path).get("SWEEP")
    if not isinstance(sweep, spec.Sweep):
      raise UserError("defines no SWEEP; write `SWEEP = fp8jax.sweeps.spec.Sweep(...)` in it")
  check(sweep, path, here, device, needs)
  return sweep


def check(
  sweep: spec.Sweep, where: str, here: int | None = 1, device: choose.Device | None = None,
  needs: Mapping[str, Needs] = TRAINS,
):  # fmt: skip
  """Raises ConfigError where a trial could not start; see `load`."""
  problems = ConfigErrors()
  problems.check(
    0 < len(sweep) <= MOST,
    f"{where}: {len(sweep):,} trials, expected 1 to {MOST:,}; give axes fewer values, or draw some "
    "with Random or search",
  )
  problems.refuse()  # the other checks look at every point
  whose = [*sweep.varying, tuple(sweep.fixed), ("seed",)]
  keys = list(itertools.chain(*whose))
  for key in dict.fromkeys(k for k in keys if keys.count(k) > 1):
    how = "name seeds=(0, 1, ...)" if key == "seed" else "leave it in one of them"
    problems.found.append(f"{where}: {key!r} stands in two axes, in fixed, or in search; {how}")
  for arm in filter(None, sweep.arms):
    problems.attempt(lambda arm=arm: inside("the sweep's folder", arm, f"{where}: arms"))
  problems.refuse()
  workdirs = [trial.workdir for trial in sweep.trials("")]
  for again in dict.fromkeys(w for w, n in collections.Counter(workdirs).items() if n > 1):
    problems.found.append(f"{where}: {again} occurs twice; drop one")
  distributions = sweep.search.distributions if sweep.search else {}
  drawn = {key: one.draw(random.Random(0)) for key, one in distributions.items()}
  is_there = os.path.isfile(sweep.config)  # else each trial says so
  job = problems.attempt(lambda: named.job(sweep.config)) if is_there else "train"
  problems.check(
    job is None or job in needs,
    f"{sweep.config}: a trial of JOB={job!r} leaves no run to read; expected {' or '.join(needs)}",
  )
  problems.refuse()
  for arm, point in itertools.product(sweep.arms, sweep.points()):
    trial = sweep.trial("", arm, {**point, **drawn}, sweep.seeds[0])
    problems.attempt(lambda trial=trial: _check_trial(sweep, trial, here, device, needs[str(job)]))
  problems.found = list(dict.fromkeys(problems.found))
  problems.refuse()


def _check_trial(
  sweep: spec.Sweep, trial: spec.Trial, here: int | None, device: choose.Device | None, needs: Needs
):
  """Refuses a configuration that launch.py would refuse; elsewhere, whatever its devices."""
  c = named.load(trial.config, trial.changes)
  try:
    config_files.check_keys(c, registry.base())
    if sweep.search and not c.eval.tokens:
      raise UserError(
        "eval.tokens=0 evaluates nothing, and a search suggests points from held-out losses; set "
        "eval.tokens=8192, or leave search out"
      )
    if here is None:
      resolve.resolve_data(c)
      precision.read(c)
      return
    hub.fetch({c.data.tokenizer: hub.TOKENIZER, c.init.hf: hub.WEIGHTS})
    resolve.resolve(c, here, device or choose.current_device(), needs=needs)
  except (ValueError, OSError) as e:
    said = e.problems if isinstance(e, ConfigError) else [str(e)]
    raise ConfigError([f"{trial.config}: {problem}" for problem in said]) from e
