"""SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202 §2)."""

import dataclasses

from fp8jax.models import smooth_swiglu
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.ops.elementwise import rms_norm
from fp8jax.ops.fused import prologue
from fp8jax.ops.fused.swiglu_mlp import swiglu_mlp
from fp8jax.ops.linear import dot
from fp8jax.params import Param

# ComputeConfig.smooth_swiglu -> down(silu(gate(x)) * up(x)), the same to the bit if unquantized.
FORMS = {"none": swiglu_mlp, "channel": smooth_swiglu.per_channel, "token": smooth_swiglu.per_token}


def params(cfg: ModelConfig):
  return {
    "norm": Param("D", init="ones", decay=False),
    "gate": Param("DF", std=cfg.init_std, inputs=1),
    "up": Param("DF", std=cfg.init_std, inputs=1),
    "down": Param("FD", std=cfg.out_std, inputs=1),
  }


def apply(p, s, x_BLD, cfg: ModelConfig, run: ComputeConfig):
  """x + down(silu(gate(norm(x))) * up(norm(x))), multiplied as FORMS says."""
  h_BLD = prologue.rms_norm(x_BLD, p["norm"], cfg.norm_eps, save=run.residuals.norm_inputs)
  equations = ("BLD,DF->BLF", "BLD,DF->BLF", "BLF,FD->BLD")
  names = ("gate", "up", "down")
  return x_BLD + FORMS[run.smooth_swiglu](
    equations, h_BLD, [p[n] for n in names], [s[n] for n in names], "linear", run.residuals.gate_up
  )


def channel_scales(p, s, x_BLD, cfg: ModelConfig):
  """float32 [F]: what "channel" divides up by at this input."""
  h_BLD = rms_norm(x_BLD, p["norm"], cfg.norm_eps)
  as_new = dataclasses.replace(s["up"])  # a product beside the layer's own
  return smooth_swiglu.channel_scales(dot("BLD,DF->BLF", h_BLD, p["up"], as_new))
