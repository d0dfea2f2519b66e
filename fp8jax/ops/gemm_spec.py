"""What a dot knows when it is traced, and what its site lends it beside the operands."""

import dataclasses
import math

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


def _parse(eqn: str, x_shape, w_shape) -> EinsumLetters:
  operands_, _, y = eqn.partition("->")
  x, _, w = operands_.partition(",")
  letters = EinsumLetters(x, w, y)
  wrong = None
  if not all(s and s.isalpha() and len(set(s)) == len(s) for s in (x, w, y)):
    wrong = "needs the form 'BLD,DF->BLF', every letter at most once per operand"
  elif len(x) != len(x_shape) or len(w) != len(w_shape):
    wrong = f"names {len(x)} and {len(w)} dimensions, the operands have {x_shape} and {w_shape}"
  elif set(y) != (set(x) ^ set(w)) | set(letters.batch):
    wrong = "must keep every letter that only one operand has, and no other"
  elif not letters.contracted:
    wrong = "contracts nothing"
  else:
    sizes = dict(zip(x, x_shape))
    empty = [c for c, n in zip(x + w, (*x_shape, *w_shape)) if n == 0]
    bad = [c for c, n in zip(w, w_shape) if sizes.get(c, n) != n]
    if bad:
      wrong = f"gives {', '.join(bad)} two sizes: the operands have {x_shape} and {w_shape}"
    elif empty:
      # Of nothing there is no largest magnitude, and the weight gradient sums over the tokens.
      wrong = (
        f"gives {', '.join(dict.fromkeys(empty))} size 0: no scale can be made of the operands' "
        f"{x_shape} and {w_shape}; leave the product out, or use jax.lax.dot_general"
      )
  if wrong:
    raise ValueError(f"einsum {eqn!r} {wrong}")
  return letters
