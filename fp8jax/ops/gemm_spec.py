"""The static specification of a dot, and the scaling inputs of its site."""

import dataclasses
import enum
import math
import string
from typing import Any, cast

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax.kernels import choose
from fp8jax.ops import stored_params
from fp8jax.ops.residuals import GemmInput
from fp8jax.ops.site import Site
from fp8jax.quantization import tensor_stats
from fp8jax.quantization.amax_history import TENSORS
from fp8jax.quantization.scaled_matrix import ScaledMatrix
from fp8jax.recipe.gemm import PASSES, Backward, Gemm, Recipe
from fp8jax.recipe.quant import WHOLE, Hadamard, Quant


@dataclasses.dataclass(frozen=True)
class EinsumLetters:
  """The three operands of an einsum, by letter."""

  x: str
  w: str
  y: str

  @property
  def contracted(self) -> str:
    return "".join(c for c in self.x if c in self.w and c not in self.y)

  @property
  def batch(self) -> str:
    return "".join(c for c in self.x if c in self.w and c in self.y)

  @property
  def produced(self) -> str:
    """Letters of w that the product keeps."""
    return "".join(c for c in self.y if c in self.w and c not in self.x)

  @property
  def tokens(self) -> str:
    """Letters that w does not have."""
    return "".join(c for c in self.x if c in self.y and c not in self.w)


class Role(enum.Enum):
  """The six operands of the three GEMMs of a linear layer.

  Attributes:
    tensor: "x", "w" or "g", the gradient of y.
    gemm: "fwd", "dgrad" or "wgrad".
    side: "lhs" or "rhs" of that Gemm.
  """

  X_FWD = ("x", "fwd", "lhs")
  W_FWD = ("w", "fwd", "rhs")
  G_DGRAD = ("g", "dgrad", "lhs")
  W_DGRAD = ("w", "dgrad", "rhs")
  X_WGRAD = ("x", "wgrad", "lhs")
  G_WGRAD = ("g", "wgrad", "rhs")

  def __init__(self, tensor: str, gemm: str, side: str):
    self.tensor, self.gemm, self.side = tensor, gemm, side

  @property
  def number(self) -> int:
    """Different for every pair of a tensor and a GEMM."""
    return 3 * TENSORS.index(self.tensor) + PASSES.index(self.gemm)


# The operands that the backward pass makes of a gradient.
BOTH_OF_G = (Role.G_DGRAD, Role.G_WGRAD)


