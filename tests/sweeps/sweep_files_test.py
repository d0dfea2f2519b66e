"""A sweep's file is checked as configurations are, before a trial starts: one line per mistake."""

import errno
import json
import math
import os
import time

import numpy as np
import pytest

from fp8jax.errors import ConfigError, UserError
from fp8jax.jobs import dispatch
from fp8jax.jobs import table as jobs_table
from fp8jax.sweeps import file, run, spec, stacked, table

HEAD = "from fp8jax.sweeps.spec import *\n"
D = "'configs/debug.py'"
SEARCH = "Optuna({'optim.b1': Choice((0.8, 0.9))}, 1)"
RATES = "Grid({'optim.peak_lr': (1e-3, 2e-3)})"


def _sweep(**fields) -> str:
  """The text of a file whose Sweep has these fields."""
  fields = {"config": D, "axes": f"({RATES},)"} | fields
  return f"{HEAD}SWEEP = Sweep({', '.join(f'{k}={v}' for k, v in fields.items())})\n"


def _axis(axis: str, **fields) -> str:
  return _sweep(axes=f"({axis},)", **fields)


# Each file, and words of the message beside the file's name.
FILES = {
  "syntax": ("SWEEP = Sweep(", ("line 1", "'(' was never closed", "no valid Python")),
  "raises": ("x = 1\nx / 0", ("line 2", "ZeroDivisionError")),
  "exits": ("import sys\nsys.exit(0)", ("line 2", "sys.exit(0)", "remove")),
  "nul": ("x = 1\n\0", ("null bytes",)),
  "import": ("import nosuch", ("line 1", "nosuch")),
  "negative seed": (_sweep(search="Optuna({'optim.b1': Uniform(0, 1)}, 1, seed=-1)"),
                    ("Optuna(seed=-1)", "from 0 to 2^31 - 1")),
  "nothing": ("x = 1", ("defines no SWEEP",)),
  "no sweep": ("SWEEP = 3", ("defines no SWEEP",)),
  "field": (_sweep(sedes="(0,)"), ("line 2", "sedes")),
  "config": (_sweep(config="3"), ("config=3", "path of a config file")),
  "no config": (_sweep(config="'configs/nosuch.py'"), ("configs/nosuch.py", "no config file")),
  "grid number": (_axis("Grid({'steps': 3})"), ("Grid(values={'steps': 3})", "tuple of values")),
  "grid text": (_axis("Grid({'optim.schedule': 'wsd'})"), ("'wsd'", "tuple of values")),
  "grid once": (_axis("Grid({'steps': (n for n in (1, 2))})"), ("generator", "tuple of values")),
  "grid empty": (_axis("Grid({'steps': ()})"), ("one value or more",)),
  "points": (_axis("Points(({'steps': 3}, 4))"), ("Points(listed=", "{key: value} each")),
  "no tuple": (_sweep(axes=RATES), ("axes=Grid(", "a tuple of axes")),
  "no axis": (_sweep(axes="({'steps': (1, 2)},)"), ("axes=({'steps'", "a tuple of axes")),
  "log of 0": (_axis("Random({'optim.peak_lr': LogUniform(0, 1)}, 2)"), ("low=0", "above 0")),
  "bounds": (_axis("Random({'steps': Integer(5, 1)}, 2)"), ("high=1", "at least low=5")),
  "fraction": (_axis("Random({'steps': Integer(1, 2.5)}, 2)"), ("high=2.5", "a whole number")),
  "nan bound": (_axis("Random({'optim.b1': Uniform(0, float('nan'))}, 2)"), ("high=nan",)),
  "choice": (_axis("Random({'steps': Choice(())}, 2)"), ("Choice(values=())", "one value")),
  "drawn": (_axis("Random({'steps': (1, 2)}, 2)"), ("distributions=", "Uniform, LogUniform")),
  "random 0": (_axis("Random({'steps': Choice((1, 2))}, 0)"), ("count=0", "at least 1")),
  "search 0": (_sweep(search="Optuna({'steps': Choice((1, 2))}, 0)"), ("count=0", "at least 1")),
  "search": (_sweep(search="Random({'steps': Choice((1, 2))}, 2)"), ("search=Random", "Optuna(")),
  "no objective": (_sweep(search=SEARCH, fixed="{'eval.tokens': 0}"),
                   ("eval.tokens=0", "a search suggests", "set eval.tokens=8192")),
  "arms": (_sweep(arms="'bf16'"), ("arms='bf16'", "a tuple of one name")),
  "seeds": (_sweep(seeds="3"), ("seeds=3", "a tuple of one whole number")),
  "seed": (_sweep(seeds="(0.5,)"), ("seeds=(0.5,)", "whole number")),
  "no seed": (_sweep(seeds="()"), ("seeds=()",)),
  "fixed": (_sweep(fixed="('steps', 3)"), ("fixed=('steps', 3)", "{key: value}")),
  "slurm": (_sweep(slurm="'gpu'"), ("slurm='gpu'", "parameter")),
  "nan": (_sweep(stop_above="float('nan')"), ("stop_above=nan", "above 0")),
  "negative": (_sweep(stop_above="-1"), ("stop_above=-1", "above 0")),
  "two axes": (_sweep(axes=f"({RATES}, {RATES})"), ("'optim.peak_lr'", "leave it in one")),
  "axis and fixed": (_sweep(fixed="{'optim.peak_lr': 1.0}"), ("'optim.peak_lr'", "in fixed")),
  "axis and search": (
    _sweep(search="Optuna({'optim.peak_lr': Uniform(0, 1)}, 2)"), ("'optim.peak_lr'", "search"),
  ),
  "axis of seeds": (_axis("Grid({'seed': (0, 1)})"), ("'seed'", "name seeds=(0, 1, ...)")),
  "fixed seed": (_sweep(fixed="{'seed': 3}"), ("'seed'", "name seeds=(0, 1, ...)")),
  "arm outside": (_sweep(arms="('bf16', '../../x')"), ("arms names '../../x'", "inside")),
  "arm above": (_sweep(arms="('..',)"), ("arms names '..'", "inside")),
  "arm absolute": (_sweep(arms="('/x',)"), ("arms names '/x'", "inside")),
  "arm": (_sweep(arms="('bf16', 'bf61')"), ("configs/debug.py:bf61", "'bf61'")),
  "batch 0": (_sweep(fixed="{'global_batch': 0}"), ("global_batch=0 must be at least 1",)),
  "batch": (_axis("Grid({'global_batch': (8, 9), 'grad_accum_steps': (2,)})"), ("global_batch=9",)),
  "key": (_axis("Grid({'optim.peak_lrr': (1.0,)})"), ("did you mean 'optim.peak_lr'",)),
  "kind": (_axis("Grid({'steps': ('x',)})"), ("steps='x'",)),
  "twice": (_axis("Grid({'optim.peak_lr': (1.0, 1.0)})"), ("peak_lr=1.0 occurs twice",)),
  "10^7": (
    _axis("Grid({k: tuple(range(1, 11)) for k in ('steps', 'seed', 'global_batch', 'seq_len',"
          " 'eval.tokens', 'eval.batch', 'log.every')})"), ("10,000,000 trials", "Random"),
  ),
  "10^9 drawn": (_axis("Random({'optim.b1': Uniform(0, 1)}, 10**9)"), ("1,000,000,000 trials",)),
}  # fmt: skip


