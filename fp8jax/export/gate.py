"""The gate of an export: the written folder computes what its source computes.

The logits of the source, of the folder as fp8jax reads it and of the folder in transformers are
compared on the same tokens: the mean over tokens of KL(source || folder), in nats, and the share of
tokens whose most likely successor is the same. fp8jax multiplies in the compute dtype, so that its
difference is that of the weights; transformers also quantizes activations where it can on a CPU.

Beside them stands the noise floor, the source against itself with weights that are one ulp away.
Rounding to few bits is chaotic: a sum in another order, or a weight one ulp larger, flips codes,
and the flips add up over layers. Two readings of the same weights that differ by no more than this
floor agree.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax.data import batch_sharding, loader
from fp8jax.errors import UserError
from fp8jax.export import client as client_lib
from fp8jax.export.settings import Export
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.hf import config as hf_config
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.step.train_spec import TrainSpec

# Longer windows say nothing more about weights.
_LONGEST = 512

# Keys without which a client refuses config.json or guesses, by section and by the kind that it
# states. Sources: transformers 5.23 utils/quantization_config.py; vLLM 0.32 quantization/fp8.py and
# compressed_tensors.py; for ropes see hf_config.ROPE_KEYS.
_REQUIRED = {
  "": ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
       "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta",
       "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "dtype"),
  "fp8": ("activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers"),
  "compressed-tensors": ("format", "config_groups", "ignore", "quantization_status"),
  **{kind: required for kind, (required, _) in hf_config.ROPE_KEYS.items()},
}  # fmt: skip


def lacks(config: Mapping[str, Any]) -> list[str]:
  """The required keys that a config.json does not have, "rope_scaling.factor"."""
  found = [key for key in _REQUIRED[""] if config.get(key) is None]
  for section, kind in (("rope_scaling", "rope_type"), ("quantization_config", "quant_method")):
    stated = config.get(section)
    if stated is not None:
      required = (kind, *_REQUIRED.get(stated.get(kind), ()))
      found += [f"{section}.{key}" for key in required if stated.get(key) is None]
  return found


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


def batches(spec: TrainSpec) -> list[Batch]:
  """At least export.gate_tokens of export.gate_text, or of every source's held-out documents.

  Raises:
    UserError: there are not so many; names the text or source, and its number of tokens.
  """
  e, rows = spec.of(Export), spec.eval.batch
  spread = batch_sharding.BatchSharder(spec.run.layout, rows)
  longest = min(spec.data.seq_len, _LONGEST)
  if e.gate_text:
    made = _of_text(spec, spread, min(longest, -(-e.gate_tokens // rows)))
    return _enough(spec, spread, f"export.gate_text={e.gate_text!r}", made, "name a longer text")
  remedy = "name a text in export.gate_text"  # the held-out share of a run that is over is fixed
  found = []
  for name in spec.data.sources:
    made = _heldout(spec, name, spread, longest)
    found += _enough(spec, spread, f"source {name!r} (held-out documents)", made, remedy)
  return found


def _enough(spec: TrainSpec, spread, text: str, windows, remedy: str) -> list[Batch]:
  """The first batches of a text that have export.gate_tokens, those without any left out.

  Args:
    windows: (tokens, counts) [local rows, length] of this process, up to the end of the text.
  """
  wanted, rows = spec.of(Export).gate_tokens, spec.eval.batch
  found, total, by_position = [], 0, np.zeros(_LONGEST, int)
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
      found.append(Batch(inputs, tokens_BL[:, :length], counts_BL))
    total += number_here
    if total >= wanted:
      return found
  fewer, has = np.arange(1, wanted), total
  if not spec.of(Export).gate_text:  # of documents fewer tokens are looked for in shorter windows
    has = np.cumsum(by_position)[np.minimum(-(-fewer // rows), _LONGEST) - 1]
  fewer = fewer[has >= fewer]
  less = f", or set export.gate_tokens={fewer.max()}" if fewer.size else ""
  raise UserError(
    f"{text} has {total} tokens to compare logits on, fewer than export.gate_tokens={wanted}: "
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


def _of_text(spec: TrainSpec, spread, length: int) -> Iterator[tuple[Any, Any]]:
  """The same of export.gate_text, the beginning that is as long as export.gate_tokens."""
  path, rows = spec.of(Export).gate_text, spec.eval.batch
  try:
    with open(os.path.expanduser(path), encoding="utf-8") as f:
      ids = spec.data.tokenizer.encode(f.read())
  except UnicodeDecodeError as e:
    raise UserError(f"export.gate_text={path!r} is no text in UTF-8: {e}; name a text file") from e
  whole = np.zeros((-(-spec.of(Export).gate_tokens // (rows * length)), rows, length), np.int32)
  ids = ids[: whole.size]
  whole.reshape(-1)[: len(ids)] = ids
  counts = (np.arange(whole.size) < len(ids)).reshape(whole.shape)
  first = spread.shard.index * spread.local_rows
  mine = slice(first, first + spread.local_rows)
  yield from zip(whole[:, mine], counts[:, mine], strict=True)


# --- differences ---------------------------------------------------------------------------------


def nudged(params):
  """The parameters with every norm's weight one ulp larger; the others are the same arrays."""

  def one(path, x):
    is_norm = any("norm" in str(getattr(key, "key", "")) for key in path)
    return jnp.nextafter(x, jnp.asarray(jnp.inf, x.dtype)) if is_norm else x

  return jax.tree_util.tree_map_with_path(one, params)


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
  kl_BL = jnp.sum(jnp.exp(p_BLV) * (p_BLV - q_BLV), axis=-1)
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


