"""Formats in which moments, master weights and gradients are stored, as named values.

Each table maps the name in a configuration to a format. None is float32. Norms and biases are
float32 whatever the name. Bytes are per parameter, scales included.
"""

import dataclasses
import math
from typing import Any

import jax

from fp8jax.errors import UserError, nearest
from fp8jax.formats import BF16, E4M3, E5M2, F16, F32, by_name
from fp8jax.quantization import bf16_remainder, quantized_tensor, stored_matrix
from fp8jax.quantization.stored_matrix import StoredMatrix
from fp8jax.recipe.papers import PAPERS
from fp8jax.recipe.quant import WHOLE, DynamicRangeExpansion, Quant, Rounding, Scale, SquareRoot

# --- moments -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moments:
  """Formats of both moments of Adam.

  Attributes:
    mu: of the mean of gradients (Lion: of its momentum).
    nu: of the mean of their squares.
  """

  mu: Quant | None = None
  nu: Quant | None = None


def _quant(format, group=WHOLE, scale=Scale.F32, **rest):
  return Quant(format, (1, group) if group else (WHOLE, WHOLE), scale, **rest)


def _nu(format, group=WHOLE, scale=Scale.F32, **rest):
  """Never rounds a nonzero to 0: m / eps would be an update of any size."""
  return _quant(format, group, scale, keeps_nonzero=True, **rest)


# The effect of each on m / (sqrt(v) + eps) over thousands of steps: `python
# experiments/moments/dynamics.py`. `moments` makes others.
MOMENTS: dict[str, Moments] = {
  "float32": Moments(),
  # DeepSeek-V3 (arXiv:2412.19437 §3.3): 4 bytes. Rounded to nearest, v stalls near b2 = 0.999,
  # which is refused: half a step of BF16 is 0.4 %, and v cannot decay by less.
  "bf16": Moments(_quant(BF16, scale=Scale.NONE), _nu(BF16, scale=Scale.NONE)),
  "bf16_sr": Moments(
    _quant(BF16, scale=Scale.NONE, rounding=Rounding.STOCHASTIC),
    _nu(BF16, scale=Scale.NONE, rounding=Rounding.STOCHASTIC),
  ),
  # Trillion-token FP8 (arXiv:2409.12517 §5): 2 bytes. m needs mantissa bits, v range.
  "tensor_e4m3_e5m2": Moments(_quant(E4M3), _nu(E5M2)),
  # COAT (arXiv:2410.19313 §4): dynamic range expansion stretches every group over E4M3's range;
  # 2.08 bytes, of which amax and exponent of a group are 5 bytes per 128.
  "coat": Moments(
    _quant(E4M3, 128, transform=DynamicRangeExpansion()),
    _nu(E4M3, 128, transform=DynamicRangeExpansion()),
  ),
  # The square root halves the binades of v, so that E4M3 holds them under plain scales: 2.06 bytes.
  "sqrt_v": Moments(_quant(E4M3, 128), _nu(E4M3, 128, transform=SquareRoot())),
  # torchao's AdamWFp8: 2.03 bytes. There v can become 0, and updates explode (a hundredfold under
  # the experiment's schedule); here it cannot.
  "e4m3_256": Moments(_quant(E4M3, 256), _nu(E4M3, 256)),
  # FP8-LM (arXiv:2310.18313 §2.2): 3 bytes. Powers of two do not move with the amax; the 10
  # mantissa bits of F16 decay all the same.
  "fp8lm": Moments(_quant(E4M3, scale=Scale.POW2), _nu(F16, scale=Scale.POW2)),
}  # fmt: skip


def moments(name: str) -> Moments:
  """The formats of a name: a key of MOMENTS, or "tensor_M_V" of any two formats.

  M and V are names of `formats.by_name`, "tensor_e4m3_240_e5m6", each under a float32 scale per
  tensor; "f32" is float32 without one. v never becomes 0. A format without a dtype takes the bytes
  of the wider one that stores it.

  Raises:
    UserError: another name, or a format that tensors cannot be stored in.

  Source: the pairs that trillion-token FP8 (arXiv:2409.12517 §5) compares.
  """
  if name in MOMENTS:
    return MOMENTS[name]
  kind, *words = name.split("_")
  reason = ""
  for at in range(1, len(words)) if kind == "tensor" else ():
    try:
      mu, nu = (by_name("_".join(part)) for part in (words[:at], words[at:]))
      return Moments(None if mu is F32 else _quant(mu), None if nu is F32 else _nu(nu))
    except ValueError as e:
      reason = f": {e}"
  near = nearest(name, MOMENTS)
  hint = f"; did you mean {near!r}?" if near else "."
  raise UserError(
    f"moment_format={name!r} is unknown{reason}{hint} Known: {', '.join(MOMENTS)}, and tensor_M_V "
    "of two formats, such as tensor_e4m3_240_e5m2"
  )


