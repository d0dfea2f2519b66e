"""The effect of each site's quantization on the loss of the forward pass, by one set of programs.

Sites are switched by data (ops/switch.py), so that no measurement compiles anything. There are two
kinds of numbers for a set of sites, both relative to the BF16 forward pass:

  measured    the change of the loss and the KL divergence of the BF16 model's predictions from
              those of the model with the set switched on
  estimated   for every site and tensor from gradients with respect to switches per token:
                loss  the sum of g over tokens: to first order, the effect of rounding errors on
                      the loss of the text. It has either sign, and noise of its own.
                KL    half the sum of g^2, where g is taken at targets drawn from the model: the
                      second order of KL, Fisher's information along the rounding errors, with the
                      errors of different tokens taken as independent

Source: Fisher's information as the second order of KL, and sampled targets for it: Martens 2014
(arXiv:1412.1193) §5 and §9.2.

Letters: I is a window, T is a token.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax import statistics
from fp8jax.errors import UserError
from fp8jax.models import transformer
from fp8jax.models.config import EVAL_PRECISIONS
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree, switch
from fp8jax.recipe import rules as rules_lib
from fp8jax.sensitivity.programs import Programs
from fp8jax.sensitivity.records import Records
from fp8jax.step.train_spec import TrainSpec

# Halves of the held-out windows: rules are chosen on one and reported on the other.
CHOOSE, REPORT = HALVES = ("choose", "report")
# Of an estimate: each tensor alone, and both.
PARTS = (*switch.TENSORS, "both")
# Both tensors of a site in its recipe.
ON = (1.0, 1.0)
# Of intervals, of which a study has thousands.
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class QuantizedSite:
  """A site of one layer that its recipe quantizes.

  Attributes:
    name: "layers/3/mlp/up", or "head".
    kind: "mlp/up", or "head".
    layer: its number, or None for the head.
    flops: of the forward GEMM, per token.
  """

  name: str
  kind: str
  layer: int | None
  flops: float
  recipe: str


def places(spec: TrainSpec, sites) -> tuple[QuantizedSite, ...]:
  """The sites whose forward GEMM is quantized, layer by layer in order of computation."""
  declared = site_tree.find_sites(transformer.site_params(spec.model))
  order = list(transformer.gemm_sites(spec.model))
  sites_now = []
  for site in site_lib.flatten(sites).values():
    if not site.recipe.fwd.is_quantized:
      continue
    path = rules_lib.path_of(site.name)
    letters = "".join(declared[path].gemm_letters)
    flops = 2.0 * math.prod(spec.model.dims[c] for c in letters)
    layers: Sequence[int | None] = range(*site.layers) if site.layers else (None,)
    for name, layer in zip(site.layer_names, layers, strict=True):
      kind = path.removeprefix("layers/")
      sites_now.append(
        (order.index(path), QuantizedSite(name, kind, layer, flops, site.recipe.name))
      )
  number = spec.model.num_layers
  sites_now.sort(key=lambda of: (number if of[1].layer is None else of[1].layer, of[0]))
  return tuple(place for _, place in sites_now)


def switches(sites, on: Mapping[str, Sequence[float]]):
  """A tree for `with_switches`: these numbers by name of a layer's site, 0 for the others."""

  def one(site):
    if not site.recipe.fwd.is_quantized:
      return None
    values = np.array([on.get(name, (0.0, 0.0)) for name in site.layer_names], np.float32)
    return values if site.layers else values[0]

  return site_lib.tree_map(one, sites)


@dataclasses.dataclass(frozen=True)
class Measured:
  """The windows of a half, with a set of sites switched on.

  Attributes:
    tokens_I, base_I: tokens that count, and the sum of their losses in BF16, nats.
    loss_I, kl_I: sums of their losses and of their KL divergences, nats.
  """

  tokens_I: np.ndarray
  base_I: np.ndarray
  loss_I: np.ndarray
  kl_I: np.ndarray

  @property
  def change(self) -> statistics.Interval:
    """Change of the loss in percent of BF16's, paired by window."""
    return _interval(100 * (self.loss_I - self.base_I), self.base_I)

  @property
  def kl(self) -> statistics.Interval:
    """Nats per token."""
    return _interval(self.kl_I, self.tokens_I)

  def joined(self, other: "Measured") -> "Measured":
    """Of the windows of both."""
    both = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
    return Measured(*map(np.concatenate, both))

  def minus(self, other: "Measured") -> dict[str, list[float]]:
    """Differences to another set, paired: of losses in percent of BF16's, and of KL."""
    loss = _interval(100 * (self.loss_I - other.loss_I), self.base_I)
    kl = _interval(self.kl_I - other.kl_I, self.tokens_I)
    return {"loss_percent": _row(loss), "kl": _row(kl)}

  def row(self) -> dict[str, Any]:
    """As results have it."""
    return {
      "loss_percent": _row(self.change), "kl": _row(self.kl), "tokens": int(self.tokens_I.sum()),
    }  # fmt: skip


def _interval(over_I, under_I) -> statistics.Interval:
  return statistics.bootstrap(over_I, under_I, _RESAMPLES)


def _row(interval: statistics.Interval) -> list[float]:
  """[estimate, low, high] with six digits."""
  return [float(f"{v:.6g}") for v in (interval.estimate, interval.low, interval.high)]


# --- a study -------------------------------------------------------------------------------------


