"""Eight fake CPU devices, warnings as errors, seeds from test names."""

import os
import pathlib
import sys
import zlib

# Before jax is imported anywhere.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / d) for d in ("", "kernels"))]

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402

# grain's worker processes read absl flags, which only a launcher parses.
flags.FLAGS.mark_as_parsed()


@pytest.fixture
def rng(request) -> np.random.Generator:
  """Random numbers that depend on the test's name alone."""
  return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def repository() -> pathlib.Path:
  return ROOT
