"""Keys of --job=calibrate and --job=prepare."""

from fp8jax.keys import NOTHING, key, section
from fp8jax.quantization import clipping


# A table: a key a row, its meaning beside it.
# fmt: off
@section("calibrate", NOTHING, mapped=True)
class Calibrate:
  """The table that --job=calibrate writes."""

  batches: int = key(8, "training batches to watch", least=1)
  method: str = key("amax", 'Amax of a delayed or static scale: "amax", the largest magnitude; '
    '"percentile", below which are so many percent of the elements; or "mse", the one with the '
    "least squared error. The last two saturate outliers.", choices=clipping.METHODS)
  percentile: float = key(99.99, 'of method "percentile"')


@section("prepare", NOTHING, mapped=True)
class Prepare:
  """The tokenized documents that --job=prepare writes."""

  shard_tokens: int = key(100000000, "tokens per ArrayRecord file", least=1)
  processes: int = key(0, "that tokenize; 0: one per core, and one for less than 8 MiB of files",
    least=0)


# fmt: on
