"""--job=rl with rl.loss="reward": the trainer's run on pairs of texts, for a reward head."""

import functools
from typing import Any

import jax
import numpy as np

from fp8jax.jobs import generator as generator_lib
from fp8jax.jobs import run_state, train
from fp8jax.ops import site
from fp8jax.rl import pairs as pairs_lib
from fp8jax.rl import ranking
from fp8jax.rl.settings import RL
from fp8jax.step.train_spec import TrainSpec


def problems_of_spec(spec: TrainSpec) -> list[str]:
  """The problems of a reward head's training with the rest, in words."""
  own, texts = spec.of(RL), []
  if not spec.model.reward_head:
    texts.append("rl.loss='reward' trains a reward head: set model.reward_head=True")
  if not own.pairs:
    texts.append("rl.pairs='' names no pairs to learn from")
  if spec.eval.batch % 2:
    texts.append(f"eval.batch={spec.eval.batch} must be even: a pair is two rows")
  if spec.eval.tokens and not own.eval_pairs:
    texts.append(
      f"eval.tokens={spec.eval.tokens}: a reward head has no loss of text; name held-out pairs as "
      "rl.eval_pairs, all of which evaluations rank, or set eval.tokens=0"
    )
  if own.eval_pairs and not spec.eval.tokens:
    texts.append(
      f"rl.eval_pairs={own.eval_pairs!r} with eval.tokens=0, which turns evaluations off; set "
      "eval.tokens=1, or leave it out"
    )
  if spec.distill.weight:
    texts.append(f"distill.weight={spec.distill.weight}: a reward head has no logits; set it to 0")
  if jax.process_count() > 1:
    texts.append("--job=rl reads pairs in one process; start one for all of its devices")
  return texts + step_problems(spec)


def step_problems(spec: TrainSpec) -> list[str]:
  """The problems of the step alone, in words."""
  texts = []
  if spec.microbatch % 2:
    texts.append(
      f"global_batch / grad_accum_steps={spec.microbatch} must be even: a pair is two rows"
    )
  for phase in range(len(spec.precision.phases)):
    recipe = site.flatten(spec.sites(phase=phase))["head"].recipe
    if recipe.is_quantized:
      texts.append(
        f"precision.rules give the reward head recipe {recipe.name!r}: its one column decides "
        "every score; begin them with ('head', 'bf16')"
      )
  return texts


class RewardState(run_state.RunState):
  """The state of a run that trains a reward head."""

  def __init__(self, heldout: list[dict[str, np.ndarray]], *args, **options):
    super().__init__(*args, **options)
    self._heldout = heldout

  def evaluator(self) -> Any:
    return ranking.Evaluator(self.spec, self._heldout)


def run(spec: TrainSpec, workdir: str) -> dict[str, Any]:
  """Learns, or resumes; as train.run.

  Raises:
    UserError, FileNotFoundError: of a line or file of pairs.
  """
  own, data, rows = spec.of(RL), spec.data, spec.eval.batch
  template = functools.partial(generator_lib.template_of, data)
  encoder = pairs_lib.Encoder(data, template, is_scored=True)
  learned = pairs_lib.Pairs(own.pairs, encoder)
  heldout = [*pairs_lib.Pairs(own.eval_pairs, encoder)] if own.eval_pairs else []
  batches = [
    ranking.laid_out(heldout[n : n + rows // 2], data.seq_len, rows)
    for n in range(0, len(heldout), rows // 2)
  ]
  fingerprint = f"{learned.fingerprint()} {data.tokenizer.fingerprint}"
  open_ = lambda spec: pairs_lib.Batches(spec, learned, ranking.laid_out)  # noqa: E731
  feed = train.Feed(fingerprint, open_, loss=f"rl.loss={own.loss}", job="rl")
  make = functools.partial(RewardState, batches)
  return train.run(spec, workdir, make_state=make, feed=feed)
