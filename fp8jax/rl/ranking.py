"""Pairs of texts for a reward head: their batches, and the share that the scores rank right."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fp8jax import statistics
from fp8jax.data import batch_sharding
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.rl import rollout
from fp8jax.rl.pairs import Pair
from fp8jax.run import evaluator
from fp8jax.step.train_spec import TrainSpec

SOURCE = "pairs"  # in evaluations, where others have sources of text


def laid_out(pairs: Sequence[Pair], length: int, rows: int = 0) -> dict[str, np.ndarray]:
  """{"tokens_BL", "targets_BL", "positions_BL", "segments_BL", "weights_BL"}: a prompt with its
  completion in each row, of weight 1/2 at its last token.

  Args:
    length: L, at least the tokens of a prompt and a completion.
    rows: B; 0 for those of the pairs, else rows beyond are padding.
  """
  batch = rollout.empty(rows or 2 * len(pairs), length)
  for i, pair in enumerate(pairs):
    for row, answer in ((2 * i, pair.chosen), (2 * i + 1, pair.rejected)):
      text = (*pair.prompt, *answer)
      here = slice(0, len(text))
      batch["tokens_BL"][row, here], batch["segments_BL"][row, here] = text, 1
      batch["positions_BL"][row, here] = np.arange(len(text))
      batch["weights_BL"][row, len(text) - 1] = 0.5
  return batch


class Evaluator:
  """Held-out evaluation of a reward head, in the place of evaluator.Evaluator."""

  passed_over: dict[str, dict[str, int]] = {SOURCE: {}}

  def __init__(self, spec: TrainSpec, batches: Sequence[Mapping[str, np.ndarray]]):
    """Args: batches of `laid_out`, of eval.batch rows."""
    self.spec, self._batches = spec, batches
    self._spread = batch_sharding.BatchSharder(spec.run.layout, spec.eval.batch)

    @functools.partial(
      jax.jit, static_argnames="run", compiler_options=choose.compiler_options(spec.device)
    )
    def sums(params, sites, batch, run):
      loss, aux = transformer.loss_and_aux(params, sites, batch, spec.model, run)
      return {"loss": loss, **aux.sums["policy"]}

    self._sums = sums

  def run(
    self, params, scaling_states: Mapping[str, Any], phase: int = 0,
    stop: Callable[[], bool] | None = None,
  ):  # fmt: skip
    """As evaluator.Evaluator.run: {SOURCE: {precision: {"loss", "tokens": pairs, "accuracy", "low",
    "high": Wilson's interval of the share that is ranked right, "margin": of the scores}}}."""
    made = {}
    for label, recipe in evaluator.precisions(self.spec, phase).items():
      sites = evaluator.sites_of(self.spec, recipe, scaling_states, phase)
      run, parts = evaluator.run_of(self.spec, recipe, sites), []
      for batch in self._batches:
        if stop is not None and stop():
          return {}
        parts.append(self._sums(params, sites, self._spread.place(dict(batch)), run=run))
      parts = jax.device_get(parts)
      total = {name: sum(float(part[name]) for part in parts) for name in parts[0]}
      share = statistics.wilson(total["accuracy"], round(total["count"]))
      made[label] = {
        "loss": total["loss"] / total["count"], "tokens": total["count"],
        "accuracy": share.estimate, "low": share.low, "high": share.high,
        "margin": total["margin"] / total["count"],
      }  # fmt: skip
    return {SOURCE: made}

  def lines(self, step: int, results) -> list[str]:
    """The evaluation of a step, as `run` returned it."""
    text = "  ".join(
      f"{label} ranked right {v['accuracy']:.4f} [{v['low']:.4f}, {v['high']:.4f}], loss "
      f"{v['loss']:.4f}, margin {v['margin']:.3f}"
      for label, v in results[SOURCE].items()
    )
    count = next(iter(results[SOURCE].values()))["tokens"]
    return [f"step {step}  of {count:.0f} held-out pairs: {text}"]
