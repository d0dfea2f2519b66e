"""GPTQ: rounds a weight column by column, later columns making up for the error of earlier ones.

Source: Frantar et al. 2022 (arXiv:2210.17323) §3.3: the optimal brain surgeon's update for a fixed
order of the columns, by one Cholesky factor. The inverse of H = gram + damp * mean(diagonal) I is
U^T U with U upper triangular. Rounding column j leaves err = (w_j - q_j) / U_jj in every row, and
column k > j moves by -err U_jk. Here H = R R^T with R upper triangular, and U = R^-1: one
factorization and one triangular inverse in place of an inverse and its factorization.

A chunk of columns first takes the updates of all columns before it in one product; inside it every
column moves those behind it at once. Rows do not mix, but by scales that they share.

N is produced, K is contracted.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from fp8jax.errors import UserError
from fp8jax.ptq.moments import Moments, product
from fp8jax.quantization import quantize as quantize_lib
from fp8jax.quantization import rounding
from fp8jax.quantization.scaled_matrix import ScaledMatrix, expand, num_tiles, per_element
from fp8jax.recipe.quant import CURRENT, WHOLE, Clamp, Quant, Quantile, Rms, Rounding

Order = Literal["as_is", "by_activation"]
ORDERS = ("as_is", "by_activation")


def problem(quant: Quant) -> str:
  """The reason why a weight cannot be quantized so one column after the other; "" without any."""
  if quant.source != CURRENT:
    return f"source={quant.source} takes its scale from elsewhere; set source=CURRENT"
  if quant.rounding is not Rounding.NEAREST:
    return f"rounding={quant.rounding.value!r} is not the choice of codes; set rounding='nearest'"
  if quant.transform or quant.keeps_nonzero:
    return "transforms and keeps_nonzero change the matrix; rotate weights for good instead"
  if quant.format.is_per_tile:
    return f"the numbers of {quant.format} follow from whole tiles; take a format with a fixed grid"
  if isinstance(quant.clip, Clamp):
    return f"clip={quant.clip} is for activations; take Largest or LeastError"
  return ""


def quantize(
  w_NK, moments: Moments, quant: Quant, damp: float = 0.01, block: int = 128,
  order: Order = "as_is",
) -> ScaledMatrix:  # fmt: skip
  """The codes of a weight that leave less error in the layer's outputs than the nearest ones.

  The scales of a tile that ends along K are chosen when its first column is reached, from the
  weights as they are moved by then, of all rows of the tile. Tiles that extend over all of K begin
  with the first column: theirs are those of the weight as given, and so are all scales of the order
  "by_activation", whose columns belong to tiles by their own places, not by their turns. So are the
  two levels of E4M3_OVER_F32 in part: the tensor's amax is that of the weight as given.

  A column that no token excites bears no error and moves no other: its weights go to the nearest.

  Args:
    w_NK: float32, the weight.
    quant: any for which `problem` is "".
    damp: added to the diagonal, as a share of its mean.
    block: columns of a chunk, rounded to whole tiles.
    order: of the columns: as they lie, or by falling second moments of their inputs.

  Raises:
    UserError: quant has a problem, or the moments have no Cholesky factor; with the fix.
  """
  if reason := problem(quant):
    raise UserError(f"gptq to {quant}: {reason}")
  if order not in ORDERS or block < 1 or not damp >= 0:
    raise UserError(
      f"gptq(damp={damp}, block={block}, order={order!r}): damp must not be negative, block at "
      f"least 1, order one of {', '.join(ORDERS)}"
    )
  rows, width = w_NK.shape
  tile = quant.tile[1]
  if WHOLE < tile < width and width % tile and isinstance(quant.clip, Rms | Quantile):
    raise UserError(
      f"gptq to {quant}: {width} columns have a partial tile, whose statistics padding would "
      "change; take clip Largest or LeastError, or a tile that divides"
    )
  data, scale, is_sound = _quantize(w_NK, moments.gram_KK, damp, quant, block, order)
  if not bool(is_sound):
    raise UserError(
      f"gptq of {rows}x{width} with damp={damp}: the second moments have no Cholesky factor; take "
      "damp=0.1, or more calibration tokens than channels"
    )
  return ScaledMatrix(data, scale, quant.tile)


def factor(gram_KK, damp):
  """U, upper triangular float32 with U^T U the inverse of the damped gram; NaN if there is none."""
  diagonal = jnp.diagonal(gram_KK)
  mean = jnp.mean(diagonal)
  # Damping keeps a dead column off zero, unless all are dead.
  more = jnp.where(mean > 0, damp * mean, 1.0) + jnp.where(diagonal > 0, 0.0, mean)
  backward = (gram_KK + jnp.diag(more))[::-1, ::-1]
  lower = jax.lax.linalg.cholesky(backward, symmetrize_input=False)
  unit = jnp.eye(lower.shape[0], dtype=jnp.float32)
  inverse = jax.lax.linalg.triangular_solve(lower, unit, left_side=True, lower=True)
  return inverse[::-1, ::-1]


@functools.partial(jax.jit, static_argnames=("quant", "block", "order"))
def _quantize(w_NK, gram_KK, damp, quant: Quant, block: int, order: Order):
  """(codes [N, K], scales [tiles of rows, tiles of K], whether U is finite)."""
  w_KN, width = w_NK.astype(jnp.float32).T, w_NK.shape[1]
  tile = quant.tile[1] if order == "as_is" else WHOLE
  tile = WHOLE if tile >= width else tile
  turns = None
  if order == "by_activation":
    turns = jnp.argsort(-jnp.diagonal(gram_KK), stable=True)
    gram_KK = gram_KK[turns][:, turns]
  u_KK = factor(gram_KK, damp)
  tensor_amax = jnp.max(jnp.where(jnp.isnan(w_KN), 0.0, jnp.abs(w_KN)))
  fixed_KN = scale = None
  if tile == WHOLE:
    scale = quantize_lib.scales(w_NK, quant)
    fixed_KN = jnp.broadcast_to(per_element(scale, quant.tile, w_NK.shape), w_NK.shape).T
    fixed_KN, w_KN = (x if turns is None else x[turns] for x in (fixed_KN, w_KN))
  chunk = min(block, width) if tile == WHOLE else max(tile, block // tile * tile)
  pad = -width % chunk
  if pad:  # columns that move nothing
    w_KN, u_KK = jnp.pad(w_KN, ((0, pad), (0, 0))), jnp.pad(u_KK, ((0, pad), (0, pad)))
    u_KK += jnp.diag(jnp.pad(jnp.zeros(width), (0, pad), constant_values=1.0))
    fixed_KN = fixed_KN if fixed_KN is None else jnp.pad(fixed_KN, ((0, pad), (0, 0)), "edge")
  codes_KN, scales = _chunks(w_KN, u_KK, fixed_KN, tensor_amax, quant, chunk, tile)
  codes_KN = codes_KN[:width]
  if turns is not None:
    codes_KN = jnp.zeros_like(codes_KN).at[turns].set(codes_KN)
  if scale is None:
    scale = scales[: num_tiles(width, tile)].T
  return codes_KN.T.astype(quant.format.dtype), scale, jnp.all(jnp.isfinite(jnp.diagonal(u_KK)))


def _chunks(w_KN, u_KK, fixed_KN, tensor_amax, quant: Quant, chunk: int, tile: int):
  """(codes float32 [K, N], scales [tiles of K, tiles of rows]) of all chunks."""
  width, rows = w_KN.shape
  group = chunk if tile == WHOLE else tile
  of_tiles = (width // group, num_tiles(rows, quant.tile[0]))

  def one(number, carry):
    """`errors` of columns that had no turn yet are zeros."""
    codes_KN, errors_KN, scales = carry
    start = number * chunk
    u_chunk = jax.lax.dynamic_slice_in_dim(u_KK, start, chunk, 1)
    now = jax.lax.dynamic_slice_in_dim(w_KN, start, chunk) - product(u_chunk, errors_KN, (0, 0))
    u_own = jax.lax.dynamic_slice_in_dim(u_chunk, start, chunk)
    given = None
    if fixed_KN is not None:
      given = jax.lax.dynamic_slice_in_dim(fixed_KN, start, chunk)
    codes, errors, own = _columns(now, u_own, given, tensor_amax, quant, group)
    codes_KN = jax.lax.dynamic_update_slice_in_dim(codes_KN, codes, start, 0)
    errors_KN = jax.lax.dynamic_update_slice_in_dim(errors_KN, errors, start, 0)
    scales = jax.lax.dynamic_update_slice_in_dim(scales, own, number * (chunk // group), 0)
    return codes_KN, errors_KN, scales

  zeros = jnp.zeros_like(w_KN)
  carry = (zeros, zeros, jnp.zeros(of_tiles, jnp.float32))
  return jax.lax.fori_loop(0, width // chunk, one, carry)[::2]


def _columns(now, u, given, tensor_amax, quant: Quant, group: int):
  """(codes, errors, scales of tiles) of a chunk [chunk, N] whose earlier updates are done."""
  chunk, rows = now.shape

  def column(i, carry):
    now, codes, errors, scale = carry
    w = now[i]
    q = rounding.nearest(w * (1.0 / scale[i]), quant.format)
    error = (w - q * scale[i]) / u[i, i]
    # Columns before this one have zeros in u's row, and its own is w itself.
    now = now - u[i][:, None] * error
    return now, codes.at[i].set(q), errors.at[i].set(error), scale

  zeros = jnp.zeros_like(now)
  if given is not None:
    _, codes, errors, _ = jax.lax.fori_loop(0, chunk, column, (now, zeros, zeros, given))
    return codes, errors, jnp.zeros((1, num_tiles(rows, quant.tile[0])), jnp.float32)

  def tile(number, carry):
    (*state, scale), of_tiles = carry
    start = number * group
    own = quantize_lib.scales(
      jax.lax.dynamic_slice_in_dim(state[0], start, group).T, quant, tensor_amax
    )
    wide = jnp.broadcast_to(expand(own, 0, quant.tile[0], rows).T, (group, rows))
    scale = jax.lax.dynamic_update_slice_in_dim(scale, wide, start, 0)
    state = jax.lax.fori_loop(start, start + group, column, (*state, scale))
    return state, of_tiles.at[number].set(own[:, 0])

  of_tiles = jnp.zeros((chunk // group, num_tiles(rows, quant.tile[0])), jnp.float32)
  state = (now, zeros, zeros, zeros)
  (_, codes, errors, _), of_tiles = jax.lax.fori_loop(0, chunk // group, tile, (state, of_tiles))
  return codes, errors, of_tiles