@pytest.mark.parametrize("text, words", FILES.values(), ids=FILES)
def test_a_mistake_in_a_sweeps_file_is_named(text, words, tmp_path, repository, monkeypatch):
  monkeypatch.chdir(repository)
  (tmp_path / "s.py").write_text(text)
  begun = time.perf_counter()
  with pytest.raises(UserError) as e:
    file.load(str(tmp_path / "s.py"))
  lines = e.value.problems if isinstance(e.value, ConfigError) else [str(e.value)]
  assert time.perf_counter() - begun < 2
  assert len(lines) == 1 and "\n" not in lines[0] and all(w in lines[0] for w in words), lines
  assert any(name in lines[0] for name in ("s.py", "configs/debug.py", "configs/nosuch.py"))


def test_a_search_over_a_configuration_without_sections_names_them(tmp_path):
  made = "ConfigDict({'seed': 0, 'steps': 4, 'optim': {'b1': 0.9}})"
  text = f"from ml_collections import ConfigDict\ndef get_config(arm=''):\n  return {made}\n"
  (tmp_path / "c.py").write_text(text)
  config = repr(str(tmp_path / "c.py"))
  (tmp_path / "s.py").write_text(_sweep(config=config, axes="()", search=SEARCH))
  with pytest.raises(ConfigError, match="eval.*: missing; begin get_config with"):
    file.load(str(tmp_path / "s.py"))


