"""The gate of an export: the written folder computes what its source computes.

The logits of the source, of the folder as fp8jax reads it and of the folder in transformers are
compared on the same tokens: the mean over tokens of KL(source || folder), in nats, and the share of
tokens whose most likely successor is the same. fp8jax multiplies in the compute dtype, so that its
difference is that of the weights; transformers also quantizes activations where it can on a CPU.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.data import batch_sharding, loader
from fp8jax.errors import UserError, one_line
from fp8jax.export.settings import Export
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import peft
from fp8jax.models.hf import weights as hf_weights
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run import noise_floor
from fp8jax.step.run_spec import RunSpec

# Longer windows say nothing more about weights.
_LONGEST = 512

# Packages of the client, with the one more that transformers asks for to read a format.
_PACKAGES = {
  "hf-bf16": ("torch", "transformers"),
  "hf-fp8-block": ("torch", "transformers", "accelerate"),
  "peft": ("torch", "transformers", "peft"),
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
path, method = os.path.join(folder, "config.json"), None
if os.path.exists(path):  # adapters have none
  with open(path) as f:
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


# Keys without which a client refuses config.json or guesses, by section and by the kind that it
# states. Sources: transformers 5.23 modeling_rope_utils.py (_validate_*_rope_parameters) and
# utils/quantization_config.py; vLLM 0.32 quantization/fp8.py and compressed_tensors.py.
_REQUIRED = {
  "": ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
       "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta",
       "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "dtype"),
  "linear": ("factor",),
  "dynamic": ("factor",),
  "yarn": ("factor", "original_max_position_embeddings"),
  "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
  "fp8": ("activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers"),
  "compressed-tensors": ("format", "config_groups", "ignore", "quantization_status"),
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
  client = plan.of(Export).client_python
  if not client:
    return {}
  error, printed = _run(client, _PROBE, *_PACKAGES[plan.of(Export).format])
  if error.startswith(_MISSING):
    raise UserError(f"export.client_python={client!r}: {error}; {_needs(plan)}: install them there")
  versions = {}
  if not error:
    with contextlib.suppress(ValueError, TypeError):
      versions = dict(json.loads(printed))
    error = f"it printed {printed[:80]!r} in place of versions"
  if not versions:
    raise UserError(
      f"export.client_python={client!r} is no working Python: {error}; {_needs(plan)}: name the "
      "python of an environment that has them"
    )
  return versions


def _needs(plan: RunSpec) -> str:
  return (
    f"export.format={plan.of(Export).format!r} needs {', '.join(_PACKAGES[plan.of(Export).format])}"
  )


def batches(plan: RunSpec) -> list[Batch]:
  """At least export.gate_tokens of export.gate_text, or of every source's held-out documents.

  Raises:
    UserError: there are not so many; names the text or source, and its number of tokens.
  """
  wanted, rows = plan.of(Export).gate_tokens, plan.eval.batch
  length = min(plan.data.seq_len, _LONGEST, -(-wanted // rows))
  number = -(-wanted // (rows * length))
  spread = batch_sharding.BatchSharder(plan.run.layout, rows)
  if plan.of(Export).gate_text:
    remedy = "name a longer text"
    texts = {
      f"export.gate_text={plan.of(Export).gate_text!r}": _of_text(plan, spread, number, length)
    }
  else:
    remedy = "name a text in export.gate_text"  # the held-out share of a run that is over is fixed
    texts = {
      f"source {name!r} (held-out documents)": _heldout(plan, name, spread, number, length)
      for name in plan.data.sources
    }
  found = []
  for text, windows in texts.items():
    total = 0
    for tokens, counts in windows:
      positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
      placed = spread.place({
        "tokens_BL": np.ascontiguousarray(tokens), "positions_BL": np.ascontiguousarray(positions),
        "counts_BL": np.ascontiguousarray(counts, np.float32),
      })  # fmt: skip
      counts_BL = placed.pop("counts_BL")
      if number_here := int(jnp.sum(counts_BL)):
        found.append(Batch(placed, counts_BL))
      total += number_here
      if total >= wanted:
        break
    else:
      fewer = f", or set export.gate_tokens={total}" if total else ""
      raise UserError(
        f"{text} has {total} tokens to compare logits on, fewer than export.gate_tokens={wanted}: "
        f"{remedy}{fewer}"
      )
  return found


# Windows are padded, and of chats the trained tokens alone count: so many times as many are looked
# through.
_SPARSE = 16


def _heldout(plan: RunSpec, name: str, spread, number: int, length: int):
  """(tokens, counts) [local rows, length] of this process, of a source's held-out documents."""
  number *= _SPARSE
  stream = loader.heldout_batches(plan.data, name, spread.local_rows, number, spread.shard)
  for batch in stream:
    yield batch["tokens_BL"][:, :length], batch["weights_BL"][:, :length] > 0


