"""The launcher's flags, with one-line errors that name the nearest valid file, key or value."""

import os
import re
import sys
from typing import NoReturn

from absl import flags

from fp8jax import console
from fp8jax.config import files as config_files
from fp8jax.config import identity, named, overrides, registry
from fp8jax.errors import ConfigError, UserError, key_hint, nearest, nearest_key, one_line

NAMES = (
  "train", "evaluate", "prepare", "preview", "export", "calibrate", "diagnose", "memory",
  "plan_inference", "generate", "quantize", "sensitivity", "search", "rl", "noise", "report",
  "compare", "doctor",
)  # fmt: skip
# They read the folders of runs.
OF_FILES = ("report", "compare")
# Jobs of files or of a machine, not of a configuration.
_WITHOUT_CONFIG = (*OF_FILES, "doctor")


def parse_flags(argv: list[str], base: config_files.Config) -> list[str]:
  """absl's parser, with one-line errors that name the nearest valid file, key or value."""
  name, job = (_value_of(flag, argv) for flag in ("config", "job"))
  path = name and name.partition(":")[0]
  is_alone = any(a.lstrip("-").startswith(("help", "?")) for a in argv[1:])
  is_alone = is_alone or bool(_value_of("sweep", argv))
  if path is None and not is_alone and job not in _WITHOUT_CONFIG:
    _refuse("--config=FILE is required, for example --config=configs/debug.py")
  if path is not None and not os.path.isfile(path):
    if os.path.isdir(path):
      _refuse(f"--config={path} is a folder, not a file{_nearest_file(path)}")
    _refuse(f"no config file {path!r}{_nearest_file(path)}")
  overrides.take_none()
  _check_sweep(argv, name, job)
  _check_unread(job or "train", argv)
  if job:
    _check_job(job, "--job=")
  try:
    if name is not None:  # absl runs the file again, and tells less of what is wrong with it
      config_files.check_keys(named.load(name, {}), base)
    rest = _parse(argv)
    if path and not job:
      flags.FLAGS["job"].value = _check_job(named.job(path), f"{path}: JOB=")
    c = flags.FLAGS["config"].value  # without an override, the file runs only here
    if c is not None:
      overrides.with_none(c)
    return rest
  except ConfigError as e:
    _refuse("\n".join(f"{path}: {problem}" for problem in e.problems))
  except UserError as e:
    _refuse(f"{e}")
  except (AttributeError, KeyError) as e:
    known = identity.flatten(base)
    for arg in argv[1:]:
      key = arg.lstrip("-").partition("=")[0]
      if key.startswith("config.") and key.removeprefix("config.") not in known:
        hint = key_hint(key.removeprefix("config."), known, "--config.{}")
        hint = hint or "there is none like it, see --help-config"
        _refuse(f"unknown key --{key}; {hint}")
    _refuse(f"{path}: {type(e).__name__}: {one_line(e)}")
  except flags.UnrecognizedFlagError as e:
    near = nearest_key(e.flagname, identity.flatten(base))
    is_key = near is not None and near.rpartition(".")[2] == e.flagname.rpartition(".")[2]
    _refuse(f"{e}" + f"; did you mean --config.{near}?" * is_key)
  except (flags.Error, ValueError) as e:
    _refuse(str(e).strip().splitlines()[-1])


def _parse(argv: list[str]) -> list[str]:
  """absl's parser, where help that was printed ends with 1; here with 0."""
  try:
    return flags.FLAGS(argv)
  except SystemExit as e:
    raise SystemExit(0 if e.code == 1 else e.code) from None


def _check_job(job: str, where: str) -> str:
  if job not in NAMES:
    near = nearest(job, NAMES)
    hint = f"did you mean {near!r}?" if near else "there is no such job"
    _refuse(f"{where}{job!r} is not one of {', '.join(map(repr, NAMES))}; {hint}")
  return job


