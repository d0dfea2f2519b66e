"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) of Llama, Qwen2 and Qwen3."""

import functools

from jax.ad_checkpoint import checkpoint_name

from fp8jax import axes
from fp8jax.kernels.attention.api import AttentionProblem
from fp8jax.kernels.device import Device
from fp8jax.models import unit_scaling
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.mixer import Aux, GemmSite, LayerContext, Maker, Mixer, block_input, block_output
from fp8jax.ops import prologue, row_tiles
from fp8jax.ops.attention import attention, key_heads_per_device
from fp8jax.ops.dots import dot, dots
from fp8jax.ops.elementwise import add_bias, rotate
from fp8jax.ops.observe import observed
from fp8jax.ops.site import Activation
from fp8jax.params import Param

# Of its parameters, sites and state.
KEY = "attn"
SITES = (
  GemmSite("q", "BLD,DHK->BLHK", "norm"),
  GemmSite("k", "BLD,DGK->BLGK", "norm"),
  GemmSite("v", "BLD,DGK->BLGK", "norm"),
  GemmSite("o", "BLHK,HKD->BLD", "mixed", is_residual=True),
)
# Attention mixes tokens, each head for itself: values may be rotated within a head.
MAKERS = {
  "norm": Maker(("norm",), "D", "D", is_gain=True),
  "mixed": Maker(("v", "v_bias"), "GK", "K"),
}
HF_NAMES = {
  "norm": "input_layernorm.weight",
  "q": "self_attn.q_proj.weight",
  "k": "self_attn.k_proj.weight",
  "v": "self_attn.v_proj.weight",
  "o": "self_attn.o_proj.weight",
  "q_bias": "self_attn.q_proj.bias",
  "k_bias": "self_attn.k_proj.bias",
  "v_bias": "self_attn.v_proj.bias",
  "q_norm": "self_attn.q_norm.weight",
  "k_norm": "self_attn.k_norm.weight",
}


def params(cfg: ModelConfig):
  std = cfg.init_std
  tree = {
    "norm": Param("D", init="ones", decay=False),
    "q": Param("DHK", std=std, inputs=1),
    "k": Param("DGK", std=std, inputs=1),
    "v": Param("DGK", std=std, inputs=1),
    "o": Param("HKD", std=cfg.out_std, inputs=2),
  }
  if cfg.qkv_bias:
    tree["q_bias"] = Param("HK", init="zeros", decay=False)
    tree["k_bias"] = Param("GK", init="zeros", decay=False)
    tree["v_bias"] = Param("GK", init="zeros", decay=False)
  if cfg.qk_norm:
    tree["q_norm"] = Param("K", init="ones", decay=False)
    tree["k_norm"] = Param("K", init="ones", decay=False)
  return tree


def activations(cfg: ModelConfig):
  """The activations that loud steps observe: outputs of norms."""
  named = {"norm": Activation("BLD")}
  if cfg.qk_norm:
    named |= {"q_norm": Activation("BLHK"), "k_norm": Activation("BLGK")}
  return named


def apply(p, s, x_BLD, context: LayerContext, cfg: ModelConfig, run: ComputeConfig):
  """(x + attention(norm(x)), Aux with keys and values of these tokens as the cache stores them).

  Args:
    context: positions and documents of the tokens. Its state is the layer's cache, with `attend`
      (generation/cache.py); without one, the tokens attend among themselves.
  """
  inputs, output = (
    row_tiles.token_wise(functools.partial(part, cfg=cfg, run=run), run.row_tile)
    for part in (_inputs, _output)
  )
  (q_BLHK, k_BLGK, v_BLGK), aux = inputs((p, s), x_BLD, context.angles), Aux()
  qkv = q_BLHK, k_BLGK, v_BLGK
  if KEY in context.states:
    cache = context.states[KEY]
    mixed_BLHK, added = cache.attend(*qkv, context.positions_BL, run.implementation)
    aux = Aux(states={KEY: added})
  else:
    where = (run.implementation, run.layout, run.attention_recipe)
    mixed_BLHK = attention(*qkv, context.segments_BL, *where)
  return output((p, s), x_BLD, mixed_BLHK), aux


def _inputs(held, x_BLD, angles, cfg: ModelConfig, run: ComputeConfig):
  """Queries, keys and values of every token, turned by its position."""
  p, s = held
  *of_qkv, _ = (site.eqn for site in SITES)
  norm = functools.partial(prologue.rms_norm, eps=cfg.norm_eps, save=run.residuals.norm_inputs)
  h_BLD = block_input(x_BLD, p, s, cfg, run)
  q_BLHK, k_BLGK, v_BLGK = dots(of_qkv, h_BLD, (p["q"], p["k"], p["v"]), (s["q"], s["k"], s["v"]))
  if cfg.qkv_bias:
    q_BLHK, k_BLGK = add_bias(q_BLHK, p["q_bias"]), add_bias(k_BLGK, p["k_bias"])
    v_BLGK = add_bias(v_BLGK, p["v_bias"])
  if cfg.qk_norm:
    q_BLHK, k_BLGK = norm(q_BLHK, p["q_norm"]).value(), norm(k_BLGK, p["k_norm"]).value()
    q_BLHK, k_BLGK = observed(q_BLHK, s, "q_norm"), observed(k_BLGK, s, "k_norm")
  q_BLHK = checkpoint_name(rotate(q_BLHK, *angles), "linear")
  k_BLGK = checkpoint_name(rotate(k_BLGK, *angles), "linear")
  return q_BLHK, k_BLGK, checkpoint_name(v_BLGK, "linear")


def _output(held, x_BLD, mixed_BLHK, cfg: ModelConfig, run: ComputeConfig):
  """The residual stream with what attention gave, multiplied by o."""
  p, s = held
  mixed_BLHK = unit_scaling.attention(mixed_BLHK, cfg)
  mixed_BLHK = checkpoint_name(axes.constrain(mixed_BLHK, "BLHK", run.layout), "linear")
  f_BLD = dot(SITES[-1].eqn, mixed_BLHK, p["o"], s["o"])
  return block_output(x_BLD, f_BLD, p, s, cfg, run)


def problem(
  cfg: ModelConfig, run: ComputeConfig, device: Device, sequences: int, length: int,
  is_isolated: bool,
) -> AttentionProblem:  # fmt: skip
  """The attention of a layer as kernels/choose.py is asked for it.

  Args:
    cfg, run: the model, and its layout and compute dtype.
    sequences: of a batch over all devices.
    length: tokens of a sequence.
    is_isolated: whether a token sees its own document alone.
  """
  rows, shards = (run.layout.size(run.layout.act_axes(letter)) for letter in "BH")
  key_heads = key_heads_per_device(cfg.num_heads, cfg.num_kv_heads, shards)
  return AttentionProblem(
    max(sequences // rows, 1), length, cfg.num_heads // shards, key_heads, cfg.head_dim,
    run.dtype.name, is_isolated, device,
  )  # fmt: skip


def flops_per_token(cfg: ModelConfig, length: int) -> float:
  """Forward FLOPs of the two products of attention, by an average context of length / 2.

  Source: PaLM (arXiv:2204.02311, appendix B), halved for causality.
  """
  return 2 * cfg.num_heads * cfg.head_dim * length


MIXER = Mixer(
  KEY, params, SITES, apply, flops_per_token, hf_names=HF_NAMES, has_cache=True,
  activations=activations, makers=MAKERS,
)  # fmt: skip
