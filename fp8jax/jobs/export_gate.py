"""The gate of an export: the written folder computes what its source computes.

The logits of the source, of the folder as fp8jax reads it and of the folder in transformers are
compared on the same tokens: the mean over tokens of KL(source || folder), in nats, and the share of
tokens whose most likely successor is the same. fp8jax multiplies in the compute dtype, so that its
difference is that of the weights; transformers also quantizes activations where it can on a CPU.
"""

import dataclasses
import functools
import json
import os
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.data import batch_sharding, loader
from fp8jax.errors import UserError
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.hf import weights as hf_weights
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.step.run_spec import RunSpec

# Longer windows say nothing more about weights.
_LONGEST = 512

# Packages of the client, with the one more that transformers asks for to read a format.
_PACKAGES = {
  "hf-bf16": ("torch", "transformers"),
  "hf-fp8-block": ("torch", "transformers", "accelerate"),
  "compressed-tensors": ("torch", "transformers", "compressed-tensors"),
}
_PROBE = """
import importlib, importlib.metadata, json, sys
for name in sys.argv[1:]:
  importlib.import_module(name.replace("-", "_"))
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""
_CLIENT = """
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import numpy, torch, transformers
folder, tokens, target = sys.argv[1:]
with open(os.path.join(folder, "config.json")) as f:
  method = (json.load(f).get("quantization_config") or {}).get("quant_method")
# Fine-grained FP8 loads in 16 bits alone; compressed-tensors cannot be cast once it is loaded.
how = {} if method == "fp8" else {"dtype": torch.float32}
model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
model = model.float() if method == "fp8" else model
rows = numpy.load(tokens)
with torch.no_grad():
  logits = [model(torch.from_numpy(row[None]).long()).logits[0].float().numpy() for row in rows]
