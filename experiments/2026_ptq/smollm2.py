"""SmolLM2-135M quantized after training: served formats to the nearest, methods in four of them.

what:      KL, share of equal most likely tokens, and loss of folders that servers read
command:   python experiments/2026_ptq/smollm2.py run DIR     (resumes; a file per arm in DIR)
           python experiments/2026_ptq/smollm2.py task DIR    (resumes; the best two of a format)
           python experiments/2026_ptq/smollm2.py table DIR   (results.json, the table of README)
needs:     assets/smollm2-135m (make run), assets/corpora/brown (experiments/corpora/prepare.py)
hardware:  two CPU cores, 6 GB; the seconds of an arm stand in the table

An arm is a --job=quantize with 32,768 calibration tokens of the Python manual. Its folder is read
back in its codes and multiplied as a server does, activations quantized, on two texts: held-out
pages of the manual, and Brown, of which no token was calibrated on. Everything is paired by window
with the unquantized model; intervals are bootstraps over windows at 95 % together for the arms of a
format. The noise floor is the folder against itself one ulp away, quantized alike.

The task is for the two arms of least KL of every format that has methods: which of eight words
comes next in Brown. The seven wrong ones are right in other questions, drawn as often as they are
there. The likeliest one after all that stands before it in its window is the answer.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import shutil
import sys
import tempfile
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent / "lab")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from configs import base, smollm2_cpt  # noqa: E402
from fp8jax import params as params_lib  # noqa: E402
from fp8jax import records, statistics  # noqa: E402
from fp8jax.config import resolve  # noqa: E402
from fp8jax.evaluation import divergence  # noqa: E402
from fp8jax.export import checks, served_pass  # noqa: E402
from fp8jax.export import fp8 as fp8_export  # noqa: E402
from fp8jax.jobs import dispatch  # noqa: E402
from fp8jax.jobs import table as jobs_table  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models.hf import names  # noqa: E402
from fp8jax.models.hf import tensors as hf_tensors  # noqa: E402
from fp8jax.models.hf import weights as hf_weights  # noqa: E402
from fp8jax.run import evaluator, provenance  # noqa: E402

MODEL = str(ROOT / "assets/smollm2-135m")
TOKENS, WINDOW, ROWS = 4096, 256, 4  # of a text
WINDOWS, PER_WINDOW, SKIPPED, CHOICES = 64, 16, 32, 8  # of the task

NEAREST = (
  "fp8", "fp8_channel_static", "fp8_dynamic", "fp8_240_dynamic", "int8", "int8_static", "w8a16",
  "w4a16_g64", "w4afp8_g64", "mxfp8_ste", "mxfp4a16", "mxfp4_ste", "nvfp4a16", "nvfp4_ste",
  "nvfp4a16_4or6", "nvfp4_ste_4or6", "fp8_gaudi2",
)  # fmt: skip
_WEIGHTS = ("rotate", "equalize", "awq", "gptq", "learned_rounding", "awq+gptq", "rotate+gptq")
# INT4 and MXFP4 of weights alone; INT8 and NVFP4 of both, which SmoothQuant is for.
METHODS = {
  "w4a16_g64": (*_WEIGHTS, "awq(clip=True)"), "mxfp4a16": _WEIGHTS,
  "int8": ("smooth_quant", *_WEIGHTS, "smooth_quant+gptq"),
  "nvfp4_ste": ("smooth_quant", *_WEIGHTS),
}  # fmt: skip
ARMS = [(recipe, "") for recipe in NEAREST]
ARMS += [(recipe, methods) for recipe, all_ in METHODS.items() for methods in all_]


def config(recipe: str, methods: str):
  c = smollm2_cpt.get_config("bf16")
  c.init.hf, c.weights.hf = "", MODEL
  c.model.preset = "hf"
  c.seq_len, c.eval.batch, c.global_batch = WINDOW, ROWS, ROWS
  c.precision.rules = (("layers/.*", recipe), ("head", "bf16"))
  c.export.format, c.export.max_kl, c.export.gate_tokens = "compressed-tensors", 20.0, 256
  c.quantize.methods = tuple(methods.split("+")) if methods else ()
  return c


def spec_of(recipe: str, folder: str = MODEL):
  c = config(recipe, "")
  c.weights.hf, c.export.requantize = folder, True
  needs = jobs_table.JOBS["export"].needs
  return resolve.resolve(c, 1, choose.current_device(), needs=needs)


def texts(spec, tokens: int = TOKENS) -> dict[str, list[divergence.Batch]]:
  """{"manual", "brown": windows of at least so many tokens}."""
  return {
    "manual": divergence.batches(spec, divergence.Wanted(tokens, "", "manual_")),
    "brown": of_text(spec, "\n\n".join(path.read_text() for path in brown()[-40:]), tokens),
  }


def brown() -> list[pathlib.Path]:
  return sorted((ROOT / "assets/corpora/brown").glob("*.txt"))


def of_text(spec, text: str, tokens: int) -> list[divergence.Batch]:
  with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
    f.write(text)
    f.flush()
    return divergence.batches(spec, divergence.Wanted(tokens, f.name, "text_"))


# --- measuring -----------------------------------------------------------------------------------


@jax.jit
def sums(source_BLV, made_BLV, tokens_BL, counts_BL):
  """Of every window: KL, equal most likely tokens, tokens, both losses, tokens with a next one."""
  p, q = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (source_BLV, made_BLV))
  same = (jnp.argmax(p, -1) == jnp.argmax(q, -1)) * counts_BL
  kl = jnp.where(counts_BL > 0, divergence.kl(source_BLV, made_BLV), 0.0)
  with_next = (counts_BL > 0).at[:, -1].set(False) & (jnp.roll(counts_BL, -1, 1) > 0)
  index = jnp.roll(tokens_BL, -1, 1)[..., None]
  losses = [-jnp.take_along_axis(x, index, -1)[..., 0] * with_next for x in (p, q)]
  return jnp.stack([x.sum(-1) for x in (kl, same, counts_BL, *losses, with_next)], -1)


def windows(batches, source, made) -> np.ndarray:
  """float64 [windows, 6] of `sums`."""
  rows = [sums(x, y, b.tokens_BL, b.counts_BL) for b, x, y in zip(batches, source, made)]
  return np.concatenate([np.asarray(r, np.float64) for r in rows])


def served(recipe: str, folder: str):
  """(spec, params, sites) of a folder as a server multiplies it."""
  spec = spec_of(recipe, folder)
  entries = names.entries(spec.model)
  stored = fp8_export.of_folder(hf_tensors.Folder(folder), entries)
  plan = checks.choose(spec, 0, (), stored)
  plan = fp8_export.with_amaxes(plan, entries, {}, {})
  return spec, *served_pass.load(spec, plan, folder)


def measure(recipe: str, folder: str, source: dict[str, list[np.ndarray]]) -> dict:
  spec, params, sites = served(recipe, folder)
  found = {}
  for name, batches in texts(spec).items():
    logits = divergence.forward(spec, sites, batches)
    made = [params_lib.on_host(x) for x in logits(params)]
    nudged = windows(batches, made, logits(divergence.nudged(params)))
    found[name] = {
      "windows": windows(batches, source[name], made).tolist(),
      "floor_kl": float(nudged[:, 0].sum() / nudged[:, 2].sum()),
    }
  return found


def unquantized() -> dict[str, list[np.ndarray]]:
  spec = spec_of("bf16")
  params, _ = hf_weights.load_params(MODEL, spec.model)
  return {
    name: [params_lib.on_host(x) for x in
           divergence.forward(spec, spec.sites(evaluator.BF16), batches)(params)]
    for name, batches in texts(spec).items()
  }  # fmt: skip


def run(target: pathlib.Path, wanted: list[str]):
  """Every arm that has no file yet; one that fails is told, and the others go on."""
  target.mkdir(parents=True, exist_ok=True)
  source, failed = None, []
  for recipe, methods in ARMS:
    arm = name_of(recipe, methods)
    path = target / f"{arm}.json"
    if path.exists() or (wanted and not any(arm.startswith(w) for w in wanted)):
      continue
    source = source or unquantized()
    try:
      row = one(target, recipe, methods, source)
    except Exception:
      traceback.print_exc()
      failed.append(arm)
      continue
    records.write_atomic(str(path), records.to_json(row))
    print(f"{arm}: {row['seconds']:.0f} s", flush=True)
  if failed:
    sys.exit(f"these arms failed: {', '.join(failed)}")


def one(target: pathlib.Path, recipe: str, methods: str, source) -> dict:
  """An arm, of which the folder keeps everything but the weights."""
  began, cpu = time.time(), _cpu()
  folder, report = quantized(target, recipe, methods)
  seconds, cpu = time.time() - began, _cpu() - cpu
  row = {
    "recipe": recipe, "methods": methods, "seconds": seconds, "cpu_seconds": cpu,
    "bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
    "quantized": report["fp8_matrices"], "calibration_tokens": report["calibration_tokens"],
    "mean_relative_error": report.get("mean_relative_error"),
    "texts": measure(recipe, str(folder), source),
    "provenance": provenance.provenance({}, "assets named in the script", 0),
  }  # fmt: skip
  _without_weights(folder)
  return row


def name_of(recipe: str, methods: str) -> str:
  return f"{recipe}-{methods or 'nearest'}"


def quantized(target: pathlib.Path, recipe: str, methods: str) -> tuple[pathlib.Path, dict]:
  """The folder of an arm, and the report of the job."""
  folder, work = target / "folders" / name_of(recipe, methods), str(target / "work")
  chosen = config(recipe, methods)
  shutil.rmtree(folder, ignore_errors=True)  # of an arm that was cut off
  return folder, dispatch.call("quantize", chosen, base.get_config(), work, out=str(folder))


def _without_weights(folder: pathlib.Path):
  for file in folder.glob("*.safetensors"):
    file.unlink()


def _cpu() -> float:
  used = resource.getrusage(resource.RUSAGE_SELF)
  return used.ru_utime + used.ru_stime


# --- the task ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Questions:
  """Which of CHOICES words comes next, in windows of a text.

  Attributes:
    batches: of the text.
    window_I, place_I: of every question its window and the token before the word.
    words_IC: token ids, the right one first.
  """

  batches: list[divergence.Batch]
  window_I: np.ndarray
  place_I: np.ndarray
  words_IC: np.ndarray


def questions(spec, windows: int) -> Questions:
  """Of the beginnings of texts of all of Brown's genres.

  Words of four letters or more that are one token, SKIPPED tokens or more into their window.
  """
  text = "\n\n".join(path.read_text()[:1200] for path in brown()[::5])
  batches = of_text(spec, text, windows * WINDOW)
  tokens_WL = np.concatenate([b.tokens_BL for b in batches])[:windows]
  pieces = {int(t): spec.data.tokenizer.decode([int(t)]) for t in np.unique(tokens_WL)}
  is_word = {t: p[:1] == " " and len(p) > 4 and p[1:].isalpha() for t, p in pieces.items()}
  goes_on = {t: p[:1].isalpha() or p[:1] in "'-" for t, p in pieces.items()}
  rng, chosen = np.random.default_rng(0), []
  for number, row in enumerate(tokens_WL.tolist()):
    places = [i for i in range(SKIPPED, len(row) - 1)
              if is_word[row[i]] and not goes_on[row[i + 1]]]  # fmt: skip
    kept = rng.permutation(places)[:PER_WINDOW]
    chosen += [(number, int(i) - 1, row[i]) for i in sorted(kept)]
  window_I, place_I, word_I = np.array(chosen).T
  words = []
  for word in word_I:
    others = rng.permutation(word_I[word_I != word])
    words.append([word, *dict.fromkeys(others.tolist())][:CHOICES])
  return Questions(batches, window_I, place_I, np.array(words))


def answers(asked: Questions, logits) -> list[int]:
  """1 for every question whose right word has the largest of the logits of its words, else 0."""
  right, first = [], 0
  for batch, made_BLV in zip(asked.batches, logits):
    here = (asked.window_I >= first) & (asked.window_I < first + len(batch.tokens_BL))
    rows, places = asked.window_I[here] - first, asked.place_I[here]
    of_words = np.asarray(made_BLV[rows[:, None], places[:, None], asked.words_IC[here]])
    right += (of_words[:, 0] > of_words[:, 1:].max(1)).astype(int).tolist()
    first += len(batch.tokens_BL)
  return right


def best(rows: list[dict]) -> list[tuple[str, str]]:
  """The two arms of least KL on the manual, of every format of which all arms are there."""
  found = []
  for recipe, all_ in METHODS.items():
    mine = [r for r in rows if r["recipe"] == recipe and r["methods"] in ("", *all_)]
    if len(mine) == len(all_) + 1:
      mine.sort(key=lambda r: np.array(r["texts"]["manual"]["windows"])[:, 0].sum())
      found += [(r["recipe"], r["methods"]) for r in mine[:2]]
  return found


def task(target: pathlib.Path, wanted: list[str], windows: int):
  """The unquantized model's answers, then those of the best arms, or the named ones, not there."""
  kept = target / "task"
  kept.mkdir(parents=True, exist_ok=True)
  arms = [arm for arm in ARMS if name_of(*arm) in wanted] if wanted else best(read(target))
  for recipe, methods in [("bf16", ""), *arms]:
    path = kept / f"{name_of(recipe, methods)}.json"
    if path.exists():
      continue
    if recipe == "bf16":
      spec = spec_of(recipe)
      sites, params = spec.sites(evaluator.BF16), hf_weights.load_params(MODEL, spec.model)[0]
      folder = None
    else:
      folder, _ = quantized(kept, recipe, methods)
      spec, params, sites = served(recipe, str(folder))
    asked = questions(spec, windows)
    right = answers(asked, divergence.forward(spec, sites, asked.batches)(params))
    row = {"recipe": recipe, "methods": methods, "right": right, "choices": CHOICES,
           "window": asked.window_I.tolist(), "words": asked.words_IC.tolist(),
           "provenance": provenance.provenance({}, "assets named in the script", 0)}  # fmt: skip
    records.write_atomic(str(path), records.to_json(row))
    if folder:
      _without_weights(folder)
    print(f"{path.stem}: {100 * np.mean(right):.1f} % of {len(right)}", flush=True)


