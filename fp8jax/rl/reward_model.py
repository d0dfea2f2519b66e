"""Rewards by a reward model: the scores of completions under a folder of --job=export.

A text is a prompt and its completion, scored at its last token. All batches have one shape.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax.compiled import aot
from fp8jax.config import layout as layout_checks
from fp8jax.data.tokenize import BYTES
from fp8jax.errors import UserError
from fp8jax.generation.settings import Generate
from fp8jax.kernels import choose
from fp8jax.models import attention_gqa, heads, transformer
from fp8jax.models.config import ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site_tree
from fp8jax.rl.rollout import Answer
from fp8jax.step import distillation
from fp8jax.step.train_spec import TrainSpec

# Of every product: the scores decide, and the model is not trained.
_RULES = ((".*", "bf16"),)


def problems(folder: str, spec: TrainSpec, has_text: bool = True) -> list[str]:
  """Reasons why a folder gives no rewards of this run's completions, in words; reads no weights.

  Args:
    has_text: whether the run's tokenizer is known.
  """
  key, own, longest = (
    f"rl.reward_model={folder!r}",
    spec.data.tokenizer,
    spec.of(Generate).max_length,
  )
  try:
    cfg = hf_config.read_config(folder)
    if not cfg.reward_head:
      return [
        f"{key} has no reward head; --job=rl with rl.loss='reward' trains one, and --job=export "
        "writes it as a sequence-classification folder"
      ]
    is_same = not has_text or own.is_of(folder)
    if has_text and is_same and own.path != BYTES:
      is_same = own.eos_id == dataclasses.replace(own, path=folder).eos_id
  except (ValueError, OSError) as e:
    return [f"{key}: {e}"]
  texts = own.beyond(cfg.vocab_size) if has_text else []
  if not is_same:
    texts.append(
      f"{key} has another tokenizer than data.tokenizer={own.path!r}, so that it would read other "
      "texts than are drawn; train it with this tokenizer, or the policy with its own"
    )
  if not longest <= spec.data.seq_len <= cfg.max_positions:
    texts.append(
      f"{key} scores whole texts: generate.max_length={longest} must be at most seq_len="
      f"{spec.data.seq_len}, and that at most its own max_positions={cfg.max_positions}"
    )
  of_model = transformer.params(cfg), transformer.site_params(cfg), cfg
  return texts + layout_checks.uneven(*of_model, [_RULES], spec.run.layout, None)


class RewardModel:
  """Scores completions, in the compute dtype and on the devices of a run."""

  def __init__(self, folder: str, spec: TrainSpec):
    """
    Raises:
      UserError: see hf_weights.load_params, or no attention runs its sizes here.
    """
    self._cfg, self._size = hf_config.read_config(folder), (spec.microbatch, spec.data.seq_len)
    self._run, self._sites = _of_model(folder, self._cfg, spec)
    params, _ = hf_weights.load_params(folder, self._cfg, spec.run.layout)
    params = distillation.take(dataclasses.replace(spec, model=self._cfg), params)
    self._params, self.fingerprint = params, params_lib.digest(params)

  def __call__(self, answers: Sequence[Answer]) -> list[float]:
    """
    Raises:
      UserError: a score is not finite; names the question.
    """
    scores = self.scores([(*q.prompt, *c.tokens) for q, c in answers])
    for (question, completion), score in zip(answers, scores, strict=True):
      if not np.isfinite(score):
        raise UserError(
          f"rl.reward_model scores {question.task.name}, {question.item.name} with {score} for the "
          f"output {completion.text[:200]!r}: its weights or activations overflow; set "
          "precision.compute_dtype='float32', or train it again"
        )
    return scores

  def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
    """Of the last token of every text; texts have tokens, at most seq_len."""
    (rows, length), made = self._size, []
    for first in range(0, len(texts), rows):
      some = texts[first : first + rows]
      tokens_BL = np.zeros(self._size, np.int32)
      for row, text in enumerate(some):
        tokens_BL[row, : len(text)] = text
      ends_B = np.pad([len(text) for text in some], (0, rows - len(some)))
      batch = {
        "tokens_BL": tokens_BL,
        "positions_BL": np.broadcast_to(np.arange(length, dtype=np.int32), self._size),
        "weights_BL": np.float32(np.arange(1, length + 1) == ends_B[:, None]),
      }
      batch = {k: jax.device_put(x, self._run.layout.act_sharding("BL")) for k, x in batch.items()}
      scores_B = _scores(self._params, self._sites, batch, cfg=self._cfg, run=self._run)
      made += np.asarray(scores_B, np.float64)[: len(some)].tolist()
    return made


def _of_model(folder: str, cfg: ModelConfig, spec: TrainSpec):
  """(how its forward pass computes, its sites).

  Raises:
    UserError: no attention runs its sizes.
  """
  run = dataclasses.replace(
    spec.run, attention_recipe=None, is_invariant=False, smooth_swiglu="none"
  )
  size = spec.microbatch, spec.data.seq_len
  chosen = choose.attention(attention_gqa.problem(cfg, run, spec.device, *size, False))
  if isinstance(chosen, choose.Refusal):
    raise UserError(f"rl.reward_model={folder!r}: {chosen.reason}")
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, _RULES, run.layout)
  return dataclasses.replace(run, attention=chosen.backend), sites


def abstract_params(folder: str, spec: TrainSpec):
  """Shapes, dtypes and shardings of a folder's parameters as a run holds them."""
  return distillation.abstract_params(
    dataclasses.replace(spec, model=hf_config.read_config(folder))
  )


def lower(folder: str, spec: TrainSpec, devices):
  """The program that scores a microbatch, lowered for devices that need not be here."""
  cfg = hf_config.read_config(folder)
  run, sites = _of_model(folder, cfg, spec)
  rows, everywhere = aot.places(spec, devices, "BL")
  params = aot.put(abstract_params(folder, spec), everywhere)
  size = spec.microbatch, spec.data.seq_len
  kinds = {"tokens_BL": jnp.int32, "positions_BL": jnp.int32, "weights_BL": jnp.float32}
  batch = {k: jax.ShapeDtypeStruct(size, kind, sharding=rows) for k, kind in kinds.items()}
  return _scores.lower(params, aot.put(sites, everywhere), batch, cfg=cfg, run=run)


@functools.partial(jax.jit, static_argnames=("cfg", "run"))
def _scores(params, sites, batch, *, cfg, run):
  """float32 [B]."""
  h_BLD = heads.weighted(transformer.hidden(params, sites, batch, cfg, run), batch["weights_BL"])
  return transformer.head_logits(h_BLD, params, sites, cfg, run)[:, 0, 0]
