"""Tokens per second of greedy generation, beside transformers' on the same CPU in the same run.

command: python experiments/bench_generate/bench.py --oracle=oracle/bin/python
needs:   assets/smollm2-135m (make run fetches it), and another Python with torch and transformers:
         python3.11 -m venv oracle && oracle/bin/pip install torch==2.13.0 transformers==5.23.0

Every arm runs in a process of its own, arms take turns, and a round is a whole call of generate
after a first one that compiles and warms up. Writes results.json beside this file, with provenance.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
MODEL = "assets/smollm2-135m"
PROMPT, NEW_TOKENS, TURNS, ROUNDS = 32, 48, 2, 2
BATCHES = (8,)
# Arms of fp8jax: recipe of the linear layers, format of the cache. The CPU emulates FP8.
ARMS = {
  "fp8jax float32": ("bf16", "compute"),
  "fp8jax float32, E4M3 cache": ("bf16", "e4m3"),
  "fp8jax block_128": ("block_128", "compute"),
}
PEER = "transformers float32"


def _prompts(count: int) -> list[list[int]]:
  """Pieces of the licence, all of one length."""
  from fp8jax.data.tokenize import Tokenizer

  ids = Tokenizer(MODEL).encode_prompt((HERE.parents[1] / "LICENSE").read_text())
  return [ids[i * PROMPT : (i + 1) * PROMPT] for i in range(count)]


def worker(arm: str, batch: int):
  """In a process of its own: rounds of one arm, as JSON."""
  import time

  from fp8jax.generation import api

  recipe, cache_format = ARMS[arm]
  generator = api.load(MODEL, recipe=recipe, slots=batch, cache_format=cache_format)
  generator.end_ids = frozenset()  # every completion has all its tokens
  prompts, sampling = _prompts(batch), api.Sampling(max_new_tokens=NEW_TOKENS)

  def once():
    start = time.perf_counter()
    found = generator.generate(prompts, sampling)
    return time.perf_counter() - start, [own[0].tokens for own in found]

  once()
  seconds, tokens = zip(*(once() for _ in range(ROUNDS)))
  print(json.dumps({"seconds": seconds, "tokens": tokens[-1]}))


def _run(command: list[str], text: str = "") -> dict:
  done = subprocess.run(command, input=text, capture_output=True, text=True)
  if done.returncode:
    sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
  return json.loads(done.stdout.splitlines()[-1])


def _measure(arm: str, batch: int, oracle: str) -> dict:
  if arm != PEER:
    return _run([sys.executable, str(HERE / "bench.py"), "--worker", arm, "--batch", str(batch)])
  request = {"prompts": _prompts(batch), "new_tokens": NEW_TOKENS, "rounds": ROUNDS}
  script = str(HERE / "peer_transformers.py")
  return _run([oracle, script, MODEL], json.dumps(request))


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--oracle", help="a Python with torch and transformers")
  parser.add_argument("--worker", help=argparse.SUPPRESS)
  parser.add_argument("--batch", type=int, default=1, help=argparse.SUPPRESS)
  options = parser.parse_args()
  os.chdir(HERE.parents[1])
  if options.worker:
    worker(options.worker, options.batch)
    return
  if not options.oracle:
    parser.error("--oracle=PATH is needed: a Python with torch and transformers")
  from fp8jax.run import provenance as provenance_lib

  oracle, lines, peer = str(pathlib.Path(options.oracle).absolute()), {}, {}
  for batch in BATCHES:
    found = {arm: [] for arm in (PEER, *ARMS)}
    loads, tokens = [], {}
    for _ in range(TURNS):
      for arm in found:
        loads.append(round(os.getloadavg()[0], 1))
        made = _measure(arm, batch, oracle)
        found[arm] += made["seconds"]
        tokens[arm] = made["tokens"]
        if arm == PEER:
          peer = {k: made[k] for k in ("torch", "transformers", "threads", "cpus")}
    count = batch * NEW_TOKENS
    for arm, seconds in found.items():
      lines[f"{arm}, batch {batch}"] = {
        "tokens_per_second": round(count / statistics.median(seconds), 1),
        "all_seconds": [round(s, 3) for s in seconds],
        "equal_tokens": sum(
          a == b for x, y in zip(tokens[arm], tokens[PEER], strict=True) for a, b in zip(x, y)
        )
        / count,
      }
      print(f"{arm}, batch {batch}", json.dumps(lines[f"{arm}, batch {batch}"]), flush=True)
    lines[f"load average, batch {batch}"] = loads
  settings = {"prompt_tokens": PROMPT, "new_tokens": NEW_TOKENS, "turns": TURNS, "rounds": ROUNDS}
  results = {
    "provenance": provenance_lib.provenance(settings, MODEL, 0) | {"peer": peer},
    "lines": lines,
  }
  (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
  main()
