"""Programs that a model wrote: attempts on files, sockets, processes, memory and outputs.

Every attempt is bounded, so that it does no harm where the sandbox is broken.
"""

import contextlib
import functools
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from fp8jax.errors import UserError
from fp8jax.evaluation import benchmarks, catalog, code_sandbox, tasks
from fp8jax.evaluation.code_sandbox import Limits, Outcome
from fp8jax.evaluation.settings import Tasks

SMALL = Limits(seconds=40.0, memory=400 << 20, output=1 << 20, files=20 << 20)


@functools.cache
def _working(tool):
  tried = (x for x in code_sandbox._sandboxes() if x.tool == tool)
  seven = Outcome("7\n", "")
  return next((x for x in tried if code_sandbox._execute(x, "print(7)", "", SMALL) == seven), None)


@pytest.fixture(params=("bwrap", "unshare"))
def run(request, monkeypatch):
  """code_sandbox.run with one of the tools, and with small limits."""
  where = _working(request.param)
  if where is None:
    pytest.skip(f"{request.param} is not installed, or gives users no namespaces here")
  monkeypatch.setattr(code_sandbox, "sandbox", lambda: where)
  return lambda program, given="", limits=SMALL: code_sandbox.run(program, given, limits=limits)


# The attempts that fail in the program itself; {outside} is a folder of the user's, with a file.
_TRY = """
import os, shutil, socket, ctypes
libc = ctypes.CDLL(None, use_errno=True)
def attempt():
{attempt}
try:
  print("result", attempt())
except OSError as e:
  print("refused", e.strerror)
"""
REFUSED = {
  "overwrite a file": "open('{outside}/victim', 'w').write('x')",
  "append to a file": "open('{outside}/victim', 'a').write('x')",
  "create a file": "open('{outside}/new', 'w')",
  "read a file": "return open('{outside}/victim').read()",
  "list a folder": "return os.listdir('{outside}')",
  "delete a file": "os.remove('{outside}/victim')",
  "delete a folder": "shutil.rmtree('{outside}')",
  "change a mode": "os.chmod('{outside}/victim', 0)",
  "change a device": "os.utime('/dev/null')",
  "write into the system": "open('/usr/lib/fp8jax-test', 'w')",
  "write into Python": f"open('{os.path.dirname(os.__file__)}/fp8jax-test', 'w')",
  "write beside /tmp": "os.mkdir('../output')",
  "make a pipe beside /tmp": "os.mkfifo('../output')",
  "open a setting of the kernel": "open('/proc/sys/kernel/core_pattern', 'r+')",
  "read the memory of process 1": "open('/proc/1/mem')",
  "reach a socket by path": (
    "s = socket.socket(socket.AF_UNIX); s.settimeout(1); s.connect('{outside}/socket')"
  ),
  "reach an abstract socket": (
    "s = socket.socket(socket.AF_UNIX); s.settimeout(1); s.connect(chr(0) + '{abstract}')"
  ),
  "reach a port": "socket.create_connection(('127.0.0.1', {port}), 1)",
}
# Calls of the kernel, which return -1.
FAILING = {
  "become root of a namespace": "return libc.unshare(0x10000000)",
  "make mounts of one's own": "return libc.unshare(0x00020000)",
  "mount": "return libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)",
  "make all writable": "return libc.mount(None, b'/', None, 32 | 4096, None)",
  "trace process 1": "return libc.ptrace(16, 1, 0, 0)",
}


@pytest.fixture
def outside():
  """A folder that no empty /tmp hides."""
  with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
    yield pathlib.Path(folder)


@pytest.mark.parametrize("name", (*REFUSED, *FAILING))
def test_nothing_outside_is_reached(run, name, outside):
  victim, abstract = outside / "victim", f"fp8jax-test-{os.getpid()}"
  victim.write_text("kept")
  before = victim.stat().st_mode
  with (
    socket.socket(socket.AF_UNIX) as by_path,
    socket.socket(socket.AF_UNIX) as by_name,
    socket.create_server(("127.0.0.1", 0)) as by_port,
  ):
    here = os.getcwd()
    os.chdir(outside)  # a path of a socket has at most 108 bytes
    by_path.bind("socket")
    os.chdir(here)
    by_path.listen()
    by_name.bind("\0" + abstract)
    by_name.listen()
    text = (REFUSED | FAILING)[name].format(
      outside=outside, abstract=abstract, port=by_port.getsockname()[1]
    )
    outcome = run(_TRY.format(attempt=f"  {text}"))
  assert outcome.failure == ""
  assert outcome.output.startswith("refused" if name in REFUSED else "result -1"), outcome
  assert {p.name for p in outside.iterdir()} == {"victim", "socket"}
  assert victim.read_text() == "kept" and victim.stat().st_mode == before


