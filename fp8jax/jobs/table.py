"""The jobs of a configuration: what each takes of it, and what it runs."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax

from fp8jax import console as console_lib
from fp8jax import hub
from fp8jax.compiled import aot
from fp8jax.config import files as config_files
from fp8jax.config import registry
from fp8jax.config import resolve as resolve_lib
from fp8jax.config.files import Config
from fp8jax.config.needs import TRAINING, Needs
from fp8jax.evaluation.settings import Noise, Tasks
from fp8jax.export import checks as export_checks
from fp8jax.export.settings import Export
from fp8jax.generation.settings import Generate, PlanInference
from fp8jax.jobs import (
  calibrate,
  checks,
  diagnose,
  evaluate,
  export,
  generate,
  memory,
  noise,
  plan_inference,
  prepare,
  preview,
  quantize,
  rl,
  rl_checks,
  search,
  sensitivity,
  train,
)
from fp8jax.kernels import choose
from fp8jax.models.config import EVAL_PRECISIONS
from fp8jax.models.hf import config as hf_config
from fp8jax.ptq.settings import Quantize
from fp8jax.rl.settings import RL
from fp8jax.run import machine
from fp8jax.run.settings import Calibrate, Prepare
from fp8jax.search.settings import Search
from fp8jax.sensitivity.settings import Sensitivity


def _spec(c: Config, needs: Needs) -> tuple[Any, ...]:
  """For a job on the devices at hand, with the files that the configuration names."""
  machine.check_platform(jax.default_backend(), jax.config.jax_platforms, jax.__version__)
  folder, _ = needs.folder(c)
  hub.fetch({needs.tokenizer(c)[0]: hub.TOKENIZER, folder: hub.WEIGHTS})
  spec = resolve_lib.resolve(c, jax.device_count(), choose.current_device(), needs=needs)
  for note in hf_config.notes(folder) if folder and jax.process_index() == 0 else ():
    print(note, file=sys.stderr)
  return (spec,)


def _text(c: Config, needs: Needs) -> tuple[Any, ...]:
  """The data and the steps: for a job that needs neither the model, the mesh nor its devices."""
  hub.fetch({c.data.tokenizer or c.init.hf: hub.TOKENIZER})
  return resolve_lib.resolve_steps(c, needs)


def _documents(c: Config, needs: Needs) -> tuple[Any, ...]:
  return _text(c, needs)[0], registry.section(c, Prepare)


def _conversations(c: Config, needs: Needs) -> tuple[Any, ...]:
  return *_text(c, needs), c.global_batch, console_lib.console()


def _program(c: Config, needs: Needs, topology: str) -> tuple[Any, ...]:
  """For devices that need not be here."""
  hub.fetch({c.init.hf: hub.WEIGHTS} if c.model.preset == "hf" else {})
  return *aot.resolve(config_files.without_files(c), topology, needs), topology


def _served(c: Config, needs: Needs, topology: str) -> tuple[Any, ...]:
  """The model and its rules, of no device; what resolves them for GPUs that need not be here."""
  name, count = aot.parse(topology)
  hub.fetch({c.init.hf: hub.WEIGHTS} if c.model.preset == "hf" else {})
  c = config_files.without_files(c)
  alone = dataclasses.replace(needs, is_on_one_device=_always)
  spec = resolve_lib.resolve(c, 1, choose.Device("cpu"), needs=alone)
  c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 1, 1, count
  return spec, name, count, lambda: aot.resolve(c, topology, needs)


@dataclasses.dataclass(frozen=True)
class Job:
  """A job.

  Attributes:
    run: of what `resolve` gives and the workdir; its result is printed, and notebooks get it.
    resolve: from the configuration to the values that `run` takes.
    option: of the command line and `dispatch.call`, e.g. "out", the folder or file that `run`
      writes; a job has one at most.
    is_for_resolve: whether `resolve` takes the option, in place of `run`.
  """

  run: Callable[..., dict[str, Any]]
  needs: Needs = Needs()
  resolve: Callable[..., tuple[Any, ...]] = _spec
  option: str = ""
  is_for_resolve: bool = False


def _always(c: Config) -> bool:
  return True


def _generates_wide(c: Config) -> bool:
  return c.generate.precision != EVAL_PRECISIONS[0]


def _evaluates_wide(c: Config) -> bool:
  return not (c.eval.tokens and EVAL_PRECISIONS[0] in (c.eval.precisions or ())) and (
    not c.eval.tasks or _generates_wide(c)
  )


# Jobs that leave the files of a run: its losses, its summary and its objective.
RUNS = ("train", "rl")
JOBS = {
  "train": Job(
    train.run,
    dataclasses.replace(
      TRAINING, problems=checks.train_problems, problems_of_spec=checks.accuracy_problems
    ),
  ),
  "evaluate": Job(
    evaluate.run,
    Needs(
      (Tasks, Generate), checks.evaluation_problems, of_weights=True, has_calibration=True,
      is_served=lambda c: bool(c.eval.tasks), batches=("eval.batch",), is_wide=_evaluates_wide,
    ),
  ),
  "generate": Job(
    generate.run,
    Needs(
      (Generate,), checks.generate_problems, of_weights=True, has_own_text=True,
      has_calibration=True, is_served=_always, batches=(),
      is_wide=_generates_wide,
    ),
  ),
  "export": Job(
    export.run,
    Needs(
      (Export,), export_checks.problems, export_checks.problems_of_spec, of_weights=True,
      takes_scores=True,
    ),
    option="out",
  ),
  "quantize": Job(
    quantize.run,
    Needs(
      (Quantize, Export), checks.quantize_problems, quantize.problems_of_spec, of_weights=True,
      is_on_one_device=_always,
    ),
    option="out",
  ),
  "sensitivity": Job(
    sensitivity.run,
    Needs(
      (Sensitivity,), checks.sensitivity_problems, of_weights=True,
      has_calibration=True, is_on_one_device=_always,  # as its switches
    ),
    option="out",
  ),
  "search": Job(
    search.run,
    Needs(
      (Tasks, Generate, Search), checks.search_problems, search.problems_of_spec, has_steps=True,
      is_on_one_device=_always,  # as its options
    ),
  ),
  "rl": Job(
    rl.run,
    Needs(
      (Tasks, Generate, RL), checks.rl_problems, rl_checks.problems_of_spec, has_steps=True,
      has_calibration=True, takes_scores=True,
    ),
  ),
  "noise": Job(
    noise.run,
    Needs(
      (Noise,), checks.noise_problems, noise.problems_of_spec, of_weights=True,
      has_calibration=True,
    ),
    option="out",
  ),
  "calibrate": Job(
    calibrate.run,
    Needs((Calibrate,), checks.calibrate_problems, of_weights=True, has_teacher=True), option="out",
  ),
  "diagnose": Job(diagnose.run, Needs((RL,), takes_scores=True)),
  "memory": Job(
    memory.run,
    Needs((Generate, RL), problems_of_spec=rl_checks.memory_problems, takes_scores=True), _program,
    "topology", is_for_resolve=True,
  ),
  "plan_inference": Job(
    plan_inference.run,
    Needs((Generate, PlanInference), checks.plan_inference_problems, is_served=_always, batches=()),
    _served, "topology", is_for_resolve=True,
  ),
  "prepare": Job(prepare.run, Needs((Prepare,)), _documents, "out"),
  "preview": Job(
    lambda *of_text: preview.run(*of_text[:-1]),  # it writes nothing
    TRAINING, _conversations,
  ),
}  # fmt: skip