class Gate:
  """Compares models with a source, whose logits of tokens that count it holds on the host.

  Attributes:
    report: {reader: {"kl", "dlogp", "top1"}} of the comparisons, "tokens", and "noise_floor": the
      same of the source against itself with its norms one ulp away.
  """

  def __init__(
    self, spec: TrainSpec, texts: list[Batch], params, of_source: TrainSpec | None = None
  ):  # fmt: skip
    """
    Args:
      spec: of the models that are compared.
      texts: what they are compared on, see `batches`.
      params: of the source, float32.
      of_source: the source's spec where that is another model, one with adapters; default: spec.
    """
    self._spec, self._batches = spec, texts
    self._logits = self._forward(spec)
    logits = self._forward(of_source) if of_source else self._logits
    made = zip(texts, logits(params), strict=True)
    self._source = [params_lib.on_host(x)[b.counts_BL > 0] for b, x in made]
    floor = self._row(logits(nudged(params)))
    self.report: dict[str, Any] = {
      "tokens": int(floor["tokens"]),
      "noise_floor": {k: floor[k] for k in ("kl", "dlogp", "top1")},
    }

  def _forward(self, spec: TrainSpec) -> Callable[[Any], Iterator[jax.Array]]:
    """From parameters to the logits [B, L, V] of every batch."""
    run = functools.partial(transformer.logits, cfg=spec.model, run=spec.run)
    jitted = jax.jit(run, compiler_options=choose.compiler_options(spec.device))
    sites = spec.sites(evaluator_lib.BF16)
    return lambda params: (jitted(params, sites, b.inputs) for b in self._batches)

  def read_back(self, folder: str, read: Callable[[str], Any]):
    """Compares the folder as fp8jax reads it, and refuses it above export.max_kl.

    fp8jax reads with the writer's defaults: config.json is held against others' demands first.

    Args:
      read: gives the parameters of a folder.
    """
    has_config = os.path.exists(os.path.join(folder, "config.json"))  # adapters have none
    if has_config and (lacking := lacks(hf_config.read_json(folder, "config.json"))):
      raise UserError(
        "export refused, nothing was written: config.json lacks keys without which transformers "
        f"and servers refuse the folder: {', '.join(lacking)}; please report it"
      )
    self._judge("fp8jax", self._logits(read(folder)))

  def client(self, folder: str, versions: dict[str, str]):
    """The same of the folder in transformers, on the CPU; in the first process."""
    if jax.process_index() == 0:
      tokens_BL = np.concatenate([b.tokens_BL for b in self._batches])
      vocab_size = self._spec.model.vocab_size
      made = client_lib.logits(self._spec.of(Export), folder, tokens_BL, vocab_size)
      self._judge("transformers", np.split(made, len(self._batches)), versions)

  def source(self) -> Iterator[np.ndarray]:
    """The source's logits [B, L, V] of every batch, 0 at tokens that do not count."""
    for b, rows in zip(self._batches, self._source, strict=True):
      source_BLV = np.zeros((*b.counts_BL.shape, rows.shape[1]), rows.dtype)
      source_BLV[b.counts_BL > 0] = rows
      yield source_BLV

  def _row(self, made: Iterable[Any]) -> dict[str, float]:
    """See `row`; `made` has logits [B, L, V] of every batch."""
    jitted = jax.jit(difference, compiler_options=choose.compiler_options(self._spec.device))
    columns = zip(self._batches, self.source(), made, strict=True)
    parts = [jax.device_get(jitted(x, y, b.tokens_BL, b.counts_BL)) for b, x, y in columns]
    return row([sum(map(float, column)) for column in zip(*parts)])

  def _judge(self, reader: str, made: Iterable[Any], versions: Mapping[str, str] | None = None):
    found = self._row(made)
    total = found.pop("tokens")
    self.report[reader] = found | dict(versions or {})
    most = self._spec.of(Export).max_kl
    if not found["kl"] <= most:
      raise UserError(
        f"export refused, nothing was written: read by {reader}, the model differs from its source "
        f"by KL {found['kl']:.4f} nats per token (the most likely token is the same in "
        f"{found['top1']:.1%} of {total:.0f}; the noise floor is "
        f"{self.report['noise_floor']['kl']:.1e}), more than export.max_kl={most}; take a finer "
        "export.strategy, keep layers unquantized by precision.first_bf16 and last_bf16, or raise "
        "export.max_kl"
      )