@dataclasses.dataclass(frozen=True)
class GemmSpec:
  """Everything about a dot that is known when it is traced.

  Attributes:
    letters: of the einsum.
    name: of the site.
    recipe: precision of the three GEMMs.
    backends: implementation of (fwd, dgrad, wgrad).
    layout: where letters live on the mesh.
    out_dtype, x_dtype: of y and of x.
    sizes: of the letters of x, then of w.
    statistics: how many statistics the site observes per tensor; tensor_stats.QUIET is the amax.
    is_observable: whether somebody may differentiate with respect to the site's tap.
    save: form in which x is a residual.
    is_frozen: whether w has no gradient, so that there is no weight gradient.
  """

  letters: EinsumLetters
  name: str
  recipe: Recipe
  backends: tuple[str, ...]
  layout: axes.Layout
  out_dtype: jnp.dtype
  x_dtype: jnp.dtype
  sizes: tuple[int, ...]
  statistics: int
  is_observable: bool
  save: GemmInput = GemmInput.UNQUANTIZED
  is_frozen: bool = False

  @property
  def observes(self) -> bool:
    """Whether the site observes anything: with the amax alone, only what it quantizes."""
    return self.recipe.is_quantized or self.statistics > tensor_stats.QUIET

  @property
  def observes_amax_only(self) -> bool:
    """Whether the amax is all it observes, which a quantizer finds as it reads."""
    return self.observes and self.statistics == tensor_stats.QUIET

  @property
  def saves_operand(self) -> bool:
    """Whether the residual of x is X_WGRAD, quantized. In the compute dtype X_WGRAD is x itself."""
    if self.is_frozen or self.save is not GemmInput.WGRAD_OPERAND:
      return False
    return self.quant(Role.X_WGRAD) is not None

  @property
  def roles_of_g(self) -> tuple[Role, ...]:
    """The operands that the backward pass makes of a gradient."""
    return (Role.G_DGRAD,) if self.is_frozen else BOTH_OF_G

  @property
  def y_shape(self) -> tuple[int, ...]:
    sizes = dict(zip(self.letters.x + self.letters.w, self.sizes))
    return tuple(sizes[c] for c in self.letters.y)

  def local_sizes(self) -> dict[str, int]:
    """Letter -> size on one device."""
    return local_sizes(self.letters.x + self.letters.w, self.sizes, self.layout)

  def letters_of(self, role: Role) -> tuple[str, str, str]:
    """Letters of an operand: all, in order; those of its rows; those that its GEMM contracts."""
    s = self.letters
    letters = {"x": s.x, "w": s.w, "g": s.y}[role.tensor]
    contracted = {"fwd": s.contracted, "dgrad": s.produced, "wgrad": s.tokens}[role.gemm]
    return letters, "".join(c for c in letters if c not in contracted + s.batch), contracted

  def partition_spec(self, role: Role, t):
    """PartitionSpec of x or g, or of its ScaledMatrix."""
    if isinstance(t, ScaledMatrix):
      return self.quantized_spec(role)
    return self.layout.act_spec(self.letters_of(role)[0])

  def quantized_spec(self, role: Role):
    """PartitionSpec of the ScaledMatrix [batch?, rows, contraction] in this role."""
    _, *groups = self.letters_of(role)
    batch, tile = self.letters.batch, cast(Quant, self.quant(role)).tile
    lead = (self.layout.act_axes_of(batch) or None,) if batch else ()
    axes_ = [self.layout.act_axes_of(group) or None for group in groups]
    scales = [None if extent == WHOLE else a for a, extent in zip(axes_, tile)]
    place: Any = jax.sharding.PartitionSpec
    return ScaledMatrix(place(*lead, *axes_), place(*lead, *scales), tile)

  def gemm(self, name: str) -> Gemm:
    return getattr(self.recipe, name)

  def backend(self, gemm: str) -> str:
    return self.backends[PASSES.index(gemm)]

  def quant(self, role: Role) -> Quant | None:
    """How an operand is quantized; None for the compute dtype."""
    return getattr(self.gemm(role.gemm), role.side)

  def rows_rotation(self, role: Role) -> Hadamard | None:
    """How the rows of an operand are rotated."""
    return self.gemm(role.gemm).rotate_rows[role.side == "rhs"]

  def remakes(self, role: Role) -> bool:
    """Whether an operand of the backward pass is made of what the forward product multiplied."""
    forward = {Role.W_DGRAD: Role.W_FWD, Role.X_WGRAD: Role.X_FWD}.get(role)
    is_later = forward is not None and self.quant(forward) is not None
    return is_later and self.recipe.backward is Backward.DEQUANTIZED

  def rotates_back(self, role: Role) -> bool:
    """Whether the gradient of X_FWD's or W_FWD's tensor leaves its product in rotated space."""
    quant, again = self.quant(role), self.recipe.backward is Backward.DEQUANTIZED
    return quant is not None and quant.rotation is not None and again

  def gain(self, gemm: str) -> float | None:
    """The constant factor of a product.

    Raises:
      ValueError: it depends on sizes of which a chunk or shard is all that is known here.
    """
    gain = self.gemm(gemm).gain
    if gain is None:
      return None
    if self.layout.is_manual and (gain.fan_out or gain.tokens):
      raise ValueError(
        f"site {self.name!r}: {gain} needs the sizes of the whole product, and the loss multiplies "
        "the head in chunks; give the head a gain of fan_in alone"
      )
    sizes = dict(zip(self.letters.x + self.letters.w, self.sizes))
    groups = (self.letters.contracted, self.letters.produced, self.letters.tokens)
    powers = zip(groups, (gain.fan_in, gain.fan_out, gain.tokens))
    one = math.prod(math.prod(sizes[c] for c in group) ** power for group, power in powers)
    return one * self.layout.microbatches**gain.tokens


