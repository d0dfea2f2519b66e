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
from fp8jax.step import gradients, quantized_once, train_spec, train_step

GRADIENTS, SAVED = "gradients of layers", "saved for backward"
VOCABULARY = "embedding, head: gradients, logits"
WEIGHTS = "weights of a layer, their gradients"
OPERANDS = "operands in FP8"
ONCE = "weights quantized once per step"
ACTIVATIONS = "activations of a layer"
KINDS = (GRADIENTS, SAVED, ONCE, VOCABULARY, WEIGHTS, OPERANDS, ACTIVATIONS)


def peak(spec: train_spec.TrainSpec, saved: int) -> tuple[str, dict[str, int]]:
  """(the peak phase, {kind: bytes on one device}).

  Args:
    saved: bytes that layers save for the backward pass (saved_tensors.py).
  """
  moments = {
    "loss": {SAVED: saved, **_loss(spec)},
    "last layer": {SAVED: saved, **_layer(spec)},
    "embedding": _embedding(spec),
  }
  if spec.optim.in_backward:
    moments["update of a layer"] = {SAVED: saved, **_update(spec)}
  if quantized_once.is_on(spec):  # they stay until the last microbatch is done
    moments = {name: {ONCE: quantized_once.account(spec).nbytes, **kinds}
               for name, kinds in moments.items()}  # fmt: skip
  return max(moments.items(), key=lambda item: sum(item[1].values()))


def logits(spec: train_spec.TrainSpec) -> int:
  """Bytes of one chunk's, float32."""
  length = spec.data.seq_len
  chunk = spec.tokens_per_device // length * min(spec.run.loss_chunk, length)
  return 0 if spec.model.reward_head else 4 * chunk * _classes(spec)


def _loss(spec) -> dict[str, int]:
  size = spec.run.dtype.itemsize
  head = spec.model.dims["D"] * _classes(spec)
  stream = spec.tokens_per_device * spec.model.dims["D"] * size
  return {
    GRADIENTS: _sums(spec, ["layers"]),
    # The head as it multiplies and its gradient, whole; logits, and theirs in both dtypes.
    VOCABULARY: _sums(spec, _vocabularies(spec))
    + (size + 4) * head
    + logits(spec) * (8 + size) // 4,
    ACTIVATIONS: 3 * stream,  # after the last norm, its gradient, what the norm reads
  }


