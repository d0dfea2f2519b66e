"""Formats of master weights between steps, as named values.

GEMM operands come from the master: from the BF16 half of "bf16_remainder", from the value of the
others.
"""

from typing import Any

from fp8jax.formats import BF16, F16
from fp8jax.quantization import bf16_remainder, quantized_tensor
from fp8jax.recipe.quant import Quant, Rounding, Scale

# BF16 and the 16 bits it lacks: see quantization/bf16_remainder.py.
REMAINDER = "remainder"

PRESETS: dict[str, Quant | str | None] = {
  "float32": None,
  # To the nearest, an update below half a step of BF16 (0.2 to 0.4 %) would be lost every time;
  # rounded stochastically it is right in the mean (Zamirai et al. 2020, arXiv:2010.06192).
  "bf16_sr": Quant(BF16, scale=Scale.NONE, rounding=Rounding.STOCHASTIC),
  "bf16_remainder": REMAINDER,
  # FP8-LM (arXiv:2310.18313 §2.2): 10 bits of mantissa under a power of two per tensor. There to
  # the nearest; here stochastically, as BF16: half a step is 0.02 to 0.05 % of a weight, and
  # continued pre-training at rates of 1e-5 moves most of them by less.
  "f16": Quant(F16, scale=Scale.POW2, rounding=Rounding.STOCHASTIC),
}


def keep(x, how: Quant | str | None, *, lead: int = 0, key=None) -> Any:
  """x in the format of the master: float32, QuantizedTensor or SplitFloat32.

  Args:
    x: float32 of any shape.
    how: a value of PRESETS.
    lead: so many first axes number tensors of their own.
    key: for stochastic rounding.
  """
  if how is None:
    return x
  return (
    quantized_tensor.pack(x, how, lead=lead, key=key)
    if isinstance(how, Quant)
    else bf16_remainder.split(x)
  )


def nbytes(how: Quant | str | None) -> tuple[float, float]:
  """(bytes that products read as they are, bytes besides) per parameter of a large tensor.

  Of float32 and F16 masters, products read BF16 or FP8 that is computed anew in every step.
  """
  if how == REMAINDER:
    return 2.0, 2.0
  if isinstance(how, Quant):
    own = quantized_tensor.nbytes(how)
    return (own, 0.0) if how.format is BF16 else (0.0, own)
  return 0.0, 4.0
