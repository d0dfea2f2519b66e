"""Keys of --job=quantize."""

from fp8jax.keys import NOTHING, key, section


# A table: a key a row, its meaning beside it.
# fmt: off
@section("quantize", NOTHING, mapped=True)
class Quantize:
  """How --job=quantize chooses the codes; precision.rules say in which formats."""

  methods: tuple[str, ...] = key((), "Of fp8jax/ptq/methods.py; () rounds to the nearest. "
    '"rotate", "equalize", "smooth_quant(alpha=0.5)" and "awq" change weights before that; '
    '"gptq(damp=0.01)" and "learned_rounding" choose codes; "bias_correction" comes after them.')
  tokens: int = key(32768, "of calibration, in whole windows of seq_len", least=1)
  text: str = key("", 'text file to calibrate on; "": training documents, as the data come')


# fmt: on
