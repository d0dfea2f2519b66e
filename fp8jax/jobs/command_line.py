"""The launcher's flags, with one-line errors that name the nearest valid file, key or value."""

import os
import re
import sys
import traceback

from absl import flags

from fp8jax.config import files as config_files
from fp8jax.config import identity, registry
from fp8jax.errors import UserError, nearest, nearest_key

NAMES = (
  "train", "evaluate", "prepare", "preview", "export", "calibrate", "diagnose", "memory",
  "generate", "sensitivity", "report", "compare", "doctor",
)  # fmt: skip
# They read the folders of runs.
OF_FILES = ("report", "compare")
# Jobs of files or of a machine, not of a configuration.
_WITHOUT_CONFIG = (*OF_FILES, "doctor")


def parse_flags(argv: list[str], base: config_files.Config) -> list[str]:
  """absl's parser, with one-line errors that name the nearest valid file, key or value."""
  path, job = (_value_of(name, argv) for name in ("config", "job"))
  path = path and path.partition(":")[0]
  is_alone = any(a.lstrip("-").startswith(("help", "sweep")) for a in argv[1:])
  if path is None and not is_alone and job not in _WITHOUT_CONFIG:
    sys.exit("error: --config=FILE is required, for example --config=configs/debug.py")
  if path is not None and not os.path.isfile(path):
    if os.path.isdir(path):
      sys.exit(f"error: --config={path} is a folder, not a file{_nearest_file(path)}")
    sys.exit(f"error: no config file {path!r}{_nearest_file(path)}")
  if job:
    near = nearest(job, NAMES)
    if job not in NAMES:
      hint = f"did you mean {near!r}?" if near else "there is no such job"
      sys.exit(f"error: --job={job!r} is not one of {', '.join(map(repr, NAMES))}; {hint}")
  try:
    rest = flags.FLAGS(argv)
    flags.FLAGS["config"].value  # noqa: B018  (without an override, the file runs only here)
    return rest
  except (AttributeError, KeyError) as e:
    known = identity.flatten(base)
    for arg in argv[1:]:
      key = arg.lstrip("-").partition("=")[0]
      if key.startswith("config.") and key.removeprefix("config.") not in known:
        near = nearest_key(key.removeprefix("config."), known)
        hint = (
          f"did you mean --config.{near}?" if near else "there is none like it, see --help-config"
        )
        sys.exit(f"error: unknown key --{key}; {hint}")
    if "has no attribute 'get_config'" in str(e):
      sys.exit(f"error: {path} defines no get_config; write `def get_config(arm='')` in it")
    sys.exit(f"error: {path}: {type(e).__name__}: {str(e).strip(chr(34))}")
  except flags.UnrecognizedFlagError as e:
    near = nearest_key(e.flagname, identity.flatten(base))
    is_key = near is not None and near.rpartition(".")[2] == e.flagname.rpartition(".")[2]
    sys.exit(f"error: {e}" + f"; did you mean --config.{near}?" * is_key)
  except (flags.Error, ValueError) as e:
    # absl quotes the traceback of a config file that raised; its last line says why.
    sys.exit(f"error: {str(e).strip().splitlines()[-1].removeprefix('ValueError: ')}")
  except SyntaxError as e:
    sys.exit(f"error: {e.filename}, line {e.lineno}: {e.msg}; the config file is no valid Python")
  except Exception as e:  # of the user's file
    frames = traceback.extract_tb(e.__traceback__)
    lines = [f.lineno for f in frames if path and f.filename.endswith(path)]
    where = f"{path}, line {lines[-1]}" if lines else path
    sys.exit(f"error: {where}: {type(e).__name__}: {e}")


def answer(argv: list[str]):
  """Prints what --explain KEY or --help-config asks for, and exits; returns without one of them.

  Args:
    argv: the command line.
  """
  name = _value_of("explain", argv)
  if name is None and not {"--help-config", "--help_config"} & {*argv}:
    return
  try:
    print(registry.explain((name or "").removeprefix("config.")))
  except UserError as e:
    sys.exit(f"error: {e}")
  sys.exit(0)


def with_changes(workdir: str, argv: list[str]) -> str:
  """`workdir` with the overrides of a command line in place of "{changes}".

  Launchers of others (an agent of Weights & Biases, a shell loop) thus give each of their runs a
  workdir of its own: "optim.peak_lr=0.001-seed=1", "tensor_current-seed=1" with the arm of
  --config=FILE:ARM, or "unchanged".
  """
  found, words = [], argv[1:]
  for word, following in zip(words, [*words[1:], ""]):
    name, is_joined, value = word.lstrip("-").partition("=")
    if not word.startswith("-") or not name.startswith(("config.", "noconfig.")):
      continue
    if not is_joined:  # a switch, or the value is the next word
      value = following if following and not following.startswith("-") else "True"
      value = "False" if name.startswith("no") else value
    found.append(f"{name.partition('config.')[2]}={value}")
  arm = (_value_of("config", argv) or "").partition(":")[2]
  changes = [*filter(None, [arm]), *sorted(found)]
  names = [re.sub(r"[^\w.+=,-]+", "_", change).strip("_") for change in changes]
  return workdir.replace("{changes}", "-".join(names) or "unchanged")


def _value_of(flag: str, argv: list[str]) -> str | None:
  """What --flag=VALUE or --flag VALUE gives."""
  for arg, following in zip(argv[1:], [*argv[2:], ""]):
    name, is_joined, value = arg.lstrip("-").partition("=")
    if name == flag and arg.startswith("-"):
      return value if is_joined else following
  return None


def _nearest_file(path: str) -> str:
  folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
  have = sorted(f for f in os.listdir(folder) if f.endswith(".py")) if os.path.isdir(folder) else []
  near = nearest(os.path.basename(path), have)
  if near:
    return f"; did you mean {os.path.join(folder, near)}?"
  return f"; {folder} has {', '.join(have)}" if have else ""
