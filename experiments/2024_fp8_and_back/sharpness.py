"""To FP8 and back: sharpness of the loss in logits while masked models train.

command: python experiments/2024_fp8_and_back/sharpness.py    (five minutes of a CPU core)

Keskar et al. (arXiv:1609.04836, metric 2.1) on the logits z of a window's last token, as in
arXiv:2405.18710: with f(z) = logsumexp(z) - z_t and a box |d_i| <= eps * (|z_i| + 1),
100 * (max f(z + d) - f(z)) / (1 + f(z)). The loss rises in every logit but the target's and falls
in that, so that the maximum lies in one corner, which needs no search.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "experiments" / "lab"))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import runs as runs_lib  # noqa: E402
import tensors  # noqa: E402

from fp8jax.config import named, resolve  # noqa: E402
from fp8jax.data import batch_sharding, loader  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models import transformer  # noqa: E402
from fp8jax.step import train_step  # noqa: E402

EPSILONS = (1e-4, 5e-4, 1e-3)
SLUG, RATE, SEED = "2024_fp8_and_back", 4e-3, 0
STEPS = (0, 36, 73, 110, 147)
BATCHES = 16  # of 8 windows: 128 last tokens


def sharpness(logits, targets, eps: float):
  """Percent, float64 [...], of logits [..., V] and targets [...]."""
  logits, targets = np.asarray(logits, np.float64), np.asarray(targets)[..., None]
  reach = eps * (np.abs(logits) + 1)
  worst = logits + reach
  at = np.take_along_axis(logits - reach, targets, -1)
  np.put_along_axis(worst, targets, at, -1)
  before, after = (_loss(z, targets) for z in (logits, worst))
  return 100 * (after - before) / (1 + before)


def _loss(z, targets):
  return np.logaddexp.reduce(z, axis=-1) - np.take_along_axis(z, targets, -1)[..., 0]


def run_of(recipe: str):
  """The run of the lab whose sharpness is measured."""
  (system,) = (s for s in runs_lib.SYSTEMS if s.slug == SLUG)
  arm = next(a for a in system.arms if a.recipe == recipe)
  (run,) = (r for r in system.runs((arm,)) if r.seed == SEED and not r.is_twin
            and dict(r.changes)["optim.peak_lr"] == RATE)  # fmt: skip
  return run


def measure(recipe: str) -> dict[str, dict[str, float]]:
  """{step: {"loss", str(eps): sharpness}} of a training run; means over last tokens."""
  run = run_of(recipe)
  spec = resolve.resolve(named.load(*run.trial), 1, choose.current_device())
  sites, (source,) = spec.sites(), spec.data.sources
  held = [
    {name: jnp.asarray(value) for name, value in batch.items()}
    for batch in loader.heldout_batches(spec.data, source, spec.eval.batch, BATCHES)
  ]

  @jax.jit
  def forward(params, batch):
    """Logits of last tokens, and the loss of all: its sum and their number."""
    z = transformer.logits(params, sites, batch, spec.model, spec.run).astype(jnp.float32)
    of = jnp.take_along_axis(jax.nn.log_softmax(z), batch["targets_BL"][..., None], -1)[..., 0]
    counts = batch["weights_BL"]
    return z[:, -1], jnp.stack([-jnp.sum(of * counts), jnp.sum(counts)])

  feed = batch_sharding.TrainBatches(
    spec.data, spec.run.layout, spec.microbatch, spec.grad_accum_steps
  )
  step, state, found = train_step.make_step(spec), train_step.make_state(spec), {}
  for number in range(STEPS[-1] + 1):
    if number in STEPS:
      passed = [forward(state.params, batch) for batch in held]
      logits = np.concatenate([np.float64(z) for z, _ in passed])
      targets, counts = (
        np.concatenate([np.asarray(batch[key][:, -1]) for batch in held])
        for key in ("targets_BL", "weights_BL")
      )
      logits, targets = logits[counts > 0], targets[counts > 0]  # the others have no target
      row = {str(eps): float(sharpness(logits, targets, eps).mean()) for eps in EPSILONS}
      total, number_of = np.sum([np.float64(sums) for _, sums in passed], 0)
      found[str(number)] = {"loss": float(total / number_of), "tokens": len(targets)} | row
    if number < STEPS[-1]:
      state, _ = step(state, feed.spread.place(next(feed.iterator)), sites)
  feed.iterator.close()
  return found


def table(found: dict) -> str:
  rows = []
  for arm, by_step in found.items():
    last = by_step[str(STEPS[-1])]
    course = [f"{by_step[str(s)]['0.0005']:.3f}" for s in STEPS]
    rows.append(
      [arm, *course, *(f"{last[str(e)]:.3f}" for e in EPSILONS[::2]), f"{last['loss']:.3f}"]
    )
  head = ["arm", *(f"step {s}" for s in STEPS), *(f"{e:g}" for e in EPSILONS[::2]), "loss"]
  return tensors.markdown(head, rows)


def main():
  (system,) = (s for s in runs_lib.SYSTEMS if s.slug == SLUG)
  found = {}
  for arm in system.arms:
    found[arm.name] = measure(arm.recipe)
    print(arm.name, found[arm.name], flush=True)
  values = [{"arm": arm, "step": int(step), "sharpness": row["0.0005"]}
            for arm, by_step in found.items() for step, row in by_step.items()]  # fmt: skip
  chart = (
    alt.Chart(alt.Data(values=values))
    .mark_line(point=True)
    .encode(
      x=alt.X("step:Q"),
      y=alt.Y("sharpness:Q", title="sharpness, %, box of 5e-4").scale(zero=False),
      color=alt.Color("arm:N", sort=list(found)),
    )
    .properties(width=420, height=260)
  )
  tensors.write(HERE, found, table(found), chart)


if __name__ == "__main__":
  main()