_MANY = """
import os, time
for _ in range({count}):
  if os.fork() == 0:
    x = b"x" * {size}
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""
# {name: (program, the words that the failure has one of)}
ENDED = {
  "a loop": ("while True: pass", ["timeout"]),
  "SIGTERM ignored, outputs closed": (
    "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.close(1); os.close(2)\n"
    "time.sleep(9)",
    ["timeout"],
  ),
  "100 processes": (_MANY.format(count=100, size=1), ["64 processes", "unavailable"]),
  "100 threads": (
    "import threading, time\nfor _ in range(100):\n"
    "  threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\ntime.sleep(60)",
    ["64 processes", "can't start new thread"],
  ),
  "memory of one process": ("x = bytearray(1 << 30)", ["MemoryError"]),
  "memory in 8 processes": (_MANY.format(count=8, size=80 << 20), ["419430400 bytes of memory"]),
  "output without end": ("while True: print('x' * 9999)", ["more than 1048576 bytes of output"]),
  "errors without end": (
    "import sys\nwhile True: print('x' * 9999, file=sys.stderr)",
    ["more than 1048576 bytes of output"],
  ),
  "files in all": (
    "for i in range(5): open(str(i), 'wb').write(bytes(15 << 20))",
    ["No space left on device"],
  ),
  "one file": ("open('x', 'wb').truncate(30 << 20)", ["File too large"]),
  "a file in memory": (
    "import os; os.truncate(os.memfd_create('x'), 30 << 20)",
    ["File too large"],
  ),
  "empty files": (
    "import time\nfor i in range(20_000): open(str(i), 'w').close()\ntime.sleep(60)",
    ["more than 10000 files"],
  ),
}


@pytest.mark.parametrize("name", ENDED)
def test_every_bound_ends_a_program(run, name):
  program, words = ENDED[name]
  seconds = 1.5 if words == ["timeout"] else SMALL.seconds
  start = time.monotonic()
  # Pages that processes share count in each, and a thread takes 8 MB of addresses.
  memory = Limits().memory if name.startswith("100") else SMALL.memory
  outcome = run(program, limits=Limits(seconds, memory, SMALL.output, SMALL.files))
  assert any(word in outcome.failure for word in words), outcome.failure
  assert time.monotonic() - start < seconds + 3
  assert len(outcome.output) <= SMALL.output + (1 << 16)  # and one piece of a pipe


# Programs that do harm to their own folder alone: {name: (program, output)}.
HARMLESS = {
  "a pipe named output": ("import os; os.mkfifo('output'); os.mkfifo('errors'); print(1)", "1\n"),
  "a link named output": ("import os; os.symlink('/proc/version', 'output'); print(1)", "1\n"),
  "a folder named errors": ("import os; os.mkdir('errors'); print(1)", "1\n"),
  "its folder deleted": (
    "import os, shutil\nif os.listdir() == ['program.py']: shutil.rmtree('.', True)\nprint(1)",
    "1\n",
  ),
  "folders 2,000 deep": (
    "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')\nprint(1)",
    "1\n",
  ),
  "signals to process 1": ("import os; os.kill(1, 9); os.kill(1, 19); print(1)", "1\n"),
  "the environment": (
    "import os; print(sorted(os.environ.keys() - {'PWD', 'LC_CTYPE'}))",
    "['OPENBLAS_NUM_THREADS']\n",
  ),
  "its files": (
    "import os; print([f for f in os.listdir() if os.path.isfile(f)])",
    "['program.py']\n",
  ),
  "input by path": ("print(open('/dev/stdin').read() + input())", "abc\nabc\n"),
  "output by path": ("open('/dev/stdout', 'w').write('1')", "1"),
  "a thread": (
    "import threading; threading.Thread(target=lambda: print(input())).start()",
    "abc\n",
  ),
  "numpy": ("import numpy; print(numpy.arange(3).sum())", "3\n"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_program_does_with_its_own_is_its_own(run, name, monkeypatch):
  monkeypatch.setenv("SECRET_TOKEN", "hidden")
  program, output = HARMLESS[name]
  assert run(program, "abc\n") == Outcome(output, "")


def test_other_processes_are_invisible(run):
  mark = f"fp8jax-test-{os.getpid()}"
  with subprocess.Popen([sys.executable, "-c", "input()", mark], stdin=subprocess.PIPE) as other:
    program = """