def change_of_task(row: dict, unquantized: dict) -> statistics.Interval:
  """Points of an arm minus those of the unquantized model; windows are resampled.

  Raises:
    ValueError: the questions are others.
  """
  if (row["window"], row["words"]) != (unquantized["window"], unquantized["words"]):
    raise ValueError(f"{row['recipe']}-{row['methods']}: other questions than those of bf16.json")
  window = np.array(row["window"])
  change = 100 * (np.array(row["right"]) - np.array(unquantized["right"]))
  sums, counts = np.bincount(window, change), np.bincount(window)
  return statistics.bootstrap(sums[counts > 0], counts[counts > 0], count=2)


# --- the table -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
  """Of an arm on a text: intervals of KL and of the change of the loss in percent."""

  kl: statistics.Interval
  loss: statistics.Interval
  top1: float
  floor: float


def cell(of_text: dict, count: int) -> Cell:
  w = np.array(of_text["windows"])
  w = w[w[:, 2] > 0]
  kl = statistics.bootstrap(w[:, 0], w[:, 2], count=count)
  loss = statistics.bootstrap(100 * (w[:, 4] - w[:, 3]), w[:, 3], count=count)
  return Cell(kl, loss, w[:, 1].sum() / w[:, 2].sum(), of_text["floor_kl"])