def local_sizes(letters: str, sizes, layout: axes.Layout) -> dict[str, int]:
  """Letter -> size on one device of a tensor that lies like an activation."""
  parts = [1 if layout.is_manual else layout.size(layout.act_axes(c)) for c in letters]
  return {c: n // k for c, n, k in zip(letters, sizes, parts)}


def make_spec(eqn: str, x, w, site: Site, *, out_dtype=None) -> GemmSpec:
  """The static part of `dot`: see there for the arguments."""
  letters = _parse(eqn, x.shape, w.shape)
  backends = site.backends
  if "auto" in backends:
    local = local_sizes(letters.x + letters.w, (*x.shape, *w.shape), site.layout)
    groups = (letters.tokens, letters.produced, letters.contracted)
    size = choose.GemmSize(*(math.prod(local[c] for c in group) for group in groups))
    backends = choose.backends(site.recipe, size, choose.current_device(), "auto")
  return GemmSpec(
    letters, site.name, site.recipe, backends, site.layout, jnp.dtype(out_dtype or x.dtype),
    jnp.dtype(x.dtype), (*x.shape, *w.shape), site.tap.shape[-1], site.is_traced, site.save,
    stored_params.is_frozen(w),
  )  # fmt: skip


def make_specs(eqns, x, ws, sites, out_dtype=None) -> tuple[GemmSpec, ...]:
  """One per weight; only shape and dtype of x are read."""
  return tuple(
    make_spec(e, x, w, s, out_dtype=out_dtype) for e, w, s in zip(eqns, ws, sites, strict=True)
  )


def equation(dimension_numbers, lhs_ndim: int, rhs_ndim: int) -> str:
  """The einsum of `jax.lax.dot_general`: batch, then what lhs keeps, then what rhs keeps."""
  (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
  used = ((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch))
  for n, axes_ in zip((lhs_ndim, rhs_ndim), used, strict=True):
    is_paired = (len(lhs_contract), len(lhs_batch)) == (len(rhs_contract), len(rhs_batch))
    if not is_paired or len({axis % n for axis in axes_ if -n <= axis < n}) < len(axes_):
      raise ValueError(
        f"dimension_numbers={dimension_numbers}: expected different axes, in pairs, of lhs with "
        f"{lhs_ndim} dimensions and rhs with {rhs_ndim}, counted from 0"
      )
  lhs = list(string.ascii_letters[:lhs_ndim])
  rhs = list(string.ascii_letters[lhs_ndim : lhs_ndim + rhs_ndim])
  for ours, theirs in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True):
    rhs[theirs] = lhs[ours]
  free = [c for c in lhs if c not in rhs] + [c for c in rhs if c not in lhs]
  y = "".join([lhs[i] for i in lhs_batch] + free)
  return f"{''.join(lhs)},{''.join(rhs)}->{y}"


def explicit(eqn: str, x_ndim: int, w_ndim: int) -> str:
  """An equation without spaces, letters in place of its ellipses.

  As in NumPy, the ellipsis of w stands for the last of the dimensions that the ellipsis of x stands
  for. These are then batch dimensions.

  Args:
    eqn: e.g. "...D, DF -> ...F".

  Raises:
    ValueError: an ellipsis of w that names no batch dimensions, or an ellipsis of x or y alone.
  """
  operands_, _, y = "".join(eqn.split()).partition("->")
  x, _, w = operands_.partition(",")
  has_x, has_w, has_y = counts = [part.count("...") for part in (x, w, y)]
  if not y or max(counts) != 1:  # nothing to spell out, or `_parse` refuses it
    return f"{x},{w}->{y}"
  of_x, of_w = (n - len(part.replace("...", "", 1)) for n, part in ((x_ndim, x), (w_ndim, w)))
  wrong = None
  if has_x != has_y:
    have, lack = ("x", "y") if has_x else ("y", "x")
    wrong = f"has '...' in {have} and not in {lack}: give it to both"
  elif has_w and not has_x:
    wrong = "has '...' in w alone: its dimensions are batch dimensions, so give it to x and y too"
  elif of_x < 0 or (has_w and of_w < 0):
    wrong = f"names more dimensions than the operands have: {x_ndim} and {w_ndim}"
  elif has_w and of_w > of_x:
    wrong = (
      f"has '...' for {of_w} dimensions of w and {of_x} of x: w's are batch dimensions, so name "
      "those that x lacks by letters"
    )
  if wrong:
    raise ValueError(f"einsum {eqn!r} {wrong}")
  spare = "".join(c for c in string.ascii_letters if c not in eqn)[:of_x]
  x, y = (part.replace("...", spare, 1) for part in (x, y))
  return f"{x},{w.replace('...', spare[of_x - of_w :], 1)}->{y}"


def _parse(eqn: str, x_shape, w_shape) -> EinsumLetters:
  operands_, _, y = explicit(eqn, len(x_shape), len(w_shape)).partition("->")
  x, _, w = operands_.partition(",")
  letters = EinsumLetters(x, w, y)
  wrong = None
  if not all(s and s.isalpha() and len(set(s)) == len(s) for s in (x, w, y)):
    wrong = "needs the form 'BLD,DF->BLF' or '...D,DF->...F', every letter at most once per operand"
  elif len(x) != len(x_shape) or len(w) != len(w_shape):
    wrong = f"names {len(x)} and {len(w)} dimensions, the operands have {x_shape} and {w_shape}"
  elif set(y) != (set(x) ^ set(w)) | set(letters.batch):
    wrong = "must keep every letter that only one operand has, and no other"
  elif not letters.contracted:
    wrong = "contracts nothing"
  else:
    sizes = dict(zip(x, x_shape))

    def named(letters):
      return ", ".join(dict.fromkeys(c if c in eqn else "'...'" for c in letters))

    empty = [c for c, n in zip(x + w, (*x_shape, *w_shape)) if n == 0]
    bad = [c for c, n in zip(w, w_shape) if sizes.get(c, n) != n]
    if bad:
      wrong = f"gives {named(bad)} two sizes: the operands have {x_shape} and {w_shape}"
    elif empty:
      # Of nothing there is no largest magnitude, and the weight gradient sums over the tokens.
      wrong = (
        f"gives {named(empty)} size 0: no scale can be made of the operands' "
        f"{x_shape} and {w_shape}; leave the product out, or use jax.lax.dot_general"
      )
  if wrong:
    raise ValueError(f"einsum {eqn!r} {wrong}")
  return letters
