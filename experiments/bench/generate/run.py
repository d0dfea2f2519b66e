"""Tokens per second of greedy generation, beside transformers' on the same CPU in the same run.

command: python experiments/bench/generate/run.py --oracle=oracle/bin/python
needs:   assets/smollm2-135m (make run fetches it), and another Python with torch and transformers:
         python3.11 -m venv oracle && oracle/bin/pip install torch==2.13.0 transformers==5.23.0

Every arm runs in a process of its own, arms take turns, and a round is a whole call of generate
after a first one that compiles and warms up. --cpus=1 pins both sides to one core. The time of the
clock and that of the processor are written: on a machine with other work the second is the fairer.
Writes results.json beside this file, with provenance.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]

import timing  # noqa: E402

MODEL = "assets/smollm2-135m"
PROMPT, NEW_TOKENS, ROUNDS = 32, 24, 2
BATCHES = (8,)
# Arms of fp8jax: recipe of the linear layers, and options of api.load. The CPU emulates FP8.
ARMS = {
  "fp8jax float32": ("bf16", {}),
  "fp8jax float32, E4M3 cache": ("bf16", {"cache_format": "e4m3"}),
  "fp8jax block_128": ("block_128", {}),
  "fp8jax block_128, values": ("block_128", {"weight_form": "values"}),
}
PEER = "transformers float32"


def _prompts(count: int) -> list[list[int]]:
  """Pieces of the licence, all of one length."""
  from fp8jax.data.tokenize import Tokenizer

  ids = Tokenizer(MODEL).encode_prompt((timing.ROOT / "LICENSE").read_text())
  return [ids[i * PROMPT : (i + 1) * PROMPT] for i in range(count)]


def worker(arm: str, batch: int):
  """In a process of its own: rounds of one arm, as JSON."""
  import time

  from fp8jax.generation import api

  recipe, options = ARMS[arm]
  generator = api.load(MODEL, recipe=recipe, slots=batch, **options)
  generator.end_ids = frozenset()  # every completion has all its tokens
  prompts, sampling = _prompts(batch), api.Sampling(max_new_tokens=NEW_TOKENS)

  def once():
    start, used = time.perf_counter(), time.process_time()
    found = generator.generate(prompts, sampling)
    tokens = [own[0].tokens for own in found]
    return time.perf_counter() - start, time.process_time() - used, tokens

  once()
  seconds, cpu_seconds, tokens = zip(*(once() for _ in range(ROUNDS)))
  print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens[-1]}))


def _run(command: list[str], text: str = "") -> dict:
  done = subprocess.run(command, input=text, capture_output=True, text=True)
  if done.returncode:
    sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
  return json.loads(done.stdout.splitlines()[-1])


def _measure(arm: str, batch: int, oracle: str) -> dict:
  if arm != PEER:
    return _run([sys.executable, str(HERE / "run.py"), "--worker", arm, "--batch", str(batch)])
  request = {"prompts": _prompts(batch), "new_tokens": NEW_TOKENS, "rounds": ROUNDS}
  script = str(HERE / "peer_transformers.py")
  return _run([oracle, script, MODEL], json.dumps(request))


def main(arguments: list[str] | None = None):
  parser = argparse.ArgumentParser()
  parser.add_argument("--oracle", help="a Python with torch and transformers")
  parser.add_argument("--worker", help=argparse.SUPPRESS)
  parser.add_argument("--batch", type=int, default=1, help=argparse.SUPPRESS)
  parser.add_argument("--cpus", type=int, default=0, help="cores of both sides; 0: all")
  parser.add_argument("--turns", type=int, default=2, help="processes of every arm")
  parser.add_argument("--arms", default="", help="comma list of fp8jax's arms by number; all")
  options = parser.parse_args(arguments)
  os.chdir(timing.ROOT)
  if options.worker:
    worker(options.worker, options.batch)
    return
  if not options.oracle:
    parser.error("--oracle=PATH is needed: a Python with torch and transformers")
  if options.cpus:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cpus])  # of workers too
  names = list(ARMS)
  chosen = [names[int(i)] for i in options.arms.split(",")] if options.arms else names
  oracle, lines, peer = str(pathlib.Path(options.oracle).absolute()), {}, {}
  for batch in BATCHES:
    found, loads = {arm: [] for arm in (PEER, *chosen)}, []
    for _ in range(options.turns):
      for arm in found:
        loads.append(round(os.getloadavg()[0], 1))
        found[arm].append(_measure(arm, batch, oracle))
    last = found[PEER][-1]
    peer = {k: last[k] for k in ("torch", "transformers", "threads", "cpus")}
    for arm, turns in found.items():
      line = lines[f"{arm}, batch {batch}"] = _summary(turns, last["tokens"])
      print(f"{arm}, batch {batch}", json.dumps(line), flush=True)
    lines[f"load average, batch {batch}"] = loads
  from fp8jax.run import provenance as provenance_lib  # needs the extra `train`

  settings = {"prompt_tokens": PROMPT, "new_tokens": NEW_TOKENS, "rounds": ROUNDS} | vars(options)
  settings = {k: v for k, v in settings.items() if k not in ("worker", "batch", "oracle")}
  results = {
    "provenance": provenance_lib.provenance(settings, MODEL, 0) | {"peer": peer},
    "lines": lines,
  }
  results["provenance"]["command"][1:] = [a for a in sys.argv[1:] if "oracle" not in a]
  timing.write(HERE / "results.json", results)


def _summary(turns: list[dict], expected: list[list[int]]) -> dict:
  """Medians over all rounds, and the share of tokens that are transformers'."""
  made = turns[-1]["tokens"]
  count = sum(map(len, made))
  seconds, cpu = ([s for turn in turns for s in turn[key]] for key in ("seconds", "cpu_seconds"))
  pairs = [(a, b) for x, y in zip(made, expected, strict=True) for a, b in zip(x, y, strict=True)]
  return {
    "tokens_per_second": round(count / statistics.median(seconds), 1),
    "tokens_per_cpu_second": round(count / statistics.median(cpu), 1),
    "seconds": [round(s, 3) for s in seconds],
    "cpu_seconds": [round(s, 3) for s in cpu],
    "equal_tokens": round(sum(a == b for a, b in pairs) / count, 4),
  }


if __name__ == "__main__":
  main()