def moment_problems(moments: Moments, mu_decay: float | None, nu_decay: float | None) -> list[str]:
  """Reasons why these formats would not train.

  Args:
    mu_decay, nu_decay: factor of each moment per step: Adam's b1 and b2, b2 of Lion's momentum.
      None if unknown: what depends on it passes.
  """
  texts = []
  for name, quant, decay in (("mu", moments.mu, mu_decay), ("nu", moments.nu, nu_decay)):
    if quant is None:
      continue
    try:
      quantized_tensor.check(quant)
    except ValueError as e:
      texts.append(f"{name}: {e}")
      continue
    # A float32 scale, amax / max, moves the grid in every step, and rounding to nearest with it.
    is_fixed = quant.scale is not Scale.F32 and quant.rounding is Rounding.NEAREST
    half_step = 2.0 ** -(quant.format.mantissa_bits + 1)
    is_slow = decay is not None and 1 - decay < half_step
    # Steps of subnormals are half of the number and more. In 8 bits, an element of m is subnormal
    # below 1/30,000 of the largest; half of the elements of v are.
    if is_fixed and (is_slow or (name == "nu" and quant.format.is_low_bit)):
      left = "any decay" if decay is None else f"a decay of {decay}"
      texts.append(
        f"{name}={quant} with {left}: rounded to the nearest on a grid that does not move, it "
        f"cannot fall by less than {half_step:.2g} of itself per step: it would stay where it was, "
        "and learning stop. Use scale='f32', or rounding='stochastic'"
      )
    if name == "nu" and _binades(quant) < _LEAST_BINADES and not quant.keeps_nonzero:
      texts.append(
        f"nu={quant}: what is {_binades(quant):.0f} binades below its tile's largest becomes 0, "
        "and m / eps a step of any size. Set keeps_nonzero=True, or "
        "transform=DynamicRangeExpansion() or SquareRoot(), or take E5M2"
      )
  return texts


# Range that v needs: gradients 2^12 below a tile's largest count as zero, and v holds squares.
# Plain E4M3 has 19 binades, its square root and E5M2 over 30.
_LEAST_BINADES = 24


def _binades(quant: Quant) -> float:
  """Between a tile's largest element and the smallest that does not become 0."""
  if isinstance(quant.transform, DynamicRangeExpansion):  # the tile's own range
    return math.inf
  each = math.log2(2 * quant.format.max / quant.format.smallest)
  return 2 * each if isinstance(quant.transform, SquareRoot) else each


# --- master weights ------------------------------------------------------------------------------

# BF16 and the 16 bits that a float32 has besides (quantization/bf16_remainder.py).
REMAINDER = "remainder"

# GEMMs read the BF16 half of "bf16_remainder" and the value of every other.
MASTERS: dict[str, Quant | str | None] = {
  "float32": None,
  # Rounding to nearest would lose every update below half a step of BF16 (0.2 to 0.4 %).
  # Stochastic rounding is right in the mean (Zamirai et al. 2020, arXiv:2010.06192).
  "bf16_sr": Quant(BF16, scale=Scale.NONE, rounding=Rounding.STOCHASTIC),
  "bf16_remainder": REMAINDER,
  # FP8-LM (arXiv:2310.18313 §2.2): 10 mantissa bits under a power of two per tensor. The paper
  # rounds to nearest. Here rounding is stochastic: half a step is 0.02 to 0.05 % of a weight, and
  # continued pre-training at rates of 1e-5 changes most weights by less.
  "f16": Quant(F16, scale=Scale.POW2, rounding=Rounding.STOCHASTIC),
  # LNS-Madam's weights (arXiv:2106.13914): 16 octaves below the largest of a tensor, rounded to the
  # nearest; the scale is a power of two, so that the numbers stay where they are. Emulated in
  # float32: 4 bytes here.
  **{
    f"lns{bits}": Quant(by_name(f"lns{bits}(gamma={2 ** (bits - 5)})"), scale=Scale.POW2)
    for bits in (16, 14, 12, 10)
  },
}


