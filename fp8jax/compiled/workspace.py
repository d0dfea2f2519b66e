"""The working set of a step at its peak, from the configuration alone.

Beside its state a step holds gradients, what layers save for their backward pass (saved_tensors.py)
and what it has in hand. Three moments compete for the most: the loss, the backward pass of the last
layer, and the gradient of the embedding, when all others are there; a fourth is a layer's update
where layers move one after the other (layerwise.py). The forms are those of GPU
programs; the compiled step is held against them (memory.py).
"""

import math

import jax

from fp8jax import params as params_lib
from fp8jax.models import transformer
from fp8jax.models.mixer import GemmSite
from fp8jax.step import run_spec, train_step

GRADIENTS, SAVED = "gradients of layers", "saved for backward"
VOCABULARY = "embedding, head: gradients, logits"
WEIGHTS = "weights of a layer, their gradients"
OPERANDS = "operands in FP8"
ACTIVATIONS = "activations of a layer"
KINDS = (GRADIENTS, SAVED, VOCABULARY, WEIGHTS, OPERANDS, ACTIVATIONS)


def peak(plan: run_spec.RunSpec, saved: int) -> tuple[str, dict[str, int]]:
  """(the moment that needs most, {kind: bytes on one device}).

  Args:
    saved: bytes that layers save for the backward pass (saved_tensors.py).
  """
  moments = {
    "loss": {SAVED: saved, **_loss(plan)},
    "last layer": {SAVED: saved, **_layer(plan)},
    "embedding": _embedding(plan),
  }
  if plan.optim.in_backward:
    moments["update of a layer"] = {SAVED: saved, **_update(plan)}
  return max(moments.items(), key=lambda item: sum(item[1].values()))


def logits(plan: run_spec.RunSpec) -> int:
  """Bytes of one chunk's, float32."""
  length = plan.data.seq_len
  chunk = plan.tokens_per_device // length * min(plan.run.loss_chunk, length)
  return 4 * chunk * _local(plan, "V")


def _loss(plan) -> dict[str, int]:
  size = plan.run.dtype.itemsize
  head = plan.model.dims["D"] * _local(plan, "V")
  stream = plan.tokens_per_device * plan.model.dims["D"] * size
  return {
    GRADIENTS: _sums(plan, ["layers"]),
    # The head as it multiplies and its gradient, whole; logits, and theirs in both dtypes.
    VOCABULARY: _sums(plan, _vocabularies(plan))
    + (size + 4) * head
    + logits(plan) * (8 + size) // 4,
    ACTIVATIONS: 3 * stream,  # after the last norm, its gradient, what the norm reads
  }


def _layer(plan) -> dict[str, int]:
  """When the last block has the gradients of the sites that read its norm, as of gate and up."""
  size, tokens = plan.run.dtype.itemsize, plan.tokens_per_device
  d, mixer = plan.model.dims["D"], transformer.mixers(plan.model)[-1]
  sites = plan.sites()["layers"][-1][mixer.key]
  gemms = {site.name: _Gemm(plan, site) for site in mixer.sites}
  first = [gemms[site.name] for site in mixer.sites if not site.is_residual]
  last = {site.input: gemms[site.name] for site in mixer.sites if site.is_residual}
  is_quantized = all(sites[gemm.name].recipe.is_quantized for gemm in first)
  made, joined = sum(gemm.produced for gemm in first), sum(g.contracted for g in last.values())
  # gate, up, and the gradient of their product; unquantized: the product and both gradients too.
  matrices = made + joined if is_quantized else 2 * (made + joined)
  if plan.run.remat in ("none", "linears", "operands") and plan.run.residuals.gate_up is None:
    matrices -= made  # which are among what is saved
  is_gathered = any(plan.run.layout.size(plan.run.layout.weight_axes(c)) > 1 for c in "D")
  in_hand = 4 * sum(gemm.weight for gemm in gemms.values()) if is_gathered else 0
  in_hand += sum(g.weight for g in first) * (1 if is_quantized else size) if is_gathered else 0
  head = 4 * d * _local(plan, "V")  # its gradient, whole
  if plan.optim.in_backward:
    in_hand = max(in_hand, _gradients(plan, ["layers"]) // plan.model.num_layers)
    head *= plan.model.tie_embeddings  # or moved already
    gradients = 0
  else:
    gradients = _sums(plan, ["layers"]) + _gradients(plan, ["layers"])
  return {
    GRADIENTS: gradients,
    VOCABULARY: _sums(plan, _vocabularies(plan)) + head,
    WEIGHTS: in_hand,
    # Their gradients for both of their products, and what they read.
    OPERANDS: tokens * (2 * made + d) if is_quantized else 0,
    ACTIVATIONS: tokens * (matrices + 5 * d) * size,
  }


class _Gemm:
  """Elements on one device: per token that a site produces and contracts, and of its weight."""

  def __init__(self, plan, site: GemmSite):
    x, w = site.eqn.partition("->")[0].split(",")
    self.name = site.name
    self.produced = math.prod(_local(plan, c) for c in w if c not in x)
    self.contracted = math.prod(_local(plan, c) for c in w if c in x)
    self.weight = self.produced * self.contracted


def _update(plan) -> dict[str, int]:
  """When a layer's gradients are there and it is moved: its part of the state, before it is put."""
  state = train_step.abstract_state(plan, 1)
  arrays = jax.tree.leaves((state.params["layers"], state.opt["layers"]))
  of_state = sum(math.prod(local_shape(x)) * x.dtype.itemsize for x in arrays)
  stream = plan.tokens_per_device * plan.model.dims["D"] * plan.run.dtype.itemsize
  head = 4 * plan.model.dims["D"] * _local(plan, "V") * plan.model.tie_embeddings
  return {
    VOCABULARY: head,
    WEIGHTS: (_gradients(plan, ["layers"]) + of_state) // plan.model.num_layers,
    ACTIVATIONS: 2 * stream,
  }


def _embedding(plan) -> dict[str, int]:
  """When every layer's gradient is there, the head's and, twice, the embedding's in float32.

  Or the embedding's alone, where the others have moved.
  """
  params = params_lib.abstract(plan.declaration, plan.model.dims, plan.run.layout)
  head = 4 * plan.model.dims["D"] * _local(plan, "V")
  embedding = 4 * math.prod(local_shape(params["embed"]))
  if plan.optim.in_backward:
    return {VOCABULARY: head * plan.model.tie_embeddings + 2 * embedding}
  return {
    GRADIENTS: _sums(plan, ["layers"]) + _gradients(plan, ["layers"]),
    VOCABULARY: _sums(plan, _vocabularies(plan)) + head + 2 * embedding,
  }


def _sums(plan, of) -> int:
  """Gradients of the microbatches before this one."""
  return _gradients(plan, of) if plan.grad_accum_steps > 1 else 0


def _gradients(plan, of) -> int:
  tree = train_step.abstract_gradients(plan)
  leaves = jax.tree.leaves([tree[name] for name in of if name in tree])
  return sum(math.prod(local_shape(x)) * x.dtype.itemsize for x in leaves)


def _vocabularies(plan) -> list[str]:
  """Of parameters that have the vocabulary: the embedding, and a head of its own."""
  return [
    name for name, p in params_lib.flatten(plan.declaration).items() if p.letters in ("VD", "DV")
  ]


def local_shape(x) -> tuple[int, ...]:
  """Of an abstract array's part on one device."""
  return x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape


def _local(plan, letter: str) -> int:
  return plan.model.dims[letter] // plan.run.layout.size(plan.run.layout.act_axes(letter))
