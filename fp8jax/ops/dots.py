"""Products of an activation and weights: the public functions, and what models call.

A product of a plain weight at a plain site is `linear.multiply`. A weight with an adapter, and a
site with a switch or one that captures its input, are products made of such ones.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.ops import capture, gemm_spec, joint, linear, prologue, site_checks, switch
from fp8jax.ops import site as site_lib
from fp8jax.ops.site import Site
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import Recipe

# Sites with a product of their own.
_OWN = {switch.SwitchedSite: switch.dot, capture.CapturingSite: capture.dot}


def dot(eqn: str, x, w, recipe: str | Recipe | Site, *, key=None, out_dtype=None) -> jax.Array:
  """Einsum of an activation and a weight; the recipe gives the precision of its three GEMMs.

  It works under jit, grad, remat, scan, vmap and shard_map. The gradients are GEMMs of the recipe
  too. Under vmap every mapped element has scales of its own. A weight without the mapped axis then
  gets the sum of the elements' gradients, as in JAX. Scan over stacked Sites, one per pass:
  `site.update` refuses one that a loop used again. FP8 saturates: an infinity in x becomes the
  largest number of its tile. A site observes that there was one.

  Args:
    eqn: e.g. "BLD,DF->BLF" or "...D, DF -> ...F". Letters in x and w but not in y are contracted,
      letters in all three are batch dimensions. "..." stands for the remaining dimensions of x, as
      in NumPy, but nothing is broadcast.
    x: activation, floating-point, or a Prologue; its gradient has its dtype. float32 subnormals
      count as 0, in w too, as they do in every product of JAX on a CPU.
    w: weight, usually the float32 master, whose gradient has its dtype; or a stored parameter
      (stored_params.py).
    recipe: a name in `RECIPES`, also with options: "rowwise(accumulate=fast)"; a Recipe; or a Site
      (`site.single`), which a recipe with delayed or static scales needs.
    key: random key of this product and step, for recipes that round stochastically; others ignore
      it. A Site has a key of its own.
    out_dtype: dtype of y; default x's.

  Returns:
    y, with the letters after "->".

  Raises:
    ValueError: the equation does not fit the shapes, the recipe is unknown, it needs a Site or a
      key, or a Site is used twice in one trace.
    TypeError: an operand is no floating-point array, out_dtype has 8 bits or is none of
      floating-point, key is no random key, or recipe is none of the three.

  Source: the named recipe's; fp8jax/recipe/library.py cites it.

  Example:
    >>> import jax.numpy as jnp, fp8jax
    >>> y = fp8jax.dot("...D, DF -> ...F", jnp.ones((2, 16)), jnp.ones((16, 4)), "block_128")
    >>> y[0].round(3)
    Array([16., 16., 16., 16.], dtype=float32)
  """
  return dots((eqn,), x, (w,), (_site_of(recipe, key),), out_dtype=out_dtype)[0]


def dots(eqns: Sequence[str], x, ws, sites: Sequence[Site], *, out_dtype=None):
  """`dot` of one activation with several weights: the residual of x is saved once.

  Args:
    x: activation or Prologue.
    eqns, ws, sites: one per weight. Joint scales are of all of them (joint.py).

  Returns:
    One y per weight.
  """
  if any(isinstance(w, Adapted) for w in ws):
    return _adapted_dots(eqns, x, ws, sites, out_dtype)
  sites = joint.lent(ws, sites)
  if not are_plain(ws, sites):
    return _own_dots(eqns, x, ws, sites, out_dtype)
  site_checks.refuse_dtypes(x, ws, out_dtype)
  return linear.multiply(gemm_spec.make_specs(eqns, x, ws, sites, out_dtype), x, ws, sites)


def are_plain(ws, sites: Sequence[Site]) -> bool:
  """Whether no weight has an adapter and no site a product of its own."""
  is_own = any(isinstance(site, tuple(_OWN)) for site in sites)
  return not is_own and not any(isinstance(w, Adapted) for w in ws)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
  """A frozen weight and a low-rank adapter beside it: y = x w + scale (x a) b.

  Source: LoRA (Hu et al. 2021, arXiv:2106.09685 §4.1). b starts at zero, so that the first step
  multiplies as the base alone.

  Attributes:
    base: the frozen weight, in any storage.
    a: [contracted letters, R].
    b: [R, produced letters].
    sites: of the products with a and with b.
    scale: alpha / r.
  """

  base: Any
  a: Any
  b: Any
  sites: tuple[Any, Any]
  scale: float = dataclasses.field(metadata=dict(static=True))


def adapter_equations(eqn: str) -> tuple[str, str]:
  """The einsums of the products with a and b: "BLD,DHK->BLHK" has "BLD,DR->BLR", "BLR,RHK->BLHK".

  R is the rank of the adapter.
  """
  operands, _, y = eqn.partition("->")
  x, _, w = operands.partition(",")
  contracted = "".join(c for c in w if c not in y)
  produced = "".join(c for c in w if c in y)
  tokens = "".join(c for c in x if c in y)
  return f"{x},{contracted}R->{tokens}R", f"{tokens}R,R{produced}->{y}"


def _adapted_dots(eqns, x, ws, sites, out_dtype):
  """`dots` of weights of which some have adapters: x a is multiplied for each, x computed once."""
  x = prologue.value(x)
  bases = [w.base if isinstance(w, Adapted) else w for w in ws]
  ys = list(dots(eqns, x, bases, sites, out_dtype=out_dtype))
  adapted = [(n, w, adapter_equations(eqns[n])) for n, w in enumerate(ws) if isinstance(w, Adapted)]
  eqns_of_a, of_a, sites_of_a = zip(*((both[0], w.a, w.sites[0]) for _, w, both in adapted))
  inner = dots(eqns_of_a, x, of_a, sites_of_a)
  for (n, w, (_, eqn)), h in zip(adapted, inner, strict=True):
    delta = dot(eqn, h, w.b, w.sites[1], out_dtype=ys[n].dtype)
    y32 = ys[n].astype(jnp.float32) + w.scale * delta.astype(jnp.float32)
    ys[n] = y32.astype(ys[n].dtype)
  return tuple(ys)


def _own_dots(eqns, x, ws, sites, out_dtype):
  """`dots` of sites of which some have products of their own."""
  x, ys = prologue.value(x), []
  for eqn, w, site in zip(eqns, ws, sites, strict=True):
    multiply = next((own for kind, own in _OWN.items() if isinstance(site, kind)), dot)
    ys.append(multiply(eqn, x, w, site, out_dtype=out_dtype))
  return tuple(ys)


def dot_general(
  lhs, rhs, dimension_numbers, recipe: str | Recipe | Site, precision=None,
  preferred_element_type=None, *, out_sharding=None, key=None,
) -> jax.Array:  # fmt: skip
  """`jax.lax.dot_general` of an activation and a weight; see `dot`.

  Args:
    lhs: activation, any rank, floating-point.
    rhs: weight, any rank, floating-point.
    dimension_numbers: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), as in JAX.
    recipe: as in `dot`. JAX has precision in its place.
    precision, out_sharding: None; the recipe is the precision.
    preferred_element_type: dtype of the result; default lhs's.
    key: as in `dot`.

  Returns:
    Batch dimensions, then the free dimensions of lhs, then those of rhs, as in JAX.

  Raises:
    ValueError, TypeError: as `dot`; precision or out_sharding is given.

  Source: the signature is that of jax.lax.dot_general.

  Example:
    >>> import jax.numpy as jnp, fp8jax
    >>> numbers = (((1,), (0,)), ((), ()))
    >>> fp8jax.dot_general(jnp.ones((2, 16)), jnp.ones((16, 4)), numbers, "block_128").shape
    (2, 4)
  """
  site = _site_of(recipe, key)
  if precision is not None:
    raise ValueError(f"precision={precision!r}: leave it out; the site's recipe is the precision")
  if out_sharding is not None:
    raise ValueError(f"{out_sharding=}: leave it out; dot(eqn, ...) places y as its site says")
  site_checks.refuse_dtypes(lhs, (rhs,))
  if site.layout.mesh is not None:
    raise ValueError("dot_general has no letters to shard by; use dot(eqn, ...) on a mesh")
  eqn = gemm_spec.equation(dimension_numbers, lhs.ndim, rhs.ndim)
  return dot(eqn, lhs, rhs, site, out_dtype=preferred_element_type)


def _site_of(recipe: str | Recipe | Site, key) -> Site:
  """The site itself, or one for a recipe that needs none."""
  if isinstance(recipe, Site):
    if key is not None:
      raise ValueError("the site has a key of its own; leave key out, or set it: site.with_keys")
    return recipe
  if isinstance(recipe, str):
    recipe = rules.recipe_by_name(recipe)
  if not isinstance(recipe, Recipe):
    raise TypeError(
      f"the fourth argument is {recipe!r}, expected a recipe's name ('block_128'), a Recipe or a "
      "Site (fp8jax.site.single('tensor_delayed'))"
    )
  if recipe.is_stateful:
    name = recipe.name
    raise ValueError(
      f"recipe {name!r} takes scales from past steps, and its name remembers none. Keep a Site: "
      f"site = fp8jax.site.single({name!r}); give it in place of the name; begin with "
      "site = fp8jax.site.calibrate(site, loss), loss being a function of the site; after every "
      "step site = fp8jax.site.update(site, jax.grad(loss)(site))"
    )
  if recipe.is_random and key is None:
    raise ValueError(
      f"recipe {recipe.name!r} rounds stochastically: give key=jax.random.key(...), another one to "
      "every product and in every step"
    )
  if recipe.is_random:
    site_checks.refuse_key(key)
  return site_lib.unobserved(recipe, key=key if recipe.is_random else None)
