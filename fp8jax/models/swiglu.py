"""SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202 §2)."""

from fp8jax.models.config import Execution, ModelConfig
from fp8jax.ops import later
from fp8jax.ops.gated import gated
from fp8jax.params import Param


def params(cfg: ModelConfig):
  return {
    "norm": Param("D", init="ones", decay=False),
    "gate": Param("DF", std=cfg.init_std, inputs=1),
    "up": Param("DF", std=cfg.init_std, inputs=1),
    "down": Param("FD", std=cfg.out_std, inputs=1),
  }


def apply(p, s, x_BLD, cfg: ModelConfig, run: Execution):
  """x + down(silu(gate(norm(x))) * up(norm(x)))."""
  h_BLD = later.rms_norm(x_BLD, p["norm"], cfg.norm_eps, keep=run.kept.norms)
  equations = ("BLD,DF->BLF", "BLD,DF->BLF", "BLF,FD->BLD")
  names = ("gate", "up", "down")
  return x_BLD + gated(
    equations, h_BLD, [p[n] for n in names], [s[n] for n in names], "linear", run.kept.gated
  )
