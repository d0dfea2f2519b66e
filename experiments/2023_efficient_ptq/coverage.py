"""Share of cells, network x text or task x seed, that 8 bits leave within 1 % of float32.

what:      passes of E5M2, E4M3, E3M4, mixed and INT8, static and dynamic; clustered by network
command:   python experiments/2023_efficient_ptq/coverage.py LAB   (resumes; the tables of README)
           LAB has runs/0p8m-python_docs-bf16-512steps-seed0 to seed3, of experiments/lab/
           run_queue.py
needs:     assets/smollm2-135m (make run), assets/corpora (experiments/corpora/prepare.py all),
           pip install scikit-learn
hardware:  one CPU core, 4 GB of memory; CPU-seconds stand in results.json
"""

import argparse
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "lab")]

import images  # noqa: E402
import numpy as np  # noqa: E402
import served  # noqa: E402
import tensors  # noqa: E402

from fp8jax import statistics  # noqa: E402
from fp8jax.formats import E3M4_30, E4M3, E5M2, INT8, Format  # noqa: E402
from fp8jax.recipe.gemm import Accumulation, Gemm, Recipe  # noqa: E402
from fp8jax.recipe.quant import Quant, Scale, Static  # noqa: E402
from fp8jax.recipe.served import channel  # noqa: E402

TOKENS, SEEDS, IMAGE_SEEDS, BAR = 1024, (0, 1, 2, 3), (0, 1, 2), 1.0
# (weights, activations); E5M2's activations are cast as they are.
FORMATS: dict[str, tuple[Format, Format]] = {
  "INT8": (INT8, INT8), "E5M2": (E5M2, E5M2), "E4M3": (E4M3, E4M3), "E3M4": (E3M4_30, E3M4_30),
  "E3M4, E4M3": (E3M4_30, E4M3),
}  # fmt: skip
SCHEMES = ("static", "dynamic")
# What the paper advises: E4M3 for text, E3M4 for images.
ADVISED = "E4M3 for text, E3M4 for images"


def gemm(name: str, scheme: str) -> Gemm:
  """Scales of weights by channel, of activations by tensor."""
  w, x = FORMATS[name]
  if x == E5M2:
    return Gemm(Quant(x, scale=Scale.ONE), channel(w), Accumulation.PRECISE)
  lhs = Quant(x, source=Static()) if scheme == "static" else Quant(x)
  return Gemm(lhs, channel(w), Accumulation.PRECISE)


def of_language(model: served.Model) -> dict[str, dict]:
  """{text: {"format | static": percent of loss}} with the null arm of INT8."""
  found: dict[str, dict] = {text: {} for text in model.texts}
  for name in FORMATS:
    for text, of in model.measure(gemm(name, "static"), has_null=name == "INT8").items():
      found[text][f"{name} | static"] = served.loss(of["windows"]).estimate
      if name == "INT8":
        found[text]["null"] = served.loss(of["null"]).estimate
  return found


def of_images(name: str) -> dict[str, dict]:
  """{"seed 0": {"format | scheme": percent of accuracy lost}}, and accuracies of float32."""
  found = {}
  for seed in IMAGE_SEEDS:
    params = images.trained(name, seed)
    base = images.measured(name, params, None)["accuracy"]
    cell = {"float32": base}
    for scheme in SCHEMES:
      for fmt in FORMATS:
        recipe = Recipe("measured", gemm(fmt, scheme))
        made = images.measured(name, params, recipe)["accuracy"]
        cell[f"{fmt} | {scheme}"] = 100 * (base - made) / base
    recipe = Recipe("measured", gemm("INT8", "static"))
    made = images.measured(name, images.nudged(params), recipe)["accuracy"]
    cell["null"] = 100 * (base - made) / base
    found[f"seed {seed}"] = cell
  return found


def run(kept: served.Kept, lab: pathlib.Path):
  """Cheap ones of every kind first."""
  models = {}
  for made in (lambda m: m, served.with_outliers):
    more = ", outliers" * (made is served.with_outliers)
    for seed in SEEDS:
      folder = str(lab / f"runs/0p8m-python_docs-bf16-512steps-seed{seed}")
      models[f"0.8M, seed {seed}{more}"] = lambda f=folder, made=made: made(served.tiny(f, TOKENS))
    models[f"SmolLM2-135M{more}"] = lambda made=made: made(served.smollm2(TOKENS))
  first = ("mlp", "0.8M, seed 0", "SmolLM2-135M", "0.8M, seed 0, outliers",
           "SmolLM2-135M, outliers")  # fmt: skip
  for name in (*first, *images.NETWORKS, *models):
    if name in models:
      kept(name, lambda name=name: of_language(models[name]()))
    else:
      kept(name, lambda name=name: of_images(name))


# --- the table -----------------------------------------------------------------------------------


def cells(arms) -> list[tuple[str, bool, dict]]:
  """(network that clusters, whether it reads text, {"format | scheme": percent lost})."""
  made = []
  for name, of in arms.items():
    for cell in of.values():
      made.append((name.partition(",")[0], name not in images.NETWORKS, dict(cell)))
  for _, is_text, cell in made:
    for scheme in SCHEMES:
      best = f"{'E4M3' if is_text else 'E3M4'} | {scheme}"
      if best in cell:
        cell[f"{ADVISED} | {scheme}"] = cell[best]
  return made


def clustered(values: list[tuple[str, float]], count: int) -> statistics.Interval:
  """A mean over cells whose interval resamples networks."""
  names = sorted({name for name, _ in values})
  sums = [sum(v for n, v in values if n == name) for name in names]
  sizes = [sum(n == name for n, _ in values) for name in names]
  return statistics.bootstrap(np.array(sums, float), np.array(sizes, float), count=count)


def table(arms) -> str:
  every, rows = cells(arms), []
  count = 2 * len(FORMATS)  # differences to INT8: four formats and the advice, two schemes
  null = [(c["null"] <= BAR) - (c["INT8 | static"] <= BAR) for *_, c in every]
  for scheme in SCHEMES:
    for name in (*FORMATS, ADVISED):
      arm, base = f"{name} | {scheme}", f"INT8 | {scheme}"
      of = [c for c in every if arm in c[2]]
      row = [name, scheme]
      for wanted in (True, False):
        passes = [c[arm] <= BAR for _, is_text, c in of if is_text == wanted]
        row.append(f"{sum(passes)} of {len(passes)}")
      row.append(f"{100 * np.mean([c[arm] <= BAR for *_, c in of]):.0f} %")
      if name == "INT8":
        rows.append([*row, "", ""])
        continue
      values = [(n, 100.0 * ((c[arm] <= BAR) - (c[base] <= BAR))) for n, _, c in of]
      i = clustered(values, count)
      word = "more" if i.low > 0 else "fewer" if i.high < 0 else "no verdict: too short"
      rows.append([*row, served.shown(i, "+.0f"), word])
  head = ["weights, activations", "scales", "text", "images", "pass",
          "points against INT8", ""]  # fmt: skip
  networks = len({n for n, *_ in every})
  return (f"{len(every)} cells of {networks} networks; null: {sum(map(abs, null))} cells of INT8 "
          f"change by an ulp.\n\n{tensors.markdown(head, rows)}")  # fmt: skip


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("lab", type=pathlib.Path)
  results = served.Kept(HERE / "results.json")
  run(results, parser.parse_args().lab)
  tensors.write_table(HERE, table(results.arms))