def store_master(x, format: Quant | str | None, *, lead: int = 0, key=None) -> Any:
  """A master weight in its format: float32, QuantizedTensor or SplitFloat32.

  Args:
    x: float32 of any shape.
    format: a value of MASTERS.
    lead: number of first axes along which every entry is a tensor with scales of its own.
    key: random key of stochastic rounding.
  """
  if format is None:
    return x
  if isinstance(format, Quant):
    return quantized_tensor.pack(x, format, lead=lead, key=key)
  # The CPU may compute x for each half, once with a fused multiply-add: at a tie of BF16 the upper
  # half of the one and the lower half of the other are a step of BF16 beside both.
  x = jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)
  return bf16_remainder.split(x)


def master_nbytes(format: Quant | str | None) -> tuple[float, float]:
  """(bytes that GEMMs read as they are, bytes besides) per parameter of a large tensor.

  GEMMs read float32 and F16 masters as BF16 or FP8, which every step makes again.
  """
  if format == REMAINDER:
    return 2.0, 2.0
  if isinstance(format, Quant):
    own = quantized_tensor.nbytes(format)
    return (own, 0.0) if format.format is BF16 else (0.0, own)
  return 0.0, 4.0


# --- frozen parameters ---------------------------------------------------------------------------

_BF16 = Quant(BF16, scale=Scale.NONE)
# Of linear layers that are not trained, by the name of model.lora.base: codes that their GEMMs
# multiply as they are, E4M3 with one scale per 128x128, or with a scale per matrix HALO's three
# (arXiv:2501.02625), the last two of the rotated weight; or BF16 or float32, which a recipe
# quantizes each step: float32 to the codes that init.hf has, where BF16 would round their scales.
FROZEN = {
  "block_fp8": stored_matrix.QUANT, "e4m3": Quant(E4M3),
  "int8_h64": PAPERS["halo_int8_2_hq"].fwd.rhs, "e3m2_h64": PAPERS["halo_fp6_1_hq"].fwd.rhs,
  "bf16": _BF16, "float32": None,
}  # fmt: skip


def is_in_codes(quant: Quant | None) -> bool:
  """Whether a value of FROZEN is of codes, which products multiply as they are."""
  return quant is not None and quant.format.is_low_bit


def store_frozen(x, quant: Quant | None, *, inputs: int, lead: int) -> Any:
  """A frozen parameter in its format: float32, BF16 or StoredMatrix; StoredMatrix as they are.

  Args:
    x: float32, or StoredMatrix of a checkpoint in FP8.
    quant: a value of FROZEN; None for float32.
    inputs: axes that its GEMM contracts, for codes.
    lead: number of first axes along which every entry is a tensor.
  """
  if isinstance(x, StoredMatrix) or quant is None:
    return x
  if is_in_codes(quant):
    return stored_matrix.pack(x, inputs, lead, quant)
  return quantized_tensor.pack(x, quant, lead=lead)


# --- gradients -----------------------------------------------------------------------------------

# Between the backward pass and the update, and summed over microbatches (gradients.py).
GRADIENTS: dict[str, Quant | None] = {
  "float32": None,
  # Rounding to nearest would lose the later ones of many microbatches.
  "bf16_sr": Quant(BF16, scale=Scale.NONE, rounding=Rounding.STOCHASTIC),
  # FP8-LM (arXiv:2310.18313 §2.1): 1 byte, a scale per tensor. A microbatch is rounded to nearest,
  # their sum stochastically.
  "e4m3": Quant(E4M3),
}


# Of a gradient's terms on their way between devices, which are summed in float32 there
# (ops/collectives.py).
WIRES: dict[str, Quant | None] = {
  "float32": None,
  "bf16": Quant(BF16, scale=Scale.NONE),
  "e4m3": Quant(E4M3, (1, 128)),
  # FP8-LM's (arXiv:2310.18313 §2.1): one scale of a tensor, of the devices that exchange it.
  "e4m3_shared": Quant(E4M3),
}


def nbytes(quant: Quant | None) -> float:
  """Bytes per element of a large moment or gradient."""
  return 4.0 if quant is None else quantized_tensor.nbytes(quant)
