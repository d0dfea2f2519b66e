"""Sums of two numbers below 100 with their working, and small models that learned to write them."""

import json
import os
import pathlib
import random
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent / "lab")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from configs import base, pretrain_tiny  # noqa: E402
from fp8jax import records, statistics  # noqa: E402
from fp8jax.jobs import dispatch  # noqa: E402

MARGIN = 5.0
EXAMPLES, LEARNED, HELD_OUT = 6_000, 2_000, 400
MOST_TOKENS = 24  # of an answer and its end; the longest has 23
Pair = tuple[int, int]


def prompt(pair: Pair) -> str:
  return f"{pair[0]}+{pair[1]}="


def solution(pair: Pair, rng: random.Random) -> str:
  """The working in one of two orders, and the sum."""
  (a, b), steps = pair, []
  for x, y in ((a % 10, b % 10), (a - a % 10, b - b % 10)):
    steps.append(f"{x}+{y}={x + y}")
  rng.shuffle(steps)
  return f"{','.join(steps)};{a + b}"


def is_right(pair: Pair, text: str) -> bool:
  return text.rpartition(";")[2].strip() == str(sum(pair)) and ";" in text


def sets() -> tuple[list[Pair], list[Pair], list[Pair]]:
  """Pairs to imitate, to answer, and held out; each once."""
  chosen = random.Random(0).sample(range(10**4), EXAMPLES + LEARNED + HELD_OUT)
  pairs = [divmod(n, 100) for n in chosen]
  return pairs[:EXAMPLES], pairs[EXAMPLES:-HELD_OUT], pairs[-HELD_OUT:]


def write(path: pathlib.Path, texts: list[str]):
  records.write_atomic(str(path), "".join(json.dumps({"text": t}) + "\n" for t in texts))


def configuration(recipe: str, seed: int):
  """Of a run of the model: three layers of 256, 2.5 million parameters, bytes."""
  c = pretrain_tiny.get_config(f"3m-{recipe}")
  c.data.tokenizer, c.data.eos, c.model.vocab_size, c.seed = "bytes", "", 512, seed
  c.eval.tokens, c.checkpoint.every = 0, 0
  return c


def call(job: str, c, workdir: pathlib.Path, source: pathlib.Path, field: str = "") -> dict:
  c.data.sources = {"main": base.source("jsonl", str(source), field=field)}
  return dispatch.call(job, c, base.get_config(), str(workdir))


def examples(seed: int, target: pathlib.Path) -> pathlib.Path:
  """Texts to imitate."""
  rng, path = random.Random(seed), target / f"examples-{seed}.jsonl"
  if not path.exists():
    target.mkdir(parents=True, exist_ok=True)
    write(path, [prompt(p) + solution(p, rng) for p in sets()[0]])
  return path


def begun(seed: int, target: pathlib.Path, steps: int) -> pathlib.Path:
  """The workdir of the weights that all arms of a seed begin with, after so many steps."""
  c = configuration("bf16", seed)
  c.steps, c.global_batch, c.seq_len = steps, 8, 256
  call("train", c, target / f"start-{seed}", examples(seed, target))
  return target / f"start-{seed}"


def continued(recipe: str, seed: int, target: pathlib.Path):
  """The configuration of a run from those weights."""
  c = configuration(recipe, seed)
  c.init.workdir, c.init.weights_only = str(target / f"start-{seed}"), True
  return c


def share(right_RI) -> str:
  """Percent right, [seeds, questions], with Student's interval over seeds, this one at 95 %."""
  e = statistics.estimate(100 * right_RI.mean(1))
  return f"{e.mean:.1f} [{max(e.low, 0):.1f}, {min(e.high, 100):.1f}]"


def difference(after_RI, against_RI, count: int) -> list[str]:
  """[points with Student's interval over seeds and its values, verdict] of an arm and its baseline.

  Args:
    after_RI, against_RI: shares right, [seeds, questions].
    count: of intervals that hold together.
  """
  if after_RI.shape != against_RI.shape:
    return ["", "no verdict: seeds are missing"]
  e = statistics.estimate(100 * (after_RI - against_RI).mean(1), count)
  words = ("parity", "worse", statistics.TOO_SHORT)
  by_seed = ", ".join(f"{d:+.1f}" for d in e.by_seed)
  word = statistics.verdict(-e.high, -e.low, MARGIN, words)
  return [f"{e.mean:+.1f} [{e.low:+.1f}, {e.high:+.1f}] ({by_seed})", word]