import glob
for path in glob.glob("/proc/[0-9]*/cmdline"):
  print(path, open(path).read().replace(chr(0), " ").replace(chr(10), " ")[:200])
"""
    outcome = run(program)
    assert pathlib.Path(f"/proc/{other.pid}/cmdline").read_text().count(mark) == 1
    other.communicate(b"\n")
  assert outcome.failure == "" and len(outcome.output.splitlines()) == 2  # process 1 and its own
  assert mark not in outcome.output and "pytest" not in outcome.output


def test_nothing_that_a_program_started_outlives_it(run):
  """A socket's end closes with the last process that holds it."""
  child = "import os, time; os.setsid(); os.fork() or time.sleep(60)"
  program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
  assert run(program).failure == ""
  limits = Limits(seconds=1.0)
  assert run(program + "; import time; time.sleep(9)", limits=limits).failure == "timeout"

  def is_there() -> bool:
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
      with contextlib.suppress(OSError):  # it has ended
        if child in path.read_text():
          return True
    return False

  # The kernel ends a namespace's processes after its first one, in its own time.
  deadline = time.monotonic() + 20
  while is_there() and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not is_there()


def test_an_orphan_ends_by_itself(run):
  """The evaluation is killed; so is nobody who would end the program at its limit."""
  where = code_sandbox.sandbox()
  program = f"from fp8jax.evaluation import code_sandbox as c; w = c.{where!r}\n" + (
    "c._execute(w, 'import time; time.sleep(99)', '', c.Limits(seconds=1))"
  )
  with subprocess.Popen([sys.executable, "-c", program]) as evaluation:
    deadline = time.monotonic() + 30
    while not _children(evaluation.pid) and time.monotonic() < deadline:
      time.sleep(0.01)
    [child] = _children(evaluation.pid)
    evaluation.kill()
  while pathlib.Path(f"/proc/{child}/root").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
  assert time.monotonic() < deadline


def _children(pid):
  return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_large_inputs_and_outputs_pass(run):
  given = "x" * (5 << 20)
  limits = Limits()
  assert run("print(input())", given, limits) == Outcome(given + "\n", "")


def test_without_a_tool_the_task_is_refused_before_anything_is_drawn(monkeypatch, tmp_path):
  code_sandbox.sandbox.cache_clear()
  monkeypatch.setattr(code_sandbox.shutil, "which", lambda name: None)
  (tmp_path / "livecodebench_v5.jsonl").write_text("")
  settings = Tasks("livecodebench_v5", data_dir=str(tmp_path), allow_code_execution=True)
  [found] = catalog.problems(settings)
  assert "apt install bubblewrap" in found and "neither bwrap nor unshare" in found
  with pytest.raises(UserError, match="apt install bubblewrap"):
    code_sandbox.run("print(1)", "")
  monkeypatch.setattr(code_sandbox.sys, "base_prefix", "/")
  with pytest.raises(UserError, match="holds the home folder"):
    code_sandbox.sandbox()


def test_whatever_an_item_raises_is_its_verdict(run):
  def judged(program, expected, function=""):
    item = tasks.Item("1", "q", "", {"tests": [("[]", expected)], "function": function})
    task = tasks.Task("t", (item,), benchmarks.verify_program, "code")
    return task.judge(item, f"```python\n{program}\n```")

  deep = judged("def f(x): print('[' * 100_000); raise SystemExit", "[]", "f")
  assert not deep.correct and "RecursionError" in deep.note
  for output in ("sNaN", "NaN", "1e999999999999999999999"):
    assert judged(f"print({output!r})", "1.0").note == "test 1: wrong output"
  assert judged("print('1.0')", "1").correct
