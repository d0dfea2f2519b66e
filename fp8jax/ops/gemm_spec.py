"""What a dot knows when it is traced, and what its site lends it beside the operands."""

import dataclasses
import math
import string

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax.kernels import choose
from fp8jax.ops.operands import EinsumLetters, Quantizer
from fp8jax.ops.site import GemmSize, Site, choose_backends
from fp8jax.quantization import tensor_stats
from fp8jax.recipe.gemm import PASSES, Recipe
from fp8jax.recipe.quant import Quant


@dataclasses.dataclass(frozen=True)
class GemmSpec:
  """Everything about a dot that is known when it is traced."""

  letters: EinsumLetters
  name: str
  recipe: Recipe
  backends: tuple[str, ...]
  layout: axes.Layout
  out_dtype: jnp.dtype
  x_dtype: jnp.dtype
  sizes: tuple[int, ...]  # of the letters of x, then of w
  statistics: int
  is_observable: bool

  @property
  def is_watched(self) -> bool:
    """A quiet site observes only what it makes narrow."""
    return self.recipe.is_narrow or self.statistics > tensor_stats.QUIET

  @property
  def is_quiet(self) -> bool:
    """Of what it observes the amax is all, which a quantizer may find as it reads."""
    return self.is_watched and self.statistics == tensor_stats.QUIET

  @property
  def y_shape(self) -> tuple[int, ...]:
    sizes = dict(zip(self.letters.x + self.letters.w, self.sizes))
    return tuple(sizes[c] for c in self.letters.y)

  def local_sizes(self) -> dict[str, int]:
    """Letter -> size on one device."""
    return local_sizes(self.letters.x + self.letters.w, self.sizes, self.layout)

  def of(self, tensor: int) -> str:
    """Letters of tensor 0, 1, 2: x, w, g."""
    return (self.letters.x, self.letters.w, self.letters.y)[tensor]

  def contracted(self, which: int) -> str:
    """Letters that product 0, 1, 2 (fwd, dgrad, wgrad) contracts."""
    return (self.letters.contracted, self.letters.produced, self.letters.tokens)[which]

  def quant(self, tensor: int, which: int) -> Quant | None:
    """How a tensor is made narrow for a product: x . w, g . w' and x' . g."""
    gemm = getattr(self.recipe, PASSES[which])
    return gemm.lhs if (tensor, which) in ((0, 0), (2, 1), (0, 2)) else gemm.rhs

  def narrow(
    self, inputs: "ScalingInputs", tensor: int, which: int, watched: bool = False
  ) -> Quantizer:
    """The same, with what the site lends."""
    return Quantizer(
      self.quant(tensor, which),
      None if inputs.amax_3 is None else inputs.amax_3[tensor],
      None if inputs.key is None else jax.random.fold_in(inputs.key, 3 * tensor + which),
      self.backends[which],
      watched,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScalingInputs:
  """What a site lends to its dot beside the operands.

  Attributes:
    amax_3: what scales of (x, w, g) are made from, None where they are current.
    key: for stochastic rounding, None where none is.
  """

  amax_3: jax.Array | None
  key: jax.Array | None

  @classmethod
  def of(cls, site: Site) -> "ScalingInputs":
    return cls(site.memory.amax_3 if site.memory is not None else None, site.key)


def local_sizes(letters: str, sizes, layout: axes.Layout) -> dict[str, int]:
  """Letter -> size on one device, where activations have it."""
  parts = [1 if layout.is_manual else layout.size(layout.act_axes(c)) for c in letters]
  return {c: n // k for c, n, k in zip(letters, sizes, parts)}


def make_spec(eqn: str, x, w, site: Site, *, out_dtype=None) -> GemmSpec:
  """The static part of `dot`: see there for the arguments."""
  letters = _parse(eqn, x.shape, w.shape)
  backends = site.backends
  if "auto" in backends:
    local = local_sizes(letters.x + letters.w, (*x.shape, *w.shape), site.layout)
    groups = (letters.tokens, letters.produced, letters.contracted)
    size = GemmSize(*(math.prod(local[c] for c in group) for group in groups))
    backends = choose_backends(site.recipe, size, choose.current_device(), "auto")
  return GemmSpec(
    letters, site.name, site.recipe, backends, site.layout, jnp.dtype(out_dtype or x.dtype),
    jnp.dtype(x.dtype), (*x.shape, *w.shape), site.tap.shape[-1], site.is_traced,
  )  # fmt: skip


def explicit(eqn: str, x_ndim: int, w_ndim: int) -> str:
  """An equation without spaces, letters in place of its ellipses.

  As in NumPy, the ellipsis of w stands for the last of the dimensions that the ellipsis of x stands
  for. These are then batch dimensions.

  Args:
    eqn: e.g. "...D, DF -> ...F".
    x_ndim: rank of x.
    w_ndim: rank of w.

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
