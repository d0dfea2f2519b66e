"""Which site went wrong first: rerun of a batch whose loss or gradient was not finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.optim import gradients
from fp8jax.quantization import tensor_stats
from fp8jax.recipe import rules
from fp8jax.step import loss_scale, train_step
from fp8jax.step.train_spec import TrainSpec


def stats_of_steps(
  spec: TrainSpec, params, batches, phase=0, statistics: int = tensor_stats.LOUD, teacher=None
):
  """Forward and backward passes that watch every site, scales chosen from what it sees.

  The loss is scaled as at the start of a run.

  Args:
    batches: each [B, L], or [A, B, L] when accumulating; one program serves all.
    statistics: tensor_stats.LOUD, or COUNTED to count magnitudes too.
    teacher: of step/distillation.py.

  Yields:
    (loss, {layer's site: float32 [3, S] tensor_stats.STATISTICS of x, w, g}, and [1 or 2, S] of
    activations, see site.TENSORS,
    {parameter: gradient is finite}), on the host; the last empty with optim.in_backward=True.
  """
  spec, sites = spec.plain, spec.sites(phase=phase, statistics=statistics)
  scale = loss_scale.init(spec.loss_scale).get("scale")

  @functools.partial(jax.jit, compiler_options=choose.compiler_options(spec.device))
  def run(params, batch, teacher):
    value, gradient, stats, _ = train_step.gradients(
      spec, params, site_lib.with_current_scales(sites), batch, scale, teacher=teacher
    )
    if spec.optim.in_backward:  # for all gradients at once there may be no room
      gradient = {}
    finite = jax.tree.map(
      lambda g: jnp.isfinite(gradients.dequantize(g)).all(), gradient, is_leaf=gradients.is_leaf
    )
    return value, stats, finite

  for batch in batches:
    loss, stats, finite = jax.device_get(run(params, batch, teacher))
    finite = {name: bool(ok) for name, ok in params_lib.flatten(finite).items()}
    yield float(loss), site_tree.per_layer(sites, stats), finite


def first_bad(
  cfg: ModelConfig, stats: dict[str, np.ndarray], finite: dict[str, bool], loss: float
) -> str:
  """The first site, in order of computation, at which something was not finite, in words."""
  *of_layer, head = transformer.gemm_sites(cfg)
  visits = [rules.layer_name(path, i) for i in range(cfg.num_layers) for path in of_layer] + [head]
  for name in visits:
    for tensor, word in ((1, "weight"), (0, "input")):
      if not np.isfinite(stats[name][tensor, 0]):
        return f"{name}: its {word} is not finite (forward)"
  if not np.isfinite(loss):
    return "the loss itself, after a finite forward pass through every site"
  for name in reversed(visits):
    if not np.isfinite(stats[name][2, 0]):
      return f"{name}: its incoming gradient is not finite (backward)"
  bad = [name for name, is_good in finite.items() if not is_good]
  if bad:
    return f"{bad[0]}: its gradient is not finite although every site's operands were"
  return "none: the same batch and the parameters that were saved give finite values"


def report(spec: TrainSpec, params, batch, phase: int = 0, teacher=None) -> dict[str, Any]:
  """JSON-able account of one batch: the loss, the first bad site, amaxes per site."""
  ((loss, stats, finite),) = stats_of_steps(spec, params, [batch], phase, teacher=teacher)
  return {
    "loss": loss,
    "first_bad_site": first_bad(spec.model, stats, finite, loss),
    "amax_x_w_g": {k: v[:, 0].tolist() for k, v in stats.items() if len(v) == 3},
    "parameters_with_bad_gradients": [k for k, ok in finite.items() if not ok],
  }