def _of_text(plan: RunSpec, spread, number: int, length: int):
  """The same of export.gate_text."""
  path = plan.of(Export).gate_text
  try:
    with open(os.path.expanduser(path), encoding="utf-8") as f:
      ids = plan.data.tokenizer.encode(f.read())
  except UnicodeDecodeError as e:
    raise UserError(f"export.gate_text={path!r} is no text in UTF-8: {e}; name a text file") from e
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
    report: {reader: {"kl", "dlogp", "top1"}} of the comparisons, "tokens", and "noise_floor": the
      same of the source against itself with its norms one ulp away.
  """

  def __init__(
    self, plan: RunSpec, texts: list[Batch], params, of_source: RunSpec | None = None
  ):  # fmt: skip
    """
    Args:
      plan: of the models that are compared.
      texts: what they are compared on, see `batches`.
      params: of the source, float32.
      of_source: the source's plan where that is another model, one with adapters; default: plan.
    """
    self._plan, of_source = plan, of_source or plan
    self._batches = texts
    self._sites = plan.sites(evaluator_lib.BF16)
    options = choose.compiler_options(plan.device)

    def logits_of(plan: RunSpec):
      run = functools.partial(transformer.logits, cfg=plan.model, run=plan.run)
      return jax.jit(run, compiler_options=options)

    self._logits, source_logits = logits_of(plan), logits_of(of_source)
    self._difference = jax.jit(noise_floor.difference, compiler_options=options)
    sites = of_source.sites(evaluator_lib.BF16)
    self._source = [source_logits(params, sites, b.inputs) for b in self._batches]
    nudged = noise_floor.nudged(params)
    floor = self._row([source_logits(nudged, sites, b.inputs) for b in self._batches])
    self.report: dict[str, Any] = {
      "tokens": int(floor["tokens"]),
      "noise_floor": {k: floor[k] for k in ("kl", "dlogp", "top1")},
    }

  def read_back(self, folder: str, base=None):
    """Compares the folder as fp8jax reads it, and refuses it above export.max_kl.

    fp8jax reads with the writer's defaults: config.json is held against others' demands first.

    Args:
      base: parameters that the folder holds the adapters of; None: it holds all.
    """
    plan = self._plan
    if base is not None:
      read = peft.added(base, folder, plan.model, plan.run.layout)
      made = [self._logits(read, self._sites, b.inputs) for b in self._batches]
      return self._judge("fp8jax", made)
    if lacking := lacks(hf_config.read_json(folder, "config.json")):
      raise UserError(
        "export refused, nothing was written: config.json lacks keys without which transformers "
        f"and servers refuse the folder: {', '.join(lacking)}; please report it"
      )
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
      client = self._plan.of(Export).client_python
      error, printed = _run(client, _CLIENT, os.path.abspath(folder), *files)
      shape = (sum(map(len, source)), *source[0].shape[1:])
      made = None if error else _logits_file(files[1], shape)
    if made is None:
      why = error or f"it wrote no logits of shape {shape}, and printed {printed[-80:]!r}"
      fix = f"; {_needs(self._plan)}: install them there" if error.startswith(_MISSING) else ""
      raise UserError(
        f"export refused, nothing was written: the client {client!r} cannot read the folder: "
        f"{why}{fix}"
      )
    rows = self._plan.eval.batch
    theirs = [made[i * rows : (i + 1) * rows] for i in range(len(source))]
    self._judge("transformers", theirs, source, counts, tokens, versions)

  def _row(self, made, source=None, counts=None, tokens=None) -> dict[str, float]:
    counts = counts or [b.counts_BL for b in self._batches]
    tokens = tokens or [b.inputs["tokens_BL"] for b in self._batches]
    columns = zip(source or self._source, made, tokens, counts, strict=True)
    parts = jax.device_get([self._difference(*x) for x in columns])
    return noise_floor.row([sum(map(float, column)) for column in zip(*parts)])

  def _judge(self, reader: str, made, source=None, counts=None, tokens=None, versions=None):
    found = self._row(made, source, counts, tokens)
    total = found.pop("tokens")
    self.report[reader] = found | (versions or {})
    most = self._plan.of(Export).max_kl
    if not found["kl"] <= most:
      raise UserError(
        f"export refused, nothing was written: read by {reader}, the model differs from its source "
        f"by KL {found['kl']:.4f} nats per token (the most likely token is the same in "
        f"{found['top1']:.1%} of {total:.0f}; the noise floor is "
        f"{self.report['noise_floor']['kl']:.1e}), more than export.max_kl={most}; take a finer "
        "export.strategy, keep layers unquantized by precision.first_bf16 and last_bf16, or raise "
        "export.max_kl"
      )


def _logits_file(path: str, shape: tuple[int, ...]) -> np.ndarray | None:
  """The client's logits; None where it wrote none of this shape."""
  try:
    made = np.load(path)
  except (OSError, ValueError):
    return None
  return made if made.shape == shape else None


_MISSING = ("ModuleNotFoundError", "ImportError")
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception)\b", re.M)


def _run(client: str, script: str, *arguments: str) -> tuple[str, str]:
  """(the error that a script ends in under this interpreter, "" for none; its stdout)."""
  try:
    command = [os.path.expanduser(client), "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
  except OSError as e:
    return one_line(e), ""
  if not done.returncode:
    return "", done.stdout
  starts = [m.start() for m in _EXCEPTION.finditer(done.stderr)]
  told = done.stderr[starts[-1] :] if starts else done.stderr[-400:]
  signal = f"ended by signal {-done.returncode}" if done.returncode < 0 else "no message"
  return " ".join(told.split())[:800] or signal, done.stdout