numpy.save(target, numpy.stack(logits))
"""


@dataclasses.dataclass(frozen=True)
class Batch:
  """Tokens that logits are compared on.

  Attributes:
    inputs: tokens_BL and positions_BL, placed.
    counts_BL: float32, 0 for padding, placed.
  """

  inputs: dict[str, jax.Array]
  counts_BL: jax.Array


def probe(plan: RunSpec) -> dict[str, str]:
  """Versions of the client's packages; {} without a client.

  Raises:
    UserError: it does not start, or lacks one; names the package.
  """
  if not plan.export.client_python:
    return {}
  return json.loads(_run(plan, _PROBE, *_PACKAGES[plan.export.format]))


def batches(plan: RunSpec) -> list[Batch]:
  """The text of export.gate_text, or held-out documents of every source.

  Raises:
    UserError: there is no such text.
  """
  rows = plan.eval.batch
  length = min(plan.data.seq_len, _LONGEST, -(-plan.export.gate_tokens // rows))
  number = -(-plan.export.gate_tokens // (rows * length))
  spread = batch_sharding.BatchSharder(plan.run.layout, rows)
  found, total = [], 0.0
  for tokens, counts in _windows(plan, spread, number, length):
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    placed = spread.place({
      "tokens_BL": np.ascontiguousarray(tokens), "positions_BL": np.ascontiguousarray(positions),
      "counts_BL": np.ascontiguousarray(counts, np.float32),
    })  # fmt: skip
    counts_BL = placed.pop("counts_BL")
    total += float(jnp.sum(counts_BL))
    found.append(Batch(placed, counts_BL))
  if not total:
    raise UserError(
      "the gate of --job=export compares logits on held-out text, and there is none: raise "
      "data.heldout_fraction, give more documents, or name a text in export.gate_text"
    )
  return found


def _windows(plan: RunSpec, spread: batch_sharding.BatchSharder, number: int, length: int):
  """(tokens, counts) [local rows, length] of this process."""
  if not plan.export.gate_text:
    for source in plan.data.sources:
      stream = loader.heldout_batches(plan.data, source, spread.local_rows, number, spread.shard)
      for batch in stream:
        yield batch["tokens_BL"][:, :length], batch["weights_BL"][:, :length] > 0
    return
  with open(os.path.expanduser(plan.export.gate_text), encoding="utf-8") as f:
    ids = plan.data.tokenizer.encode(f.read())
  whole = np.zeros((number, plan.eval.batch, length), np.int32)
  ids = ids[: whole.size]
  whole.reshape(-1)[: len(ids)] = ids
  counts = (np.arange(whole.size) < len(ids)).reshape(whole.shape)
  first = spread.shard.index * spread.local_rows
  for tokens, counted in zip(whole, counts):
    mine = slice(first, first + spread.local_rows)
    yield tokens[mine], counted[mine]


class Gate:
  """Compares models with a source, whose logits it holds.

  Attributes:
    report: {reader: {"kl", "top1"}} of the comparisons, and "tokens".
  """

  def __init__(self, plan: RunSpec, params, of_source: RunSpec | None = None):
    """
    Args:
      plan: of the models that are compared.
      params: of the source, float32.
      of_source: the source's plan where that is another model, one with adapters; default: plan.
    """
    self._plan, of_source = plan, of_source or plan
    self._batches = batches(plan)
    self._sites = plan.sites(evaluator_lib.BF16)
    options = choose.compiler_options(plan.device)

    def logits_of(plan: RunSpec):
      run = functools.partial(transformer.logits, cfg=plan.model, run=plan.run)
      return jax.jit(run, compiler_options=options)

    self._logits, source_logits = logits_of(plan), logits_of(of_source)
    self._compare = jax.jit(_compare, compiler_options=options)
    sites = of_source.sites(evaluator_lib.BF16)
    self._source = [source_logits(params, sites, b.inputs) for b in self._batches]
    self.report: dict[str, Any] = {
      "tokens": int(sum(float(jnp.sum(b.counts_BL)) for b in self._batches))
    }

  def read_back(self, folder: str):
    """Compares the folder as fp8jax reads it, and refuses it above export.max_kl."""
    params, _ = hf_weights.load_params(folder, self._plan.model, self._plan.run.layout)
    made = [self._logits(params, self._sites, b.inputs) for b in self._batches]
    self._judge("fp8jax", made)

  def client(self, folder: str, versions: dict[str, str]):
    """The same of the folder in transformers, on the CPU."""
    # The source's logits go to the host, where one process has them all; the others do not wait.
    tokens = [hf_weights.on_host(b.inputs["tokens_BL"]) for b in self._batches]
    source = [hf_weights.on_host(x) for x in self._source]
    counts = [hf_weights.on_host(b.counts_BL) for b in self._batches]
    if jax.process_index() != 0:
      return
    with tempfile.TemporaryDirectory() as scratch:
      files = [os.path.join(scratch, name) for name in ("tokens.npy", "logits.npy")]
      np.save(files[0], np.concatenate(tokens))
      _run(self._plan, _CLIENT, os.path.abspath(folder), *files)
      made = np.load(files[1])
    rows = self._plan.eval.batch
    theirs = [made[i * rows : (i + 1) * rows] for i in range(len(source))]
    self._judge("transformers", theirs, source, counts, versions)

  def _judge(self, reader: str, made, source=None, counts=None, versions=None):
    counts = counts or [b.counts_BL for b in self._batches]
    parts = [self._compare(*x) for x in zip(source or self._source, made, counts, strict=True)]
    kl, same, total = (sum(map(float, column)) for column in zip(*jax.device_get(parts)))
    found = {"kl": kl / total, "top1": same / total}
    self.report[reader] = found | (versions or {})
    most = self._plan.export.max_kl
    if not found["kl"] <= most:
      raise UserError(
        f"export refused, nothing was written: read by {reader}, the model differs from its source "
        f"by KL {found['kl']:.4f} nats per token (the most likely token is the same in "
        f"{found['top1']:.1%} of {total:.0f}), more than export.max_kl={most}; take a finer "
        "export.strategy, keep layers unquantized by precision.first_bf16 and last_bf16, or raise "
        "export.max_kl"
      )


def _compare(source_BLV, made_BLV, counts_BL):
  """Sums over tokens of KL(source || made), of equal most likely tokens, and of tokens."""
  p_BLV, q_BLV = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (source_BLV, made_BLV))
  kl_BL = jnp.sum(jnp.exp(p_BLV) * (p_BLV - q_BLV), axis=-1)
  same_BL = jnp.argmax(p_BLV, -1) == jnp.argmax(q_BLV, -1)
  # A NaN of a token that does not count is no news.
  kl_BL = jnp.where(counts_BL > 0, kl_BL, 0.0)
  return jnp.sum(kl_BL), jnp.sum(same_BL * counts_BL), jnp.sum(counts_BL)


def _run(plan: RunSpec, script: str, *arguments: str) -> str:
  """stdout of a script under the client's interpreter."""
  client = plan.export.client_python
  command = [os.path.expanduser(client), "-c", script, *arguments]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise UserError(
      f"export.client_python={client!r} failed: {last}; export.format={plan.export.format!r} "
      f"needs {', '.join(_PACKAGES[plan.export.format])} there: install them, or set "
      "export.client_python='' to leave this comparison out"
    )
  return done.stdout
