"""Quantized attention as a value: the Quants of its seven products.

S = Q K' and O = P V are two products like a linear layer's, with K and V in the place of a weight,
so that two Recipes say everything: `scores` (x is Q, w is K, g is dS) and `values` (x is P, w is V,
g is dO). The backward pass computes S once more, which is the seventh product.

Source: FlashAttention-3 (arXiv:2407.08608 §3.3) and its released kernel; SageBwd (arXiv:2505.11594
§4, arXiv:2603.02170). Nothing here computes: kernels/attention/reference.py does.
"""

import dataclasses
import math
from typing import Any

from fp8jax.formats import E4M3, INT8, Format
from fp8jax.recipe.gemm import PASSES, Gemm, Recipe
from fp8jax.recipe.quant import CURRENT, WHOLE, Quant, Rounding, Scale, Static


def whole_head(head_dim: int) -> int:
  """The Hadamard block of a head that is rotated as a whole: the largest that divides it."""
  return head_dim & -head_dim


@dataclasses.dataclass(frozen=True)
class Attention:
  """How attention's products are quantized; a Gemm without Quants is in the compute dtype.

  An operand is one matrix per sequence and key head. The queries of the heads that share a key head
  lie below one another in it, so that a WHOLE extent of Q is all of them; a tile of rows never
  covers two heads. Operands as rows x contraction, with L queries, M keys, K head size:
    scores  fwd S = (Q: L x K)(K: M x K)', dgrad dQ = (dS: L x M)(K: K x M)',
            wgrad dK' = (Q: K x L)(dS: M x L)'
    values  fwd O = (P: L x M)(V: K x M)', dgrad dP = (dO: L x K)(V: M x K)',
            wgrad dV = (P: M x L)(dO: K x L)'

  Attributes:
    name: in configurations and logs.
    scores, values: the Gemms. Scales are current and rounding is to the nearest: attention has
      neither a state nor a random key.
    recompute_quantized: whether the backward pass has S as scores.fwd computes it; else from Q and
      K in the compute dtype.
    rotation: size of the Hadamard blocks of a head in which Q and K are rotated for quantized
      products; WHOLE is the largest power of two that divides the head size, None no rotation.
    smooth_k: subtract from the keys of a document their mean, which changes no probability.
    p_scale: fixed scale of P, a power of two, where its Quants are Static; P = exp(S - largest S)
      is at most 1. None: P has its own scales.
  """

  name: str
  scores: Recipe
  values: Recipe
  recompute_quantized: bool = False
  rotation: int | None = None
  smooth_k: bool = False
  p_scale: float | None = None

  def __post_init__(self):
    where = f"attention {self.name!r}"
    for part in ("scores", "values"):
      of = getattr(self, part)
      if of != Recipe(of.name, of.fwd, of.dgrad, of.wgrad):
        raise ValueError(f"{where}: {part} has backward or an estimator; attention has neither")
      for p in PASSES:
        gemm = getattr(getattr(self, part), p)
        if gemm.is_quantized and not gemm.multiplies_codes:
          raise ValueError(f"{where}: {part}.{p} quantizes rhs alone; set both operands, or none")
        if gemm != Gemm(gemm.lhs, gemm.rhs, gemm.accumulate):
          raise ValueError(
            f"{where}: {part}.{p} has rotate_rows, compensates or a gain, which products of "
            "attention do not; leave them out"
          )
        for side in ("lhs", "rhs"):
          self._check(f"{where}: {part}.{p}.{side}", getattr(gemm, side), (part, side, p))
    size = self.rotation
    if size not in (None, WHOLE) and (type(size) is not int or size < 2 or size & (size - 1)):
      raise ValueError(
        f"{where}: rotation={size!r} must be a power of two from 2, WHOLE={WHOLE} for the whole "
        "head, or None"
      )
    if not self.scores.fwd.is_quantized and (
      size is not None or self.smooth_k or self.recompute_quantized
    ):
      raise ValueError(
        f"{where}: rotation={size}, smooth_k={self.smooth_k} and recompute_quantized="
        f"{self.recompute_quantized} are for a quantized S, and scores.fwd has no Quant; give it "
        "Quants, or leave these out"
      )
    if self.p_scale is not None:
      self._check_p_scale(where, self.p_scale)

  def _check(self, where: str, quant: Quant | None, place: tuple[str, str, str]):
    if quant is None:
      return
    is_p = place[0] == "values" and place[1] == "lhs" and place[2] != "dgrad"
    wanted = Static() if is_p and self.p_scale is not None else CURRENT
    if quant.source != wanted:
      raise ValueError(
        f"{where}: source={quant.source} with p_scale={self.p_scale}, expected {wanted}: attention "
        "keeps no amaxes, and only P may have a fixed scale (source=Static(), p_scale=...)"
      )
    if quant.rounding is not Rounding.NEAREST:
      raise ValueError(
        f"{where}: {quant} has rounding={quant.rounding.value!r}, and attention rounds to the "
        "nearest and is given no random key; set rounding=Rounding.NEAREST"
      )
    if quant.transform is not None:
      raise ValueError(
        f"{where}: transform={quant.transform}; both Q and K are rotated by rotation=..., and no "
        "other operand is"
      )

  def _check_p_scale(self, where: str, p_scale: float):
    quants = [q for q in (self.values.fwd.lhs, self.values.wgrad.lhs) if q is not None]
    is_power = 0 < p_scale <= 1 and math.frexp(p_scale)[0] == 0.5
    if not is_power or any(q.scale is not Scale.POW2 for q in quants) or not quants:
      raise ValueError(
        f"{where}: p_scale={p_scale!r} must be a power of two up to 1, with Quants of P whose "
        f"scale is 'pow2'; got {quants}"
      )
    if any(1 / p_scale > q.format.max for q in quants):
      raise ValueError(
        f"{where}: p_scale={p_scale} makes P as large as {1 / p_scale:g}, more than the "
        f"formats of {quants} have; set a larger one"
      )

  def __repr__(self):
    return self.name

  @property
  def products(self) -> dict[str, Gemm]:
    """The seven products by name; "S again" is of the backward pass."""
    again = self.scores.fwd if self.recompute_quantized else Gemm()
    return {
      "S": self.scores.fwd, "O": self.values.fwd, "S again": again, "dV": self.values.wgrad,
      "dP": self.values.dgrad, "dQ": self.scores.dgrad, "dK": self.scores.wgrad,
    }  # fmt: skip

  @property
  def query_block(self) -> int:
    """Queries after which no tile goes on: the least common multiple of the tiles along L."""
    along_rows = (self.scores.fwd.lhs, self.scores.dgrad.lhs, self.values.fwd.lhs,
                  self.values.dgrad.lhs)  # fmt: skip
    along_contraction = (self.scores.wgrad, self.values.wgrad)
    tiles = [q.tile[0] for q in along_rows if q]
    tiles += [q.tile[1] for gemm in along_contraction for q in (gemm.lhs, gemm.rhs) if q]
    return math.lcm(*(t for t in tiles if t != WHOLE))

  def rotation_size(self, head_dim: int) -> int | None:
    """Size of the blocks in which a head is rotated; None for none.

    Raises:
      ValueError: it does not divide the head.
    """
    if self.rotation is None:
      return None
    size = self.rotation or whole_head(head_dim)
    if size < 2 or head_dim % size:
      raise ValueError(
        f"attention {self.name!r}: rotation={self.rotation} and heads of {head_dim}: the size of a "
        "Hadamard block is a power of two that divides the head; take another, or None"
      )
    return size

  def with_wide_backward(self, name: str) -> "Attention":
    """The same forward pass; the backward pass has no quantized product."""
    wide = dict(dgrad=Gemm(), wgrad=Gemm())
    parts = {p: dataclasses.replace(getattr(self, p), **wide) for p in ("scores", "values")}
    return dataclasses.replace(self, name=name, recompute_quantized=False, **parts)

  def to_dict(self) -> dict[str, Any]:
    """A JSON-able description; `from_dict` inverts it exactly."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return fields | {"scores": self.scores.to_dict(), "values": self.values.to_dict()}

  @classmethod
  def from_dict(cls, description: dict[str, Any]) -> "Attention":
    parts = {p: Recipe.from_dict(description[p]) for p in ("scores", "values")}
    return cls(**{**description, **parts})


def _fa3(name: str, rows: int, p_scale: float, rotation: int | None = None) -> Attention:
  """Forward in E4M3, backward in the compute dtype: FlashAttention-3 has no other.

  Its sums are float32 registers, of which Hopper's FP8 unit fills about 14 bits; here all of them.
  """
  operand, v = Quant(E4M3, (rows, WHOLE)), Quant(E4M3, (WHOLE, rows))
  p = Quant(E4M3, scale=Scale.POW2, source=Static())
  values = Gemm(p, v, rows) if rows != WHOLE else Gemm(p, v)
  return Attention(
    name, Recipe("scores", Gemm(operand, operand)), Recipe("values", values), rotation=rotation,
    p_scale=p_scale,
  )  # fmt: skip


# The paper: a scale per block, here of 128 queries or keys, P as it is, Q and K rotated.
FA3 = _fa3("fa3", 128, 1.0, rotation=WHOLE)
FA3_UNROTATED = _fa3("fa3_unrotated", 128, 1.0)
# The released kernel: a scale per sequence and key head, no rotation, and the exponent of P is
# raised by 8, so that its largest element is 256.
FA3_TENSOR = _fa3("fa3_tensor", WHOLE, 2.0**-8)


def _sage_bwd(name: str, format: Format, block: int = 64) -> Attention:
  """Six of seven products in blocks of 8 bits; dP = dO V' stays in the compute dtype.

  P has a scale per query and block of keys in the forward pass, all else one per block. The papers'
  block is a tile of their kernel; 64 is our choice.
  """

  def quant(rows: int, contraction: int) -> Quant:
    return Quant(format, (rows, contraction))

  square, rows, columns = quant(block, block), quant(block, WHOLE), quant(WHOLE, block)
  scores = Recipe(
    "scores", Gemm(rows, rows), Gemm(square, columns, block), Gemm(columns, square, block)
  )
  values = Recipe(
    "values", Gemm(quant(1, block), columns, block), wgrad=Gemm(square, columns, block)
  )
  return Attention(name, scores, values, recompute_quantized=True, smooth_k=True)


SAGE_BWD = _sage_bwd("sage_bwd", INT8)
# The same in FP8, which the papers' kernels have for P and V alone.
SAGE_BWD_E4M3 = _sage_bwd("sage_bwd_e4m3", E4M3)
# Its arm with a backward pass in the compute dtype.
SAGE_FWD = SAGE_BWD.with_wide_backward("sage_fwd")

ATTENTIONS = {
  a.name: a for a in (FA3, FA3_UNROTATED, FA3_TENSOR, SAGE_BWD, SAGE_BWD_E4M3, SAGE_FWD)
}
