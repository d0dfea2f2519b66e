"""What the trainer costs on a CPU: steps by recipe, quiet and loud, loader, import of a folder.

command: GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python experiments/bench/cpu/run.py
         (step, numerics, loader, import; or name some of them)
needs:   assets/smollm2-135m (make run fetches it); 12 GB of memory and 4 GB of disk for import

Writes results.json beside this file, with provenance.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]

MODEL = "assets/smollm2-135m"
RECIPES = ("bf16", "tensor_current", "block_128", "block_128_pow2")
ROUNDS, STEPS = 2, 3
LOADER_SECONDS = 15


def _spec(recipe):
  from configs import smollm2_cpt
  from fp8jax.config import resolve
  from fp8jax.kernels import choose

  c = smollm2_cpt.get_config(recipe)
  c.global_batch, c.seq_len = 4, 256
  return resolve.resolve(c, 1, choose.current_device())


def bench_step():
  """Median seconds of a 1024-token SmolLM2-135M step; recipes take turns."""
  import jax
  import numpy as np

  from fp8jax.data import batch_sharding, loader
  from fp8jax.step import train_step

  times = {recipe: [] for recipe in RECIPES}
  spec = _spec("bf16")
  host = next(loader.train_batches(spec.data, spec.global_batch))
  for _ in range(ROUNDS):
    for recipe in RECIPES:
      spec = _spec(recipe)
      step_fn, sites = train_step.make_step(spec), spec.sites()
      state = train_step.make_state(spec)
      batch = batch_sharding.BatchSharder(spec.run.layout, spec.microbatch).place(host)
      state, _ = jax.block_until_ready(step_fn(state, batch, sites))
      for _ in range(STEPS):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step_fn(state, batch, sites))
        times[recipe].append(time.perf_counter() - start)
      del state
  seconds = {recipe: float(np.median(t)) for recipe, t in times.items()}
  return {
    "tokens_per_step": 1024,
    "seconds": {k: round(v, 3) for k, v in seconds.items()},
    "ratio_to_bf16": {k: round(v / seconds["bf16"], 3) for k, v in seconds.items()},
    "all_seconds": {k: [round(x, 3) for x in t] for k, t in times.items()},
  }


NUMERICS_RECIPES, NUMERICS_EVERY = ("block_128", "tensor_delayed"), 100


def bench_numerics():
  """Median seconds of a quiet step and of one that reports numerics; the two take turns.

  overhead: what log.tensor_stats_every=100 adds to training, as a share: the loud step, and the
  rows, image and alarms of its snapshot, which the host makes. Compiling the loud step, once, is
  not in it.
  """
  import jax
  import numpy as np

  from fp8jax.data import batch_sharding, loader
  from fp8jax.ops import site_tree
  from fp8jax.quantization import tensor_stats
  from fp8jax.run import alarms, metrics_writer, numerics_image
  from fp8jax.step import train_step

  found = {}
  for recipe in NUMERICS_RECIPES:
    spec = _spec(recipe)
    host = next(loader.train_batches(spec.data, spec.global_batch))
    batch = batch_sharding.BatchSharder(spec.run.layout, spec.microbatch).place(host)
    step_fn = train_step.make_step(spec)
    sites = {
      "quiet": spec.sites(statistics=tensor_stats.QUIET),
      "loud": spec.sites(statistics=tensor_stats.LOUD),
    }  # fmt: skip
    state = train_step.calibrate(spec, train_step.make_state(spec), batch, 0)
    times = {kind: [] for kind in sites}
    written = []
    with tempfile.TemporaryDirectory() as folder:
      log = metrics_writer.Metrics(folder, 0, {}, True, None)
      numerics = {}
      watch = alarms.AlarmMonitor(spec.log.alarms, site_tree.recipes_of(sites["loud"]))
      for round_ in range(1 + ROUNDS * STEPS):
        for kind, of_kind in sites.items():
          start = time.perf_counter()
          state, values = jax.block_until_ready(step_fn(state, batch, of_kind))
          if round_:  # the first compiles
            times[kind].append(time.perf_counter() - start)
        start = time.perf_counter()  # as jobs/run_reports.py does
        stats = jax.device_get(values["tensor_stats"])
        summary = alarms.summarise(sites["loud"], stats, values.get("alignment", {}))
        numerics = alarms.with_drift(summary, numerics)
        log.write_nested(round_, "numerics", numerics, lambda: numerics_image.draw(numerics))  # noqa: B023
        log.write_row(round_, {"exponents": alarms.exponents(sites["loud"], stats)})
        watch.new(numerics)
        written.append(time.perf_counter() - start)
      log.close()
    del state
    quiet, loud = (float(np.median(times[kind])) for kind in sites)
    extra = float(np.median(written[1:]))
    found[recipe] = {
      "quiet_seconds": round(quiet, 3),
      "loud_seconds": round(loud, 3),
      "look_seconds": round(extra, 3),
      "overhead": round((loud - quiet + extra) / (NUMERICS_EVERY * quiet), 5),
      "all_seconds": {k: [round(x, 3) for x in t] for k, t in times.items()},
    }
  return {"tokens_per_step": 1024, "every": NUMERICS_EVERY, "recipes": found}


def bench_loader():
  """Tokens per second of reading, tokenizing, packing and batching, with the model's tokenizer."""
  from fp8jax.data import loader

  spec = _spec("bf16")
  iterator = loader.train_batches(spec.data, spec.global_batch)
  next(iterator)
  start, tokens = time.perf_counter(), 0
  while time.perf_counter() - start < LOADER_SECONDS:
    tokens += int(next(iterator)["weights_BL"].sum())
  return {"tokens_per_second": round(tokens / (time.perf_counter() - start))}


