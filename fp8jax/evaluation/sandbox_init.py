"""Process 1 of a sandbox: it limits the program, counts what it takes, and ends with it.

code_sandbox.py gives this text to a Python in namespaces of its own. The text imports the standard
library alone. The kernel ends every process of the sandbox when process 1 ends.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time

_PERIOD = 0.01  # seconds between two counts
_FILES = 10_000  # in /tmp; empty ones take memory, too
# <linux/mount.h>, <linux/prctl.h>, <linux/securebits.h>
_NOSUID, _NODEV, _BIND, _REC, _DETACH = 2, 4, 4096, 16384, 2
_MOUNT_SETATTR, _HERE, _RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_SET_DUMPABLE, _SET_SECUREBITS, _NO_NEW_PRIVS, _NO_ROOT = 4, 28, 38, 3
_DEVICES = ("null", "zero", "full", "random", "urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def main():
  spec = json.loads(sys.argv[1])
  if spec["root"]:
    _make_root(spec["binds"], spec["links"], spec["files"])
  _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # the program cannot trace this process
  os.chdir("/tmp")
  with open(spec["program"], "rb") as source, open("program.py", "wb") as f:
    f.write(source.read())
  signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
  child = os.fork()
  if not child:
    _become(spec)
  os._exit(_watch(child, spec))


def _become(spec):
  """Sets the limits and becomes the program, without the rights of a namespace's root."""
  signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
  limits = {"CPU": spec["seconds"], "AS": spec["memory"], "FSIZE": spec["files"], "NOFILE": 64,
            "CORE": 0}  # fmt: skip
  if tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):
    limits["NPROC"] = spec["processes"]  # before, processes outside of the namespace counted
  for name, value in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
  if spec["root"]:
    _check(_libc.prctl(_SET_SECUREBITS, _NO_ROOT, 0, 0, 0), "securebits")
  _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
  os.execv(sys.executable, [sys.executable, "-I", "-B", "program.py"])


def _watch(child: int, spec) -> int:
  """Waits for the program; its exit code, or 1 after it took too much."""
  end = time.monotonic() + spec["seconds"]  # later than the parent's end, and without the parent
  while time.monotonic() < end:
    pid = 1
    while pid:
      pid, status = os.waitpid(-1, os.WNOHANG)
      if pid == child:
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code
    excess = _excess(spec["processes"], spec["memory"])
    if excess:
      os.write(2, f"\nstopped: {excess}\n".encode())
      return 1
    signal.sigtimedwait((signal.SIGCHLD,), _PERIOD)
  return 1


def _excess(processes: int, memory: int) -> str:
  """The bound that the processes exceed together, "" for none."""
  tasks = resident = 0
  for name in os.listdir("/proc"):
    if name.isdigit() and name != "1":
      try:
        with open(f"/proc/{name}/stat") as f:
          fields = f.read().rpartition(")")[2].split()
      except OSError:  # it has ended
        continue
      tasks, resident = tasks + int(fields[17]), resident + int(fields[21])
  if tasks > processes:
    return f"more than {processes} processes and threads"
  if resident * resource.getpagesize() > memory:
    return f"more than {memory} bytes of memory in all processes"
  files = os.statvfs("/tmp")
  return f"more than {_FILES} files" if files.f_files - files.f_ffree > _FILES else ""


def _make_root(binds: list[str], links: list[list[str]], size: int):
  """A root of what `binds` and `links` name, read-only, with its own /proc and an empty /tmp."""
  _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
  os.mkdir("/tmp/old")
  _check(_libc.pivot_root(b"/tmp", b"/tmp/old"), "pivot_root")
  os.chdir("/")
  os.mkdir("/tmp")
  _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, f"size={size},mode=700")
  for path in (*binds, *(f"/dev/{name}" for name in _DEVICES)):
    is_folder = os.path.isdir("/old" + path)
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
      open(path, "a").close()
    _mount("/old" + path, path, "", _BIND | _REC)
  fds = [["/proc/self/fd", "/dev/fd"]]
  fds += [[f"/proc/self/fd/{i}", f"/dev/{x}"] for i, x in enumerate(("stdin", "stdout", "stderr"))]
  for target, link in (*links, *fds):
    os.symlink(target, link)
  os.mkdir("/proc")
  _mount("proc", "/proc", "proc", _NOSUID | _NODEV)
  with open("/proc/sys/user/max_user_namespaces", "w") as f:
    f.write("0")  # with one, the program would be its root, and could mount
  _check(_libc.umount2(b"/old", _DETACH), "umount")
  os.rmdir("/old")
  # All is read-only, also a Python below /tmp; then /tmp alone is not.
  for path, flags, change in (
    (b"/", _RECURSIVE, (_READ_ONLY | _NOSUID, 0)), (b"/tmp", 0, (0, _READ_ONLY)),
  ):  # fmt: skip
    attributes = (ctypes.c_uint64 * 4)(*change)
    code = _libc.syscall(_MOUNT_SETATTR, _HERE, path, flags, attributes, 32)
    _check(code, "mount_setattr (Linux 5.12)")


def _mount(source: str, target: str, kind: str, flags: int, options: str = ""):
  texts = (x.encode() or None for x in (source, target, kind))
  code = _libc.mount(*texts, ctypes.c_ulong(flags), options.encode() or None)
  _check(code, f"mount {target}")


def _check(code: int, call: str):
  if code:
    raise OSError(f"{call}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
  main()
