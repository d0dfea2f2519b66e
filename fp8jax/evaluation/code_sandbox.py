"""Programs that a model wrote, executed in a sandbox: bubblewrap, or util-linux's `unshare`.

Both give the program mount, process, user, network and IPC namespaces of its own. It sees: the
system's programs and libraries, Python and its packages, all read-only; its own /proc; the devices
null, zero, full, random and urandom; and an empty /tmp, its working directory, which lies in memory
and ends with it. Not there: every other file, the network, sockets that files or abstract names
stand for, other processes, the environment of the parent.

Bound are the time on the clock and, per process, on the processor; and, of all processes together,
memory, number (threads count), size and number of files. Process 1 of the sandbox counts memory,
processes and files every 10 ms and ends the sandbox at a bound; what fits in between passes
(measured on two busy cores: up to 135 forks for a bound of 64). Forks meet a limit of the kernel
besides, but on kernels before 5.14 and for a root user whose Python only root may read. Outputs are
pipes, read up to their bound.

Not bound are the kernel's own calls, which are not filtered: a fault of the kernel, its keyrings,
and the load on processors and memory bus. A socket inside Python's folders or /usr could be
reached. Evaluation executes programs only where eval.allow_code_execution says so, and refuses
where neither tool works. Landlock is no third choice: it stops no connection to a socket by path.
"""

import dataclasses
import decimal
import fcntl
import functools
import json
import os
import pathlib
import re
import selectors
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Iterable

from fp8jax.errors import UserError

