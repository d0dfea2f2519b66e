"""Formats of Adam's moments, as named values, and their known failures.

Bytes are per parameter, for both moments, scales included. What each does to m / (sqrt(v) + eps)
over thousands of steps: `python experiments/moments/dynamics.py`.
"""

import dataclasses
import math

from fp8jax.formats import BF16, E4M3, E5M2, F16
from fp8jax.quantization import quantized_tensor
from fp8jax.recipe.quant import WHOLE, DynamicRangeExpansion, Quant, Rounding, Scale, SquareRoot


@dataclasses.dataclass(frozen=True)
class Moments:
  """Quants of both moments; None is float32.

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
    _quant(E4M3, 128, transform=DynamicRangeExpansion()),
    _nu(E4M3, 128, transform=DynamicRangeExpansion()),
  ),
  # The root halves the binades of v, so that E4M3 holds them under plain scales: 2.06 bytes.
  "sqrt_v": Moments(_quant(E4M3, 128), _nu(E4M3, 128, transform=SquareRoot())),
  # torchao's AdamWFp8: 2.03 bytes. There v does become 0, and updates explode (a hundredfold on the
  # schedule above); here it does not.
  "e4m3_256": Moments(_quant(E4M3, 256), _nu(E4M3, 256)),
  # FP8-LM (arXiv:2310.18313 §2.2): 3 bytes. Its powers of two never move, which F16's 10 bits bear.
  "fp8lm": Moments(_quant(E4M3, scale=Scale.POW2), _nu(F16, scale=Scale.POW2)),
}  # fmt: skip


def problems(moments: Moments, mu_decay: float | None, nu_decay: float | None) -> list[str]:
  """Why these moments would not train, in words.

  Args:
    mu_decay, nu_decay: what is left of each after a step without gradient: Adam's b1 and b2, b2 of
      Lion's momentum. None where it is not known: what depends on it passes.
  """
  found = []
  for name, quant, decay in (("mu", moments.mu, mu_decay), ("nu", moments.nu, nu_decay)):
    if quant is None:
      continue
    try:
      quantized_tensor.check(quant)
    except ValueError as e:
      found.append(f"{name}: {e}")
      continue
    # A float32 amax / max moves the grid at every step, and nearest rounding with it.
    is_fixed = quant.scale is not Scale.F32 and quant.rounding is Rounding.NEAREST
    half_step = 2.0 ** -(quant.format.mantissa_bits + 1)
    is_slow = decay is not None and 1 - decay < half_step
    # 8 bits have subnormals, whose steps are half of themselves and more. Of m, those are elements
    # 1/30,000 of the largest; v has half of its numbers there.
    if is_fixed and (is_slow or (name == "nu" and quant.format.is_narrow)):
      left = "any decay" if decay is None else f"a decay of {decay}"
      found.append(
        f"{name}={quant} with {left}: rounded to the nearest on a grid that does not move, it "
        f"cannot fall by less than {half_step:.2g} of itself per step: it would stay where it was, "
        "and learning stop. Use scale='f32', or rounding='stochastic'"
      )
    if name == "nu" and _binades(quant) < _LEAST_BINADES and not quant.keeps_nonzero:
      found.append(
        f"nu={quant}: what is {_binades(quant):.0f} binades below its tile's largest becomes 0, "
        "and m / eps a step of any size. Set keeps_nonzero=True, or "
        "transform=DynamicRangeExpansion() or SquareRoot(), or take E5M2"
      )
  return found


# Of v, the square of what varies: less, and gradients 2^12 below a tile's largest count as none.
# Plain E4M3 has 19, its square root and E5M2 over 30.
_LEAST_BINADES = 24


def _binades(quant: Quant) -> float:
  """Between a tile's largest and the smallest that does not become 0."""
  if isinstance(quant.transform, DynamicRangeExpansion):  # the tile's own range, whatever it is
    return math.inf
  each = math.log2(2 * quant.format.max / quant.format.smallest)
  return 2 * each if isinstance(quant.transform, SquareRoot) else each


def nbytes(quant: Quant | None) -> float:
  """Bytes per element of a large tensor."""
  return 4.0 if quant is None else quantized_tensor.nbytes(quant)