def bench_import():
  """Peak memory of importing a random bfloat16 folder of Qwen2.5-1.5B's shape into float32."""
  with tempfile.TemporaryDirectory() as folder:
    _write_random_folder(folder)
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import run; run.import_once({folder!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  return json.loads(done.stdout)


def _write_random_folder(folder):
  """Shards of at most a few hundred MB, written one at a time."""
  import ml_dtypes
  import numpy as np
  from safetensors.numpy import save_file

  from fp8jax.models import presets
  from fp8jax.models.hf import config as hf_config

  cfg = presets.QWEN25_1P5B
  (pathlib.Path(folder) / "config.json").write_text(
    json.dumps(hf_config.config_to_hf(cfg, "bfloat16"))
  )
  rng, index, size = np.random.default_rng(0), {}, 0
  for number, (name, shape) in enumerate(_tensors(cfg)):
    tensor = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    file = f"model-{number:05d}.safetensors"
    save_file({name: tensor}, f"{folder}/{file}")
    index[name] = file
    size += tensor.nbytes
  (pathlib.Path(folder) / "model.safetensors.index.json").write_text(
    json.dumps({"metadata": {"total_size": size}, "weight_map": index})
  )


def _tensors(cfg):
  """(name, shape) of a Qwen2 checkpoint, from its published layout."""
  d, f, k = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
  q, kv = cfg.num_heads * k, cfg.num_kv_heads * k
  yield "model.embed_tokens.weight", (cfg.vocab_size, d)
  yield "model.norm.weight", (d,)
  for i in range(cfg.num_layers):
    at = f"model.layers.{i}"
    yield f"{at}.input_layernorm.weight", (d,)
    yield f"{at}.post_attention_layernorm.weight", (d,)
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
      yield f"{at}.self_attn.{name}_proj.weight", (rows, d)
      yield f"{at}.self_attn.{name}_proj.bias", (rows,)
    yield f"{at}.self_attn.o_proj.weight", (d, q)
    yield f"{at}.mlp.gate_proj.weight", (f, d)
    yield f"{at}.mlp.up_proj.weight", (f, d)
    yield f"{at}.mlp.down_proj.weight", (d, f)


def import_once(folder):
  """In a process of its own: import, then print what it took."""
  import jax

  from fp8jax.models import presets
  from fp8jax.models.hf import weights as hf_weights

  def peak():
    # Unlike getrusage's, this one starts anew with the program.
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

  jax.devices()
  before, start = peak(), time.perf_counter()
  params, _ = jax.block_until_ready(hf_weights.load_params(folder, presets.QWEN25_1P5B))
  sizes = [x.nbytes for x in jax.tree.leaves(params)]
  gib = 2**30
  print(json.dumps({
    "seconds": round(time.perf_counter() - start, 1),
    "peak_gib": round(peak() / gib, 2),
    "before_gib": round(before / gib, 2),
    "parameters_gib": round(sum(sizes) / gib, 2),
    "largest_tensor_gib": round(presets.QWEN25_1P5B.vocab_size * 1536 * 4 / gib, 2),
  }))  # fmt: skip


BENCHES = {
  "step": bench_step, "numerics": bench_numerics, "loader": bench_loader, "import": bench_import,
}  # fmt: skip


def main(names):
  import timing

  path = HERE / "results.json"
  results = timing.read(path)
  for name in names or BENCHES:
    print(f"{name} ...", flush=True)
    results[name] = {**BENCHES[name](), "provenance": timing.provenance()}
    print(json.dumps({k: v for k, v in results[name].items() if k != "provenance"}, indent=2))
    timing.write(path, results)


if __name__ == "__main__":
  main(sys.argv[1:])
