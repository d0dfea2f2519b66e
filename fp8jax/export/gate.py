"""The gate of an export asks two questions of the folder that is written.

Fidelity: does a client compute what we say that the folder computes? The logits of transformers on
a CPU, in float32 and with activations unquantized, stand beside those of our own forward pass of
the folder's weights. Their KL is at most FIDELITY times the noise floor of these weights
(evaluation/divergence.py), or times _LEAST. Where compressed-tensors quantizes activations, every
matrix's product is held against ours of the same inputs, as the package rounds them: over the first
16 tokens of a window it differs by at most PRODUCT of what the rounding costs. From logits to
logits that cannot be asked: readers sum in an order of their own, one activation that is rounded
the other way moves all that follow, and the KL is that of two roundings. It is at most FIDELITY
times the floor of that precision, or what the rounding of activations costs. In INT8 it also has
the package's scale, the largest magnitude / 127.5, where servers and our pass divide by 127.

vLLM (export.client) computes in bfloat16, as it serves, with quantized activations: its KL is at
most FIDELITY times that of our own pass of the folder in bfloat16, logits too, against float32, or
what the rounding of activations costs. Where that is _APART times what bfloat16 costs, its KL from
our pass without that rounding is at least their geometric mean, or activations are not rounded
there. And it tells of every matrix by what it was multiplied.

Cost: how far is the folder from its source? The mean over tokens of KL(source || folder), in nats,
with the bootstrap interval over windows, and the share of tokens whose most likely successor is the
same; of the weights alone ("fp8jax") and with quantized activations ("served"). It is refused above
export.max_kl alone.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import params as params_lib
from fp8jax import statistics
from fp8jax.errors import UserError
from fp8jax.evaluation import divergence
from fp8jax.evaluation.divergence import Batch
from fp8jax.export import client as client_lib
from fp8jax.export import fp8 as fp8_lib
from fp8jax.export import served_pass, vllm_client
from fp8jax.export.settings import Export
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import schemes
from fp8jax.models.hf import tensors as hf_tensors
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.step.train_spec import TrainSpec

FIDELITY = 3.0
# SmolLM2's E4M3 products differ by 8e-5 of the rounding's cost at most, by 0.02 where ties fall to
# the other side. A scale that is 0.4 % larger makes it about 0.5: the largest codes then round
# otherwise.
PRODUCT = 0.1
# Rounding that costs so many times what bfloat16 costs can be seen beside it.
_APART = 4.0
# Nats per token: float32 sums in another order differ by as much in SmolLM2 (5e-11, with a floor of
# 3.5e-11), and one ulp may flip nothing in a small model.
_LEAST = 3e-11
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
    report: {reader: {"kl", "low", "high", "dlogp", "top1"}} of the comparisons with the source,
      "vllm" also its "device" and {"layers": {how matrices are multiplied: number}},
      "fidelity": {"kl", "bound"} of the client's weights and {"served_kl", "served_bound",
      "product": the largest of `products`, "product_of"} of its activations, "tokens", and
      "noise_floor": the source against itself with its norms one ulp away.
  """

  def __init__(
    self, spec: TrainSpec, texts: list[Batch], params, of_source: TrainSpec | None = None
  ):  # fmt: skip
    """
    Args:
      texts: what they are compared on, see divergence.batches.
      params: of the source, float32.
      of_source: the source's spec where that is another model, one with adapters; default: spec.
    """
    self._spec, self._batches = spec, texts
    self._logits = self._forward(spec)
    logits = self._forward(of_source) if of_source else self._logits
    made = zip(texts, logits(params), strict=True)
    self._source = [params_lib.on_host(x)[b.counts_BL > 0] for b, x in made]
    floor = self._row(self.source(), logits(divergence.nudged(params)))
    self.report: dict[str, Any] = {
      "tokens": int(floor["tokens"]),
      "noise_floor": {k: floor[k] for k in ("kl", "dlogp", "top1")},
    }

  def _forward(self, spec: TrainSpec, sites=None) -> Callable[[Any], Iterator[jax.Array]]:
    sites = spec.sites(evaluator_lib.BF16) if sites is None else sites
    return divergence.forward(spec, sites, self._batches)

  def read_back(self, folder: str, read: Callable[[str], Any], plan: fp8_lib.Plan | None = None):
    """Compares the folder as fp8jax reads it, and refuses it above export.max_kl.

    fp8jax reads with the writer's defaults: config.json is held against others' demands first.
    """
    has_config = os.path.exists(os.path.join(folder, "config.json"))  # adapters have none
    if has_config and (lacking := lacks(hf_config.read_json(folder, "config.json"))):
      raise UserError(
        "export refused, nothing was written: config.json lacks keys without which transformers "
        f"and servers refuse the folder: {', '.join(lacking)}; please report it"
      )
    self._judge("fp8jax", self._logits(read(folder)))
    if plan is not None and served_pass.quantizes_inputs(plan):
      spec = served_pass.whole(self._spec, plan)
      params, sites = served_pass.load(spec, plan, folder)
      self._judge("served", self._forward(spec, sites)(params))

  def client(
    self, folder: str, versions: dict[str, str], read: Callable[[str], Any],
    plan: fp8_lib.Plan | None = None,
  ):  # fmt: skip
    """The same of the folder in transformers, on the CPU; refused where it computes another model.

    Every process must call this; the client runs in the first.
    """
    wide = _computing_in(jnp.float32, self._spec)
    params = served_pass.load_as_client(wide, folder, plan.matrices) if plan else read(folder)
    logits = self._forward(wide)
    ours = [params_lib.on_host(x) for x in logits(params)]
    floor = self._kl(ours, logits(divergence.nudged(params)))
    bounds = {"bound": FIDELITY * max(floor, _LEAST)}
    served, is_quantized = ours, plan is not None and served_pass.quantizes_inputs(plan)
    if plan is not None and is_quantized:
      wide = served_pass.whole(wide, plan)
      params, sites = served_pass.load(wide, plan, folder)
      logits = self._forward(wide, sites)
      served = [params_lib.on_host(x) for x in logits(params)]
      floor = self._kl(served, logits(divergence.nudged(params)))
      bounds["served_bound"] = FIDELITY * max(floor, self._kl(ours, served))
    if jax.process_index() == 0:
      tokens_BL = np.concatenate([b.tokens_BL for b in self._batches])
      *parts, kept = client_lib.logits(
        self._spec.of(Export), folder, tokens_BL, ours[0].shape[-1], _schemes(plan),
        served_pass.client_dtype(plan.matrices if plan else {}),
      )  # fmt: skip
      made, plain = (np.split(x, len(self._batches)) for x in parts)
      self.report["transformers"] = self._row(self.source(), made) | versions
      del self.report["transformers"]["tokens"]
      found = {"kl": self._kl(ours, plain)}
      found |= {"served_kl": self._kl(served, made)} if is_quantized else {}
      self.report["fidelity"] = found | bounds
      self._judge_client(found, bounds)
      if plan is not None and is_quantized and _schemes(plan):
        self._judge_products(products(kept, folder, plan.matrices))

  def server(
    self, folder: str, versions: dict[str, str], read: Callable[[str], Any],
    plan: fp8_lib.Plan | None = None,
  ):  # fmt: skip
    """The same of the folder in vLLM, in bfloat16; refused where it computes another model.

    Every process must call this; the client runs in the first.
    """
    wide, narrow = (_computing_in(d, self._spec) for d in (jnp.float32, jnp.bfloat16))
    weights = params = read(folder)
    logits, logits_in_16, served = self._forward(wide), self._forward(narrow), None
    if plan is not None and served_pass.quantizes_inputs(plan):
      specs = [served_pass.whole(s, plan) for s in (wide, narrow)]
      params, sites = served_pass.load(specs[0], plan, folder)
      served, logits_in_16 = (self._forward(s, sites) for s in specs)
      logits = served
    ours = [params_lib.on_host(x) for x in logits(params)]
    in_16 = map(_in_16, logits_in_16(params))
    most, plain, least = max(self._kl(ours, in_16), _LEAST), ours, 0.0
    if served is not None:
      plain = [params_lib.on_host(x) for x in self._forward(wide)(weights)]
      rounding = self._kl(plain, ours)
      of_bf16 = self._kl(plain, map(_in_16, self._forward(narrow)(weights)))
      # Of activations that stay in 16 bits the one is seen, of rounded ones the other.
      least = math.sqrt(rounding * of_bf16) if of_bf16 < rounding / _APART else 0.0
      most = max(most, rounding)
    if jax.process_index() == 0:
      tokens_BL = np.concatenate([b.tokens_BL for b in self._batches])
      matrices = plan.matrices.items() if plan else ()
      parts, layers = vllm_client.logits(
        self._spec.of(Export), folder, tokens_BL, ours[0].shape[-1],
        {name: m.scheme.inputs is not None for name, m in matrices},
      )  # fmt: skip
      made = np.split(parts, len(self._batches))
      self.report["vllm"] = self._row(self.source(), made) | versions | layers
      del self.report["vllm"]["tokens"]
      of = "" if served is None else "served_"
      found, bounds = {f"{of}kl": self._kl(ours, made)}, {f"{of}bound": FIDELITY * most}
      if served is not None:
        found |= {"unrounded_kl": self._kl(plain, made), "unrounded_least": least}
      self.report["fidelity"] = found | bounds
      self._judge_client(found, bounds)
      if found.get("unrounded_kl", 0.0) < least:
        raise UserError(
          "export refused, nothing was written: vllm leaves activations unquantized: from our pass "
          f"without their rounding it differs by KL {found['unrounded_kl']:.2e} nats per token, "
          f"less than {least:.2e}, the geometric mean of what bfloat16 and their rounding cost; "
          "check the folder on the device that serves, or export a recipe of weights alone"
        )

  def _judge_products(self, ratios: Mapping[str, float]):
    name = max(ratios, key=lambda name: ratios[name] if ratios[name] >= 0 else math.inf)
    self.report["fidelity"] |= {"product": ratios[name], "product_of": name}
    if not ratios[name] <= PRODUCT:
      raise UserError(
        f"export refused, nothing was written: transformers multiplies {name} otherwise than "
        f"fp8jax: of the same activations the product differs by {ratios[name]:.3f} of what their "
        f"rounding costs, more than {PRODUCT:g}; please report it with the versions of the client, "
        "or export without export.client_python and check the server"
      )

  def _judge_client(self, found: Mapping[str, float], bounds: Mapping[str, float]):
    client = self._spec.of(Export).client
    measure = "noise floor" if client == "transformers" else "cost of bfloat16 or of the rounding"
    for kl, bound, what in (
      ("kl", "bound", "the weights"), ("served_kl", "served_bound", "the activations")
    ):  # fmt: skip
      if kl in found and not found[kl] <= bounds[bound]:
        raise UserError(
          f"export refused, nothing was written: {client} computes another model from {what} "
          f"than fp8jax reads in the folder: KL {found[kl]:.2e} nats per token, more than "
          f"{bounds[bound]:.2e}, {FIDELITY:g} times the {measure}; please report it with the "
          "versions of the client, or export without export.client_python and check the server"
        )

  def source(self) -> Iterator[np.ndarray]:
    """The source's logits [B, L, V] of every batch, 0 at tokens that do not count."""
    for b, rows in zip(self._batches, self._source, strict=True):
      source_BLV = np.zeros((*b.counts_BL.shape, rows.shape[1]), rows.dtype)
      source_BLV[b.counts_BL > 0] = rows
      yield source_BLV

  def _kl(self, source: Iterable[Any], made: Iterable[Any]) -> float:
    return divergence.compared(self._spec, self._batches, source, made)["kl"]

  def _row(self, source: Iterable[Any], made: Iterable[Any]) -> dict[str, float]:
    """See divergence.row, with the interval "low" to "high" of its "kl" over windows."""
    columns = zip(self._batches, source, made, strict=True)
    sums = np.concatenate([
      np.stack([
        params_lib.on_host(one)
        for one in _by_window(x, y, b.tokens_BL % x.shape[-1], b.counts_BL)
      ], -1)
      for b, x, y in columns
    ]).astype(np.float64)  # fmt: skip
    counted = sums[sums[:, 3] > 0]
    row = divergence.row(sums.sum(0))
    interval = statistics.bootstrap(counted[:, 0], counted[:, 3])
    return {"kl": row.pop("kl"), "low": interval.low, "high": interval.high, **row}

  def _judge(self, reader: str, made: Iterable[Any]):
    row = self._row(self.source(), made)
    total = row.pop("tokens")
    self.report[reader] = row
    most = self._spec.of(Export).max_kl
    if not row["kl"] <= most:
      raise UserError(
        f"export refused, nothing was written: read by {reader}, the model differs from its source "
        f"by KL {row['kl']:.4f} nats per token, 95 % interval {row['low']:.4f} to "
        f"{row['high']:.4f} (the most likely token is the same in {row['top1']:.1%} of "
        f"{total:.0f}; the noise floor is {self.report['noise_floor']['kl']:.1e}), more than "
        f"export.max_kl={most}; take a finer export.strategy or recipe, keep layers unquantized by "
        "precision.first_bf16 and last_bf16, or raise export.max_kl"
      )