def gain(row: dict, nearest: dict, text: str, count: int) -> statistics.Interval:
  """KL of an arm minus that of rounding to the nearest, paired by window, nats per token."""
  mine, its = (np.array(r["texts"][text]["windows"]) for r in (row, nearest))
  return statistics.bootstrap(mine[:, 0] - its[:, 0], its[:, 2], count=count)


def read(folder: pathlib.Path) -> list[dict]:
  return [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]


def table(target: pathlib.Path):
  import tensors

  rows, tasks = read(target), read(target / "task")
  by_arm, of_task = ({(r["recipe"], r["methods"]): r for r in of} for of in (rows, tasks))
  head = ["format", "methods", "MB", "CPU-s", "KL, manual", "top-1", "loss, %", "KL, Brown",
          "loss, %", "floor, KL", "KL against the nearest, manual", "", "task, points"]  # fmt: skip
  lines = []
  for recipe, methods in (arm for arm in ARMS if arm in by_arm):
    row, count = by_arm[recipe, methods], len(METHODS.get(recipe, ())) + 1
    manual, brown = (cell(row["texts"][name], count) for name in ("manual", "brown"))
    change, word, points = "", "", ""
    if methods and (recipe, "") in by_arm:
      g = gain(row, by_arm[recipe, ""], "manual", count)
      change = _interval(g, "+.4f")
      word = (
        "lower" if g.high < -manual.floor else "higher" if g.low > manual.floor else "no verdict"
      )
    if (recipe, methods) in of_task:
      points = _interval(change_of_task(of_task[recipe, methods], of_task["bf16", ""]), "+.1f")
    lines.append([
      recipe, methods or "to the nearest", f"{row['bytes'] / 1e6:.0f}",
      f"{row['cpu_seconds']:.0f}", _interval(manual.kl, ".4f"), f"{100 * manual.top1:.1f} %",
      _interval(manual.loss, "+.2f"), _interval(brown.kl, ".4f"), _interval(brown.loss, "+.2f"),
      f"{manual.floor:.1e}", change, word, points,
    ])  # fmt: skip
  made = {"rows": rows, "tasks": tasks}
  (HERE / "results.json").write_text(json.dumps(made) + "\n")
  said = ""
  if tasks:
    right = of_task["bf16", ""]["right"]
    said = (
      f"\n\nThe task: which of {CHOICES} words comes next in Brown, {len(right)} questions; the "
      f"unquantized model answers {100 * np.mean(right):.1f} %, chance {100 / CHOICES:.1f} %. "
      "Points against it, 95 % together for the two arms of a format."
    )
  tensors.write_table(HERE, tensors.markdown(head, lines) + said)


def _interval(i: statistics.Interval, form: str) -> str:
  return f"{i.estimate:{form}} [{i.low:{form}}, {i.high:{form}}]"


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("command", choices=("run", "task", "table"))
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("arms", nargs="*", help="to run these alone; of run, beginnings of names")
  parser.add_argument("--windows", type=int, default=WINDOWS, help="of the task")
  args = parser.parse_args()
  if args.command == "run":
    run(args.folder, args.arms)
  elif args.command == "task":
    task(args.folder, args.arms, args.windows)
  else:
    table(args.folder)
