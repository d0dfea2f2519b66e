"""Keys of --job=quantize."""

from fp8jax.keys import NOTHING, key, section


# A table: a key a row, its meaning beside it.
# fmt: off
@section("quantize", NOTHING)
class Quantize:
  """How --job=quantize chooses the codes; precision.rules say in which formats."""

  methods: tuple[str, ...] = key((), "Applied in order: () rounds to the nearest. Before codes: "
    '"rotate", "equalize", "smoothquant(alpha=0.5)", "awq". For codes, one of "gptq(damp=0.01)" and '
    '"learned_rounding". After them: "bias_correction".')
  tokens: int = key(32768, "of calibration, whole windows of seq_len", least=1)
  text: str = key("", 'text file to calibrate on; "": training documents, as the data come')


# fmt: on
