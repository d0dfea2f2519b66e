"""Language models whose linear layers multiply in given formats, in memory: nothing is exported.

A model is compared with itself unquantized, in float32, window by window on the same tokens.
`2026_ptq/smollm2.py` has the texts and the sums.
"""

import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "experiments/2026_ptq")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import smollm2 as smollm2_lib  # noqa: E402

from configs import pretrain_tiny  # noqa: E402
from fp8jax import params as params_lib  # noqa: E402
from fp8jax import records, statistics  # noqa: E402
from fp8jax.config import resolve  # noqa: E402
from fp8jax.evaluation import divergence  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models import transformer  # noqa: E402
from fp8jax.models.hf import weights as hf_weights  # noqa: E402
from fp8jax.ops import site as site_lib  # noqa: E402
from fp8jax.ops import site_tree  # noqa: E402
from fp8jax.ptq import fold  # noqa: E402
from fp8jax.ptq import layers as layers_lib  # noqa: E402
from fp8jax.quantization import amax_history, quantize, stored_matrix  # noqa: E402
from fp8jax.recipe import rules  # noqa: E402
from fp8jax.recipe.gemm import Gemm, Recipe  # noqa: E402
from fp8jax.recipe.quant import Quant  # noqa: E402
from fp8jax.run import evaluator, provenance, restore  # noqa: E402

TEXTS = {"manual": "manual", "brown": "Brown"}
# Columns of a window's sums.
KL, SAME, TOKENS, LOSS, MADE_LOSS, WITH_NEXT = range(6)


@dataclasses.dataclass
class Model:
  """A language model and texts to compare on.

  Attributes:
    params: float32 or as they are stored.
    texts: {name: batches}, of which the calibration of static scales is no part.
    calibration: tokens [B, L] of another stretch of the first text.
  """

  name: str
  spec: Any
  params: Any
  texts: dict[str, list[divergence.Batch]]
  calibration: list[np.ndarray]

  @functools.cached_property
  def source(self) -> dict[str, list[np.ndarray]]:
    """Logits of the unquantized model."""
    return self.logits(self.spec.sites(evaluator.BF16), self.params)

  def logits(self, sites, params) -> dict[str, list[np.ndarray]]:
    run = divergence.forward(self.spec, sites, [b for of in self.texts.values() for b in of])
    made = map(params_lib.on_host, run(params))
    return {name: [next(made) for _ in of] for name, of in self.texts.items()}

  @functools.cached_property
  def amaxes(self) -> dict[str, float]:
    """{"layers/3/mlp/up": largest magnitude of its inputs on the calibration text}."""
    text, found = layers_lib.Layers(self.spec, self.params, self.calibration), {}
    for layer in range(self.spec.model.num_layers):
      own = layers_lib.layer_of(self.params, layer)
      moments = text.moments(own)
      for mixer in transformer.mixers(self.spec.model):
        for name, sites in layers_lib.sites_by_input(mixer).items():
          amax = float(jnp.max(moments[mixer.key][name].amax_K))
          found |= {f"layers/{layer}/{mixer.key}/{site}": amax for site in sites}
      text.advance(own)
    return found

  def sites(self, fwd: Gemm, pattern: str = "layers/.*"):
    """All linear layers multiply so; static scales are the calibration's."""
    name = rules.add(Recipe("measured", fwd))
    backends = site_tree.Backends("reference", self.spec.device, self.spec.tokens_per_device)
    tree = site_tree.build_sites(
      transformer.site_params(self.spec.model), self.spec.model.dims,
      ((pattern, name), (".*", "bf16")), self.spec.run.layout, backends=backends,
    )  # fmt: skip

    def one(site):
      if site.scaling_state is None:
        return site
      amax_3 = jnp.float32([[self.amaxes[layer], 1.0, 1.0] for layer in site.layer_names])
      return dataclasses.replace(site, scaling_state=amax_history.calibrated(site.recipe, amax_3))

    return site_lib.tree_map(one, tree)

  def measure(self, fwd: Gemm, has_null: bool = False, params=None, codes=None) -> dict[str, dict]:
    """{text: {"windows": [windows, 6], "null": the same of the nudged arm, "floor": their KL}}.

    Args:
      fwd: how linear layers multiply; weights are quantized once.
      has_null: whether the arm runs again with norms one ulp larger.
      params: others than the model's, which stays what they are compared with.
      codes: {site: codes of its weight}; None: the nearest.
    """
    sites = self.sites(fwd)
    params = self.params if params is None else params
    if fwd.rhs is not None:
      params = coded(self.spec, params, fwd.rhs, codes)
    made, found = self.logits(sites, params), {}
    nudged = self.logits(sites, divergence.nudged(params)) if has_null else {}
    for name, batches in self.texts.items():
      sums = smollm2_lib.windows(batches, self.source[name], made[name])
      found[name] = {"windows": sums.round(6).tolist()}
      if has_null:
        null = smollm2_lib.windows(batches, self.source[name], nudged[name])
        floor = smollm2_lib.windows(batches, made[name], nudged[name])
        found[name]["null"] = null.round(6).tolist()
        found[name]["floor"] = float(floor[:, KL].sum() / floor[:, TOKENS].sum())
    return found


