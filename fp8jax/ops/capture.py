"""A site that hands out numbers of its input: for quantization after training.

As an observation (site.py), they leave as the cotangent of the site's tap; a tap may be any tree of
float32 arrays here. A forward pass with a vjp of the taps alone has no backward pass left after
XLA's elimination of dead code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.ops import gemm_spec, linear, operands, prologue
from fp8jax.ops import site as site_lib
from fp8jax.ops.gemm_spec import Role
from fp8jax.ops.site import ScalingInputs
from fp8jax.recipe.gemm import Recipe

_PLAIN = Recipe("captured")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CapturingSite(site_lib.Site):
  """A site in the place of one that hands out nothing.

  Attributes:
    tap: a tree of zeros like `summary` of the input, whose cotangent is that summary.
    summary: from the input as a matrix [tokens, contracted] to a tree of float32 arrays.
  """

  summary: Callable[[jax.Array], Any] = dataclasses.field(
    default=lambda x: x, metadata=dict(static=True)
  )

  def claim(self):
    """Refuses: `dot` alone reads the summary, and claims nothing."""
    raise ValueError(
      f"site {self.name!r} captures its input, and the operation that multiplies it does not; "
      "multiply it by `dot`"
    )


def capturing(site: site_lib.Site, tap, summary) -> CapturingSite:
  """A site like this one, not stacked, that hands out the summary of its input through `tap`."""
  fields = {f.name: getattr(site, f.name) for f in dataclasses.fields(site_lib.Site)}
  fields["tap"] = tap
  return CapturingSite(**fields, summary=summary)


def dot(eqn: str, x, w, site: CapturingSite, out_dtype):
  """`dots.dot` of an array and a weight, in the site's recipe.

  Raises:
    ValueError: an einsum with batch letters.
  """
  fields = {f.name: getattr(site, f.name) for f in dataclasses.fields(site_lib.Site)}
  fields["tap"] = np.zeros((3, 1), np.float32)  # observed by nobody
  plain = site_lib.Site(**fields)
  spec = gemm_spec.make_spec(eqn, x, w, plain, out_dtype=out_dtype)
  if spec.letters.batch:
    raise ValueError(f"site {spec.name}: a product with batch letters has no one input matrix")
  x = prologue.value(x)
  unquantized = dataclasses.replace(spec, recipe=_PLAIN, x_dtype=jnp.dtype(jnp.float32))
  matrix = operands.operand(unquantized, Role.X_FWD, x, ScalingInputs(None, None)).value
  x = _with_tap(x, site.tap, site.summary(jax.lax.stop_gradient(matrix)))
  return linear.multiply((spec,), x, (w,), (plain,))[0]


@jax.custom_vjp
def _with_tap(x, tap, summary):
  """x; the cotangent of the tap is the summary."""
  del tap, summary
  return x


def _fwd(x, tap, summary):
  del tap
  return x, summary


def _bwd(summary, g):
  return g, summary, jax.tree.map(jnp.zeros_like, summary)


_with_tap.defvjp(_fwd, _bwd)
