"""INT8 beside four FP8 formats: errors of tensors, SmolLM2 quantized, QAT, FP8 weights in INT8.

what:      signal-to-noise ratios by class of tensor; KL and loss of two texts; both signs
command:   python experiments/2023_fp8_vs_int8/compare.py LAB      (resumes; then tables of README)
           LAB has runs/0p8m-python_docs-bf16-512steps-seed0 to seed2, of experiments/lab/
           run_queue.py; other trainings are written beside them, under fp8_vs_int8/
needs:     assets/smollm2-135m (make run), assets/corpora (experiments/corpora/prepare.py all)
hardware:  one CPU core, 6 GB of memory; CPU-seconds stand in results.json
"""

import argparse
import functools
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "lab")]

import numpy as np  # noqa: E402
import served  # noqa: E402
import tensors  # noqa: E402

from configs import base, pretrain_tiny  # noqa: E402
from fp8jax import statistics  # noqa: E402
from fp8jax.formats import E3M4_30, E4M3, E5M2, INT8, by_name  # noqa: E402
from fp8jax.jobs import dispatch  # noqa: E402
from fp8jax.recipe.gemm import Accumulation, Gemm  # noqa: E402
from fp8jax.recipe.served import channel  # noqa: E402
from fp8jax.run import restore  # noqa: E402

FORMATS = {
  "INT8": INT8, "E2M5": by_name("e2m5(inf=False, nan=False)"), "E3M4": E3M4_30, "E4M3": E4M3,
  "E5M2": E5M2,
}  # fmt: skip
TOKENS, SEEDS, STEPS = 1024, (0, 1, 2), 20
# An input channel in 64 is 32 times larger, the weights that read it as much smaller.
TIMES, EVERY = 32.0, 64
# Sites that read one kind of input.
CLASSES = {"q, k, v": ("attn/q", "attn/k", "attn/v"), "o": ("attn/o",),
           "gate, up": ("mlp/gate", "mlp/up"), "down": ("mlp/down",)}  # fmt: skip
AFTER_NORMS = ("q, k, v", "gate, up")
# Trained in, by the name in a configuration; bf16 is the control of as many more steps.
TRAINED = {"INT8": "int8", "E4M3": "fp8_dynamic", "BF16": "bf16"}


def gemm(name: str) -> Gemm:
  """W8A8: scales by output channel and by token, taken when it multiplies."""
  quant = channel(FORMATS[name])
  return Gemm(quant, quant, Accumulation.PRECISE)


def errors() -> dict[str, dict[str, list[float]]]:
  """{"x | q, k, v | outliers": {format: dB, layer by layer}} of one pass over the manual."""
  seen, found = tensors.captured(), {}
  for title, sites in CLASSES.items():
    for made in ("plain", "outliers") if title in AFTER_NORMS else ("plain",):
      for site in sites:
        for x, w, _ in seen[f"layers/{site}"]:
          # Rows are tokens and output channels; both are contracted along the last axis.
          both = {"x": x[:512].astype(np.float32), "w": w.T.astype(np.float32)}
          if made == "outliers":
            loud = np.arange(x.shape[1]) % EVERY == EVERY // 2
            both["x"] = both["x"] * np.where(loud, TIMES, 1.0)
            both["w"] = both["w"] * np.where(loud, 1 / TIMES, 1.0)
          for name, matrix in both.items():
            of = found.setdefault(f"{name} | {title} | {made}", {f: [] for f in FORMATS})
            for fmt, form in FORMATS.items():
              of[fmt].append(round(served.sqnr(matrix, channel(form)), 4))
  return found


