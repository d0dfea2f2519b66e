"""python launch.py --config=configs/X.py[:arm] [--config.a.b=value] [--job=JOB] [--workdir=DIR]

python launch.py --job=report --workdir=DIR; --job=compare DIR...
python launch.py --sweep=experiments/sweeps/X.py [--parallel=N | --submit=slurm | --print | --vmap]
python launch.py --job=doctor; --explain optim.peak_lr; --help-config

Exit codes: 0 finished, 1 an error, 3 diverged (loss or gradient not finite), 75 saved after SIGTERM
(the same command resumes; schedulers requeue on it), 130 saved after Ctrl-C. A finished run that is
started again takes no step; WORKDIR/summary.json has the held-out loss as "objective". `{changes}`
in --workdir stands for the arm and the keys that the command line gives.
"""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys

# sed: deletes XLA's message "Very slow compile?", which comes after two minutes, and the one that
# tells how long it took. No flag does (jax#26098), and TF_CPP_MIN_LOG_LEVEL=3 hides all errors.
_NO_BANNER = r"""/slow_operation_alarm\.cc:[0-9]+\] ?(The operation took .*)?$/{
:a
N
/Very slow compile\?[^\n]*\n\*+$/d
/\n.*\n.*\n.*\n/!ba
}"""


def _leave(*_):
  """Ctrl-C before a job has begun: one line."""
  os.write(sys.stderr.fileno(), b"interrupted\n")
  os._exit(130)


def _with_huge_pages():
  """Begins again with huge pages for malloc where the CPU computes, unless the user chose.

  A step gives its scratch memory back to the kernel and asks for it again: a fault and 4 KiB of
  zeros at a time, a quarter of a small step. glibc reads the choice before main. Keeping the memory
  (mallopt) saves more, but let a process grow threefold: freed aligned blocks are not found again.
  """
  is_for_gpu = os.path.exists("/proc/driver/nvidia") and os.environ.get("JAX_PLATFORMS") != "cpu"
  if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ and not is_for_gpu:
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _without_banner():
  """Lets sed pass on what libraries write to descriptor 2; Python writes past it, to a terminal.

  sed is a process of its own, so that the last words of a process that aborts are passed on, too.
  """
  sed = shutil.which("sed")
  if "TF_CPP_MIN_LOG_LEVEL" in os.environ or sed is None or sys.platform != "linux":
    return  # the user chose what is logged
  with contextlib.suppress(OSError):
    stderr = os.dup(2)
    command = [sed, "-u", "-E", _NO_BANNER]
    options = {"stdout": stderr, "start_new_session": True}  # Ctrl-C is not for it
    filtered = subprocess.Popen(command, stdin=subprocess.PIPE, **options).stdin
    sys.stderr = open(stderr, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.dup2(filtered.fileno(), 2)
    filtered.close()


if __name__ == "__main__":
  _with_huge_pages()
  # Tracing makes millions of objects that live on: looking for cycles each time that 700 are new
  # costs half a second before the first step.
  gc.set_threshold(50_000, 20, 100)
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)  # imports take seconds
  _without_banner()

from fp8jax import errors  # noqa: E402

try:
  from absl import app, flags
  from ml_collections import config_flags

  from configs import base
  from fp8jax.jobs import command_line, dispatch, doctor
  from fp8jax.run import distributed
except ModuleNotFoundError as e:  # the library alone is installed
  sys.exit(f"error: {errors.missing_package(e)}")

CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Which configuration, e.g. configs/debug.py."
)
JOB = flags.DEFINE_enum(
  "job", "train", command_line.NAMES, "What to do with it; default: its file's JOB, or train."
)
WORKDIR = flags.DEFINE_string("workdir", "", "Where the run lives; default runs/<config>[_<arm>].")
OUT = flags.DEFINE_string(
  "out", "", "--job=export, calibrate, prepare, sensitivity: what to write instead of WORKDIR/..."
)
TOPOLOGY = flags.DEFINE_string(
  "topology", "", "--job=memory, plan_inference: GPUs that need not be here, e.g. h200:8."
)
BASELINE = flags.DEFINE_string(
  "baseline", "bf16", "--job=compare RUN...: the arm that the others are compared with."
)
DISTRIBUTED = flags.DEFINE_boolean(
  "distributed",
  False,
  "Call jax.distributed.initialize(), which finds SLURM, Open MPI or the flags below.",
)
COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port of process 0, without a scheduler."
)
PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes, without a scheduler.")
TIMEOUT = flags.DEFINE_integer("timeout", 300, "Seconds to wait for the other processes.")
PROCESS = flags.DEFINE_integer("process", None, "Index of this process, without a scheduler.")
SWEEP = flags.DEFINE_string("sweep", "", "Runs the trials of this file (experiments/sweeps).")
PARALLEL = flags.DEFINE_integer("parallel", 0, "Trials at a time; default one per GPU or core.")
SUBMIT = flags.DEFINE_string("submit", "", "Runs the trials as jobs: slurm, or local to try it.")
PRINT = flags.DEFINE_boolean("print", False, "Prints the commands of unfinished trials.")

VMAP = flags.DEFINE_boolean(
  "vmap",
  False,
  "Trains trials that differ in seed and schedule of the rate alone at once; small models.",
)


def main(argv):
  if signal.getsignal(signal.SIGINT) is _leave:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs answer it, most by saving
  if JOB.value in command_line.OF_FILES:
    name = flags.FLAGS["config"].config_filename if CONFIG.value is not None else ""
    sys.exit(dispatch.run_of_files(JOB.value, name, WORKDIR.value, argv[1:], BASELINE.value))
  if len(argv) > 1:
    sys.exit(f"unexpected argument {argv[1]!r}; options are written --name=value")
  if not COORDINATOR.value and (PROCESSES.value is not None or PROCESS.value is not None):
    sys.exit("error: --processes and --process need --coordinator=host:port of process 0")
  if JOB.value == "doctor":
    sys.exit(doctor.run())
  if SWEEP.value:
    root = os.path.dirname(os.path.abspath(__file__))
    sys.exit(
      dispatch.run_sweep(
        SWEEP.value, root, WORKDIR.value, PARALLEL.value, SUBMIT.value, PRINT.value, VMAP.value
      )
    )
  for name, value in dispatch.environment(CONFIG.value).items():
    os.environ.setdefault(name, value)
  if DISTRIBUTED.value or COORDINATOR.value:
    distributed.initialize(COORDINATOR.value, PROCESSES.value, PROCESS.value, TIMEOUT.value)
  name = flags.FLAGS["config"].config_filename
  workdir = command_line.with_changes(WORKDIR.value, sys.argv)
  options = {"out": OUT.value, "topology": TOPOLOGY.value}
  sys.exit(dispatch.run(JOB.value, CONFIG.value, base.get_config(), name, workdir, **options))


if __name__ == "__main__":
  command_line.answer(sys.argv)
  try:
    app.run(main, flags_parser=lambda argv: command_line.parse_flags(argv, base.get_config()))
  except KeyboardInterrupt:
    _leave()
