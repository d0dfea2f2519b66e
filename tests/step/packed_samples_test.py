"""Samples packed into windows have the losses of samples alone, a window each."""

import chats
import harness
import jax
import numpy as np
import pytest

from fp8jax.data import loader
from fp8jax.data.chat import packing
from fp8jax.models import transformer

# A product's sums may be cut up otherwise for another number of rows, and nothing else may differ.
BOUNDS = {"float32": 5e-6, "bfloat16": 5e-3}


@pytest.mark.parametrize(
  "recipe, dtype",
  [
    ("bf16", "bfloat16"),
    ("block_128", "float32"),
    pytest.param("bf16", "float32", marks=pytest.mark.slow),
    pytest.param("block_128", "bfloat16", marks=pytest.mark.slow),
  ],
)
def test_packed_losses_are_those_of_samples_alone(tmp_path, recipe, dtype):
  """Token by token, in the forward pass's scales per 1x128; then their sum by the step's loss."""
  chats.write(tmp_path / "a.jsonl", 12)
  spec = chats.spec(tmp_path / "a.jsonl", seq_len=64, samples_per_step=12)
  steps = loader.chat_steps(spec, 5)
  alone = [packing.pack([steps.samples[i]], 64) for i in range(12)]
  alone = {key: np.stack([window[key] for window in alone]) for key in alone[0]}
  packed = {key: x for key, x in steps[0].items() if key != "step"}
  assert len(packed["tokens_BL"]) == 5 and packed["segments_BL"].max() > 2
  spec = harness.debug_plan(recipe, precision__compute_dtype=dtype, memory__loss_chunk=64)
  params, sites = harness.init_params(spec.model), spec.sites()

  @jax.jit
  def losses(batch):
    """(Minus log-probability of every target [B, L], the loss that is trained)."""
    logits = transformer.logits(params, sites, batch, spec.model, spec.run)
    each_BL = -jax.nn.log_softmax(logits)[
      np.arange(len(logits))[:, None], np.arange(64)[None], batch["targets_BL"]
    ]
    return each_BL, transformer.loss(params, sites, batch, spec.model, spec.run)

  def by_sample(batch):
    each_BL, total = map(np.asarray, losses(batch))
    found = {}
    for row, segments in enumerate(batch["segments_BL"]):
      for number in set(segments[batch["weights_BL"][row] > 0]):
        here = segments == number
        found[bytes(batch["tokens_BL"][row][here].tolist())] = each_BL[row][here]
    return found, total, (each_BL * batch["weights_BL"]).sum()

  (together, of_packed, its_sum), (apart, of_alone, _) = by_sample(packed), by_sample(alone)
  assert together.keys() == apart.keys() and len(apart) == 12
  for text, want in apart.items():
    np.testing.assert_allclose(together[text], want, rtol=BOUNDS[dtype])
  np.testing.assert_allclose([of_packed, its_sum], of_alone, rtol=BOUNDS[dtype])


def test_the_number_of_padding_changes_no_bit_of_loss_and_gradients(tmp_path):
  """Padding is segment 0; it was the number after a window's last, which no token had either."""
  chats.write(tmp_path / "a.jsonl", 12)
  batch = loader.chat_steps(chats.spec(tmp_path / "a.jsonl", samples_per_step=12), 7)[0]
  del batch["step"]
  segments = batch["segments_BL"]
  before = np.where(segments == 0, segments.max(1, keepdims=True) + 1, segments)
  assert (before != segments).any(1).sum() > 3 and before.min() == 1
  spec = harness.debug_plan("tensor_current", memory__loss_chunk=48)
  params, sites = harness.init_params(spec.model), spec.sites()
  both = jax.jit(jax.value_and_grad(
    lambda params, batch: transformer.loss(params, sites, batch, spec.model, spec.run)
  ))  # fmt: skip
  old, new = both(params, batch | {"segments_BL": before}), both(params, batch)
  assert np.isfinite(new[0]) and any(map(np.any, jax.tree.leaves(new[1])))
  harness.assert_trees_equal(old, new)