class Study:
  """Measurements of one model on one text, each made once and kept in its records."""

  def __init__(
    self, spec: TrainSpec, params, sites, batches: Mapping[str, list[dict[str, Any]]],
    records: Records, say=lambda line: None,
  ):  # fmt: skip
    """
    Args:
      params: as the training state or an import has them.
      sites: in their recipes, with scaling states.
      batches: of HALVES, on the host.
      records: of earlier measurements, and where new ones go.
      say: is told a line per new measurement.
    """
    self.spec, self.sites, self.places = spec, sites, places(spec, sites)
    self.programs = Programs(spec)
    self._params, self._records, self._say = params, records, say
    self._plain = spec.sites(EVAL_PRECISIONS[1])
    self._batches = batches
    self._references: dict[str, list[Any]] = {}
    self._first = {place.name: place.layer for place in self.places}

  def tokens(self, half: str) -> np.ndarray:
    """Tokens that count, by window [I]."""
    return np.concatenate([b["weights_BL"].sum(-1) for b in self._batches[half]])

  def estimate(self) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """{site of a layer: {part: {"loss", "kl": sums over the tokens of a window [I]}}}.

    On the windows of CHOOSE, with the targets of the text for "loss" and drawn ones for "kl".
    """
    totals: dict[str, dict[str, dict[str, list[float]]]] = {
      place.name: {part: {"loss": [], "kl": []} for part in PARTS} for place in self.places
    }
    for i in range(len(self._batches[CHOOSE])):
      for which, source in enumerate(("loss", "kl")):
        sums = self._records.get(
          f"estimated {source}, batch {i}", functools.partial(self._estimate_one, i, which)
        )
        for name, parts in sums.items():
          for part, values in zip(PARTS, parts, strict=True):
            totals[name][part][source] += values
    return {
      name: {part: {k: np.array(v) for k, v in kinds.items()} for part, kinds in parts.items()}
      for name, parts in totals.items()
    }

  def _estimate_one(self, i: int, which: int, sites=None) -> dict[str, Any]:
    batch = _on_device(self._batches[CHOOSE][i])
    if which:
      batch["targets_BL"] = jnp.asarray(self._reference(CHOOSE)[i][3])
    sites = self.sites if sites is None else sites
    tree = self.programs.gradient(self._params, sites, batch)[which]
    self._say(f"gradients of batch {i + 1}, {('text', 'drawn targets')[which]}")
    estimates = {}
    for site, values in _pairs(sites, tree):
      values = np.asarray(values, np.float64)
      if not np.isfinite(values).all():
        raise UserError(f"site {site.name}: the gradient is not finite; --job=diagnose the weights")
      rows = values if site.layers else [values]
      estimates |= {name: _digits(row) for name, row in zip(site.layer_names, rows, strict=True)}
    return estimates

  def measure(self, label: str, on: Mapping[str, Sequence[float]], half: str) -> Measured:
    """A half with sites switched on: {name of a layer's site: (of x, of w)}; the others are off.

    Args:
      label: of the set in records, with which it is the same set in every call.
    """
    fresh = functools.partial(self._measure, label, on, half)
    row = self._records.get(f"measured on {half}: {label}", fresh)
    return Measured(self.tokens(half), *(np.array(row[k]) for k in ("base", "loss", "kl")))

  def _measure(self, label: str, on: Mapping[str, Sequence[float]], half: str) -> dict[str, Any]:
    switched, layers = self._switched(on), [self._first[name] for name in on]
    start = min((n for n in layers if n is not None), default=self.spec.model.num_layers - 1)
    values_of = {"base": [], "loss": [], "kl": []}
    for batch, (hidden, inputs, base, _) in zip(
      self._batches[half], self._reference(half), strict=True
    ):
      loss, kl = self.programs.measure(
        self._params, self._plain, switched, _on_device(batch), inputs[start],
        np.int32(start), hidden,
      )  # fmt: skip
      for key, values in (("base", base), ("loss", loss), ("kl", kl)):
        values_of[key] += _digits(np.asarray(values, np.float64))
    change = 100 * (sum(values_of["loss"]) / sum(values_of["base"]) - 1)
    self._say(f"{label}, {half}: loss {change:+.3f} %")
    return values_of

  def _switched(self, on: Mapping[str, Sequence[float]]):
    return switch.with_switches(self.sites, switches(self.sites, on))

  def _reference(self, half: str) -> list[Any]:
    """Of every batch (hidden, inputs of layers, sums of losses, drawn targets), on the host."""
    if half not in self._references:
      logits = []
      for i, batch in enumerate(self._batches[half]):
        key = jax.random.fold_in(jax.random.key(self.spec.seed), 2 * i + HALVES.index(half))
        made = self.programs.reference(self._params, self._plain, _on_device(batch), key)
        logits.append(jax.device_get(made))
        self._say(f"BF16 forward pass, {half}, batch {i + 1}")
      self._references[half] = logits
    return self._references[half]


def _pairs(sites, tree) -> Iterable[tuple[site_lib.Site, Any]]:
  """(site, its value) of a tree that has values for quantized sites alone."""
  pairs: list[tuple[site_lib.Site, Any]] = []
  site_lib.tree_map(lambda site, value: pairs.append((site, value)), sites, tree)
  return [(site, value) for site, value in pairs if value is not None]


def _on_device(batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
  return {name: jnp.asarray(x) for name, x in batch.items()}


def _digits(values) -> Any:
  """Nested lists of numbers with seven digits, as many as float32 has."""
  return [float(f"{v:.7g}") if np.ndim(v) == 0 else _digits(v) for v in values]
