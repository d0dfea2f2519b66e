"""Minifloats and integers of 3 to 8 bits x techniques: KL, loss, BOPs and bytes.

what:      a model of 3M parameters, weights and activations in a format; one linear layer of
           SmolLM2, its weight in a format
command:   python experiments/2023_minifloats/grid.py LAB   (resumes; then tables and picture)
           LAB has runs/3m-python_docs-bf16-512steps-seed0, of experiments/lab/run_queue.py
needs:     assets/smollm2-135m (make run), assets/corpora (experiments/corpora/prepare.py all)
hardware:  one CPU core, 3 GB of memory; CPU-seconds stand in results.json
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "lab")]

import altair as alt  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import served  # noqa: E402
import tensors  # noqa: E402

from fp8jax.formats import E2M1, E2M3, E3M2, E3M4_30, E4M3, E5M2, Format, by_name  # noqa: E402
from fp8jax.models import transformer  # noqa: E402
from fp8jax.phases.schedule import Phase, Precision  # noqa: E402
from fp8jax.ptq import apply, methods  # noqa: E402
from fp8jax.ptq import layers as layers_lib  # noqa: E402
from fp8jax.ptq import run as ptq_run  # noqa: E402
from fp8jax.recipe import rules  # noqa: E402
from fp8jax.recipe.gemm import Accumulation, Gemm, Recipe  # noqa: E402
from fp8jax.recipe.served import channel  # noqa: E402
from fp8jax.report import charts, page  # noqa: E402
from fp8jax.search import cost  # noqa: E402

TOKENS, LAYER, SITE = 4096, 15, "mlp/up"


def _without_specials(exponent: int, mantissa: int) -> Format:
  return by_name(f"e{exponent}m{mantissa}(inf=False, nan=False)")


# A minifloat has 2 exponent bits and 1 mantissa bit at least, so that 3 bits are an integer.
FORMATS: dict[str, Format] = {f"INT{bits}": by_name(f"int{bits}") for bits in range(3, 9)} | {
  "E2M1": E2M1, "E3M1": _without_specials(3, 1), "E2M2": _without_specials(2, 2), "E3M2": E3M2,
  "E2M3": E2M3, "E4M2": _without_specials(4, 2), "E3M3": _without_specials(3, 3),
  "E2M4": _without_specials(2, 4), "E5M2": E5M2, "E4M3": E4M3, "E3M4": E3M4_30,
  "E2M5": _without_specials(2, 5),
}  # fmt: skip
TECHNIQUES = ("smooth_quant", "gptq", "learned_rounding(steps=100)")
# Techniques where rounding costs most; to the nearest in all.
WITH_TECHNIQUES = ("INT3", "INT4", "E2M1", "INT6", "E2M3", "E3M2")
ARMS = [(name, "") for name in FORMATS]
ARMS += [(name, technique) for technique in TECHNIQUES for name in WITH_TECHNIQUES]


def gemm(name: str) -> Gemm:
  quant = channel(FORMATS[name])
  return Gemm(quant, quant, Accumulation.PRECISE)


def of_model(model: served.Model, name: str, technique: str) -> dict:
  """Windows of a model after post-training quantization in memory."""
  if not technique:
    return model.measure(gemm(name), has_null=True)
  of_layers = rules.add(Recipe("measured", gemm(name)))
  of = (("layers/.*", of_layers), (".*", "bf16"))
  spec = dataclasses.replace(model.spec, precision=Precision((Phase(0, of),)))
  chosen = methods.in_order([methods.by_name(technique)])
  with tempfile.TemporaryDirectory() as folder:
    made = ptq_run.quantize(
      spec, model.params, model.calibration, chosen, folder, lambda *_: None)  # fmt: skip
    return model.measure(gemm(name), params=made.params, codes=made.codes)


@functools.cache
def _layer():
  """(weight [N, K], moments of its inputs) of one linear layer of SmolLM2."""
  model = served.smollm2(2048)
  text = layers_lib.Layers(model.spec, model.params, model.calibration)
  for layer in range(LAYER):
    text.advance(layers_lib.layer_of(model.params, layer))
  own, (key, site) = layers_lib.layer_of(model.params, LAYER), SITE.split("/")
  (mixer,) = (m for m in transformer.mixers(model.spec.model) if m.key == key)
  (source,) = (name for name, of in layers_lib.sites_by_input(mixer).items() if site in of)
  inputs = mixer.params(model.spec.model)[site].inputs or 0
  w_NK = layers_lib.matrix(jnp.asarray(own[key][site], jnp.float32), inputs)
  return w_NK, text.moments(own)[key][source]


def of_layer(name: str) -> dict[str, float]:
  """{technique: squared error of the outputs over their squares}, of the weight alone."""
  (w_NK, moments), found = _layer(), {}
  total = float(jnp.sum(moments.errors(w_NK)))
  mean_K = np.asarray(moments.sum_K / moments.count, np.float64)
  for technique in ("round_to_nearest", "gptq", "learned_rounding(steps=100)"):
    chosen = (methods.by_name(technique),)
    ((codes, _),) = apply.to_matrices([w_NK], moments, channel(FORMATS[name]), chosen, SITE)
    error_NK = codes.dequantize() - w_NK
    error = float(jnp.sum(moments.errors(error_NK)))
    # A bias takes out the mean error of every output.
    mean_N = np.asarray(error_NK, np.float64) @ mean_K
    corrected = error - float(moments.count) * np.square(mean_N).sum()
    found[technique.partition("(")[0]] = error / total
    found[f"{technique.partition('(')[0]}, bias"] = corrected / total
  return found


def run(kept: served.Kept, lab: pathlib.Path):
  folder = str(lab / "runs/3m-python_docs-bf16-512steps-seed0")
  model = functools.cache(lambda: served.tiny(folder, TOKENS, size="3m"))
  for name, technique in ARMS:
    arm = f"{name}, {technique or 'nearest'}"
    kept(arm, lambda n=name, t=technique: of_model(model(), n, t))
  for name in FORMATS:
    kept(f"layer, {name}", lambda n=name: of_layer(n))


# --- tables and picture --------------------------------------------------------------------------


@functools.cache
def _macs() -> dict[str, int]:
  from configs import pretrain_tiny
  from fp8jax.config import resolve
  from fp8jax.kernels import choose

  c = pretrain_tiny.get_config("3m-python_docs-float32")
  of = cost.macs_per_token(resolve.resolve(c, 1, choose.current_device()).model)
  return {k: v for k, v in of.items() if k != "head"}


def costs(name: str) -> tuple[float, float]:
  """(BOPs of the linear layers as a share of BF16's, bytes per weight as a share of BF16's)."""
  recipe, macs = Recipe("measured", gemm(name)), _macs()
  bops = cost.bops(macs, dict.fromkeys(macs, recipe)) / (cost.WIDE**2 * sum(macs.values()))
  return bops, FORMATS[name].bits / 16


def points(arms) -> list[tuple[str, str, float, float, dict]]:
  """(format, technique, BOPs, bytes, windows by text) of arms that have run."""
  made = []
  for name, technique in ARMS:
    arm = f"{name}, {technique or 'nearest'}"
    if arm in arms:
      made.append((name, technique or "nearest", *costs(name), arms[arm]))
  return made


def best(rows, names) -> tuple | None:
  """The arm of these formats with the least KL on the manual."""
  of = [r for r in rows if r[0] in names]
  return min(of, key=lambda r: served.kl(r[4]["manual"]["windows"]).estimate, default=None)


def front(rows) -> set[tuple[str, str]]:
  """Arms of which no cheaper or equally dear one has less KL on the manual."""
  kl = {(r[0], r[1]): served.kl(r[4]["manual"]["windows"]).estimate for r in rows}
  return {
    (r[0], r[1]) for r in rows
    if not any(o[2] <= r[2] and kl[o[0], o[1]] < kl[r[0], r[1]] for o in rows)
  }  # fmt: skip


def _of_model(arms) -> str:
  rows, on_front = points(arms), front(points(arms))
  table = []
  for name, technique, bops, size, of in sorted(rows, key=lambda r: (r[2], r[0], r[1])):
    row = [name, technique, f"{bops:.4f}", f"{size:.4f}"]
    for text in served.TEXTS:
      windows = of[text]["windows"]
      row += [served.shown(served.kl(windows), ".3g"), served.shown(served.loss(windows), "+.2f")]
    table.append([*row, "yes" if (name, technique) in on_front else ""])
  head = ["format", "technique", "BOPs", "bytes", "KL, manual", "loss, %", "KL, Brown", "loss, %",
          "on the front"]  # fmt: skip
  return tensors.markdown(head, table)


def _of_bits(arms) -> str:
  """The best minifloat arm beside the best integer one, by bits."""
  rows, table = points(arms), []
  null = {t: served.null([r[4] for r in rows if r[1] == "nearest"], t) for t in served.TEXTS}
  for bits in range(4, 9):
    floats = best(rows, [n for n, f in FORMATS.items() if f.bits == bits and n[0] == "E"])
    integer = best(rows, [f"INT{bits}"])
    if floats is None or integer is None:
      continue
    row = [str(bits), f"{floats[0]}, {floats[1]}", f"{integer[0]}, {integer[1]}"]
    for text in served.TEXTS:
      i = served.kl_against(floats[4][text]["windows"], integer[4][text]["windows"], 10)
      row += [served.shown(i, "+.2g"), served.word(i, null[text])]
    table.append(row)
  head = ["bits", "minifloat", "integer", f"KL minus INT's, manual, null {null['manual']:.1e}", "",
          f"Brown, null {null['brown']:.1e}", ""]  # fmt: skip
  return tensors.markdown(head, table)


def _of_layer(arms) -> str:
  rows = []
  for name in sorted(FORMATS, key=lambda n: (FORMATS[n].bits, n)):
    if (of := arms.get(f"layer, {name}")) is not None:
      rows.append([name, *(f"{100 * v:.3g}" for v in of.values())])
  head = ["format", "nearest", "with a bias", "GPTQ", "with a bias", "learned rounding",
          "with a bias"]  # fmt: skip
  return tensors.markdown(head, rows)


def picture(arms) -> alt.TopLevelMixin:
  """KL on the manual against BOPs and against bytes."""
  values = [
    dict(format=name, kind="integer" if name[0] == "I" else "minifloat", bops=bops, bytes=size,
         technique=technique.partition("(")[0].replace("_", " "),
         kl=served.kl(of["manual"]["windows"]).estimate)
    for name, technique, bops, size, of in points(arms)
  ]  # fmt: skip
  drawn = []
  for field, title in (("bops", "BOPs, share of BF16's"), ("bytes", "bytes, share of BF16's")):
    x = alt.X(f"{field}:Q", title=title, scale=alt.Scale(type="log", nice=False))
    y = alt.Y("kl:Q", title="KL, nats per token", scale=alt.Scale(type="log"))
    of = dict(x=x, y=y, color=alt.Color("kind:N", title=None))
    shape = alt.Shape("technique:N", title=None)
    marks = alt.Chart(alt.Data(values=values)).mark_point(filled=True, size=50)
    drawn.append(marks.encode(**of, shape=shape, tooltip=["format:N"]).properties(
      width=320, height=240))  # fmt: skip
  return alt.hconcat(*drawn)


def tables(arms) -> str:
  parts = []
  if points(arms):
    parts += ["The model:", _of_model(arms), "By bits, the best arm of each kind:", _of_bits(arms)]
  if any(name.startswith("layer, ") for name in arms):
    parts += ["One linear layer, squared error of its outputs in percent of their squares:",
              _of_layer(arms)]  # fmt: skip
  return "\n\n".join(parts)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("lab", type=pathlib.Path)
  results = served.Kept(HERE / "results.json")
  run(results, parser.parse_args().lab)
  tensors.write_table(HERE, tables(results.arms))
  with charts.unchecked():
    page.pictures(str(HERE / "pareto"), charts.spec(
      charts.themed(picture(results.arms)), checked=False))  # fmt: skip