_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Limits:
  """Of one execution.

  Attributes:
    seconds: of wall time, and of processor time of a process.
    memory: bytes: addresses of a process; resident pages of all, shared ones in each.
    output: bytes of standard output, and of standard error.
    files: bytes of all files.
    processes: of all processes, threads among them.
  """

  seconds: float = 6.0
  memory: int = 4 << 30
  output: int = 16 << 20
  files: int = 64 << 20
  processes: int = 64


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Of one execution: its standard output, and "" or why it failed."""

  output: str
  failure: str


@dataclasses.dataclass(frozen=True)
class Sandbox:
  """A way to execute programs.

  Attributes:
    tool: "bwrap" or "unshare".
    command: before Python's arguments; {files} stands for the bytes of files.
    user: id that it runs as, None for the own one.
  """

  tool: str
  command: tuple[str, ...]
  user: int | None


# numpy's threads would count as processes.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
_INIT = pathlib.Path(__file__).with_name("sandbox_init.py")
_NOBODY = 65534
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")  # of `bwrap --dev`
# Readable, beside Python's folders; the last is the store of Nix.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache",
           "/etc/alternatives", "/nix/store")  # fmt: skip

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
  blocks = _FENCE.findall(output)
  return blocks[-1] if blocks else ""


def run(program: str, given: str, function: str = "", limits: Limits = Limits()) -> Outcome:
  """Executes a Python program.

  Args:
    given: standard input.
    function: name of a function, or of a method of class Solution, to call with the JSON values in
      the lines of `given`; "" executes the program as it is.

  Returns:
    Its output and failure: "timeout", "exit code 1: LAST LINE OF STANDARD ERROR", ...

  Raises:
    UserError: no sandbox works here.
  """
  text = _IMPORTS + program + (_CALL.format(name=function) if function else "")
  return _execute(sandbox(), text, given, limits)


@functools.cache
def sandbox() -> Sandbox:
  """The first sandbox that works: bubblewrap, else unshare; the root user as nobody where it can.

  Raises:
    UserError: none does; says what to install.
  """
  refusals = []
  for tried in _sandboxes():
    outcome = _execute(tried, "print(7)", "", Limits())
    if outcome == Outcome("7\n", ""):
      return tried
    refusals.append(f"{tried.tool}: {outcome.failure}")
  raise UserError(
    "no sandbox for programs that a model writes works here "
    f"({'; '.join(refusals) or 'neither bwrap nor unshare is installed'}); install bubblewrap (apt "
    "install bubblewrap), let users have namespaces (sysctl kernel.apparmor_restrict_unprivileged_"
    "userns=0; in a container --security-opt seccomp=unconfined --security-opt "
    "systempaths=unconfined), or leave the task out"
  )


def _sandboxes() -> Iterable[Sandbox]:
  binds, links = _readable()
  bwrap = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1",
           "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]  # fmt: skip
  bwrap += ["--size", "{files}", "--tmpfs", "/tmp"]  # first: Python may lie below it
  for path in binds:
    bwrap += ["--ro-bind", path, path]
  for target, path in links:
    bwrap += ["--symlink", target, path]
  # A root user owns devices and files of /proc/sys without any capability.
  for path in ("/", "/proc", "/dev", "/dev/pts", *(f"/dev/{x}" for x in _DEVICES)):
    bwrap += ["--remount-ro", path]
  unshare = ["--user", "--map-root-user", "--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup",
             "--fork", "--kill-child"]  # fmt: skip
  for tool, arguments in (("bwrap", bwrap), ("unshare", unshare)):
    path = shutil.which(tool)
    for user in (_NOBODY, None) if os.geteuid() == 0 else (None,):
      if path is not None:
        yield Sandbox(tool, (path, *arguments), user)


def _readable() -> tuple[list[str], list[tuple[str, str]]]:
  """(paths that a program sees, [(target of a link, its path)])."""
  links = [(os.readlink(path), path) for path in _SYSTEM if os.path.islink(path)]
  paths = [path for path in _SYSTEM if os.path.exists(path) and not os.path.islink(path)]
  paths += [os.path.realpath(sys.base_prefix), *filter(os.path.isdir, _packages())]
  home = os.path.realpath(os.path.expanduser("~"))
  for path in paths:
    if os.path.commonpath((home, path)) == path:
      raise UserError(f"Python's folder {path} holds the home folder {home}, which programs of a "
                      "model must not read; install Python in a folder of its own")  # fmt: skip
  return paths, links


def _packages() -> list[str]:
  return list(map(os.path.realpath, site.getsitepackages()))


def _execute(where: Sandbox, program: str, given: str, limits: Limits) -> Outcome:
  binds, links = _readable()
  imports = f"import sys; sys.path += {_packages()!r}\n"
  files = [_sealed(imports + program), _sealed(given)]
  spec = {
    "program": files[0], "root": where.tool == "unshare", "binds": binds, "links": links,
    "seconds": int(limits.seconds) + 1, "memory": limits.memory, "files": limits.files,
    "processes": limits.processes,
  }  # fmt: skip
  command = [x.format(files=limits.files) for x in where.command]
  command += [os.path.realpath(sys.executable), "-I", "-S", "-c", _INIT.read_text()]
  try:
    process = subprocess.Popen(
      [*command, json.dumps(spec)], stdin=files[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      cwd="/", env=_ENVIRONMENT, start_new_session=True, pass_fds=files[:1], user=where.user,
      group=where.user, extra_groups=None if where.user is None else (),
    )  # fmt: skip
  finally:
    for fd in files:
      os.close(fd)
  with process:
    written = (bytearray(), bytearray())
    try:
      failure = _read(process, written, limits)
    finally:
      if process.returncode is None:  # not reaped, so that the group is ours
        os.killpg(process.pid, signal.SIGKILL)
  code = process.returncode
  output, errors = (text.decode("utf-8", "replace") for text in written)
  last = errors.strip().splitlines()[-1:]
  if not failure and code:
    failure = f"exit code {code}: {last[0][:200] if last else ''}"
  return Outcome(output, failure)


def _sealed(text: str) -> int:
  """A file in memory that nobody can change."""
  fd = os.memfd_create("fp8jax-program", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
  with open(fd, "wb", closefd=False) as f:
    f.write(text.encode("utf-8", "replace"))
  seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
  fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
  os.lseek(fd, 0, os.SEEK_SET)
  return fd


def _read(process: subprocess.Popen, written: tuple[bytearray, bytearray], limits: Limits) -> str:
  """Appends standard output and error to `written`; why reading ended early, or ""."""
  end = time.monotonic() + limits.seconds
  with selectors.DefaultSelector() as selector:
    for stream, text in zip((process.stdout, process.stderr), written):
      if stream is not None:
        os.fchmod(stream.fileno(), 0o666)  # /dev/stdout opens for the sandbox's user, too
        selector.register(stream, selectors.EVENT_READ, text)
    while selector.get_map():
      left = end - time.monotonic()
      if left <= 0:
        return "timeout"
      for key, _ in selector.select(left):
        piece = os.read(key.fd, 1 << 16)
        key.data.extend(piece)
        if not piece:
          selector.unregister(key.fileobj)
        if len(key.data) > limits.output:
          return f"more than {limits.output} bytes of output"
  try:
    process.wait(max(end - time.monotonic(), 0.1))
  except subprocess.TimeoutExpired:
    return "timeout"
  return ""


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
    return numbers[0] == numbers[1]
  except decimal.InvalidOperation:  # also of the comparison: sNaN
    return False
