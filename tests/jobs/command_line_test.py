"""Mistakes on the command line end in one message that names the fix, before anything is loaded."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from absl import app, flags

from configs import base
from fp8jax.config import files as config_files
from fp8jax.config import identity
from fp8jax.errors import UserError
from fp8jax.jobs import command_line, dispatch, train

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEBUG = "--config=configs/debug.py"
# ml_collections 1.1 loads files with a method that Python means to remove.
loads_config_file = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
COMMAND_LINES = [
  ([], "error: --config=FILE is required, for example --config=configs/debug.py"),
  (["--sweep="], "error: --config=FILE is required, for example --config=configs/debug.py"),
  (["--job=doctor", "--job=train"],
   "error: --config=FILE is required, for example --config=configs/debug.py"),
  ([DEBUG, "--config.optim.peak_lrr=1"],
   "error: unknown key --config.optim.peak_lrr; did you mean --config.optim.peak_lr?"),
  ([DEBUG, "--config.step=5"], "error: unknown key --config.step; did you mean --config.steps?"),
  ([DEBUG, "--config.peak_lr=1"],
   "error: unknown key --config.peak_lr; did you mean --config.optim.peak_lr?"),
  ([DEBUG, "--config.zzzzqq=1"],
   "error: unknown key --config.zzzzqq; there is none like it, see --help-config"),
  # Wishes, not misspellings: a section in common makes no key of them.
  *(([DEBUG, f"--config.{wish}=1"],
     f"error: unknown key --config.{wish}; there is none like it, see --help-config")
    for wish in ("log.wandb", "export.gguf", "optim.muon", "data.collate")),
  ([DEBUG, "--config.optm.peak_lr=1"], "did you mean --config.optim.peak_lr?"),
  ([DEBUG, "--config.optim.warmup=1"], "did you mean --config.optim.warmup_steps?"),
  ([DEBUG, "--steps=5"], "Unknown command line flag 'steps'; did you mean --config.steps?"),
  ([DEBUG, "--optim.peak_lr=5"], "'optim.peak_lr'; did you mean --config.optim.peak_lr?"),
  ([DEBUG, "--job=sft"], "'compare', 'doctor'; there is no such job"),
  (["--config=configs/llama.py"], "no config file 'configs/llama.py'; configs has base.py, "),
  ([DEBUG, "--config.data.sources.main.paht=x"],
   "did you mean --config.data.sources.main.path?"),
  ([DEBUG, "--config.steps=many"],
   "flag --config.steps=many: invalid literal for int() with base 10: 'many'"),
  ([DEBUG, "--config.steps=1.5"], "flag --config.steps=1.5: invalid literal for int()"),
  ([DEBUG, "--config.optim.peak_lr=high"],
   "flag --config.optim.peak_lr=high: could not convert string to float: 'high'"),
  ([DEBUG, "--config.log.tensorboard=maybe"],
   "flag --config.log.tensorboard=maybe: ('Non-boolean argument"),
  ([DEBUG, "--config.mesh=8"], "flag --config.mesh=8: Failed to parse '8' as a ConfigDict"),
  ([DEBUG, "--job=tarin"],
   "error: --job='tarin' is not one of 'train', 'evaluate', 'prepare', 'preview', 'export', "
   "'calibrate', 'diagnose', 'memory', 'plan_inference', 'generate', 'quantize', 'sensitivity', "
   "'search', 'rl', 'noise', 'report', 'compare', 'doctor'; "
   "did you mean 'train'?"),
  ([DEBUG, "--jobb=train"], "Unknown command line flag 'jobb'. Did you mean: job ?"),
  (["--config=configs/debgu.py"],
   "error: no config file 'configs/debgu.py'; did you mean configs/debug.py?"),
  (["--config", "configs/debgu.py", "--config.steps=1"],
   "error: no config file 'configs/debgu.py'; did you mean configs/debug.py?"),
  (["--config=experiments/2025_infir2/config.py:bf17"],
   ": unknown arm 'bf17'; expected one of bf16, block_128"),
  (["--config=experiments/2025_infir2/config.py:bf17", "--config.steps=1"],
   "error: experiments/2025_infir2/config.py, line "),
  (["--sweep=experiments/sweeps/recipes_by_rate.py", DEBUG],
   "error: --config=configs/debug.py beside --sweep: the sweep's file names its config"),
  (["--sweep=experiments/sweeps/recipes_by_rate.py", "--job=evaluate"],
   "error: --job=evaluate beside --sweep: the JOB of its config says what its trials do; leave it"),
  (["--sweep=experiments/sweeps/recipes_by_rate.py", "--config.steps=7"],
   "error: --config.steps=7 beside --sweep: state it in the sweep's file, fixed={'steps': 7}"),
  (["--sweep=experiments/sweeps/recipes_by_rate.py", "--noconfig.log.tensorboard"],
   "state it in the sweep's file, fixed={'log.tensorboard': ...}"),
  (["--sweep=experiments/sweeps/recipes_by_rate.py", "--config.data.tokenizer=/x"],
   "state it in the sweep's file, fixed={'data.tokenizer': ...}"),
  (["--job=doctor", "--workdir=x"], "error: --workdir is not read by --job=doctor; leave it out"),
  (["--sweep=experiments/sweeps/recipes_by_rate.py", "--distributed"],
   "error: --distributed is not read by --sweep; leave it out"),
  (["--sweep=experiments/sweeps/recipes_by_rate.py", "--out=x"],
   "error: --out is not read by --sweep; leave it out"),
  (["--job=report", "--out=x"], "error: --out is not read by --job=report; leave it out"),
  (["--job=doctor", "--topology=h200:8"],
   "error: --topology is not read by --job=doctor; leave it out"),
  ([DEBUG, "--baseline=bf16"], "error: --baseline is not read by --job=train; leave it out"),
  *(([DEBUG, option], f"error: --{option.strip('-').split('=')[0]} without --sweep=FILE")
    for option in ("--vmap", "--print", "--parallel=2", "--submit=slurm")),
]  # fmt: skip


@loads_config_file
@pytest.mark.parametrize("arguments, message", COMMAND_LINES,
                         ids=[" ".join(c[0]) or "nothing" for c in COMMAND_LINES])  # fmt: skip
def test_command_line_mistake_is_named(arguments, message, parse, capsys):
  with pytest.raises(SystemExit) as e:
    parse(*arguments)
  said = f"{e.value.code}\n{capsys.readouterr().err}"
  assert e.value.code not in (0, None) and message in said


@loads_config_file
def test_a_file_names_its_job_and_the_command_line_overrules_it(parse, tmp_path):
  path = tmp_path / "c.py"
  text = (
    "from configs import base\nJOB = 'rl'\ndef get_config(arm=''):\n  return base.get_config()\n"
  )
  path.write_text(text)
  for arguments, job in (([], "rl"), (["--job=memory"], "memory")):
    parse(f"--config={path}", *arguments)
    assert flags.FLAGS["job"].value == job
  parse(DEBUG)
  assert flags.FLAGS["job"].value == "train"
  path.write_text(text.replace("'rl'", "'tarin'"))
  with pytest.raises(SystemExit) as e:
    parse(f"--config={path}")
  assert "c.py: JOB='tarin' is not one of" in f"{e.value.code}"


@loads_config_file
def test_command_line_overrides_reach_the_config(parse):
  c = parse(f"{DEBUG}:bf16", "--config.steps=7", "--config.precision.rules=(('.*', 'bf16'),)",
            "--config.model.num_layers=3", "--config.data.sources.main.path=x")  # fmt: skip
  assert (c.steps, c.model.num_layers, c.data.sources.main.path) == (7, 3, "x")
  assert c.precision.rules == ((".*", "bf16"),)


@loads_config_file
def test_an_optional_key_takes_none_and_another_does_not(parse):
  names = ("model.num_layers", "model.rope_theta", "model.reward_head", "model.mixers", "steps")
  c = parse(DEBUG, *(f"--config.{name}=None" for name in names))
  assert [c.model[name.partition(".")[2]] for name in names[:4]] == [None] * 4
  with pytest.raises(UserError, match="^1 problem.*\n  - steps=None: expected a whole number$"):
    config_files.check_keys(c, base.get_config())


@pytest.mark.parametrize(
  "arguments, message",
  [
    ([f"{DEBUG}:block128"],
     "error: 1 problem in the config:\n"
     "  - precision.rules: unknown recipe 'block128'; did you mean 'block_128'?"),
    # Both before JAX is imported; test_command_line_mistake_is_named has them in this process.
    pytest.param([DEBUG, "train"], "unexpected argument 'train'; options are written --name=value",
                 marks=pytest.mark.slow),
    pytest.param([DEBUG, "--config.stepz=1"],
                 "error: unknown key --config.stepz; did you mean --config.steps?",
                 marks=pytest.mark.slow),
  ],
  ids=["arm", "argument", "key"],
)  # fmt: skip
def test_launcher_exits_with_one_message(arguments, message, tmp_path):
  done = subprocess.run(
    [sys.executable, ROOT / "launch.py", *arguments, f"--workdir={tmp_path / 'run'}"],
    capture_output=True, text=True, cwd=ROOT,
  )  # fmt: skip
  assert done.returncode == 1
  assert done.stderr.startswith(message) and "Traceback" not in done.stderr
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "arguments, code, text",
  [
    (["--explain", "optim.peak_lr"], 0, "optim.peak_lr = 0.001\n"),
    (["--explain=config.optim.b1"], 0, "optim.b1 = 0.9\n    decay of the first moment"),
    (["--explain=data.sources.main.path"], 0, "data.sources = "),
    (["--explain=optim.peak_lrr"], "error: 'optim.peak_lrr' is no key of the configuration; did "
     "you mean optim.peak_lr?", ""),
  ],
)  # fmt: skip
def test_explain_prints_the_meaning_of_a_key(arguments, code, text, capsys):
  with pytest.raises(SystemExit) as e:
    command_line.answer(["launch.py", *arguments])
  assert e.value.code == code and capsys.readouterr().out.startswith(text)


@pytest.mark.parametrize("switch", ["--help", "--helpshort", "--helpfull", "--helpxml", "-?"])
def test_help_is_no_failure(switch, monkeypatch, capsys):
  app.define_help_flags()
  monkeypatch.setattr(sys.modules["__main__"], "__doc__", "python launch.py --config=FILE")
  with pytest.raises(SystemExit) as e:
    command_line.parse_flags(["launch.py", switch], base.get_config())
  assert e.value.code == 0 and "launch.py" in capsys.readouterr().out


def test_help_config_has_every_key_and_its_meaning(capsys):
  with pytest.raises(SystemExit):
    command_line.answer(["launch.py", "--help-config"])
  text = capsys.readouterr().out
  named = re.findall(r"^(\S+) = ", text, re.M)
  assert re.findall(r"^(\S+) = .*\n(?!    \S)", text, re.M) == []
  open_keys = ("data.sources.", "sharding.weights.", "sharding.acts.")
  known = [k for k in identity.flatten(base.get_config()) if not k.startswith(open_keys)]
  assert set(known) <= {*named} and len(named) == len({*named})
  command_line.answer(["launch.py", "--config=x"])  # no question, no answer


BANNER = """\
E0000 00:00:1764084000.5 77 slow_operation_alarm.cc:73]\x20
********************************
[Compiling module jit_f] Very slow compile? If you want to file a bug, run with envvar XLA_FLAGS=x
********************************
E0000 00:00:1764084010.5 77 slow_operation_alarm.cc:140] The operation took 2m10.5s