def _layer(spec) -> dict[str, int]:
  """When the last block has the gradients of the sites that read its norm, as of gate and up."""
  size, tokens = spec.run.dtype.itemsize, spec.tokens_per_device
  d, mixer = spec.model.dims["D"], transformer.mixers(spec.model)[-1]
  sites = spec.sites()["layers"][-1][mixer.key]
  gemms = {site.name: _Gemm(spec, site) for site in mixer.sites}
  first = [gemms[site.name] for site in mixer.sites if not site.is_residual]
  last = {site.input: gemms[site.name] for site in mixer.sites if site.is_residual}
  is_quantized = all(sites[gemm.name].recipe.dgrad.multiplies_codes for gemm in first)
  made, joined = sum(gemm.produced for gemm in first), sum(g.contracted for g in last.values())
  # gate, up, and the gradient of their product; unquantized: the product and both gradients too.
  matrices = made + joined if is_quantized else 2 * (made + joined)
  if spec.run.remat in ("none", "linears", "operands") and spec.run.residuals.gate_up is None:
    matrices -= made  # which are among what is saved
  is_gathered = any(spec.run.layout.size(spec.run.layout.weight_axes(c)) > 1 for c in "D")
  in_hand = 4 * sum(gemm.weight for gemm in gemms.values()) if is_gathered else 0
  once = quantized_once.account(spec).names if quantized_once.is_on(spec) else ()
  if is_gathered and not all(sites[gemm.name].name in once for gemm in first):
    in_hand += sum(g.weight for g in first) * (1 if is_quantized else size)
  head = 4 * d * _classes(spec)  # its gradient, whole
  if spec.optim.in_backward:
    in_hand = max(in_hand, _gradients(spec, ["layers"]) // spec.model.num_layers)
  if spec.optim.in_backward or gradients.adds_in_place(spec):
    head *= spec.model.tie_embeddings  # or moved, or added, already
  return {
    GRADIENTS: _stacks(spec),
    VOCABULARY: _sums(spec, _vocabularies(spec)) + head,
    WEIGHTS: in_hand,
    # Their gradients for both of their products, and what they read.
    OPERANDS: tokens * (2 * made + d) if is_quantized else 0,
    ACTIVATIONS: tokens * (matrices + 5 * d) * size,
  }


class _Gemm:
  """Elements on one device: per token that a site produces and contracts, and of its weight."""

  def __init__(self, spec, site: GemmSite):
    x, w = site.eqn.partition("->")[0].split(",")
    self.name = site.name
    self.produced = math.prod(_local(spec, c) for c in w if c not in x)
    self.contracted = math.prod(_local(spec, c) for c in w if c in x)
    self.weight = self.produced * self.contracted


def _update(spec) -> dict[str, int]:
  """When a layer's gradients are there and it is moved: its part of the state, before it is put."""
  state = train_step.abstract_state(spec, 1)
  arrays = jax.tree.leaves((state.params["layers"], state.opt["layers"]))
  of_state = sum(math.prod(local_shape(x)) * x.dtype.itemsize for x in arrays)
  stream = spec.tokens_per_device * spec.model.dims["D"] * spec.run.dtype.itemsize
  head = 4 * spec.model.dims["D"] * _classes(spec) * spec.model.tie_embeddings
  return {
    VOCABULARY: head,
    WEIGHTS: (_gradients(spec, ["layers"]) + of_state) // spec.model.num_layers,
    ACTIVATIONS: 2 * stream,
  }


def _embedding(spec) -> dict[str, int]:
  """When every layer's gradient is there, the head's and, twice, the embedding's in float32.

  Or the embedding's alone, where the others have moved.
  """
  params = params_lib.abstract(spec.declaration, spec.model.dims, spec.run.layout)
  head = 4 * spec.model.dims["D"] * _classes(spec)
  embedding = 4 * math.prod(local_shape(params["embed"]))
  if spec.optim.in_backward:
    return {VOCABULARY: head * spec.model.tie_embeddings + 2 * embedding}
  return {
    GRADIENTS: _stacks(spec),
    VOCABULARY: _sums(spec, _vocabularies(spec)) + head + 2 * embedding,
  }


def _sums(spec, of) -> int:
  """Gradients of the microbatches before this one."""
  return _gradients(spec, of) if spec.grad_accum_steps > 1 else 0


def _stacks(spec) -> int:
  """Gradients of all layers: their sums, and those of this microbatch if they are a stack too."""
  is_used = spec.optim.in_backward or gradients.adds_in_place(spec)
  own = 0 if is_used else _gradients(spec, ["layers"])
  return _sums(spec, ["layers"]) + own


def _gradients(spec, of) -> int:
  tree = gradients.abstract(spec)
  leaves = jax.tree.leaves([tree[name] for name in of if name in tree])
  return sum(math.prod(local_shape(x)) * x.dtype.itemsize for x in leaves)


def _vocabularies(spec) -> list[str]:
  """Of parameters that have the vocabulary: the embedding, and a head of its own."""
  return [
    name for name, p in params_lib.flatten(spec.declaration).items() if p.letters in ("VD", "DV")
  ]


def _classes(spec) -> int:
  """Columns of the head on one device: the vocabulary's, or the one of a reward head."""
  return 1 if spec.model.reward_head else _local(spec, "V")


def local_shape(x) -> tuple[int, ...]:
  """Of an abstract array's part on one device."""
  return x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape


def _local(spec, letter: str) -> int:
  return spec.model.dims[letter] // spec.run.layout.size(spec.run.layout.act_axes(letter))
