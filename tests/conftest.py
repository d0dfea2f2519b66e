"""Eight fake CPU devices, warnings as errors, seeds from test names."""

import gc
import json
import os
import pathlib
import sys
import tempfile
import tracemalloc  # noqa: F401  (pytest's own import fails while etils, of TFDS, imports lazily)
import zlib

# Before jax is imported anywhere.
ON_GPU = os.environ.get("FP8JAX_TEST_GPU") == "1"
if not ON_GPU:
  os.environ["JAX_PLATFORMS"] = "cpu"
# On a core that others use too, eight devices may meet late: XLA aborts the process after 40 s.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
  " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / d) for d in ("", "kernels"))]

# Each of several workers has its share of the cores: the threads of one do not wait for a core that
# another computes on, which costs 7 % of the suite's time on two cores.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
  cores = sorted(os.sched_getaffinity(0))
  index, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
  os.sched_setaffinity(0, set(cores[index::count]) or {cores[index % len(cores)]})

# Many tests compile the same programs, some in processes of their own: the second time they are
# read back, small ones in 1.5 ms instead of 17. The folder is this run's, or one that several runs
# share.
_CACHE = tempfile.TemporaryDirectory(prefix="fp8jax_compiled_")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _CACHE.name)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# Tracing makes millions of small objects that live until the program is made: looking for cycles
# among them each time that 700 are new costs a twentieth of the suite's time.
gc.set_threshold(50_000, 20, 100)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402

# grain's worker processes read absl flags, which only a launcher parses.
flags.FLAGS.mark_as_parsed()


# Files that take long come first: no process is then left with one when the others are done. A file
# that nobody has measured is among the first fifty.
_SECONDS = json.loads((ROOT / "tests" / "cpu_seconds.json").read_text())
_UNMEASURED = 10.0


def pytest_sessionstart():
  if ON_GPU and (kind := jax.devices()[0]).platform != "gpu":
    pytest.exit(f"FP8JAX_TEST_GPU=1 and there is no GPU: JAX computes on {kind.device_kind}", 1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  """Notes the CPU time of a test, that of its processes included, with its last report."""
  begin = sum(os.times()[:4])
  item.user_properties.append(("cpu_begin", begin))
  return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
  report = yield
  if call.when == "teardown":
    begin = dict(item.user_properties)["cpu_begin"]
    report.user_properties = [("cpu_seconds", sum(os.times()[:4]) - begin)]
  return report


_cpu_seconds: dict[str, float] = {}  # of every test file, in the process that reports


def pytest_runtest_logreport(report):
  for name, value in report.user_properties:
    if name == "cpu_seconds":
      path = report.nodeid.partition("::")[0]
      _cpu_seconds[path] = _cpu_seconds.get(path, 0.0) + value


def pytest_sessionfinish(session):
  """Leaves CPU seconds by file; tests/guards.py compares them with the budget."""
  if "PYTEST_XDIST_WORKER" not in os.environ and _cpu_seconds:
    folder = ROOT / ".pytest_cache"
    folder.mkdir(exist_ok=True)
    rounded = {name: round(seconds, 2) for name, seconds in sorted(_cpu_seconds.items())}
    (folder / "cpu_seconds.json").write_text(json.dumps(rounded, indent=1) + "\n")


def pytest_collection_modifyitems(items):
  items.sort(key=lambda item: -_SECONDS.get(item.nodeid.partition("::")[0], _UNMEASURED))


# Where what is compiled is what is tested: the compiler is the one that users have. Elsewhere
# compiling takes most of the time, and LLVM's optimizations a third of that.
_EXACT = ("quantization", "kernels", "invariance_test")
_TRAINING = ("amax_history_test",)  # in such a folder, and compiles steps of training
# There, too: on a CPU what is compiled is the interpreter of kernels.
_INTERPRETED = ("mosaic_sm90_test", "prologues_test", "quantize_sm90_test")


@pytest.fixture(autouse=True, scope="module")
def _compiled_quickly(request):
  names = {request.path.parent.name, request.path.stem}
  quick = _TRAINING if ON_GPU else (*_TRAINING, *_INTERPRETED)
  if names & set(_EXACT) and not names & set(quick):
    yield
    return
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # of processes that tests start
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def rng(request) -> np.random.Generator:
  """Random numbers that depend on the test's name alone."""
  return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def _interpret(monkeypatch, cores: int, detect_races: bool):
  """GPU kernels run on CPU, on so many multiprocessors; what nobody writes is NaN."""
  from jax._src.pallas.mosaic_gpu.interpret import shared_memory
  from jax.experimental.pallas import mosaic_gpu as plgpu

  from fp8jax.kernels.gemm import mosaic_sm90
  from fp8jax.kernels.quantize import tile_program

  monkeypatch.setattr(mosaic_sm90, "num_cores", lambda: cores)
  monkeypatch.setattr(tile_program, "CLIPS", "always")
  # The first device to finish would complain about those still at work.
  monkeypatch.setattr(shared_memory.GPUSharedMemory, "assert_no_barriers_allocated", lambda _: None)
  params = plgpu.InterpretGPUParams(detect_races=detect_races, uninitialized_memory="nan")
  return plgpu.force_gpu_interpret_mode(params)


@pytest.fixture
def interpreted(monkeypatch):
  """GPU kernels are interpreted, and races fail; or run on the GPU, see `make test-gpu`."""
  if ON_GPU:
    yield
    return
  with _interpret(monkeypatch, 4, detect_races=True):
    yield


@pytest.fixture
def interpreted_on_mesh(monkeypatch):
  """The same for several devices, one kernel per program: more of them get mixed up."""
  with _interpret(monkeypatch, 1, detect_races=False):
    yield


@pytest.fixture
def repository() -> pathlib.Path:
  return ROOT


@pytest.fixture
def parse(monkeypatch):
  """(arguments) -> the parsed config: launch.py's parser over flags of its own."""
  from ml_collections import config_flags

  from configs import base
  from fp8jax.jobs import command_line

  monkeypatch.chdir(ROOT)

  def run(*arguments):
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", flag_values=values)
    flags.DEFINE_enum("job", "train", command_line.NAMES, "", flag_values=values)
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.delitem(sys.modules, "config_config", raising=False)  # the file loaded before
    monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
    command_line.parse_flags(sys.argv, base.get_config())
    return values["config"].value

  return run
