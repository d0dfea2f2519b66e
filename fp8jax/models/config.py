"""The decoder (ModelConfig) and its execution (ComputeConfig); precision of GEMMs is elsewhere.

Field names follow Hugging Face's config.json where the field's literature agrees with it.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from fp8jax import axes
from fp8jax.keys import key, section
from fp8jax.ops.attention import Implementation
from fp8jax.ops.residuals import GemmInput, ResidualFormats
from fp8jax.recipe.attention import Attention

# The largest values that are no mistake: far above any published model, and small enough that a
# list of all tensors fits in memory.
LARGEST = {
  "vocab_size": 2**24, "hidden_size": 2**20, "intermediate_size": 2**22, "num_layers": 10_000,
  "num_heads": 2**16, "num_kv_heads": 2**16, "head_dim": 2**16, "max_positions": 2**31 - 1,
}  # fmt: skip

REMAT = ("none", "linears", "operands", "full")
WEIGHT_OPERANDS = ("per_product", "per_step")
UNIT_SCALING = ("none", "loss", "all")
# Forward passes that an evaluation may take: the recipes of training, and 16 bits everywhere.
EVAL_PRECISIONS = ("recipe", "bf16")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are stretched beyond the trained context.

  Attributes:
    kind: "default", "linear", "dynamic", "llama3" or "yarn" (Hugging Face's rope_type).
    factor: context extension.
    original_max_positions: context length of the pre-training, for llama3 and yarn; None takes
      max_positions. "dynamic" stretches beyond max_positions.
    low_freq_factor, high_freq_factor: llama3's band.
    beta_fast, beta_slow: yarn's band, in rotations.
    attention_factor: yarn's multiplier on cos and sin; None derives 0.1 ln(factor) + 1.
  """

  kind: str = "default"
  factor: float = 1.0
  original_max_positions: int | None = None
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None


# fmt: off
@section("model.lora")
class Lora:
  """Low-rank adapters beside a frozen model (Hu et al. 2021, arXiv:2106.09685).

  Embedding and head of the frozen model are BF16; norms and biases float32.
  """

  rank: int = key(0, "rank of the adapters; 0 trains every parameter instead")
  alpha: float = key(16.0, "the adapter's product is multiplied by alpha / rank")
  targets: tuple[str, ...] = key(("attn/.*", "mlp/.*"), "regular expressions on whole names of "
    'linear layers: "attn/q", "mlp/.*"')
  base: str = key("block_fp8", 'storage of the frozen linear layers: "block_fp8" (E4M3 codes with '
    "a scale per 128x128, which block recipes multiply as they are; those of a checkpoint in FP8 "
    'to the bit), with a scale per matrix HALO\'s "e4m3" (of tensor_current, halo_fp8_0), and of '
    'rotated weights "int8_h64" (of halo_int8_2_hq) and "e3m2_h64" (of halo_fp6_1_hq), "bf16", or '
    '"float32", which recipes round to the codes of init.hf to the bit')
