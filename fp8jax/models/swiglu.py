"""SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202 §2)."""

from jax.ad_checkpoint import checkpoint_name

from fp8jax.models.config import ModelConfig
from fp8jax.ops import later
from fp8jax.ops.dot import dot, dots
from fp8jax.params import Param


def params(cfg: ModelConfig):
  return {
    "norm": Param("D", init="ones", decay=False),
    "gate": Param("DF", std=cfg.init_std, inputs=1),
    "up": Param("DF", std=cfg.init_std, inputs=1),
    "down": Param("FD", std=cfg.out_std, inputs=1),
  }


def apply(p, s, x_BLD, cfg: ModelConfig):
  """x + down(silu(gate(norm(x))) * up(norm(x)))."""
  h_BLD = later.rms_norm(x_BLD, p["norm"], cfg.norm_eps)
  gate_BLF, up_BLF = dots(
    ("BLD,DF->BLF", "BLD,DF->BLF"), h_BLD, (p["gate"], p["up"]), (s["gate"], s["up"])
  )
  gate_BLF, up_BLF = checkpoint_name(gate_BLF, "linear"), checkpoint_name(up_BLF, "linear")
  return x_BLD + dot("BLF,FD->BLD", later.silu_mul(gate_BLF, up_BLF), p["down"], s["down"])
