"""The decoder: embed, scan over layers, normalise, predict.

The model is declared here once and in order: parameters (`params`), GEMM sites (`gemm_sites`) and
mixers (`MIXERS`, each in its own file; see mixer.py). Other folders that ask for the parts of the
model read these declarations.

Parameters and sites are plain nested dictionaries with the same keys; those of the layers are
stacked in front along N, the sites in runs of layers that multiply alike. A parameter may be
stored in a low-bit format (ops/stored_params.py). A batch is a dictionary of arrays:

  tokens_BL      int32 inputs
  targets_BL     int32, the token that follows each input
  weights_BL     float32, 0 where the target does not count
  positions_BL   int32 position of each token in its document
  segments_BL    int32 document of each token, from 1, and 0 of padding; absent if documents may
                 attend to each other
  teacher        for distillation, see `taught`; absent otherwise
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import axes
from fp8jax import params as params_lib
from fp8jax.models import attention_gqa, heads, invariant, lora, mlp_swiglu, rope, unit_scaling
from fp8jax.models import embedding as embedding_lib
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.mixer import Aux, GemmSite, LayerContext, Mixer
from fp8jax.ops import cross_entropy, policy_gradient, prologue, residuals, row_tiles, stored_params
from fp8jax.ops import site as site_lib
from fp8jax.ops.cross_entropy import Teacher, cross_entropy_by_source
from fp8jax.ops.dots import dot
from fp8jax.ops.linear import SAVED_NAME
from fp8jax.ops.observe import observed
from fp8jax.ops.site import Activation
from fp8jax.params import Param

# By name, for ModelConfig.mixers.
MIXERS: dict[str, Mixer] = {"attention_gqa": attention_gqa.MIXER, "mlp_swiglu": mlp_swiglu.MIXER}


def mixers(cfg: ModelConfig) -> tuple[Mixer, ...]:
  """The blocks of a layer, in order."""
  return tuple(MIXERS[name] for name in cfg.mixers)


def problems(cfg: ModelConfig) -> list[str]:
  """The problems of these mixers, in words; empty without any."""
  unknown = [name for name in cfg.mixers if name not in MIXERS]
  if unknown or not cfg.mixers:
    return [f"model.mixers={cfg.mixers!r} must name one or more of {', '.join(MIXERS)}"]
  keys = [mixer.key for mixer in mixers(cfg)]
  if len(set(keys)) < len(keys):
    return [
      f"model.mixers={cfg.mixers!r} keep parameters under {', '.join(keys)}: two blocks of a layer "
      "would have the same; name every mixer once"
    ]
  return []


def layer_params(cfg: ModelConfig):
  """The declaration tree of one layer."""
  return lora.declared({mixer.key: mixer.params(cfg) for mixer in mixers(cfg)}, cfg)


def params(cfg: ModelConfig):
  """The declaration tree."""
  is_trainable = cfg.lora is None
  tree = {
    "embed": Param("VD", std=cfg.init_std, trainable=is_trainable),
    "layers": params_lib.tree_map(Param.stacked, layer_params(cfg)),
    "norm": Param("D", init="ones", decay=False, trainable=is_trainable),
  }
  if not cfg.tie_embeddings:
    tree["head"] = heads.declared(cfg)
  return tree


def site_params(cfg: ModelConfig):
  """The declarations that become sites: `params`, and the head even where it is tied."""
  return {**params(cfg), "head": heads.declared(cfg)}


def gemm_sites(cfg: ModelConfig) -> dict[str, GemmSite]:
  """{path: site} of every GEMM, in order of computation: "layers/mlp/up", ..., "head"."""
  layers = {}
  for mixer in mixers(cfg):
    adapted = lora.targets(mixer.params(cfg), mixer.key, cfg.lora) if cfg.lora else ()
    sites = lora.with_sites(mixer.sites, adapted)
    layers |= {f"layers/{mixer.key}/{site.name}": site for site in sites}
  return {**layers, "head": GemmSite("head", heads.equation(cfg), "norm", is_chunked=True)}


def activations(cfg: ModelConfig) -> dict[str, Activation]:
  """{path: declaration} of what loud steps observe beside GEMMs, with "layers/residual", the
  residual stream after a layer."""
  of_mixers = {
    f"layers/{mixer.key}/{name}": activation
    for mixer in mixers(cfg)
    for name, activation in mixer.activations(cfg).items()
  }
  stream = Activation("BLD", has_gradient=True)
  logits = Activation("BL" + heads.declared(cfg).letters[1])
  ends = {"embed": stream, "norm": Activation("BLD"), "logits": logits}
  return {**of_mixers, "layers/residual": stream, **ends}


def linear_layers(cfg: ModelConfig) -> list[str]:
  """ "attn/q" of every linear layer of a layer, adapters aside."""
  return [f"{mixer.key}/{site.name}" for mixer in mixers(cfg) for site in mixer.sites]


def loss(params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """Sum over tokens of weight * -log p(target), or of a reward head over pairs: float32 scalar."""
  return loss_and_aux(params, sites, batch, cfg, run)[0]


def loss_and_aux(params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """(`loss`, Aux of all layers added up). Training differentiates the loss and aux.losses."""
  # A tied embedding is read once; one whose gradient has parts, as embedding and as head.
  ends = {k: p for k, p in params.items() if k != "layers" and not stored_params.parts_of(p)}
  params = {**params, **stored_params.value(ends)}
  x_BLD, aux = _after_last(params, sites, batch, cfg, run)
  loss, sums = head_loss(x_BLD, params, sites, batch, cfg, run)
  return loss, dataclasses.replace(aux, sums=sums)


def logits(params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """float32 [B, L, V], or the scores [B, L, 1] of a reward head. For inspection and parity."""
  return head_logits(hidden(params, sites, batch, cfg, run), params, sites, cfg, run)


def head_logits(h_BLD, params, sites, cfg: ModelConfig, run: ComputeConfig):
  """`logits` of what `hidden` gave, or of some of its positions."""
  head, eqn = _head(params, cfg)

  def multiply(held, h_BLD):
    return dot(eqn, h_BLD, *held, out_dtype=jnp.float32)

  head = invariant.as_multiplied(head, sites["head"], eqn, run)
  return invariant.of_tokens(multiply, run)((head, sites["head"]), h_BLD)


def hidden(params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """Normalised last hidden states [B, L, D] in the compute dtype."""
  return hidden_and_aux(params, sites, batch, cfg, run)[0]


def hidden_and_aux(params, sites, batch, cfg: ModelConfig, run: ComputeConfig, states=None):
  """(`hidden`, Aux of all layers added up): also the forward pass of generation.

  Args:
    params: as in `loss`, or quantized for inference (generation/weights.py).
    batch: tokens_BL and positions_BL.
    states: {key of a mixer: its state of every layer, stacked}, see LayerContext; Aux.states is
      then a tree like it.
  """
  x_BLD, aux = _after_last(params, sites, batch, cfg, run, states)
  return normalised(x_BLD, params, sites, cfg, run), aux


def embed(params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """The input of the first layer: tokens embedded, [B, L, D] in the compute dtype."""
  x_BLD = embedding_lib.embedded(params["embed"], batch["tokens_BL"], cfg, run)
  return observed(axes.constrain(x_BLD, "BLD", run.layout), sites, "embed")


def layer_context(batch, cfg: ModelConfig, run: ComputeConfig) -> LayerContext:
  """The part of a batch that every layer reads; without weights all tokens weigh 1."""
  weights_BL = batch.get("weights_BL")
  if weights_BL is None:
    weights_BL = jnp.ones(batch["tokens_BL"].shape, jnp.float32)
  turn = lambda _, positions_BL: rope.cos_sin(positions_BL, cfg)  # noqa: E731
  angles = invariant.of_tokens(turn, run)((), batch["positions_BL"])
  return LayerContext(angles, batch.get("segments_BL"), weights_BL)


def layer(x_BLD, of_layer, context: LayerContext, cfg: ModelConfig, run: ComputeConfig):
  """(the residual stream after one layer, Aux of its blocks added up).

  Args:
    of_layer: its (parameters, sites), perhaps with states of its mixers.
  """
  (p, s, *states), total = of_layer, Aux()
  if states:
    context = context._replace(states=states[0])
  for mixer in mixers(cfg):
    own = lora.attached(p[mixer.key], s[mixer.key], cfg)
    x_BLD, aux = mixer.apply(own, s[mixer.key], x_BLD, context, cfg, run)
    total += aux
  return observed(axes.constrain(x_BLD, "BLD", run.layout), s, "residual"), total


def head_loss(x_BLD, params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """(`loss` of what the last layer gave, Aux.sums); `params` and `sites` need no layers."""
  if cfg.reward_head:
    return _ranking_loss(x_BLD, params, sites, batch, cfg, run)
  if "policy" in batch:
    return _policy_loss(x_BLD, params, sites, batch, cfg, run)
  if run.is_invariant:
    return _invariant_head_loss(x_BLD, params, sites, batch, cfg, run)
  head, eqn = _head(params, cfg)
  parts = stored_params.parts_of(head)
  head = stored_params.terms(head) if parts else stored_params.value(head)
  norm = stored_params.value({"norm": params["norm"]})
  h_BLD = normalised(x_BLD, norm, sites, cfg, run)
  h_BLD, head = unit_scaling.head(h_BLD, head, cfg, run)
  loss, by_source, distilled = cross_entropy_by_source(
    h_BLD, head, eqn, batch["targets_BL"], batch["weights_BL"], sites["head"], run.loss_chunk,
    is_frozen=cfg.lora is not None, logits_site=sites.get("logits"),
    sources_BL=batch.get("sources_BL"), num_sources=run.num_sources,
    gradient_gain=unit_scaling.loss_gain(cfg), teacher=batch.get("teacher"),
    temperature=run.temperature, parts=parts,
  )  # fmt: skip
  sums = {"by_source": by_source, "distill": distilled}
  return loss, {name: value for name, value in sums.items() if value is not None}


def _invariant_head_loss(x_BLD, params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """`head_loss` from `log_probs`, with the gradient that it has otherwise."""
  ends = (
    {k: p for k, p in params.items() if k != "layers"},
    {k: s for k, s in sites.items() if k != "layers"},
  )
  plain = dataclasses.replace(run, is_invariant=False)

  def exact(x_BLD, ends, batch):
    of_head, sites = ends
    of_head = stored_params.value(of_head)
    h_BLD = normalised(x_BLD, of_head, sites, cfg, run)
    logp_BL, _ = log_probs(h_BLD, of_head, sites, batch["targets_BL"], cfg, run)
    return cross_entropy.sums_of(-logp_BL, batch, run.num_sources)

  def as_ever(x_BLD, ends, batch):
    of_head, sites = ends
    return head_loss(x_BLD, of_head, sites, batch, cfg, plain)

  return row_tiles.with_gradients_of(as_ever, exact)(x_BLD, ends, batch)


def _ranking_loss(x_BLD, params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """(`loss` of pairs of rows, whose scores are at their tokens of weight, sums)."""
  params = stored_params.value({k: p for k, p in params.items() if k != "layers"})
  run = dataclasses.replace(run, is_invariant=False)
  h_BLD = normalised(heads.weighted(x_BLD, batch["weights_BL"]), params, sites, cfg, run)
  scores_BLC = observed(head_logits(h_BLD, params, sites, cfg, run), sites, "logits")
  loss, sums = heads.bradley_terry(scores_BLC[:, 0, 0], batch["weights_BL"].sum(1))
  return loss, {"policy": sums}


def _policy_loss(x_BLD, params, sites, batch, cfg: ModelConfig, run: ComputeConfig):
  """(objective of batch["policy"], sums), differentiated as the cross entropy of its weights."""
  policy, others = batch["policy"], {k: v for k, v in batch.items() if k != "policy"}
  ends = {k: p for k, p in params.items() if k != "layers"}, {"head": sites["head"]}
  of_head, quiet = (
    jax.lax.stop_gradient(ends[0]),
    {"head": site_lib.unwatched(sites["head"], "policy_head")},
  )
  of_head = stored_params.value(of_head)
  h_BLD = normalised(jax.lax.stop_gradient(x_BLD), of_head, quiet, cfg, run)
  targets_BL = batch["targets_BL"]
  logp_BL, _ = log_probs(h_BLD, of_head, quiet, targets_BL, cfg, run, policy.temperature)
  terms = policy_gradient.of_tokens(policy, logp_BL, batch["weights_BL"])
  others["weights_BL"] = terms.weights_BL
  plain = dataclasses.replace(run, is_invariant=False, temperature=policy.temperature)
  surrogate, sums = head_loss(x_BLD, params, sites, others, cfg, plain)
  loss = terms.loss + (surrogate - jax.lax.stop_gradient(surrogate))
  return loss, {**sums, "policy": terms.sums}


def log_probs(h_BLD, params, sites, targets_BL, cfg: ModelConfig, run: ComputeConfig, t=1.0):
  """(float32 [B, L] log-probability of every target, bool [B, L] whether it is the best token) at a
  temperature; logits of run.loss_chunk positions exist at a time."""

  def chunk(_, xs):
    logits_BLV = head_logits(xs[0], params, sites, cfg, run)
    rows = invariant.of_tokens(cross_entropy.log_probs, run)
    logp_BL = rows(jnp.float32(t), logits_BLV, xs[1])
    return (), jnp.stack([logp_BL, jnp.argmax(logits_BLV, axis=-1) == xs[1]], axis=-1)

  both: Any = cross_entropy.for_chunks(chunk, (), run.loss_chunk, h_BLD, targets_BL)[1]
  return both[..., 0], both[..., 1] > 0


def taught(params, sites, batch, cfg: ModelConfig, run: ComputeConfig, weight: float, t: float):
  """A batch with its teacher, which makes the loss a distillation's (ops/cross_entropy.py).

  Args:
    params: the teacher's.
    sites: in bf16, of names that no site of the student has.
    weight, t: share of the KL and temperature.
  """
  read = stored_params.value({k: p for k, p in params.items() if k != "layers"})
  h_BLD = hidden({**read, "layers": params["layers"]}, sites, batch, cfg, run)
  return {**batch, "teacher": Teacher(h_BLD, _head(read, cfg)[0], sites["head"], weight, t)}


def fold_channel_scales(params, scales, cfg: ModelConfig):
  """The parameters with scales {key of a mixer: float32 [N, F]} in the weights of their mixers."""
  layers = dict(params["layers"])
  for mixer in mixers(cfg):
    if mixer.fold_channel_scales is not None and mixer.key in scales:
      layers[mixer.key] = mixer.fold_channel_scales(layers[mixer.key], scales[mixer.key])
  return {**params, "layers": layers}


def alignment(params, cfg: ModelConfig):
  """{path of a site: float32 [N]}: see Mixer.alignment."""
  return {
    f"layers/{mixer.key}/{site}": values_N
    for mixer in mixers(cfg) if mixer.alignment is not None
    for site, values_N in mixer.alignment(params["layers"][mixer.key]).items()
  }  # fmt: skip


def _after_last(params, sites, batch, cfg: ModelConfig, run: ComputeConfig, states=None):
  """(the residual stream after all layers, Aux of them added up)."""
  step, more = functools.partial(layer, cfg=cfg, run=run), () if states is None else (states,)
  if run.is_invariant:
    step = invariant.layer(layer, mixers(cfg), cfg, run, is_differentiable=states is None)
  elif states is None:
    step = remat(step, run)
  x_BLD, aux = scan_layers(step, params, sites, batch, cfg, run, *more)
  return x_BLD, aux.sum()


def scan_layers(step, params, sites, batch, cfg: ModelConfig, run: ComputeConfig, *states):
  """(residual stream [B, L, D] after the last layer, what else layers give, stacked).

  Args:
    step: (stream, (parameters, sites, *states), context) -> (stream, anything), as `layer`.
    states: of `hidden_and_aux`, or nothing.
  """
  x_BLD, context = embed(params, sites, batch, cfg, run), layer_context(batch, cfg, run)
  if states:
    context = context._replace(positions_BL=batch["positions_BL"])
  given = []
  for _, of_sites, p, *more in runs(sites, params["layers"], *states):
    xs = (p, of_sites, *more)
    x_BLD, of_layers = jax.lax.scan(lambda x, of_layer: step(x, of_layer, context), x_BLD, xs)
    given.append(of_layers)
  return x_BLD, jax.tree.map(lambda *of_runs: jnp.concatenate(of_runs), *given)


def runs(sites, *stacks):
  """Of every run of layers that multiply alike: the slice of its layers, its sites, its stacks.

  Args:
    stacks: trees that are stacked over the layers; or tuples, with a stack for every run.
  """

  def part(p, layers: slice):
    return p if layers == slice(0, p.shape[0]) else p[layers]

  start = 0
  for number, of_run in enumerate(sites["layers"]):
    layers = slice(start, start + jax.tree.leaves(of_run)[0].shape[0])
    own = (
      stack[number] if isinstance(stack, tuple)
      else jax.tree.map(functools.partial(part, layers=layers), stack)
      for stack in stacks
    )  # fmt: skip
    yield layers, of_run, *own
    start = layers.stop


def normalised(x_BLD, params, sites, cfg: ModelConfig, run: ComputeConfig):
  """`hidden` of what the last layer gave."""
  weight_D = unit_scaling.parameter(params["norm"], x_BLD.size, cfg, run)

  def norm(weight_D, x_BLD):
    return prologue.rms_norm(x_BLD, weight_D, cfg.norm_eps, save=run.residuals.norm_inputs).value()

  return observed(invariant.of_tokens(norm, run)(weight_D, x_BLD), sites, "norm")


def _head(params, cfg: ModelConfig):
  # Inference has a tied head beside the embedding if it is quantized.
  return params["head" if "head" in params else "embed"], heads.equation(cfg)


def remat(layer, run: ComputeConfig):
  """A function like `layer`, whose backward pass saves what run.remat and run.residuals say."""
  if run.residuals.layer_inputs is not None:
    return residuals.from_compressed_input(layer, run.residuals.layer_inputs, run.dtype)
  if run.remat == "none":
    return layer
  linears = ("linear", residuals.NAME)
  saved = {"linears": linears, "operands": (*linears, SAVED_NAME), "full": ()}[run.remat]
  policy = jax.checkpoint_policies.save_only_these_names(*saved)
  # Inside scan the loop already keeps XLA from merging forward and recomputation.
  return jax.checkpoint(layer, policy=policy, prevent_cse=False)