********************************
[Compiling module jit_f] Very slow compile? If you want to file a bug, run with envvar XLA_FLAGS=x
********************************
"""
KEPT = """\
E0000 00:00:1764084011.5 77 slow_operation_alarm.cc:73] Constant folding an instruction takes > 1s:

  %a = f32[] add(%b, %c)

E0000 00:00:1764084012.5 77 slow_operation_alarm.cc:140] The operation took 1.2s
Constant folding an instruction takes > 1s:
F0000 00:00:1764084013.5 77 a.cc:1] Check failed: the last words before it aborts
"""


@pytest.mark.parametrize("level", ["", "0"])
def test_xlas_banner_alone_is_left_out_of_stderr(tmp_path, level):
  """A configuration writes to descriptor 2 as XLA does, and then aborts as XLA does."""
  path = tmp_path / "c.py"
  path.write_text(
    f"import os, sys\nos.write(2, {(BANNER + KEPT).encode()!r})\n"
    "print('python', file=sys.stderr)\n"
    "print(os.environ['GLIBC_TUNABLES'], file=sys.stderr)\nos.abort()\n"
  )
  env = {
    k: v for k, v in os.environ.items() if k not in ("TF_CPP_MIN_LOG_LEVEL", "GLIBC_TUNABLES")
  } | {"JAX_PLATFORMS": "cpu"}
  mine = "glibc.malloc.top_pad=131072"
  env |= {"TF_CPP_MIN_LOG_LEVEL": level, "GLIBC_TUNABLES": mine} if level else {}
  command = [sys.executable, ROOT / "launch.py", f"--config={path}"]
  done = subprocess.run(command, env=env, capture_output=True, text=True)
  assert done.returncode == -signal.SIGABRT
  malloc = mine if level else "glibc.malloc.hugetlb=1"  # as the process began, not as it was left
  assert {"python", malloc, *KEPT.splitlines()} <= {*done.stderr.splitlines()}
  assert (BANNER in done.stderr) == bool(level) == ("Very slow compile?" in done.stderr)


@pytest.mark.parametrize(
  "error, code, line",
  [
    (None, 7, ""), (KeyboardInterrupt(), 130, "interrupted\n"),
    (train.NonFinite("step 3\x1b"), 3, "error: step 3\\x1b\n"),
    (UserError("key=1"), 1, "error: key=1\n"),
    (FileNotFoundError(2, "No such file", "a"), 1, "error: [Errno 2] No such file: 'a'\n"),
    (OSError(28, "No space left on device"), 1, "error: w cannot be written: No space left"),
    (ModuleNotFoundError(name="altair.x"), 1,
     "error: the package 'altair.x' is not installed; pip install 'fp8jax[report]'\n"),
    (ModuleNotFoundError(name="other.x"), 1,
     "error: the package 'other.x' is not installed; pip install 'other'\n"),
  ],
  ids=repr,
)  # fmt: skip
def test_an_end_has_its_exit_code_and_one_line_on_stderr(capsys, error, code, line):
  def action():
    if error is not None:
      raise error
    return 7

  assert dispatch._reported(action, "w") == code
  out, err = capsys.readouterr()
  assert out == "" and err.startswith(line) and err.count("\n") == (error is not None)
  with pytest.raises(RuntimeError, match="a bug"):
    dispatch._reported(lambda: exec("raise RuntimeError('a bug')"), "w")
