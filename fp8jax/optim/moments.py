"""How Adam's moments are kept, as named values, and what is known to break.

Bytes are per parameter, for both moments, scales included. What each does to m / (sqrt(v) + eps)
over thousands of steps: `python experiments/moments/dynamics.py`.
"""

import dataclasses

from fp8jax.formats import BF16, E4M3, E5M2, F16
from fp8jax.quant import packed
from fp8jax.recipe import WHOLE, Expand, Quant, Rounding, Scale, SquareRoot


@dataclasses.dataclass(frozen=True)
class Moments:
  """How both moments are kept; None is float32.

  Attributes:
    mu: the mean of gradients (Lion: its momentum).
    nu: the mean of their squares.
  """

  mu: Quant | None = None
  nu: Quant | None = None


def _quant(format, group=WHOLE, scale=Scale.F32, **rest):
  return Quant(format, (1, group) if group else (WHOLE, WHOLE), scale, **rest)


def _nu(format, group=WHOLE, scale=Scale.F32, **rest):
  """Never 0 where the gradient was not: m / eps would be a step of any size."""
  return _quant(format, group, scale, keeps_nonzero=True, **rest)


PRESETS = {
  "float32": Moments(),
  # DeepSeek-V3 (arXiv:2412.19437 §3.3): 4 bytes. To the nearest it stalls near b2 = 0.999, where it
  # is refused: half a step of BF16 is 0.4 %, and v cannot fall by less.
  "bf16": Moments(_quant(BF16, scale=Scale.NONE), _nu(BF16, scale=Scale.NONE)),
  "bf16_sr": Moments(
    _quant(BF16, scale=Scale.NONE, rounding=Rounding.STOCHASTIC),
    _nu(BF16, scale=Scale.NONE, rounding=Rounding.STOCHASTIC),
  ),
  # Trillion-token FP8 (arXiv:2409.12517 §5): 2 bytes. m wants mantissa, v range.
  "tensor_e4m3_e5m2": Moments(_quant(E4M3), _nu(E5M2)),
  # COAT (arXiv:2410.19313 §4): every group's range stretched over E4M3's; 2.08 bytes, as amax and
  # exponent of a group take 5.
  "coat": Moments(
    _quant(E4M3, 128, transform=Expand()), _nu(E4M3, 128, transform=Expand())
  ),
  # The root halves the binades of v, so that E4M3 holds them under plain scales: 2.06 bytes.
  "sqrt_v": Moments(_quant(E4M3, 128), _nu(E4M3, 128, transform=SquareRoot())),
  # torchao's AdamWFp8: 2.03 bytes. There v does become 0, and updates explode (a hundredfold on the
  # schedule above); here it does not.
  "e4m3_256": Moments(_quant(E4M3, 256), _nu(E4M3, 256)),
  # FP8-LM (arXiv:2310.18313 §2.2): 3 bytes. Its powers of two never move, which F16's 10 bits bear.
  "fp8lm": Moments(_quant(E4M3, scale=Scale.POW2), _nu(F16, scale=Scale.POW2)),
}  # fmt: skip


def problems(moments: Moments, b2: float) -> list[str]:
  """Why these moments would not train, in words; b2 is the decay of nu."""
  found = []
  for name, quant in (("mu", moments.mu), ("nu", moments.nu)):
    if quant is None:
      continue
    try:
      packed.check(quant)
    except ValueError as e:
      found.append(f"{name}: {e}")
  nu = moments.nu
  if nu is None or nu.rounding is Rounding.STOCHASTIC or found:
    return found
  # A float32 amax / max moves the grid at every step, and nearest rounding with it.
  is_fixed = nu.scale is not Scale.F32
  half_step = 2.0 ** -(nu.format.mantissa_bits + 1)
  if is_fixed and (nu.format.is_narrow or 1 - b2 < half_step):
    found.append(
      f"nu={nu} with b2={b2}: rounded to the nearest on a grid that does not move, v cannot fall "
      f"by less than {half_step:.2g} of itself per step, and it wants {1 - b2:.2g}: it would stay "
      "where it was, and learning stop. Use scale='f32', or rounding='stochastic'"
    )
  return found


def nbytes(quant: Quant | None) -> float:
  """Bytes per element of a large tensor."""
  return 4.0 if quant is None else packed.nbytes(quant)
