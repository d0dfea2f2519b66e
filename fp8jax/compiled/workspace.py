"""What a step works on at its fullest moment, from the configuration alone.

Beside its state a step holds gradients, what waits for the backward pass of the layers (waiting.py)
and what it has in hand. Three moments compete for the most: the loss, the backward pass of the last
layer, and the gradient of the embedding, when all others are there; a fourth is a layer's update
where layers move one after the other (layerwise.py). The forms are those of GPU
programs; the compiled step is held against them (account.py).
"""

import math

import jax
import jax.numpy as jnp

from fp8jax import params as params_lib
from fp8jax.compiled import saved_tensors
from fp8jax.step import run_spec, train_step

GRADIENTS, KEPT = "gradients of layers", "kept for backward"
VOCABULARY = "embedding, head: gradients, logits"
WEIGHTS = "weights of a layer, their gradients"
OPERANDS = "operands in FP8"
ACTIVATIONS = "activations of a layer"
VOCABULARIES = ("embed", "head")
KINDS = (GRADIENTS, KEPT, VOCABULARY, WEIGHTS, OPERANDS, ACTIVATIONS)


def peak(plan: run_spec.RunSpec) -> tuple[str, dict[str, int]]:
  """(the moment that needs most, {kind: bytes on one device})."""
  moments = {"loss": _loss(plan), "last layer": _layer(plan), "embedding": _embedding(plan)}
  if plan.optim.in_backward:
    moments["update of a layer"] = _update(plan)
  return max(moments.items(), key=lambda item: sum(item[1].values()))


def logits(plan: run_spec.RunSpec) -> int:
  """Bytes of one chunk's, float32."""
  length = plan.data.seq_len
  chunk = plan.tokens_per_device // length * min(plan.run.loss_chunk, length)
  return 4 * chunk * _local(plan, "V")


def _loss(plan) -> dict[str, int]:
  size = _dtype(plan).itemsize
  head = plan.model.dims["D"] * _local(plan, "V")
  stream = plan.tokens_per_device * plan.model.dims["D"] * size
  return {
    GRADIENTS: _sums(plan, ["layers"]),
    KEPT: _kept(plan),
    # The head as it multiplies and its gradient, whole; logits, and theirs in both dtypes.
    VOCABULARY: _sums(plan, VOCABULARIES) + (size + 4) * head + logits(plan) * (8 + size) // 4,
    ACTIVATIONS: 3 * stream,  # after the last norm, its gradient, what the norm reads
  }


def _layer(plan) -> dict[str, int]:
  """When the gradients of gate and up are there."""
  size, tokens = _dtype(plan).itemsize, plan.tokens_per_device
  d, f = plan.model.dims["D"], _local(plan, "F")
  mlp = plan.sites()["layers"][-1]["mlp"]
  is_narrow = all(mlp[name].recipe.is_narrow for name in ("gate", "up"))
  # gate, up, and the gradient of their product; wide, that product and both their gradients too.
  matrices = 3 if is_narrow else 6
  if plan.run.remat in ("none", "linears", "quantized") and plan.run.residuals.gate_up is None:
    matrices -= 2  # gate and up are among what waits
  weights = [d * f] * 3
  is_gathered = any(plan.run.layout.size(plan.run.layout.weight_axes(c)) > 1 for c in "D")
  in_hand = 4 * sum(weights) if is_gathered else 0
  in_hand += 2 * weights[0] * (1 if is_narrow else size) if is_gathered else 0
  head = 4 * d * _local(plan, "V")  # its gradient, whole
  if plan.optim.in_backward:
    in_hand = max(in_hand, _gradients(plan, ["layers"]) // plan.model.num_layers)
    head *= plan.model.tie_embeddings  # or moved already
    gradients = 0
  else:
    gradients = _sums(plan, ["layers"]) + _gradients(plan, ["layers"])
  return {
    GRADIENTS: gradients,
    KEPT: _kept(plan),
    VOCABULARY: _sums(plan, VOCABULARIES) + head,
    WEIGHTS: in_hand,
    # Both gradients for both of their products, and what gate and up read.
    OPERANDS: tokens * (4 * f + d) if is_narrow else 0,
    ACTIVATIONS: tokens * (matrices * f + 5 * d) * size,
  }


def _update(plan) -> dict[str, int]:
  """When a layer's gradients are there and it is moved: its part of the state, before it is put."""
  state = train_step.abstract_state(plan, 1)
  arrays = jax.tree.leaves((state.params["layers"], state.opt["layers"]))
  of_state = sum(math.prod(local_shape(x)) * x.dtype.itemsize for x in arrays)
  stream = plan.tokens_per_device * plan.model.dims["D"] * _dtype(plan).itemsize
  head = 4 * plan.model.dims["D"] * _local(plan, "V") * plan.model.tie_embeddings
  return {
    KEPT: _kept(plan),
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
    VOCABULARY: _sums(plan, VOCABULARIES) + head + 2 * embedding,
  }


def _sums(plan, of) -> int:
  """Gradients of the microbatches before this one."""
  return _gradients(plan, of) if plan.grad_accum_steps > 1 else 0


def _gradients(plan, of) -> int:
  tree = train_step.abstract_gradients(plan)
  leaves = jax.tree.leaves([tree[name] for name in of if name in tree])
  return sum(math.prod(local_shape(x)) * x.dtype.itemsize for x in leaves)


def _kept(plan) -> int:
  return sum(item.nbytes for item in saved_tensors.of_layers(plan))


def local_shape(x) -> tuple[int, ...]:
  """Of an abstract array's part on one device."""
  return x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape


def _local(plan, letter: str) -> int:
  return plan.model.dims[letter] // plan.run.layout.size(plan.run.layout.act_axes(letter))


def _dtype(plan) -> jnp.dtype:
  return jnp.dtype(plan.run.dtype)
