"""Eight fake CPU devices, warnings as errors, seeds from test names."""

import os
import pathlib
import sys
import tempfile
import zlib

# Before jax is imported anywhere.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / d) for d in ("", "kernels"))]

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402

# Many tests compile the same programs: the second time they are read back. The folder is this
# run's own.
_CACHE = tempfile.TemporaryDirectory(prefix="fp8jax_compiled_")
jax.config.update("jax_compilation_cache_dir", _CACHE.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# grain's worker processes read absl flags, which only a launcher parses.
flags.FLAGS.mark_as_parsed()


@pytest.fixture
def rng(request) -> np.random.Generator:
  """Random numbers that depend on the test's name alone."""
  return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def repository() -> pathlib.Path:
  return ROOT