def _computing_in(dtype, spec: TrainSpec) -> TrainSpec:
  return dataclasses.replace(spec, run=dataclasses.replace(spec.run, dtype=jnp.dtype(dtype)))


def _in_16(logits_BLV: jax.Array) -> jax.Array:
  """A server's head writes its logits in bfloat16."""
  return logits_BLV.astype(jnp.bfloat16).astype(logits_BLV.dtype)


def products(
  kept: Mapping[str, np.ndarray], folder: str, exported: Mapping[str, fp8_lib.Matrix]
) -> dict[str, float]:  # fmt: skip
  """{weight: root mean square over tokens of |its product in the client - ours| / |ours - that of
  unrounded activations|}: no token that is larger than the others hides them.

  Args:
    kept: inputs and products of the client's matrices, see client.logits.

  Raises:
    UserError: it has not quantized the activations of a matrix.
  """
  reader = hf_tensors.Folder(folder, values=served_pass.client_values(exported))
  dtype, ratios = served_pass.client_dtype(exported), {}
  for name, matrix in exported.items():
    if matrix.scheme.inputs is None:
      continue
    stem = name.removesuffix(".weight")
    if f"{stem}.x" not in kept:
      raise UserError(
        f"export refused, nothing was written: transformers left the activations of {name} "
        "unquantized; please report it with the versions of the client"
      )
    x, w = kept[f"{stem}.x"], reader.read_float(name)
    rounded = served_pass.client_inputs(x, matrix, dtype)
    ours = rounded @ w.T
    parts = kept[f"{stem}.y"] - ours, (x - rounded) @ w.T, ours
    error, cost, size = (np.linalg.norm(part, axis=1) for part in parts)
    cost = np.maximum(cost, 1e-5 * size)  # rounding may cost nothing, sums in float32 do
    ratio = np.divide(error, cost, out=np.where(error > 0, np.inf, 0.0), where=cost > 0)
    ratios[name] = float(np.sqrt(np.mean(ratio**2)))
  return ratios


@jax.jit
def _by_window(source_BLV, made_BLV, tokens_BL, counts_BL):
  """divergence.difference of every window: [B] each."""
  parts = source_BLV, made_BLV, tokens_BL, counts_BL
  return jax.vmap(lambda *one: divergence.difference(*(x[None] for x in one)))(*parts)


def _schemes(plan: fp8_lib.Plan | None) -> int:
  """How many matrices of the client are to have a scheme; 0 where it has none."""
  has = plan is not None and all(m.scheme.method != schemes.FINE_GRAINED
                                 for m in plan.matrices.values())  # fmt: skip
  return len(plan.matrices) if has and plan else 0
