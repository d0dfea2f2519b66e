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
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.config import EVAL_PRECISIONS
from fp8jax.ops import residuals, site_tree, switch
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.recipe import rules as rules_lib
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
# Positions of a chunk of the head.
_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class QuantizedSite:
  """A site of one layer that its recipe quantizes.

  Attributes:
    name: "layers/3/mlp/up", or "head".
    kind: "mlp/up", or "head".
    layer: its number, or None for the head.
    flops: of the forward GEMM, per token.
    recipe: name of its recipe.
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
  found = []
  for site in site_lib.flatten(sites).values():
    if not site.recipe.fwd.is_quantized:
      continue
    path = rules_lib.path_of(site.name)
    letters = "".join(declared[path].gemm_letters)
    flops = 2.0 * math.prod(spec.model.dims[c] for c in letters)
    layers: Sequence[int | None] = range(*site.layers) if site.layers else (None,)
    for name, layer in zip(site.layer_names, layers, strict=True):
      kind = path.removeprefix("layers/")
      found.append((order.index(path), QuantizedSite(name, kind, layer, flops, site.recipe.name)))
  number = spec.model.num_layers
  found.sort(key=lambda of: (number if of[1].layer is None else of[1].layer, of[0]))
  return tuple(place for _, place in found)


def with_scales(spec: TrainSpec, phase: int, states: Mapping[str, Any]):
  """The sites in their recipes of a phase, with the scales that are not current.

  Raises:
    UserError: there are none, or no site is quantized.
  """
  sites = spec.sites(phase=phase)
  missing = sorted(scaling_lib.states(sites).keys() - states.keys())
  if missing:
    recipe = site_lib.flatten(sites)[missing[0]].recipe
    raise UserError(
      f"site {missing[0]}: {recipe.name!r} takes scales from an amax history or a calibration, and "
      "these weights come without one; name the workdir of a run that trained with it, or "
      "precision.calibration=TABLE of --job=calibrate, or measure a recipe with current scales "
      "such as 'tensor_current'"
    )
  if not places(spec, sites):
    raise UserError(
      "precision.rules quantize no forward GEMM, so there is nothing to measure; give the config "
      "an arm, --config=FILE:block_128"
    )
  return scaling_lib.with_states(sites, states) if states else sites


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


# --- the programs --------------------------------------------------------------------------------


class Programs:
  """The three programs of a study; each is compiled once.

  Attributes:
    compiled: programs that have been traced so far, and so compiled.
    reference, gradient, measure: jitted; see the functions they are made of.
  """

  def __init__(self, spec: TrainSpec):
    self.compiled = 0

    def jit(fn):
      def traced(*args):
        self.compiled += 1
        return fn(spec, *args)

      return jax.jit(traced, compiler_options=choose.compiler_options(spec.device))

    self.reference, self.gradient, self.measure = map(jit, (_reference, _gradient, _measure))


def _reference(spec: TrainSpec, params, sites, batch, key):
  """The BF16 forward pass: (hidden [B, L, D], inputs of layers [N, B, L, D], sums of losses [B],
  targets drawn from the model [B, L])."""

  def step(x_BLD, of_layer, context):
    return transformer.layer(x_BLD, of_layer, context, spec.model, spec.run)[0], x_BLD

  x_BLD, inputs_NBLD = transformer.scan_layers(step, params, sites, batch, spec.model, spec.run)
  hidden_BLD = transformer.normalised(x_BLD, params, sites, spec.model, spec.run)

  def one(h_TD, targets_T, keys):
    logits_TV = _logits(spec, params, sites, h_TD)
    drawn_T = jax.vmap(jax.random.categorical)(keys, logits_TV)
    return _nll(logits_TV, targets_T), drawn_T.astype(jnp.int32)

  targets_T = batch["targets_BL"].reshape(-1)
  keys = jax.random.split(key, targets_T.shape[0])
  loss_T, drawn_T = _by_chunks(one, _rows(hidden_BLD), targets_T, keys)
  return hidden_BLD, inputs_NBLD, _sums(loss_T, batch), drawn_T.reshape(batch["targets_BL"].shape)


def kl(base_TV, changed_TV):
  """[T]: KL divergence of the distribution with logits `changed_TV` from that with `base_TV`."""
  base_TV = jax.nn.log_softmax(base_TV)
  return jnp.sum(jnp.exp(base_TV) * (base_TV - jax.nn.log_softmax(changed_TV)), axis=-1)


def _measure(spec: TrainSpec, params, plain, sites, batch, x_BLD, start, hidden_BLD):
  """(sums of losses [B], sums of KL from BF16 [B]) with switched sites.

  Args:
    plain: sites of BF16.
    sites: with switches; those of layers before `start` are off.
    x_BLD: the input of layer `start` in BF16.
    hidden_BLD: of BF16.
  """
  context = transformer.layer_context(batch, spec.model)
  for layers, of_sites, p in transformer.runs(sites, params["layers"]):

    def step(i, x_BLD, of_run=(p, of_sites), first=layers.start):
      of_layer = jax.tree.map(lambda x: x[i - first], of_run)
      return transformer.layer(x_BLD, of_layer, context, spec.model, spec.run)[0]

    x_BLD = jax.lax.fori_loop(jnp.maximum(start, layers.start), layers.stop, step, x_BLD)
  changed_BLD = transformer.normalised(x_BLD, params, sites, spec.model, spec.run)

  def one(h_TD, base_TD, targets_T):
    logits_TV = _logits(spec, params, sites, h_TD)
    return _nll(logits_TV, targets_T), kl(_logits(spec, params, plain, base_TD), logits_TV)

  targets_T = batch["targets_BL"].reshape(-1)
  loss_T, kl_T = _by_chunks(one, _rows(changed_BLD), _rows(hidden_BLD), targets_T)
  return _sums(loss_T, batch), _sums(kl_T, batch)


def _gradient(spec: TrainSpec, params, sites, batch):
  """Trees like the sites of ([N?, 3, B] sums of g over tokens, [N?, 3, B] half sums of g^2).

  g is the gradient of the sum of losses with respect to switches per token at 0; of PARTS.
  """
  shape = batch["targets_BL"].shape
  # Rounding errors per token of all layers are many times larger than the layers' inputs.
  run = dataclasses.replace(spec.run, remat="full", residuals=residuals.ResidualFormats())
  targets_T, weights_T = (batch[name].reshape(-1) for name in ("targets_BL", "weights_BL"))

  def off(site):
    lead = (site.layers[1] - site.layers[0],) if site.layers else ()
    is_on = site.recipe.fwd.is_quantized
    return jnp.zeros((*lead, 2, math.prod(shape))) if is_on else None

  def loss(tree):
    switched = switch.with_switches(sites, tree)
    hidden_BLD = transformer.hidden(params, switched, batch, spec.model, run)
    head, numbers = {"head": sites["head"]}, tree["head"]

    @jax.checkpoint
    def one(h_TD, targets_T, switch_T):
      of_head = switch.with_switches(head, {"head": None if numbers is None else switch_T.T})
      return (_nll(_logits(spec, params, of_head, h_TD), targets_T),)

    switch_T = jnp.zeros((*weights_T.shape, 2)) if numbers is None else numbers.T
    (loss_T,) = _by_chunks(one, _rows(hidden_BLD), targets_T, switch_T)
    return jnp.sum(loss_T * weights_T)

  def sums(g, which: int):
    g = g.reshape(*g.shape[:-1], *shape)
    g = jnp.concatenate([g, jnp.sum(g, axis=-3, keepdims=True)], axis=-3)
    return jnp.sum(0.5 * jnp.square(g) if which else g, axis=-1)

  gradient = jax.grad(loss)(site_lib.tree_map(off, sites))
  return tuple(jax.tree.map(functools.partial(sums, which=i), gradient) for i in range(2))


def _logits(spec: TrainSpec, params, sites, h_TD):
  return transformer.head_logits(h_TD[None], params, sites, spec.model)[0]


def _nll(logits_TV, targets_T):
  picked = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=-1)[:, 0]
  return jax.nn.logsumexp(logits_TV, axis=-1) - picked


def _rows(x_BLD):
  return x_BLD.reshape(-1, x_BLD.shape[-1])


def _sums(values_T, batch):
  """[B] of values per token, of tokens that count."""
  weights_BL = batch["weights_BL"]
  return jnp.sum(values_T.reshape(weights_BL.shape) * weights_BL, axis=-1)


def _by_chunks(fn, *arrays):
  """fn of arrays [T, ...], so many rows at a time: of the vocabulary only a chunk exists."""
  count = arrays[0].shape[0]
  chunk = min(_CHUNK, count)
  padding = -count % chunk

  def split(x):
    if padding:  # of rows that are there: a key has no zero
      x = jnp.concatenate([x, x[:padding]])
    return x.reshape(-1, chunk, *x.shape[1:])

  found = jax.lax.map(lambda xs: fn(*xs), tuple(map(split, arrays)))
  return tuple(x.reshape(-1, *x.shape[2:])[:count] for x in found)


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
    found: dict[str, dict[str, dict[str, list[float]]]] = {
      place.name: {part: {"loss": [], "kl": []} for part in PARTS} for place in self.places
    }
    for i in range(len(self._batches[CHOOSE])):
      for which, source in enumerate(("loss", "kl")):
        sums = self._records.get(
          f"estimated {source}, batch {i}", functools.partial(self._estimate_one, i, which)
        )
        for name, parts in sums.items():
          for part, values in zip(PARTS, parts, strict=True):
            found[name][part][source] += values
    return {
      name: {part: {k: np.array(v) for k, v in kinds.items()} for part, kinds in parts.items()}
      for name, parts in found.items()
    }

  def _estimate_one(self, i: int, which: int) -> dict[str, Any]:
    batch = _on_device(self._batches[CHOOSE][i])
    if which:
      batch["targets_BL"] = jnp.asarray(self._reference(CHOOSE)[i][3])
    tree = self.programs.gradient(self._params, self.sites, batch)[which]
    self._say(f"gradients of batch {i + 1}, {('text', 'drawn targets')[which]}")
    found = {}
    for site, values in _pairs(self.sites, tree):
      values = np.asarray(values, np.float64)
      if not np.isfinite(values).all():
        raise UserError(f"site {site.name}: the gradient is not finite; --job=diagnose the weights")
      rows = values if site.layers else [values]
      found |= {name: _digits(row) for name, row in zip(site.layer_names, rows, strict=True)}
    return found

  def measure(self, label: str, on: Mapping[str, Sequence[float]], half: str) -> Measured:
    """A half with sites switched on: {name of a layer's site: (of x, of w)}; the others are off.

    Args:
      label: of the set in records, with which it is the same set in every call.
    """
    fresh = functools.partial(self._measure, label, on, half)
    found = self._records.get(f"measured on {half}: {label}", fresh)
    return Measured(self.tokens(half), *(np.array(found[k]) for k in ("base", "loss", "kl")))

  def _measure(self, label: str, on: Mapping[str, Sequence[float]], half: str) -> dict[str, Any]:
    switched = switch.with_switches(self.sites, switches(self.sites, on))
    layers = [self._first[name] for name, numbers in on.items() if any(numbers)]
    start = min((n for n in layers if n is not None), default=self.spec.model.num_layers - 1)
    found = {"base": [], "loss": [], "kl": []}
    for batch, (hidden, inputs, base, _) in zip(
      self._batches[half], self._reference(half), strict=True
    ):
      loss, kl = self.programs.measure(
        self._params, self._plain, switched, _on_device(batch), inputs[start],
        np.int32(start), hidden,
      )  # fmt: skip
      for key, values in (("base", base), ("loss", loss), ("kl", kl)):
        found[key] += _digits(np.asarray(values, np.float64))
    change = 100 * (sum(found["loss"]) / sum(found["base"]) - 1)
    self._say(f"{label}, {half}: loss {change:+.3f} %")
    return found

  def _reference(self, half: str) -> list[Any]:
    """Of every batch (hidden, inputs of layers, sums of losses, drawn targets), on the host."""
    if half not in self._references:
      found = []
      for i, batch in enumerate(self._batches[half]):
        key = jax.random.fold_in(jax.random.key(self.spec.seed), 2 * i + HALVES.index(half))
        made = self.programs.reference(self._params, self._plain, _on_device(batch), key)
        found.append(jax.device_get(made))
        self._say(f"BF16 forward pass, {half}, batch {i + 1}")
      self._references[half] = found
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