def _check_sweep(argv: list[str], config: str | None, job: str | None):
  """Refuses options that a sweep does not read, and those of a sweep without one."""
  sweep = _value_of("sweep", argv)
  for name in ("parallel", "submit", "print", "vmap"):
    if sweep is None and _value_of(name, argv) is not None:
      _refuse(f"--{name} without --sweep=FILE, whose trials it is for")
  changes = [a for a in argv[1:] if a.lstrip("-").startswith(("config.", "noconfig."))]
  if sweep is not None and changes:
    key, _, value = changes[0].partition("config.")[2].partition("=")
    is_plain = re.fullmatch(r"-?[\d.e-]+|True|False|None", value)
    shown = f"{{{key!r}: {value if is_plain else '...'}}}"
    _refuse(f"{changes[0]} beside --sweep: state it in the sweep's file, fixed={shown}")
  if sweep is not None and config is not None:
    _refuse(f"--config={config} beside --sweep: the sweep's file names its config; leave one out")
  if sweep is not None and job not in (None, "train"):
    _refuse(f"--job={job} beside --sweep: the JOB of its config says what its trials do; leave it "
            "out")  # fmt: skip


def _check_unread(job: str, argv: list[str]):
  """Refuses options that a sweep, or a job of files or of the machine, does not read."""
  who = "--sweep" if _value_of("sweep", argv) else f"--job={job}"
  unread = ["baseline"] if job != "compare" else []
  if who == "--sweep" or job in _WITHOUT_CONFIG:
    unread += ["out", "topology", "distributed", "coordinator", "processes", "process"]
  unread += ["workdir"] if job == "doctor" else []
  for name in unread:
    if _value_of(name, argv) is not None:
      _refuse(f"--{name} is not read by {who}; leave it out")


def _refuse(message: str) -> NoReturn:
  sys.exit(console.visible(f"error: {message}"))


def answer(argv: list[str]):
  """Prints what --explain KEY or --help-config asks for, and exits; returns without one of them."""
  name = _value_of("explain", argv)
  if name is None and not {"--help-config", "--help_config"} & {*argv}:
    return
  try:
    print(registry.explain((name or "").removeprefix("config.")))
  except UserError as e:
    _refuse(f"{e}")
  sys.exit(0)


def with_changes(workdir: str, argv: list[str]) -> str:
  """`workdir` with the overrides of a command line in place of "{changes}".

  Other launchers (an agent of Weights & Biases, a shell loop) thus give each of their runs a
  workdir of its own: "optim.peak_lr=0.001-seed=1", "tensor_current-seed=1" with the arm of
  --config=FILE:ARM, or "unchanged".
  """
  pairs, words = [], argv[1:]
  for word, following in zip(words, [*words[1:], ""]):
    name, is_joined, value = word.lstrip("-").partition("=")
    if not word.startswith("-") or not name.startswith(("config.", "noconfig.")):
      continue
    if not is_joined:  # a switch, or the value is the next word
      value = following if following and not following.startswith("-") else "True"
      value = "False" if name.startswith("no") else value
    pairs.append(f"{name.partition('config.')[2]}={value}")
  arm = (_value_of("config", argv) or "").partition(":")[2]
  changes = [*filter(None, [arm]), *sorted(pairs)]
  names = [re.sub(r"[^\w.+=,-]+", "_", change).strip("_") for change in changes]
  return workdir.replace("{changes}", "-".join(names) or "unchanged")


def _value_of(flag: str, argv: list[str]) -> str | None:
  """The value of the last --flag=VALUE or --flag VALUE, which absl takes."""
  last = None
  for arg, following in zip(argv[1:], [*argv[2:], ""]):
    name, is_joined, value = arg.lstrip("-").partition("=")
    if name == flag and arg.startswith("-"):
      last = value if is_joined else following
  return last


def _nearest_file(path: str) -> str:
  folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
  have = sorted(f for f in os.listdir(folder) if f.endswith(".py")) if os.path.isdir(folder) else []
  near = nearest(os.path.basename(path), have)
  if near:
    return f"; did you mean {os.path.join(folder, near)}?"
  return f"; {folder} has {', '.join(have)}" if have else ""
