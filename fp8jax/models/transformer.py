"""The decoder: embed, scan over layers, normalise, predict.

Parameters and sites are plain nested dictionaries with the same keys; those of the layers are
stacked in front along N, the sites in runs of layers that multiply alike. A parameter may be kept
narrow (ops/stored_params.py). A batch is a dictionary of arrays:

  tokens_BL      int32 inputs
  targets_BL     int32, the token that follows each input
  weights_BL     float32, 0 where the target does not count
  positions_BL   int32 position of each token in its document
  segments_BL    int32 document of each token; absent if documents may attend to each other
"""

import functools

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax import params as params_lib
from fp8jax.models import attention_gqa, mlp_swiglu, rope, smooth_swiglu
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.ops import residuals, stored_params
from fp8jax.ops.cross_entropy import cross_entropy
from fp8jax.ops.fused import prologue
from fp8jax.ops.linear import SAVED_NAME, dot
from fp8jax.params import Param


def params(cfg: ModelConfig):
  """The declaration tree."""
  layer = {"attn": attention_gqa.params(cfg), "mlp": mlp_swiglu.params(cfg)}
  tree = {
    "embed": Param("VD", std=cfg.init_std),
    "layers": params_lib.tree_map(Param.stacked, layer),
    "norm": Param("D", init="ones", decay=False),
  }
  if not cfg.tie_embeddings:
    tree["head"] = Param("DV", std=cfg.init_std, inputs=1)
  return tree


def site_params(cfg: ModelConfig):
  """The declarations that become sites: `params`, and the head even where it is tied."""
  return {**params(cfg), "head": Param("DV", inputs=1)}


def loss(params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """Sum over tokens of weight * -log p(target): a float32 scalar."""
  params = _with_values(params)
  x_BLD = _after_last(params, sites, batch, cfg, run)
  return head_loss(x_BLD, params, sites, batch, cfg, run)


def logits(params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """float32 [B, L, V]. For inspection and parity; training never builds this."""
  params = _with_values(params)
  h_BLD = hidden(params, sites, batch, cfg, run)
  head, eqn = _head(params, cfg)
  return dot(eqn, h_BLD, head, sites["head"], out_dtype=jnp.float32)


def hidden(params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """Normalised last hidden states [B, L, D] in the compute dtype."""
  params = _with_values(params)
  x_BLD = _after_last(params, sites, batch, cfg, run)
  return _normalised(x_BLD, params, cfg, run)


def embed(params, batch, run: ComputeConfig):
  """What the first layer reads: tokens embedded, [B, L, D] in the compute dtype."""
  embed = stored_params.value(params["embed"])
  x_BLD = jnp.take(embed, batch["tokens_BL"], axis=0, mode="clip").astype(run.dtype)
  return axes.constrain(x_BLD, "BLD", run.layout)


def layer_context(batch, cfg: ModelConfig):
  """What every layer knows of a batch: (rotary angles, segments or None)."""
  return rope.cos_sin(batch["positions_BL"], cfg), batch.get("segments_BL")


def layer(x_BLD, of_layer, around, cfg: ModelConfig, run: ComputeConfig):
  """The residual stream after one layer.

  Args:
    of_layer: its (parameters, sites).
    around: of the batch, see `surroundings`.
  """
  (p, s), (angles, segments_BL) = of_layer, around
  x_BLD = attention_gqa.apply(p["attn"], s["attn"], x_BLD, angles, segments_BL, cfg, run)
  x_BLD = mlp_swiglu.apply(p["mlp"], s["mlp"], x_BLD, cfg, run)
  return axes.constrain(x_BLD, "BLD", run.layout)


def head_loss(x_BLD, params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """`loss` of what the last layer gave; `params` and `sites` need not have the layers."""
  params = stored_params.value({k: p for k, p in params.items() if k != "layers"})
  head, eqn = _head(params, cfg)
  h_BLD = _normalised(x_BLD, params, cfg, run)
  return cross_entropy(
    h_BLD, head, eqn, batch["targets_BL"], batch["weights_BL"], sites["head"], run.loss_chunk
  )


def channel_scales(params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """float32 [N, F]: swiglu.channel_scales of every layer at a batch."""

  def step(x_BLD, of_layer, around):
    (p, s), (angles, segments_BL) = of_layer, around
    x_BLD = attention_gqa.apply(p["attn"], s["attn"], x_BLD, angles, segments_BL, cfg, run)
    scales_F = mlp_swiglu.channel_scales(p["mlp"], s["mlp"], x_BLD, cfg)
    return mlp_swiglu.apply(p["mlp"], s["mlp"], x_BLD, cfg, run), scales_F

  return _scan_layers(step, _with_values(params), sites, batch, cfg, run)[1]


def alignment(params):
  """float32 [N]: largest |cosine| of gate and up weights over the channels of every layer."""
  mlp = params["layers"]["mlp"]
  return smooth_swiglu.alignment(
    stored_params.compute_copy(mlp["gate"]), stored_params.compute_copy(mlp["up"])
  )


def _after_last(params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """The residual stream after all layers."""
  remembered = _remat(functools.partial(layer, cfg=cfg, run=run), run)
  step = lambda *args: (remembered(*args), None)  # noqa: E731
  return _scan_layers(step, params, sites, batch, cfg, run)[0]


def _scan_layers(step, params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """(residual stream [B, L, D] after the last layer, what else layers give, stacked).

  Args:
    step: (residual stream, (parameters, sites), surroundings) -> (stream, anything).
  """
  x_BLD, around = embed(params, batch, run), layer_context(batch, cfg)
  start, found = 0, []
  for run_of_layers in sites["layers"]:
    stop = start + jax.tree.leaves(run_of_layers)[0].shape[0]
    of_run = params["layers"]
    if stop - start < cfg.num_layers:
      of_run = jax.tree.map(lambda p, a=start, b=stop: p[a:b], of_run)
    both = (of_run, run_of_layers)
    x_BLD, more = jax.lax.scan(lambda x, of_layer: step(x, of_layer, around), x_BLD, both)
    start = stop
    found.append(more)
  return x_BLD, jax.tree.map(lambda *runs: jnp.concatenate(runs), *found)


def _normalised(x_BLD, params, cfg: ModelConfig, run: ComputeConfig):
  return prologue.rms_norm(
    x_BLD, params["norm"], cfg.norm_eps, save=run.residuals.norm_inputs
  ).value()


def _with_values(params):
  """Arrays of all but the layers', which their dots read. A tied embedding is read once."""
  layers = params["layers"]
  return {
    **stored_params.value({k: p for k, p in params.items() if k != "layers"}),
    "layers": layers,
  }


def _head(params, cfg: ModelConfig):
  if cfg.tie_embeddings:
    return params["embed"], "BLD,VD->BLV"
  return params["head"], "BLD,DV->BLV"


def _remat(layer, run: ComputeConfig):
  if run.residuals.layer_inputs is not None:
    return residuals.from_narrow_input(layer, run.residuals.layer_inputs)
  if run.remat == "none":
    return layer
  saved = jax.checkpoint_policies.nothing_saveable
  names = {
    "linears": ("linear", residuals.NAME),
    "quantized": ("linear", residuals.NAME, SAVED_NAME),
  }
  if run.remat in names:
    saved = jax.checkpoint_policies.save_only_these_names(*names[run.remat])
  # Inside scan the loop already keeps XLA from merging forward and recomputation.
  return functools.partial(jax.checkpoint, policy=saved, prevent_cse=False)(layer)
