"""Programs that a model wrote, executed in a subprocess with limits.

The subprocess has a temporary directory without other files, none of the user's environment, limits
on time, memory, file sizes, open files and processes, and, where Linux lets an unprivileged user
have them (`unshare`), no network and a process tree of its own that ends with it. It can read the
files that the user can read: this is protection against accidents and simple mischief, not a
prison. Evaluation executes programs only where eval.allow_code_execution says so.
"""

import dataclasses
import decimal
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Limits:
  """Of one execution.

  Attributes:
    seconds: of wall time, and of processor time.
    memory: bytes of address space.
    output: bytes of a written file, standard output among them.
    processes: of the user, this one among them; the root user is not bound by it.
  """

  seconds: float = 6.0
  memory: int = 4 << 30
  output: int = 16 << 20
  processes: int = 64


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Of one execution: its standard output, and "" or why it failed."""

  output: str
  failure: str


# numpy's threads would count as processes.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}

# Sets the limits inside the new process, and becomes the program.
_LAUNCHER = """
import os, resource, sys
seconds, memory, output, processes = map(int, sys.argv[1:5])
for name, value in (("CPU", seconds), ("AS", memory), ("FSIZE", output), ("NPROC", processes),
                    ("NOFILE", 64), ("CORE", 0)):
  resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
os.execv(sys.executable, [sys.executable, "-I", "-B", "program.py"])
"""

_IMPORTS = """import sys, math, re, random, string, itertools, functools, collections, heapq, bisect
from math import *
from typing import *
from itertools import *
from functools import *
from collections import *
from heapq import *
from bisect import *
sys.setrecursionlimit(50000)
"""

# Calls the function with one JSON value per line of the input, and prints its value as JSON.
_CALL = """
if __name__ == "__main__":
  import json as _json, sys as _sys
  _arguments = [_json.loads(_line) for _line in _sys.stdin.read().split("\\n") if _line.strip()]
  _function = getattr(Solution(), {name!r}) if "Solution" in globals() else globals()[{name!r}]
  print(_json.dumps(_function(*_arguments)))
"""


def last_block(output: str) -> str:
  """The last fenced block of an output, "" for none."""
  found = _FENCE.findall(output)
  return found[-1] if found else ""


def run(program: str, given: str, function: str = "", limits: Limits = Limits()) -> Outcome:
  """Executes a Python program.

  Args:
    program: its text.
    given: standard input.
    function: name of a function, or of a method of class Solution, to call with the JSON values in
      the lines of `given`; "" executes the program as it is.
    limits: see Limits.

  Returns:
    Its output and failure: "timeout", "exit code 1: LAST LINE OF STANDARD ERROR", ...
  """
  text = _IMPORTS + program + (_CALL.format(name=function) if function else "")
  with tempfile.TemporaryDirectory(prefix="fp8jax-program-") as folder:
    for name, content in (("program.py", text), ("input", given)):
      with open(os.path.join(folder, name), "w", encoding="utf-8", errors="replace") as f:
        f.write(content)
    numbers = (int(limits.seconds) + 1, limits.memory, limits.output, limits.processes)
    command = [*isolation(), sys.executable, "-I", "-S", "-c", _LAUNCHER, *map(str, numbers)]
    work = os.path.join(folder, "work")
    os.mkdir(work)
    os.rename(os.path.join(folder, "program.py"), os.path.join(work, "program.py"))
    paths = [os.path.join(folder, name) for name in ("input", "output", "errors")]
    with open(paths[0], "rb") as source, open(paths[1], "wb") as out, open(paths[2], "wb") as err:
      process = subprocess.Popen(
        command,
        stdin=source,
        stdout=out,
        stderr=err,
        cwd=work,
        env=_ENVIRONMENT,
        start_new_session=True,
      )
      try:
        code = process.wait(limits.seconds)
      except subprocess.TimeoutExpired:
        code = None
      finally:
        _end(process)
    written = [_read(path, limits.output) for path in paths[1:]]
  if code is None:
    return Outcome(written[0], "timeout")
  last = written[1].strip().splitlines()[-1:]
  return Outcome(written[0], f"exit code {code}: {last[0][:200] if last else ''}" if code else "")


@functools.cache
def isolation() -> tuple[str, ...]:
  """The command before a program that takes the network away, () where the system refuses it."""
  command = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
  program = shutil.which("unshare")
  if program is None:
    return ()
  test = subprocess.run([program, *command, "true"], capture_output=True)
  return (program, *command) if test.returncode == 0 else ()


def is_same(output: str, expected: str, is_json: bool) -> bool:
  """Whether two outputs are the same.

  Args:
    is_json: both are one JSON value; otherwise lines are compared, without white space around
      them, as texts and then as lists of decimal numbers.
  """
  if is_json:
    try:
      return json.loads(output) == json.loads(expected)
    except ValueError:
      return False
  lines, wanted = (text.strip().splitlines() for text in (output, expected))
  return len(lines) == len(wanted) and all(map(_is_same_line, lines, wanted))


def _is_same_line(line: str, wanted: str) -> bool:
  if line.strip() == wanted.strip():
    return True
  try:
    numbers = [list(map(decimal.Decimal, text.split())) for text in (line, wanted)]
  except decimal.InvalidOperation:
    return False
  return numbers[0] == numbers[1]


def _end(process: subprocess.Popen):
  """Kills the process with all that it started."""
  try:
    os.killpg(process.pid, signal.SIGKILL)
  except ProcessLookupError:
    pass
  process.wait()


def _read(path: str, most: int) -> str:
  with open(path, "rb") as f:
    return f.read(most).decode("utf-8", "replace")