def smollm2(tokens: int, window: int = 128) -> Model:
  """SmolLM2-135M on held-out pages of the Python manual and on Brown."""
  c = smollm2_lib.config("bf16", "")
  c.weights.hf, c.seq_len, c.eval.batch = smollm2_lib.MODEL, window, 8
  needs = smollm2_lib.jobs_table.JOBS["export"].needs
  spec = resolve.resolve(c, 1, choose.current_device(), needs=needs)
  params, _ = hf_weights.load_params(smollm2_lib.MODEL, spec.model)
  texts = smollm2_lib.texts(spec, 2 * tokens)
  return _model("smollm2-135m", spec, params, texts)


def tiny(workdir: str, tokens: int, window: int = 128, size: str = "0p8m") -> Model:
  """A model of the lab of a size of pretrain_tiny, on the manual and on Brown, in float32."""
  c = pretrain_tiny.get_config(f"{size}-python_docs-float32")
  c.seq_len, c.eval.batch = window, 8
  spec = resolve.resolve(c, 1, choose.current_device())
  params = restore.load_trained(spec, workdir).params
  texts = smollm2_lib.texts(spec, 2 * tokens)
  return _model(pathlib.Path(workdir).name, spec, params, texts)


def _model(name: str, spec, params, texts) -> Model:
  """The first half of every text is for calibration, the other to compare on."""
  halves = {text: len(of) // 2 for text, of in texts.items()}
  calibration = [b.tokens_BL for b in texts["manual"][: halves["manual"]]]
  rest = {text: of[halves[text] :][: halves[text]] for text, of in texts.items()}
  return Model(name, spec, params, rest, calibration)


def with_outliers(model: Model, times: float = 32.0, every: int = 64) -> Model:
  """The same function with outliers: one input channel in so many after each norm is so many times
  larger, and the weights that read it are as much smaller. A power of two, so that float32
  computes the same numbers, but for sums in the norm.
  """
  spec, stacked = model.spec, dict(model.params["layers"])
  for mixer in transformer.mixers(spec.model):
    own = {name: np.asarray(x, np.float32) for name, x in stacked[mixer.key].items()}
    for name, maker in mixer.makers.items():
      if maker.is_gain:
        width = spec.model.hidden_size
        scale = np.where(np.arange(width) % every == every // 2, 1 / times, 1.0)
        scale = np.broadcast_to(scale, (spec.model.num_layers, width))
        own = fold.scaled(own, mixer, name, scale, spec.model)
    stacked[mixer.key] = {name: jnp.asarray(x) for name, x in own.items()}
  params = {**model.params, "layers": stacked}
  return Model(f"{model.name}-outliers", spec, params, model.texts, model.calibration)


@functools.partial(jax.jit, static_argnames="quant")
def _nearest(w_NK, quant: Quant):
  return quantize.quantize(w_NK, quant)


def coded(spec, params, quant: Quant, codes=None):
  """The parameters with the linear layers' weights as codes, which products multiply as they are.

  Args:
    codes: {site: a function that reads its ScaledMatrix}; None: the nearest of `quant`.
  """
  stacked = dict(params["layers"])
  for mixer in transformer.mixers(spec.model):
    own, declared = dict(stacked[mixer.key]), mixer.params(spec.model)
    for site in mixer.sites:
      w, inputs = own[site.name], declared[site.name].inputs or 0
      datas, scales = [], []
      for layer in range(spec.model.num_layers):
        name = f"layers/{layer}/{mixer.key}/{site.name}"
        if codes is None:
          one = _nearest(layers_lib.matrix(jnp.asarray(w[layer], jnp.float32), inputs), quant)
        else:
          one = codes[name]()
        datas.append(np.asarray(layers_lib.weight(jnp.asarray(one.data), w[layer])))
        scales.append(np.asarray(one.scale).T)
      data, scale = jnp.asarray(np.stack(datas)), jnp.asarray(np.stack(scales))
      own[site.name] = stored_matrix.StoredMatrix(data, scale, inputs, quant)
    stacked[mixer.key] = own
  return {**params, "layers": stacked}


# --- numbers of windows --------------------------------------------------------------------------


def _ratio(numerators, denominators, count: int) -> statistics.Interval:
  """sum(numerators) / sum(denominators) with Student's interval over windows, of a linearized ratio
  (Cochran 1977, section 6.4): a bootstrap of few windows has no tails.
  """
  used = denominators > 0
  ratio = numerators[used].sum() / denominators[used].sum()
  residuals = (numerators - ratio * denominators)[used] / denominators[used].mean()
  e = statistics.estimate(residuals, count)
  return statistics.Interval(float(ratio), float(ratio + e.low), float(ratio + e.high), "student")


def kl(windows, count: int = 1) -> statistics.Interval:
  """Nats per token."""
  w = np.asarray(windows)
  return _ratio(w[:, KL], w[:, TOKENS], count)


def loss(windows, count: int = 1) -> statistics.Interval:
  """How much higher the loss is, in percent."""
  w = np.asarray(windows)
  return _ratio(100 * (w[:, MADE_LOSS] - w[:, LOSS]), w[:, LOSS], count)


def kl_against(windows, others, count: int = 1) -> statistics.Interval:
  """KL minus another arm's, paired by window, nats per token."""
  mine, its = np.asarray(windows), np.asarray(others)
  return _ratio(mine[:, KL] - its[:, KL], its[:, TOKENS], count)


def null(arms, text: str) -> float:
  """The largest change of KL by an ulp, nats per token, of the arms that have a null arm."""
  changes = [kl_against(of[text]["null"], of[text]["windows"]).estimate
             for of in arms if "null" in of[text]]  # fmt: skip
  return max(map(abs, changes))


def word(i: statistics.Interval, floor: float) -> str:
  """Of a paired difference: "lower", "higher", or none beyond the null arm's spread."""
  if i.high < -floor:
    return "lower"
  return "higher" if i.low > floor else "no verdict: too short"


def shown(i: statistics.Interval, form: str) -> str:
  return f"{i.estimate:{form}} [{i.low:{form}}, {i.high:{form}}]"


# --- errors of matrices --------------------------------------------------------------------------


def sqnr(x, quant: Quant) -> float:
  """Signal-to-noise ratio in dB of a matrix [rows, contraction] that is quantized so."""
  x = np.asarray(x, np.float32)
  made = np.asarray(_nearest(jnp.asarray(x), quant).dequantize(), np.float64)
  noise = np.square(made - x).sum()
  return float(10 * np.log10(np.square(x, dtype=np.float64).sum() / max(noise, 1e-300)))


class Kept:
  """A results file whose arms are there one by one, so that a run goes on."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self.arms = json.loads(path.read_text())["arms"] if path.exists() else {}

  def __call__(self, name: str, make) -> Any:
    """The arm of this name, made if it is not there."""
    if name not in self.arms:
      began = time.process_time()
      self.arms[name] = make()
      origin = provenance.provenance({}, "texts and seeds in the script", 0)
      record = {"provenance": origin, "arms": self.arms}
      self.path.parent.mkdir(parents=True, exist_ok=True)
      records.write_atomic(str(self.path), json.dumps(record) + "\n")
      print(f"{name}: {time.process_time() - began:.0f} CPU-seconds", flush=True)
    return self.arms[name]