def test_mistakes_of_all_trials_are_reported_together(tmp_path, repository, monkeypatch):
  monkeypatch.chdir(repository)
  axes = "Grid({'optim.peak_lrr': (1.0,)}), Grid({'steps': ('x', 0)}), Grid({'seq_len': (-1,)})"
  (tmp_path / "s.py").write_text(_sweep(axes=f"({axes})", arms="('bf16', 'block_128')"))
  with pytest.raises(ConfigError) as e:
    file.load(str(tmp_path / "s.py"))
  assert len(e.value.problems) == 2 and "did you mean" in e.value.problems[0]  # of two arms
  (tmp_path / "s.py").write_text(_axis("Grid({'steps': ('x', 0), 'seq_len': (-1, 256)})"))
  with pytest.raises(ConfigError) as e:
    file.load(str(tmp_path / "s.py"))
  said = str(e.value)
  assert "steps='x'" in said and "steps=0" in said and "seq_len=-1" in said
  assert len(e.value.problems) == len({*e.value.problems})


def test_trials_are_checked_as_the_job_of_their_file(tmp_path, repository, monkeypatch, capsys):
  """Sections of other jobs, a reward head, and None in place of a number too."""
  monkeypatch.chdir(repository)
  pairs = tmp_path / "pairs.jsonl"
  pairs.write_text(json.dumps({"prompt": "a=", "chosen": "77", "rejected": "7"}) + "\n")
  values = {
    "model.reward_head": True, "rl.loss": "reward", "rl.pairs": str(pairs), "eval.every": 0,
    "rl.eval_pairs": str(pairs), "precision.rules": (("head", "bf16"), ("layers/.*", "bf16")),
  }  # fmt: skip
  (tmp_path / "c.py").write_text(
    "from configs import debug\nJOB = 'rl'\ndef get_config(arm=''):\n  c = debug.get_config(arm)\n"
    f"  c.update_from_flattened_dict({values})\n  return c\n"
  )
  fields = {"config": f"'{tmp_path}/c.py'", "axes": "(Grid({'model.reward_head': (True, None)}),)"}
  (tmp_path / "s.py").write_text(_sweep(**fields))
  needs = {name: jobs_table.JOBS[name].needs for name in jobs_table.RUNS}
  with pytest.raises(ConfigError) as e:
    file.load(str(tmp_path / "s.py"), needs=needs)
  (problem,) = e.value.problems  # of None alone
  assert "rl.loss='reward' trains a reward head: set model.reward_head" in problem
  (tmp_path / "s.py").write_text(_sweep(config=fields["config"]))
  assert len(sweep := file.load(str(tmp_path / "s.py"), needs=needs)) == 2
  first = sweep.trials("")[0]  # the loss of RL is none of text
  assert first.bound(1.0) == math.inf and spec.Trial("configs/debug.py", {}, "").bound(1.0) == 1.0
  with pytest.raises(ConfigError, match="JOB='rl' need runs of their own; leave --vmap out"):
    stacked.groups(sweep.trials(str(tmp_path)))
  (tmp_path / "c.py").write_text((tmp_path / "c.py").read_text().replace("'rl'", "'evaluate'"))
  assert dispatch.run_sweep(str(tmp_path / "s.py"), ".", str(tmp_path / "w"), 1, "", True) == 1
  said = "c.py: a trial of JOB='evaluate' leaves no run to read; expected train or rl"
  assert said in capsys.readouterr().err


def test_names_of_many_values_are_those_that_file_systems_take(tmp_path):
  points = tuple({"data.tokenizer": 3 * ("é" * 20 + end), "init.hf": "x" * 90} for end in "ab")
  sweep = spec.Sweep("c.py", axes=(spec.Points(points),), arms=("a" * 180,))
  names = [t.workdir for t in sweep.trials("")]
  assert len({*names}) == 2 and all(len(os.fsencode(name)) <= 255 for name in names)
  for name in names:
    (tmp_path / name).mkdir()


def test_values_that_are_read_often_are_taken(tmp_path, repository, monkeypatch):
  """Lists, ranges and arrays too."""
  monkeypatch.chdir(repository)
  values = "{'optim.peak_lr': np.logspace(-4, -2, 3), 'global_batch': range(1, 3)}"
  text = _sweep(axes=f"[Grid({values})]")
  (tmp_path / "s.py").write_text("import numpy as np\n" + text)
  sweep = file.load(str(tmp_path / "s.py"))
  assert len(sweep) == len(sweep.trials("x")) == 6
  rates = sorted({t.changes["optim.peak_lr"] for t in sweep.trials("x")})
  np.testing.assert_allclose(rates, (1e-4, 1e-3, 1e-2))


