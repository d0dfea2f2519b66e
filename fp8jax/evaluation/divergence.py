"""Differences between the predictions of two models on the same tokens, and their noise floor.

KL(source || other) is in nats per token; the change of log p is that of the text's own tokens.

The noise floor is a model's difference from itself with norm weights that are one ulp larger.
Rounding to few bits is chaotic: a sum in another order, or a weight one ulp larger, flips codes,
and the flips add up over layers. Two readings of the same weights that differ by no more than this
floor agree.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax.data import batch_sharding, loader, text_files
from fp8jax.errors import UserError
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.ops import stored_params
from fp8jax.step.train_spec import TrainSpec

# Longer windows say nothing more about weights.
_LONGEST = 512


# --- texts ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
  """Tokens that logits are compared on.

  Attributes:
    inputs: tokens_BL and positions_BL, placed.
    tokens_BL, counts_BL: on the host; counts are float32, 0 for tokens that do not count.
  """

  inputs: dict[str, jax.Array]
  tokens_BL: np.ndarray
  counts_BL: np.ndarray


@dataclasses.dataclass(frozen=True)
class Wanted:
  """The text to compare logits on.

  Attributes:
    tokens: at least so many, of the text or of every source.
    path: of a text file; "": every source's held-out documents.
    keys: of the configuration, which messages name: "export.gate_" of export.gate_tokens.
  """

  tokens: int
  path: str
  keys: str


def batches(spec: TrainSpec, wanted: Wanted) -> list[Batch]:
  """At least so many tokens of a text, or of every source's held-out documents.

  Raises:
    UserError: there are not so many; names the text or source, and its number of tokens.
  """
  rows = spec.eval.batch
  spread = batch_sharding.BatchSharder(spec.run.layout, rows)
  longest = min(spec.data.seq_len, _LONGEST)
  if wanted.path:
    made = _of_text(spec, wanted, spread, min(longest, -(-wanted.tokens // rows)))
    text = f"{wanted.keys}text={wanted.path!r}"
    return _enough(spec, spread, text, made, wanted, "name a longer text")
  remedy = f"name a text in {wanted.keys}text"  # the held-out share of a run that is over is fixed
  chosen = []
  for name in spec.data.sources:
    made = _heldout(spec, name, spread, longest)
    chosen += _enough(spec, spread, f"source {name!r} (held-out documents)", made, wanted, remedy)
  return chosen


def _enough(spec: TrainSpec, spread, text: str, windows, w: Wanted, remedy: str) -> list[Batch]:
  """The first batches of a text that have enough tokens, those without any left out.

  Args:
    windows: (tokens, counts) [local rows, length] of this process, up to the end of the text.
  """
  wanted, rows = w.tokens, spec.eval.batch
  chosen, total, by_position = [], 0, np.zeros(_LONGEST, int)
  for tokens, counts in windows:
    length = min(tokens.shape[1], -(-wanted // rows))
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    placed = spread.place({
      "tokens_BL": np.ascontiguousarray(tokens), "positions_BL": np.ascontiguousarray(positions),
      "counts_BL": np.ascontiguousarray(counts, np.float32),
    })  # fmt: skip
    tokens_BL, counts_BL = (params_lib.on_host(placed[k]) for k in ("tokens_BL", "counts_BL"))
    by_position[: counts_BL.shape[1]] += counts_BL.sum(0, dtype=int)
    counts_BL = counts_BL[:, :length]
    if number_here := int(counts_BL.sum()):
      inputs = {k: placed[k][:, :length] for k in ("tokens_BL", "positions_BL")}
      chosen.append(Batch(inputs, tokens_BL[:, :length], counts_BL))
    total += number_here
    if total >= wanted:
      return chosen
  fewer, has = np.arange(1, wanted), total
  if not w.path:  # of documents fewer tokens are looked for in shorter windows
    has = np.cumsum(by_position)[np.minimum(-(-fewer // rows), _LONGEST) - 1]
  fewer = fewer[has >= fewer]
  less = f", or set {w.keys}tokens={fewer.max()}" if fewer.size else ""
  raise UserError(
    f"{text} has {total} tokens to compare logits on, fewer than {w.keys}tokens={wanted}: "
    f"{remedy}{less}"
  )


def _heldout(spec: TrainSpec, name: str, spread, longest: int) -> Iterator[tuple[Any, Any]]:
  """(tokens, counts) [local rows, longest] of this process, of a source's held-out documents."""
  stream = loader.heldout_batches(spec.data, name, spread.local_rows, sys.maxsize, spread.shard)
  for batch in stream:
    weights = spread.place({"weights_BL": batch["weights_BL"]})["weights_BL"]
    if not params_lib.on_host(weights).any():  # in every process: padding follows
      return
    yield batch["tokens_BL"][:, :longest], batch["weights_BL"][:, :longest] > 0