# fmt: on


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """One decoder, by default of the Llama family: grouped-query attention, RMSNorm, SwiGLU, rotary
  positions.

  Attributes:
    architecture: "llama", "mistral" (without a sliding window), "qwen2" or "qwen3": names the
      Hugging Face class this is read from and written as. The differences are in the other fields.
    vocab_size, hidden_size, intermediate_size, num_layers: V, D, F, N.
    num_heads, num_kv_heads, head_dim: H, G, K.
    max_positions: longest context the weights were made for.
    rope_theta: base of the rotary frequencies.
    rope_scaling: how they are stretched.
    norm_eps: RMSNorm's epsilon.
    qkv_bias: bias on queries, keys and values (Qwen2).
    qk_norm: RMSNorm on every query and key head (Qwen3).
    tie_embeddings: whether the output head is the input embedding.
    init_std: standard deviation of freshly drawn weights; output projections get
      init_std / sqrt(2 N) (Radford et al. 2019 §2.3).
    residual_tau: 0 adds a block as x + f(norm(x)); above, as sqrt(1 - tau) x + sqrt(tau)
      norm(f(x)), so that the stream keeps its variance (µnit scaling, arXiv:2502.05967 §2.3, whose
      norms are LayerNorms). Output projections then start like all others.
    unit_scaling: one of UNIT_SCALING. "loss" multiplies the loss's gradient alone, by a constant
      that gives the gradient of logits variance 1; "all" every operation beside linear layers
      (unit_scaling.py), and blocks are sqrt(1 - tau) x + sqrt(tau) f(norm(x)).
    mixers: blocks of every layer in order, keys of transformer.MIXERS.
    lora: adapters, all other parameters but a reward head being frozen; None trains every
      parameter.
    reward_head: whether the head is [D, 1], the score of a text at its last token, and no [D, V].
  """

  architecture: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_positions: int
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling = RopeScaling()
  norm_eps: float = 1e-6
  qkv_bias: bool = False
  qk_norm: bool = False
  tie_embeddings: bool = False
  init_std: float = 0.02
  residual_tau: float = 0.0
  unit_scaling: str = "none"
  mixers: tuple[str, ...] = ("attention_gqa", "mlp_swiglu")
  lora: Lora | None = None
  reward_head: bool = False

  @property
  def dims(self) -> dict[str, int]:
    """Letter -> size."""
    return {
      "V": self.vocab_size, "D": self.hidden_size, "F": self.intermediate_size,
      "N": self.num_layers, "H": self.num_heads, "G": self.num_kv_heads, "K": self.head_dim,
      "R": self.lora.rank if self.lora else 0, "C": 1,
    }  # fmt: skip

  @property
  def norms_follow(self) -> bool:
    """Whether a block's norm is of its output."""
    return self.residual_tau > 0 and self.unit_scaling != "all"

  @property
  def out_std(self) -> float:
    return self.init_std / (1 if self.residual_tau else 2 * self.num_layers) ** 0.5

  def problems(self) -> list[str]:
    """The problems of this configuration, in words; empty without any."""
    texts = []
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name in LARGEST and value < 1:
        texts.append(f"model.{field.name}={value} must be at least 1")
      elif field.name in LARGEST and value > LARGEST[field.name]:
        texts.append(f"model.{field.name}={value} must be at most {LARGEST[field.name]}")
    if not texts and self.num_heads % self.num_kv_heads:
      texts.append(
        f"model.num_heads={self.num_heads} must be a multiple of "
        f"model.num_kv_heads={self.num_kv_heads}: queries share keys in equal groups"
      )
    for name in ("rope_theta", "norm_eps"):
      if not 0 < getattr(self, name) < math.inf:
        texts.append(f"model.{name}={getattr(self, name)} must be positive and finite")
    if not 0 <= self.init_std < math.inf:
      texts.append(f"model.init_std={self.init_std} must not be negative, NaN or infinite")
    if not 0 <= self.residual_tau < 1:
      texts.append(f"model.residual_tau={self.residual_tau} must be at least 0 and below 1")
    named = ("qkv_bias", "qk_norm", "tie_embeddings", "lora")
    without = [name for name in named if getattr(self, name)]
    if self.unit_scaling == "all" and (without or not self.residual_tau):
      texts.append(
        f"model.unit_scaling='all' with {', '.join(without) or 'model.residual_tau=0'}: blocks are "
        "sqrt(1 - tau) x + sqrt(tau) f(norm(x)) without biases, QK-norm and adapters, and the "
        "embedding is not the head; set model.residual_tau=0.4, model.tie_embeddings=False and "
        "such a model.preset, or model.unit_scaling='loss'"
      )
    if self.reward_head and (self.tie_embeddings or self.unit_scaling != "none"):
      texts.append(
        f"model.reward_head=True with model.unit_scaling={self.unit_scaling!r} and "
        f"model.tie_embeddings={self.tie_embeddings}, which are of logits; set 'none' and False"
      )
    if self.head_dim % 2:
      texts.append(f"model.head_dim={self.head_dim} must be even for rotary embeddings")
    return texts

  def to_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
  """How a model runs. Changes rounding and memory, never what is computed.

  Attributes:
    dtype: compute dtype of activations and of GEMM operands that no recipe narrows.
    attention: implementation, see ops.attention.
    attention_recipe: of attention's products, emulated; None for those of `dtype`.
    temperature: divides logits in the loss.
    is_invariant: whether a token's bits depend on the tokens before it alone (models/invariant.py).
    row_tile: tokens that a block computes at a time; 0 for all, and set by models/invariant.py.
    remat: "none" recomputes nothing in the backward pass; "linears" saves the outputs of linear
      layers and attention and recomputes norms, activations and quantization; "operands" also
      saves the operands of GemmInput.WGRAD_OPERAND, so that no quantization is repeated; "full"
      saves only each layer's input.
    residuals: formats of residuals; `residuals.layer_inputs` for remat "full" alone.
    loss_chunk: positions per chunk of the cross-entropy.
    smooth_swiglu: how the feed-forward layer multiplies, a key of swiglu.FORMS.
    layout: mesh and sharding tables.
    weight_operands: whether each product quantizes its weight, "per_product", or a training step
      all of them once, "per_step" (step/quantized_once.py).
    num_sources: sources whose losses are added up apart, where a batch has sources_BL; 0 for none.
  """

  dtype: jnp.dtype = jnp.dtype(jnp.float32)
  attention: Implementation = "xla"
  remat: str = "none"
  residuals: ResidualFormats = ResidualFormats()
  loss_chunk: int = 512
  layout: axes.Layout = axes.LOCAL
  smooth_swiglu: str = "none"
  num_sources: int = 0
  attention_recipe: Attention | None = None
  temperature: float = 1.0
  is_invariant: bool = False
  row_tile: int = 0
  weight_operands: str = "per_product"

  @property
  def implementation(self) -> Implementation:
    """That of attention."""
    return "fixed_order" if self.row_tile else self.attention

  def problems(self, model: ModelConfig) -> list[str]:
    """Reasons why this model cannot run so, in words; empty without any."""
    texts = []
    if self.residuals.layer_inputs is not None and self.remat != "full":
      texts.append(
        f"memory.save_layer_inputs with memory.remat_policy={self.remat!r}: only 'full' "
        "saves the input of every layer as such; elsewhere norms save it: set "
        "memory.save_norm_inputs instead"
      )
    saves_operand = self.residuals.gemm_inputs is GemmInput.WGRAD_OPERAND
    if saves_operand and self.remat == "linears":
      texts.append(
        "memory.save_gemm_inputs='quantized' with memory.remat_policy='linears': 'linears' saves "
        "no FP8 operands; set memory.remat_policy='operands', or "
        "memory.save_gemm_inputs='none'"
      )
    if self.smooth_swiglu != "none" and model.unit_scaling == "all":
      texts.append(
        f"precision.smooth_swiglu={self.smooth_swiglu!r} with model.unit_scaling='all', which has "
        "its own factor there; leave one out"
      )
    if self.remat in ("linears", "operands") and model.norms_follow:
      texts.append(
        f"memory.remat_policy={self.remat!r} with model.residual_tau={model.residual_tau}: a norm "
        "that follows a block reads the output of its last linear layer, which that policy does "
        "not save; take 'none' or 'full'"
      )
    if self.remat == "operands" and not saves_operand:
      texts.append(
        "memory.remat_policy='operands' saves the FP8 operands of "
        "memory.save_gemm_inputs='quantized', which is 'none': set it, or "
        "memory.remat_policy='linears', which saves the same without them"
      )
    shards = self.layout.size(self.layout.act_axes("F"))
    gate_up = self.residuals.gate_up
    group = max(gate_up.tile[1], 1) if gate_up is not None else 1  # channels that share a scale
    if model.intermediate_size // shards % group:
      texts.append(
        f"memory.save_gate_up has groups of {group} channels, and {shards} devices have "
        f"{model.intermediate_size} / {shards} of gate and up each: a group would lie on two. Take "
        "a smaller group, or another mesh.tensor"
      )
    return texts