def test_trials_of_other_machines_are_checked_without_their_devices(
  tmp_path, repository, monkeypatch
):
  """A mesh of eight and a kernel of theirs stand; a key, a number or a recipe does not."""
  monkeypatch.chdir(repository)
  fixed = "{'mesh.fsdp': 64, 'kernels.attention': 'cudnn'}"
  (tmp_path / "s.py").write_text(_sweep(fixed=fixed))
  assert len(file.load(str(tmp_path / "s.py"), None)) == 2
  with pytest.raises(ConfigError, match="mesh"):
    file.load(str(tmp_path / "s.py"), 1)
  for fields, word in (
    ({"fixed": "{'global_batch': 0}"}, "global_batch=0"),
    ({"arms": "('bf61',)"}, "bf61"),
    ({"fixed": "{'stepz': 0}"}, "stepz"),
  ):
    (tmp_path / "s.py").write_text(_sweep(**fields))
    with pytest.raises(ConfigError, match=word):
      file.load(str(tmp_path / "s.py"), None)


@pytest.mark.parametrize(
  "given, message",
  [
    (dict(parallel=-1), "--parallel=-1: expected 1 or more, or 0"),
    (dict(is_mapped=True, submit="slurm"), "leave --submit, --print or --vmap out"),
    (dict(is_mapped=True, is_printed=True), "leave --submit, --print or --vmap out"),
    (dict(submit="slrum"), "--submit='slrum' is not one of slurm, local"),
    (dict(submit="slurm"), "no `sbatch`; start the sweep where jobs are submitted"),
    (dict(submit="local", slurm="{'timeout': 3}"), "is not what submitit's executor takes"),
    (dict(search=SEARCH, is_printed=True), "a search suggests"),
    (dict(search=SEARCH, is_mapped=True), "a search suggests"),
    (dict(workdir="s.py"), "cannot be a folder: File exists; name another"),
  ],
  ids=str,
)
def test_options_that_do_not_go_together_are_refused(
  given, message, tmp_path, repository, monkeypatch
):
  monkeypatch.chdir(repository)
  monkeypatch.setenv("PATH", "")
  if given.get("submit"):
    pytest.importorskip("submitit")
  options = {"parallel": 0, "submit": "", "is_printed": False, "is_mapped": False, "workdir": "out"}
  fields = {k: v for k, v in given.items() if k not in options}
  options |= {k: v for k, v in given.items() if k in options}
  options["folder"] = str(tmp_path / options.pop("workdir"))
  (tmp_path / "s.py").write_text(_sweep(**fields))
  with pytest.raises(UserError, match=message):
    run.run(str(tmp_path / "s.py"), ".", **options)
  assert not (tmp_path / "out" / "sweep.json").exists()


def test_a_folder_is_of_one_sweep(tmp_path, monkeypatch):
  """Two files of one name share runs/NAME; one that has begun keeps its table and its search."""
  monkeypatch.chdir(tmp_path)
  sweep, began = spec.Sweep("c.py"), []
  (tmp_path / "out").mkdir()
  table.claim("out", "a/s.py", sweep)
  begun = (tmp_path / "out" / "sweep.json").read_text()
  table.claim("out", str(tmp_path / "a" / "s.py"), sweep)  # the same one
  (tmp_path / "a").mkdir()
  (tmp_path / "link").symlink_to(tmp_path / "a")
  monkeypatch.chdir(tmp_path / "a")
  for folder, path in (("../out", "s.py"), (str(tmp_path / "out"), "../link/s.py")):
    table.claim(folder, path, sweep)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(file, "load", lambda *_, **needs: sweep)
  monkeypatch.setattr(run.plan_lib, "of", lambda *_: began.append("process") or pytest.fail())
  monkeypatch.setattr(run, "_mapped", lambda *_: began.append("mapped") or pytest.fail())
  for is_mapped in (False, True):
    with pytest.raises(
      UserError, match=r"is of the sweep '\.\./a/s.py'.* this is '\.\./b/s.py'; name"
    ):
      run.run("b/s.py", ".", str(tmp_path / "out"), 1, "", False, is_mapped)
  assert not began and (tmp_path / "out" / "sweep.json").read_text() == begun


@pytest.mark.parametrize("workdir, folder", [("", "runs/s"), ("~/out", "home/out")])
def test_a_full_disk_names_the_folder_of_the_sweep(workdir, folder, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path / "home"))

  def write(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(run, "run", write)
  assert dispatch.run_sweep("a/s.py", ".", workdir, 1, "", False) == 1
  assert str(tmp_path / folder) in capsys.readouterr().err