def trained(lab: pathlib.Path, seed: int, how: str) -> str:
  """The folder of a model that trained 20 more steps in a format."""
  c = pretrain_tiny.get_config(f"0p8m-python_docs-{TRAINED[how]}")
  c.init.workdir = str(lab / f"runs/0p8m-python_docs-bf16-512steps-seed{seed}")
  c.init.weights_only = True
  c.precision.compute_dtype, c.precision.verify_fp8_gemms = "float32", False
  c.steps, c.seed, c.eval.tokens = STEPS, 100 + seed, 0
  c.optim.schedule, c.optim.warmup_steps = "cosine", 2
  c.optim.peak_lr, c.optim.min_lr = 2e-4, 2e-5
  folder = lab / f"fp8_vs_int8/{how}-seed{seed}"
  dispatch.call("train", c, base.get_config(), str(folder))
  return str(folder)


def qat(lab: pathlib.Path, seed: int) -> dict[str, dict]:
  """{"trained in, multiplied in": windows}, all against the BF16 model before."""
  model = served.tiny(str(lab / f"runs/0p8m-python_docs-bf16-512steps-seed{seed}"), TOKENS)
  found = {f"before, {name}": model.measure(gemm(name)) for name in ("INT8", "E4M3")}
  found["before, null"] = model.measure(gemm("INT8"), has_null=True)
  for how in TRAINED:
    params = restore.load_trained(model.spec, trained(lab, seed, how)).params
    found[f"{how}, unquantized"] = model.measure(Gemm(), params=params)
    for name in ("INT8", "E4M3"):
      found[f"{how}, {name}"] = model.measure(gemm(name), params=params)
  return found


def from_the_start(lab: pathlib.Path, seed: int) -> dict[str, dict]:
  """{format: windows} of a model that trained in FP8 as those of LAB did in BF16."""
  c = pretrain_tiny.get_config("0p8m-python_docs-block_128")
  c.steps, c.seed, c.eval.tokens = 512, seed, 0
  c.optim.warmup_steps = c.optim.decay_steps = 64
  c.kernels.matmul = "dequantized"
  folder = lab / f"fp8_vs_int8/block_128-seed{seed}"
  dispatch.call("train", c, base.get_config(), str(folder))
  model = served.tiny(str(folder), TOKENS)
  return {name: model.measure(gemm(name)) for name in ("INT8", "E4M3")}


def run(kept: served.Kept, lab: pathlib.Path):
  plain = functools.cache(lambda: served.smollm2(TOKENS))
  loud = functools.cache(lambda: served.with_outliers(plain(), TIMES, EVERY))
  for of, model in (("smollm2-135m", plain), ("smollm2-135m-outliers", loud)):
    for name in FORMATS:
      arm = f"{of}, {name}"
      kept(arm, lambda model=model, name=name: model().measure(
        gemm(name), has_null=name in ("INT8", "E4M3")))  # fmt: skip
  kept("tensors", errors)
  for seed in SEEDS:
    kept(f"qat, seed {seed}", lambda seed=seed: qat(lab, seed))
    kept(f"block_128, seed {seed}", lambda seed=seed: from_the_start(lab, seed))


# --- tables --------------------------------------------------------------------------------------


def _tensors(of) -> str:
  """Mean dB of the layers; INT8's beside E4M3's, with an interval over layers."""
  rows = []
  for name, by_format in of.items():
    tensor, title, made = name.split(" | ")
    row = [{"x": "activations of", "w": "weights"}[tensor] + f" {title}", made]
    row += [f"{np.mean(by_format[f]):.1f}" for f in FORMATS]
    difference = np.subtract(by_format["INT8"], by_format["E4M3"])
    i = statistics.bootstrap(difference, count=len(of))
    row += [served.shown(i, "+.1f"), _sign(i)]
    rows.append(row)
  head = ["dB of", "", *FORMATS, "INT8 minus E4M3", "ahead"]
  return tensors.markdown(head, rows)


def _sign(i) -> str:
  return "INT8" if i.low > 0 else "E4M3" if i.high < 0 else "no verdict"


