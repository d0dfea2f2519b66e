"""A site: the precision, scaling state and observation of one linear layer of a model.

A tree of sites has the keys of the parameters and is stacked over layers for scan. The static part
of a `Site` says how to multiply. Of its arrays, `scaling_state` is an input, for delayed and
static scales. `tap` is an output: zeros whose cotangent is the site's observation, so that
differentiating the loss with respect to all taps returns the observations of all sites. XLA drops
observations that nobody differentiates. `update` computes the next state from both.

Rule: one site per GEMM call. A site used twice would add its observations. `Site.claim` refuses it
while tracing; `update` and `calibrate` refuse what no trace shows, such as a loop, by `Site.roots`.
"""

import collections
import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from fp8jax import axes
from fp8jax.kernels import choose
from fp8jax.ops.residuals import GemmInput
from fp8jax.quantization import amax_history, tensor_stats
from fp8jax.recipe import library
from fp8jax.recipe import rules as rules_lib
from fp8jax.recipe.gemm import PASSES, Recipe

# By the number of rows of a tap: the tensors that they are of.
TENSORS = {1: ("x",), 2: ("x", "g"), 3: amax_history.TENSORS}


@dataclasses.dataclass(frozen=True)
class Activation:
  """The declaration of an activation that loud steps observe.

  Attributes:
    letters: "BLD".
    has_gradient: whether its gradient is observed too.
  """

  letters: str
  has_gradient: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Site:
  """How one linear layer multiplies.

  Attributes:
    tap: float32 [3, S] ([N, 3, S] when stacked), zeros. Its cotangent is the first S of
      tensor_stats.STATISTICS for (x, w, g); S = 1 is the amax alone (tensor_stats.QUIET).
    scaling_state: scaling state of delayed and static scales; None if every scale is current.
    key: random key of this step, if the recipe rounds stochastically.
    joint_amax: float32 scalar that a product is lent (ops/joint.py).
    roots: float32 [3] ([N, 3] when stacked), zeros. Its cotangent is the square roots of the
      amaxes, by which `update` sees that these were added up, averaged or scaled. None in models,
      which use each of their sites once.
    name: path of the weight, e.g. "layers/mlp/up", or "layers/2-25/mlp/up" for some layers.
    layers: (first, one past the last) of the layers it is stacked over; () for one product.
    save: form in which the layer's input is a residual.
    recipe: precision of the three GEMMs.
    backends: implementation of (fwd, dgrad, wgrad); "auto" is decided at the dot, by its sizes.
    layout: where the letters of x, w and y live.
  """

  tap: jax.Array
  scaling_state: amax_history.ScalingState | None = None
  key: jax.Array | None = None
  name: str = dataclasses.field(default="", metadata=dict(static=True))
  recipe: Recipe = dataclasses.field(default=library.BF16, metadata=dict(static=True))
  backends: tuple[str, ...] = dataclasses.field(
    default=("xla", "xla", "xla"), metadata=dict(static=True)
  )
  layout: axes.Layout = dataclasses.field(default=axes.LOCAL, metadata=dict(static=True))
  layers: tuple[int, ...] = dataclasses.field(default=(), metadata=dict(static=True))
  save: GemmInput = dataclasses.field(default=GemmInput.UNQUANTIZED, metadata=dict(static=True))
  joint_amax: Any = None
  roots: Any = None

  @property
  def tensors(self) -> tuple[str, ...]:
    """The tensors that it observes, one per row of the tap."""
    return TENSORS[self.tap.shape[-2]]

  @property
  def layer_names(self) -> list[str]:
    """Names of its layers in rules and tables, "layers/3/mlp/up"; its name if it has none."""
    if not self.layers:
      return [self.name]
    return rules_lib.names_of_layers(self.name, range(*self.layers))

  @property
  def is_traced(self) -> bool:
    """Whether the tap is an argument of the program being traced, so that it may be observed."""
    return isinstance(self.tap, core.Tracer)

  def claim(self):
    """Marks the site as used by a product; a second time in one trace is an error.

    The mark is no field: it is on the object, which unflattening makes anew in every trace.
    """
    if self.is_traced:
      if getattr(self, "_claimed", False):
        raise ValueError(
          f"site {self.name!r} is used by two products: their observations would be added "
          "up. Give each product a site of its own"
        )
      object.__setattr__(self, "_claimed", True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScalingInputs:
  """The arrays that a dot reads from its site, beside the operands.

  Attributes:
    amax_3: float32 [3], amaxes of (x, w, g) that scales are made from; None if all are current.
    key: random key of stochastic rounding, None if nothing is rounded so.
    joint_amax: float32 scalar of all weights that multiply x; None if no scale is joint.
    roots: of the site (site_checks.of_roots).
  """

  amax_3: jax.Array | None
  key: jax.Array | None
  joint_amax: Any = None
  roots: Any = None

  @classmethod
  def of(cls, site: Site) -> "ScalingInputs":
    amax_3 = site.scaling_state.amax_3 if site.scaling_state is not None else None
    return cls(amax_3, site.key, site.joint_amax)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationSite(Site):
  """A place where an activation is observed and nothing multiplied (ops/observe.py).

  Attributes:
    tap: as a Site's, but of (x, g), the activation and its gradient, or of x alone.
    letters: of the activation, "BLD".
  """

  letters: str = dataclasses.field(default="", metadata=dict(static=True))


def single(
  recipe: Recipe | str = "block_128",
  matmul: str = "auto",
  name: str = "dot",
  save: GemmInput = GemmInput.UNQUANTIZED,
) -> Site:
  """A site for use outside a model: one device, no sharding table.

  Args:
    recipe: a Recipe or the name of one.
    matmul: "auto" or a backend of kernels.choose.
    name: in error messages.
    save: form in which x is a residual.

  Returns:
    A Site, a pytree. That of a recipe with delayed or static scales has no amaxes yet, and its
    products are NaN until `calibrate`. One that rounds stochastically has a random key, which
    jax.grad takes with allow_int=True.

  Raises:
    ValueError: the recipe is unknown, or the backend cannot run it here.

  Source: the amaxes are the FP8 metas of Transformer Engine, as a value.

  Example:
    >>> import fp8jax
    >>> fp8jax.site.single("tensor_delayed(steps=16)").scaling_state.history_3H.shape
    (3, 16)
  """
  recipe = rules_lib.recipe_by_name(recipe) if isinstance(recipe, str) else recipe
  chosen = tuple(matmul if getattr(recipe, p).multiplies_codes else "xla" for p in PASSES)
  if matmul != "auto":  # which is decided at the dot; sizes are unknown here
    chosen = choose.backends(recipe, choose.GemmSize(0, 0, 0), choose.current_device(), matmul)
  return fresh(recipe, name, backends=chosen, save=save, roots=jnp.zeros(3, jnp.float32))


def unobserved(recipe: Recipe, matmul: str = "auto", name: str = "dot", key=None) -> Site:
  """A `single` site without tensor statistics, so that it may be used again and under vmap."""
  site = single(recipe, matmul, name)
  return dataclasses.replace(site, tap=np.zeros(site.tap.shape, np.float32), key=key, roots=None)


def unwatched(site: Site, name: str) -> Site:
  """A site that multiplies alike under another name and observes nothing, so that its product is
  none of those that are counted and differentiated."""
  tap = np.zeros((*site.tap.shape[:-1], tensor_stats.QUIET), np.float32)
  return dataclasses.replace(site, tap=tap, name=name)


def fresh(
  recipe: Recipe, name: str, layers: tuple[int, ...] = (), statistics: int = tensor_stats.QUIET,
  **rest,
) -> Site:  # fmt: skip
  """A site that no step has used; `rest` are static fields of Site."""
  stacked = (layers[1] - layers[0],) if layers else ()
  scaling_state = amax_history.init(recipe, stacked) if recipe.is_stateful else None
  key = jax.random.split(_own_key(jax.random.key(0), name), stacked) if recipe.is_random else None
  tap = jnp.zeros((*stacked, 3, statistics), jnp.float32)
  return Site(tap, scaling_state, key, name, recipe, layers=layers, **rest)


def _own_key(key, name: str):
  return jax.random.fold_in(key, zlib.crc32(name.encode()))


def flatten(sites) -> dict[str, Site]:
  """{name: Site} of a tree of sites, in order of computation."""
  return {s.name: s for s in jax.tree.leaves(sites, is_leaf=lambda x: isinstance(x, Site))}


def tree_map(fn, sites, *rest):
  """jax.tree.map over Sites."""
  return jax.tree.map(fn, sites, *rest, is_leaf=lambda x: isinstance(x, Site))


# --- from step to step ---------------------------------------------------------------------------


def update(sites, stats):
  """The sites after a step: the step's amaxes enter the amax histories.

  Args:
    sites: a Site or a tree of them: variables["fp8"] of linen, nnx.state(model, Fp8) of nnx.
    stats: the gradient of the loss with respect to `sites`; of several microbatches, see `combine`.

  Returns:
    The same tree. Sites with current scales are as they were. Of a site whose amaxes were added up
    (a loop used it again, microbatches were), averaged (pmean) or scaled (with a loss, by clipping)
    the state is NaN from here on where this is compiled.

  Raises:
    ValueError: outside jit, of such a site.

  Source: Transformer Engine's DelayedScaling (arXiv:2209.05433 §5).

  Example:
    >>> import jax, jax.numpy as jnp, fp8jax
    >>> x, w = jnp.ones(8), jnp.ones((8, 4))
    >>> loss = jax.jit(lambda site: fp8jax.dot("D,DF->F", x, w, site).sum())
    >>> site = fp8jax.site.calibrate(fp8jax.site.single("tensor_delayed"), loss)
    >>> fp8jax.site.update(site, jax.grad(loss)(site)).scaling_state.history_3H[:, :2].tolist()
    [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
  """
  return _with_states_of(
    lambda site, amax_3: amax_history.update(site.scaling_state, amax_3, site.recipe), sites, stats
  )


def combine(stats, other):
  """Tensor statistics of two microbatches, or of two devices, as those of both.

  Args:
    stats, other: gradients with respect to the same tree of sites.

  Returns:
    A tree like them: amaxes are the larger ones.

  Source: fp8jax/quantization/tensor_stats.py.

  Example:
    >>> import dataclasses, jax.numpy as jnp, fp8jax
    >>> one, other = (fp8jax.site.single() for _ in range(2))
    >>> other = dataclasses.replace(other, tap=jnp.full((3, 1), 2.0))
    >>> fp8jax.site.combine(one, other).tap[:, 0].tolist()
    [2.0, 2.0, 2.0]
  """

  def one(a, b):
    roots = None if a.roots is None else tensor_stats.larger(a.roots, b.roots)
    return dataclasses.replace(a, tap=tensor_stats.combine(a.tap, b.tap), roots=roots)

  return tree_map(one, stats, other)


def calibrate(sites, loss: Callable[[Any], jax.Array]):
  """The sites with amax histories that begin with a first batch's amaxes.

  It runs forward and backward once, with scales from the tensors themselves.

  Args:
    sites: as in `update`.
    loss: a scalar function of such a tree, e.g. lambda sites: loss(params, sites, batch).

  Returns:
    The same tree. Sites with current scales are as they were. A tensor of zeros has scale 1 until a
    step has seen others.

  Raises:
    ValueError: as `update`, and so of a site that the loss does not reach.

  Source: as `update`; Transformer Engine begins with scales of 1 instead.

  Example:
    >>> import jax, jax.numpy as jnp, fp8jax
    >>> x, w = jnp.ones(8), 2 * jnp.ones((8, 4))
    >>> loss = jax.jit(lambda site: fp8jax.dot("D,DF->F", x, w, site).sum())
    >>> site = fp8jax.site.calibrate(fp8jax.site.single("tensor_delayed"), loss)
    >>> site.scaling_state.amax_3.tolist()
    [1.0, 2.0, 1.0]
  """
  # Random keys have no gradient.
  stats = jax.grad(loss, allow_int=True)(with_current_scales(sites))
  return tree_map(_reached, calibrated(sites, stats))


def _reached(site: Site) -> Site:
  """The site, its state NaN where nothing was observed."""
  if (state := site.scaling_state) is None:
    return site
  is_missed = (state.amax_3 == 0).all(-1)
  if not isinstance(is_missed, core.Tracer) and np.any(is_missed):
    raise ValueError(
      f"site {site.name!r}: the loss does not reach it (stop_gradient, an untaken branch, another "
      "head), or all it has is zeros: calibrate by another loss, or take a recipe of current scales"
    )
  return dataclasses.replace(site, scaling_state=amax_history.unknown(state, is_missed))


def calibrated(sites, stats):
  """The sites with amax histories that begin with the tensor statistics `stats`, see `update`."""
  return _with_states_of(
    lambda site, amax_3: amax_history.calibrated(site.recipe, amax_3), sites, stats
  )


def _with_states_of(make, sites, stats):
  """The sites with the scaling states make(site, amaxes [..., 3])."""

  def one(site, seen):
    if site.scaling_state is None:
      return site
    state = make(site, seen.tap[..., 0])
    return dataclasses.replace(site, scaling_state=_of_one_product(site.name, state, seen))

  return tree_map(one, sites, stats)


def _of_one_product(name: str, state: amax_history.ScalingState, seen: Site):
  """The state, NaN where the observation is not that of one product."""
  if seen.roots is None:
    return state
  is_other = ~amax_history.are_of_one_product(seen.tap[..., 0], seen.roots)
  if not isinstance(is_other, core.Tracer) and np.any(is_other):
    raise ValueError(
      f"site {name!r}: its amaxes are not those of one product; they were added up, averaged or "
      "scaled. Stack one site per pass of a loop, or per device, and scan over the stack; join "
      "microbatches by site.combine and devices by jax.lax.pmax; leave sites out of loss scaling "
      "and of gradient clipping"
    )
  return amax_history.unknown(state, is_other)


def with_current_scales(sites):
  """The sites with current scales throughout: for calibration and inspection."""

  def one(site):
    return dataclasses.replace(site, recipe=site.recipe.with_current_scales(), scaling_state=None)

  return tree_map(one, sites)


def with_keys(sites, key):
  """The sites with random keys that depend on `key` and their names; sites of one name get others
  by their order."""
  seen = collections.Counter()

  def one(site):
    if site.key is None:
      return site
    own = _own_key(key, site.name)
    if seen[site.name]:
      own = jax.random.fold_in(own, seen[site.name])
    seen[site.name] += 1
    return dataclasses.replace(site, key=jax.random.split(own, site.key.shape))

  return tree_map(one, sites)


def with_folded_keys(sites, number):
  """The sites with other keys for every `number`: one microbatch of a step."""

  def one(site):
    if site.key is None:
      return site
    fold = functools.partial(jax.random.fold_in, data=number)
    return dataclasses.replace(site, key=(jax.vmap(fold) if site.layers else fold)(site.key))

  return tree_map(one, sites)
