"""SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202 §2)."""

import dataclasses
import functools

import jax.numpy as jnp

from fp8jax.models import smooth_swiglu, unit_scaling
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.mixer import Aux, GemmSite, LayerContext, Maker, Mixer, block_input, block_output
from fp8jax.ops import prologue, row_tiles
from fp8jax.ops.dots import dot
from fp8jax.ops.site import Activation
from fp8jax.ops.swiglu_mlp import swiglu_mlp
from fp8jax.params import Param

# Of its parameters, sites and state.
KEY = "mlp"
SITES = (
  GemmSite("gate", "BLD,DF->BLF", "norm"),
  GemmSite("up", "BLD,DF->BLF", "norm"),
  GemmSite("down", "BLF,FD->BLD", "gated", is_residual=True, has_channel_scales=True),
)
MAKERS = {"norm": Maker(("norm",), "D", "D", is_gain=True), "gated": Maker(("up",), "F")}
HF_NAMES = {
  "norm": "post_attention_layernorm.weight",
  "gate": "mlp.gate_proj.weight",
  "up": "mlp.up_proj.weight",
  "down": "mlp.down_proj.weight",
}

# ComputeConfig.smooth_swiglu -> down(silu(gate(x)) * up(x)), the same to the bit if unquantized.
FORMS = {"none": swiglu_mlp, "channel": smooth_swiglu.per_channel, "token": smooth_swiglu.per_token}


def params(cfg: ModelConfig):
  return {
    "norm": Param("D", init="ones", decay=False),
    "gate": Param("DF", std=cfg.init_std, inputs=1),
    "up": Param("DF", std=cfg.init_std, inputs=1),
    "down": Param("FD", std=cfg.out_std, inputs=1),
  }


def activations(cfg: ModelConfig):
  """The activation that loud steps observe: the output of the norm."""
  del cfg
  return {"norm": Activation("BLD")}


def apply(p, s, x_BLD, context: LayerContext, cfg: ModelConfig, run: ComputeConfig):
  """(x + down(silu(gate(norm(x))) * up(norm(x))), Aux), multiplied as FORMS says.

  Its state is float32 [F], the largest smooth_swiglu.channel_scales so far; None without any.
  """
  function = functools.partial(_apply, states=context.states, cfg=cfg, run=run)
  return row_tiles.token_wise(function, run.row_tile)((p, s), x_BLD)


def _apply(held, x_BLD, states, cfg: ModelConfig, run: ComputeConfig):
  (p, s), aux = held, Aux()
  h_BLD = block_input(x_BLD, p, s, cfg, run)
  eqns, ws, sites = zip(*((site.eqn, p[site.name], s[site.name]) for site in SITES), strict=True)
  if KEY in states:
    as_new = dataclasses.replace(s["up"])  # a product beside the layer's own
    up_BLF = dot(eqns[1], prologue.value(h_BLD), p["up"], as_new)
    before_F, scales_F = states[KEY], smooth_swiglu.channel_scales(up_BLF)
    aux = Aux(states={KEY: scales_F if before_F is None else jnp.maximum(before_F, scales_F)})
  multiply = FORMS[run.smooth_swiglu] if cfg.unit_scaling != "all" else unit_scaling.swiglu_mlp
  f_BLD = multiply(eqns, h_BLD, ws, sites, "linear", run.residuals.gate_up)
  return block_output(x_BLD, f_BLD, p, s, cfg, run), aux


MIXER = Mixer(
  KEY, params, SITES, apply, hf_names=HF_NAMES, alignment=smooth_swiglu.alignment,
  fold_channel_scales=smooth_swiglu.fold, activations=activations, makers=MAKERS,
)  # fmt: skip