def _models(arms) -> str:
  """KL of formats beside INT8's, both models and texts."""
  rows = []
  for model in ("smollm2-135m", "smollm2-135m-outliers"):
    of_model = {f: arms[f"{model}, {f}"] for f in FORMATS}
    for text, title in served.TEXTS.items():
      null = served.null(of_model.values(), text)
      for name, of in of_model.items():
        windows, int8 = of[text]["windows"], of_model["INT8"][text]["windows"]
        row = [model.removeprefix("smollm2-135m-").replace("smollm2-135m", "plain"), title, name,
               served.shown(served.kl(windows), ".4f"),
               served.shown(served.loss(windows), "+.2f")]  # fmt: skip
        if name == "INT8":
          rows.append([*row, "", f"{null:.1e}", ""])
          continue
        i = served.kl_against(windows, int8, 16)
        rows.append([*row, served.shown(i, "+.4f"), f"{null:.1e}", served.word(i, null)])
  head = ["SmolLM2", "text", "format", "KL", "loss, %", "KL minus INT8's", "null", ""]
  return tensors.markdown(head, rows)


def _loss(of, text: str) -> float:
  """Nats per token of what was made, over the unquantized BF16 model's, in percent."""
  w = np.asarray(of[text]["windows"])
  return 100 * (w[:, served.MADE_LOSS].sum() / w[:, served.LOSS].sum() - 1)


def _qat(arms) -> str:
  """Losses over seeds, in percent of the unquantized model that training began or ended with."""
  seeds = [
    arms[f"qat, seed {seed}"]
    | {f"block_128, {name}": of for name, of in arms[f"block_128, seed {seed}"].items()}
    for seed in SEEDS
  ]
  pairs = {
    "QAT in INT8 against BF16 steps, both in INT8": ("INT8, INT8", "BF16, INT8"),
    "QAT in E4M3 against BF16 steps, both in E4M3": ("E4M3, E4M3", "BF16, E4M3"),
    "QAT in INT8 against QAT in E4M3, each in its own": ("INT8, INT8", "E4M3, E4M3"),
    "trained in E4M3, taken to INT8 against itself in E4M3": ("E4M3, INT8", "E4M3, E4M3"),
    "trained in E4M3, taken to INT8 against QAT in INT8": ("E4M3, INT8", "INT8, INT8"),
    "trained in block_128 from the start, INT8 against E4M3": (
      "block_128, INT8",
      "block_128, E4M3",
    ),
    "INT8: trained in block_128 from the start against BF16": ("block_128, INT8", "before, INT8"),
    "null: INT8 before any step, norms one ulp larger": None,
  }
  rows = []
  for title, pair in pairs.items():
    row = [title]
    for text in served.TEXTS:
      if pair:
        values = [_loss(s[pair[0]], text) - _loss(s[pair[1]], text) for s in seeds]
      else:
        of = [s["before, null"][text] for s in seeds]
        values = [_loss({text: {"windows": o["null"]}}, text) - _loss({text: o}, text) for o in of]
      e = statistics.estimate(values, 14 if pair else 1)
      row.append(f"{e.mean:+.3f} [{e.low:+.3f}, {e.high:+.3f}]")
      row.append("" if not pair else statistics.verdict(e.low, e.high, 0.0, (
        "lower", "higher", "no verdict: too short")))  # fmt: skip
    rows.append(row)
  head = ["loss, % of the unquantized", "manual", "", "Brown", ""]
  return tensors.markdown(head, rows)


def tables(arms) -> str:
  parts = []
  if "tensors" in arms:
    parts += ["Signal-to-noise ratio, mean of layers:", _tensors(arms["tensors"])]
  if all(f"{m}, {f}" in arms for m in ("smollm2-135m", "smollm2-135m-outliers") for f in FORMATS):
    parts += ["The model:", _models(arms)]
  if all(f"{of}, seed {seed}" in arms for of in ("qat", "block_128") for seed in SEEDS):
    parts += [f"QAT of {STEPS} steps and training in FP8, three seeds:", _qat(arms)]
  return "\n\n".join(parts)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("lab", type=pathlib.Path)
  results = served.Kept(HERE / "results.json")
  run(results, parser.parse_args().lab)
  tensors.write_table(HERE, tables(results.arms))
