"""The gate of an export: the written folder computes what its source computes.

The logits of the source, of the folder as fp8jax reads it and of the folder in transformers are
compared on the same tokens: the mean over tokens of KL(source || folder), in nats, and the share of
tokens whose most likely successor is the same. fp8jax multiplies in the compute dtype, so that its
difference is that of the weights; transformers also quantizes activations where it can on a CPU.

Beside them stands the noise floor of the source (evaluation/divergence.py).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fp8jax import params as params_lib
from fp8jax.errors import UserError
from fp8jax.evaluation import divergence
from fp8jax.evaluation.divergence import Batch
from fp8jax.export import client as client_lib
from fp8jax.export.settings import Export
from fp8jax.models.hf import config as hf_config
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.step.train_spec import TrainSpec

# Keys without which a client refuses config.json or guesses, by section and by the kind that it
# states. Sources: transformers 5.23 utils/quantization_config.py; vLLM 0.32 quantization/fp8.py and
# compressed_tensors.py; for ropes see hf_config.ROPE_KEYS.
_REQUIRED = {
  "": ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
       "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta",
       "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "dtype"),
  "fp8": ("activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers"),
  "compressed-tensors": ("format", "config_groups", "ignore", "quantization_status"),
  "modelopt": ("quant_algo", "config_groups", "ignore"),
  **{kind: required for kind, (required, _) in hf_config.ROPE_KEYS.items()},
}  # fmt: skip


def lacks(config: Mapping[str, Any]) -> list[str]:
  """The required keys that a config.json does not have, "rope_scaling.factor"."""
  keys = [key for key in _REQUIRED[""] if config.get(key) is None]
  for section, kind in (("rope_scaling", "rope_type"), ("quantization_config", "quant_method")):
    stated = config.get(section)
    if stated is not None:
      required = (kind, *_REQUIRED.get(stated.get(kind), ()))
      keys += [f"{section}.{key}" for key in required if stated.get(key) is None]
  return keys


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
      texts: what they are compared on, see divergence.batches.
      params: of the source, float32.
      of_source: the source's spec where that is another model, one with adapters; default: spec.
    """
    self._spec, self._batches = spec, texts
    self._logits = self._forward(spec)
    logits = self._forward(of_source) if of_source else self._logits
    made = zip(texts, logits(params), strict=True)
    self._source = [params_lib.on_host(x)[b.counts_BL > 0] for b, x in made]
    floor = self._row(logits(divergence.nudged(params)))
    self.report: dict[str, Any] = {
      "tokens": int(floor["tokens"]),
      "noise_floor": {k: floor[k] for k in ("kl", "dlogp", "top1")},
    }

  def _forward(self, spec: TrainSpec) -> Callable[[Any], Iterator[jax.Array]]:
    return divergence.forward(spec, spec.sites(evaluator_lib.BF16), self._batches)

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
    return divergence.compared(self._spec, self._batches, self.source(), made)

  def _judge(self, reader: str, made: Iterable[Any], versions: Mapping[str, str] | None = None):
    row = self._row(made)
    total = row.pop("tokens")
    self.report[reader] = row | dict(versions or {})
    most = self._spec.of(Export).max_kl
    if not row["kl"] <= most:
      raise UserError(
        f"export refused, nothing was written: read by {reader}, the model differs from its source "
        f"by KL {row['kl']:.4f} nats per token (the most likely token is the same in "
        f"{row['top1']:.1%} of {total:.0f}; the noise floor is "
        f"{self.report['noise_floor']['kl']:.1e}), more than export.max_kl={most}; take a finer "
        "export.strategy, keep layers unquantized by precision.first_bf16 and last_bf16, or raise "
        "export.max_kl"
      )
