"""The declaration of a block of a layer: everything that other folders ask about a mixer.

A mixer is one residual block, x + f(norm(x)): attention, or a feed-forward layer. Its file states
its parameters, its GEMM sites and its function; `transformer.MIXERS` names it. Start-up tables, the
check of FP8 GEMMs, memory, alarms, diagnosis, FLOPs and the Hugging Face mapping read these.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fp8jax.models import unit_scaling
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.ops import elementwise, prologue
from fp8jax.ops.observe import observed
from fp8jax.ops.site import Activation


@dataclasses.dataclass(frozen=True)
class GemmSite:
  """A GEMM of a mixer, beside the declaration of its weight.

  Attributes:
    name: key of the weight and of the site.
    eqn: einsum of the forward GEMM, "BLD,DF->BLF".
    input: name of the activation that it reads; sites of one mixer with the same name share it.
    is_residual: its result is added to the residual stream and nothing else reads it. Every other
      result is named "linear" for remat policies (jax.ad_checkpoint.checkpoint_name).
    has_channel_scales: under smooth_swiglu="channel" its weight is multiplied by channel scales,
      so that the scale of the weight is current whatever the recipe says.
    is_chunked: it is called once per chunk of the sequence (ComputeConfig.loss_chunk).
  """

  name: str
  eqn: str
  input: str
  is_residual: bool = False
  has_channel_scales: bool = False
  is_chunked: bool = False


def block_input(x_BLD, p, s, cfg: ModelConfig, run: ComputeConfig) -> Any:
  """The input of a block's GEMMs: norm(x), observed, a Prologue; x itself where the norm follows.

  Under unit scaling a branch has its factor at both ends: sqrt(tau) forward where it is added, and
  backward where it is split off, so that gradients inside have variance 1 too.

  Args:
    p, s: parameters and sites of the block, the norm's among them.
  """
  if cfg.norms_follow:
    return x_BLD
  if cfg.unit_scaling == "all":
    x_BLD = elementwise.scale_bwd(x_BLD, math.sqrt(cfg.residual_tau))
  return _normed(x_BLD, p, s, cfg, run)


def block_output(x_BLD, f_BLD, p, s, cfg: ModelConfig, run: ComputeConfig):
  """The residual stream x with the block's f added, see ModelConfig.residual_tau."""
  if not cfg.residual_tau:
    return x_BLD + f_BLD
  keep, take = math.sqrt(1 - cfg.residual_tau), math.sqrt(cfg.residual_tau)
  if cfg.norms_follow:
    h_BLD = take * prologue.value(_normed(f_BLD, p, s, cfg, run))
  else:
    h_BLD = elementwise.scale_fwd(f_BLD, take)
  return (keep * x_BLD + h_BLD).astype(x_BLD.dtype)


def _normed(x_BLD, p, s, cfg: ModelConfig, run: ComputeConfig):
  weight_D = unit_scaling.parameter(p["norm"], x_BLD.size, cfg, run)
  h_BLD = prologue.rms_norm(x_BLD, weight_D, cfg.norm_eps, save=run.residuals.norm_inputs)
  return observed(h_BLD, s, "norm")


class LayerContext(NamedTuple):
  """The part of a batch that every layer reads.

  Attributes:
    angles: (cos_BLK, sin_BLK) of rotary positions.
    segments_BL: document of each token, or None if documents may attend to each other.
    weights_BL: float32 weight of each token in the loss.
    states: {key of a mixer: what it keeps of the tokens before these}, of the layer; a mixer whose
      key is there returns what these tokens add as Aux.states.
    positions_BL: position of each token in its sequence, where there are states; else None.
  """

  angles: Any
  segments_BL: Any
  weights_BL: Any
  states: Mapping[str, Any] = {}
  positions_BL: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aux:
  """Results of a block beside the residual stream; of a dense layer in training there are none.

  Losses and statistics are float32 scalars and sums over tokens of (weight of the token in the
  loss) x (its value), so that values of layers and of microbatches add up exactly.

  Attributes:
    losses: {name: sum}, part of the loss that training differentiates, coefficients included.
    statistics: {name: sum}, for metrics alone.
    sums: {"by_source": float32 [S, 2]}, of losses and weights, where a batch tells the sources.
    states: {key of the mixer: what the tokens add to its state}, see LayerContext.states.
  """

  losses: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  statistics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  sums: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  states: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __add__(self, other: "Aux") -> "Aux":
    def add(a, b):
      return {k: a[k] + b[k] if k in a and k in b else {**a, **b}[k] for k in {**a, **b}}

    return Aux(
      add(self.losses, other.losses), add(self.statistics, other.statistics),
      add(self.sums, other.sums), {**self.states, **other.states},
    )  # fmt: skip

  def sum(self) -> "Aux":
    """Of stacked values [N]; states stay stacked."""
    sums = jax.tree.map(lambda values: values.sum(0), dataclasses.replace(self, states={}))
    return dataclasses.replace(sums, states=self.states)


@dataclasses.dataclass(frozen=True)
class Mixer:
  """A residual block of a layer.

  Attributes:
    key: of its part of a layer's parameters and sites.
    params: ModelConfig -> {name: Param}, of one layer.
    sites: its GEMMs, in order of computation.
    activations: ModelConfig -> {name: Activation}, what it lets loud steps observe beside its GEMMs
      (ops/observe.py): its norms.
    apply: (p, s, x_BLD, context, cfg, run) -> (x_BLD, Aux), see attention_gqa.apply.
    has_cache: whether `apply` needs a state of the tokens before these where they are not among
      its tokens: a KV cache (LayerContext.states).
    flops_per_token: (ModelConfig, length) -> forward FLOPs per token of products of activations.
    hf_names: {name: Hugging Face's suffix after "model.layers.N."}; None if Hugging Face has no
      such layer.
    alignment: p of all layers -> {site: float32 [N]}, the largest |cosine| of the weights that make
      that site's input (smooth_swiglu.alignment); None if there is none.
    fold_channel_scales: (p of all layers, s_NF) -> p that holds these channel scales, which are the
      states of this mixer (smooth_swiglu); None if it has none.
  """

  key: str
  params: Callable[..., dict]
  sites: tuple[GemmSite, ...]
  apply: Callable[..., Any]
  flops_per_token: Callable[..., float] = lambda cfg, length: 0
  activations: Callable[..., Mapping[str, Activation]] = lambda cfg: {}
  has_cache: bool = False
  hf_names: Mapping[str, str] | None = None
  alignment: Callable[..., dict] | None = None
  fold_channel_scales: Callable[..., dict] | None = None
