"""The loss of SmolLM2-135M with forward products summed in 14 bits, promoted, and in float32.

command: python experiments/2024_deepseek_v3/heldout.py   (make run fetches the weights)

2,048 held-out tokens of the Python documentation, weights untouched, linears `tensor_current` but
for the head. Writes the part "heldout" of results.json.
"""

import jax
import jax.numpy as jnp
import numpy as np
from accumulators import ROOT, record

from configs import smollm2_cpt
from fp8jax.config import resolve
from fp8jax.data import loader
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.hf import weights

LENGTH, SEQUENCES = 512, 4
# arm: (recipe, kernels.matmul).
ARMS = {
  "unquantized": ("bf16", "auto"),
  "float32": ("tensor_current", "reference"),
  "14 bits": ("tensor_current", "emulated_sm90"),
  "promoted every 128": ("tensor_current(accumulate=precise)", "emulated_sm90"),
}


def token_losses(recipe: str, matmul: str) -> np.ndarray:
  """float64 [tokens], nats."""
  c = smollm2_cpt.get_config(recipe)
  c.init.hf = str(ROOT / c.init.hf)
  c.seq_len, c.eval.batch, c.kernels.matmul = LENGTH, SEQUENCES, matmul
  spec = resolve.resolve(c, 1, choose.current_device())
  params, _ = weights.load_params(c.init.hf, spec.model)
  batch = next(iter(loader.heldout_batches(spec.data, "main", SEQUENCES, 1)))
  batch = {name: jnp.asarray(value) for name, value in batch.items()}

  @jax.jit
  def run(params):
    logits = transformer.logits(params, spec.sites(), batch, spec.model, spec.run)
    chosen = jnp.take_along_axis(
      jax.nn.log_softmax(logits.astype(jnp.float32)), batch["targets_BL"][..., None], -1
    )
    return -chosen[..., 0]

  counts = np.asarray(batch["weights_BL"]) > 0
  return np.float64(run(params))[counts]


def main():
  losses = {arm: token_losses(*how) for arm, how in ARMS.items()}
  found = {}
  for arm, nats in losses.items():
    change = nats - losses["float32"]
    found[arm] = {
      "loss": float(nats.mean()),
      "change": float(change.mean()),
      "standard_error": float(change.std(ddof=1) / np.sqrt(len(change))),
      "mean_abs_change": float(np.abs(change).mean()),
    }
    print(arm, found[arm])
  record("heldout", found | {"tokens": len(losses["float32"])})


if __name__ == "__main__":
  main()
