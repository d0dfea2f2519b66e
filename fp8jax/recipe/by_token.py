"""Whether a recipe's forward product of a token depends on no other token (precision.invariant)."""

from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import CURRENT, Quant, Scale


def problems(recipe: Recipe) -> list[str]:
  """Reasons why it does, in words; empty without any."""
  gemm, texts = recipe.fwd, []
  if gemm.lhs is not None and not _is_by_row(gemm.lhs):
    texts.append(
      f"its activations are quantized as {gemm.lhs}, whose scale or rounding is not of a token "
      "alone; take scales per token (block_128, rowwise), or delayed or static ones with their "
      "states"
    )
  if gemm.rotate_rows[0] is not None:
    texts.append("it rotates tokens into each other; take a recipe without rotate_rows")
  if gemm.compensates:
    texts.append("it multiplies outliers of a whole tensor apart; take one that does not")
  if gemm.rhs is not None and gemm.rhs.is_random:
    texts.append("its weights are rounded at random in every step; take one that does not")
  return texts


def _is_by_row(quant: Quant) -> bool:
  """Whether the codes of a row depend on no other row, nor on random bits."""
  if quant.is_random or (quant.scale is Scale.E4M3_OVER_F32 and quant.source == CURRENT):
    return False
  has_own = quant.source != CURRENT or quant.scale in (Scale.ONE, Scale.NONE)
  return quant.tile[0] == 1 or has_own