def _of_text(spec: TrainSpec, w: Wanted, spread, length: int) -> Iterator[tuple[Any, Any]]:
  """The same of a text, the beginning that is as long as is wanted."""
  ids = spec.data.tokenizer.encode(text_files.read(w.path, f"name a text file as {w.keys}text"))
  rows = spec.eval.batch
  whole = np.zeros((-(-w.tokens // (rows * length)), rows, length), np.int32)
  ids = ids[: whole.size]
  whole.reshape(-1)[: len(ids)] = ids
  counts = (np.arange(whole.size) < len(ids)).reshape(whole.shape)
  first = spread.shard.index * spread.local_rows
  mine = slice(first, first + spread.local_rows)
  yield from zip(whole[:, mine], counts[:, mine], strict=True)


# --- differences ---------------------------------------------------------------------------------


def kl(source, other):
  """KL of the distributions with logits `other` [..., V] from those with `source`: [...], nats.

  The sum of p log(p/q) - p + q, whose terms are not negative: an ulp's KL is the square of one,
  which the rounding of the logarithms' common offset would hide in a sum of p log(p/q) alone.
  """
  p, q = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (source, other))
  d = p - q
  small = jnp.clip(d, -1.0, 1.0)
  near = jnp.exp(p) * jnp.maximum(small + jnp.expm1(-small), 0.0)
  return jnp.sum(jnp.where(small == d, near, jnp.exp(p) * d + jnp.exp(q) - jnp.exp(p)), axis=-1)


def difference(source_BLV, made_BLV, tokens_BL, counts_BL):
  """Sums over the tokens that count of what a token's predictions differ by.

  Args:
    source_BLV, made_BLV: logits.
    tokens_BL: token of each position; the change of log p is that of the token after it.
    counts_BL: float32, 0 for tokens that do not count. The last position has no next token.

  Returns:
    float32 (KL(source || made) in nats, |change of log p| in nats, how often the most likely token
    is the same, tokens, tokens with a next one).
  """
  p_BLV, q_BLV = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (source_BLV, made_BLV))
  kl_BL = kl(source_BLV, made_BLV)
  same_BL = jnp.argmax(p_BLV, -1) == jnp.argmax(q_BLV, -1)
  change_BL = jnp.take_along_axis(p_BLV - q_BLV, jnp.roll(tokens_BL, -1, 1)[..., None], -1)[..., 0]
  has_next_BL = (counts_BL > 0).at[:, -1].set(False)
  # A NaN of a token that does not count is no news.
  sums = (
    jnp.where(counts_BL > 0, kl_BL, 0.0), jnp.where(has_next_BL, jnp.abs(change_BL), 0.0),
    same_BL * counts_BL, counts_BL, has_next_BL.astype(jnp.float32),
  )  # fmt: skip
  return tuple(map(jnp.sum, sums))


def row(sums) -> dict[str, float]:
  """{"kl", "dlogp", "top1", "tokens"} per token, of the sums of `difference`."""
  kl, change, same, tokens, with_next = map(float, sums)
  return {"kl": kl / tokens, "dlogp": change / max(with_next, 1.0), "top1": same / tokens,
          "tokens": tokens}  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
  """(columns, cells) of rows of `row` with "recipe", for a terminal and a report."""
  columns = ["recipe", "KL, nats per token", "mean change of log p, nats", "same most likely token"]
  return columns, [
    [r["recipe"], f"{float(r['kl']):.1e}", f"{float(r['dlogp']):.1e}", f"{r['top1']:.3f}"]
    for r in rows
  ]


def forward(spec: TrainSpec, sites, texts: Sequence[Batch]) -> Callable[[Any], Iterator[jax.Array]]:
  """From parameters to the logits [B, L, V] of every batch; of a reward head (score, 0), whose
  softmax is the probability to be preferred to a text of score 0."""
  program = choose.program(_logits, spec.device, ("cfg", "run"))
  run = functools.partial(program, cfg=spec.model, run=spec.run)
  return lambda params: (run(params, sites, b.inputs) for b in texts)


def _logits(params, sites, inputs, *, cfg, run):
  logits_BLV = transformer.logits(params, sites, inputs, cfg, run)
  return jnp.pad(logits_BLV, ((0, 0), (0, 0), (0, 1))) if cfg.reward_head else logits_BLV


def compared(spec: TrainSpec, texts: Sequence[Batch], source: Iterable[Any], made: Iterable[Any]):
  """See `row`; `source` and `made` have logits [B, L, V] of every batch."""
  jitted = choose.program(difference, spec.device)
  columns = zip(texts, source, made, strict=True)
  parts = [jax.device_get(jitted(x, y, b.tokens_BL, b.counts_BL)) for b, x, y in columns]
  return row([sum(map(float, column)) for column in zip(*parts)])


# --- the noise floor -----------------------------------------------------------------------------


def nudged(params):
  """The parameters with every norm's weight one ulp larger; the others are the same arrays."""

  def one(path, x):
    if not any("norm" in str(getattr(key, "key", "")) for key in path):
      return x
    return params_lib.next_up(stored_params.compute_copy(x))

  return jax.tree_util.tree_map_with_path(one, params, is_leaf=stored_params.is_stored)


def noise_floor(spec: TrainSpec, params, sites, texts: Sequence[Batch]) -> dict[str, float]:
  """See `row`: a model from itself with its norms one ulp larger, in the recipes of its sites."""
  logits = forward(spec, sites, texts)
  return compared(spec, texts, logits(params), logits(nudged(params)))
