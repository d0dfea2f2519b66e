"""Folders of runs with made-up numbers: what a report reads."""

import importlib.util
import json
import pathlib

import numpy as np

LAYERS, SITES = 30, ("attn/k", "attn/o", "attn/q", "attn/v", "mlp/down", "mlp/gate", "mlp/up")
STATISTICS = ("amax", "underflow", "saturation", "smallest_scale", "largest_scale", "snr_db",
              "kurtosis", "rms", "nonfinite", "variance", "amax_drift", "mean",
              "snr_drift")  # fmt: skip
# Of these magnitudes, so that numbers have the length of those of a run.
UNITS = {"variance": 1e-9, "amax": 1e-3, "underflow": 1e-4}
# Activations that no GEMM quantizes, and the statistics that they lack.
ACTIVATIONS, OF_LAYER = ("embed", "norm", "logits"), ("attn/norm", "mlp/norm", "residual")
OF_QUANTIZED = {"underflow", "saturation", "smallest_scale", "largest_scale", "snr_db",
                "snr_drift"}  # fmt: skip
MEMORY = {"declared": 3 * 2**30, "peak": 2**32, "rows": [
  {"kind": "masters", "declared": 2**30, "compiled": None, "note": ""},
  {"kind": " part of another", "declared": 7, "compiled": None, "note": ""},
]}  # fmt: skip


def write_run(folder, steps=1000, snapshots=100, layers=LAYERS, seed=0, counted=1):
  """The files of a run with random numbers: SmolLM2's sites, every step, `snapshots` snapshots.

  Every `counted`-th snapshot has counts by exponent: in a run all have, but here they are slow.
  """
  rng = np.random.default_rng(seed)
  tensors = {"head": "xwg"} | {f"layers/{i}/{s}": "xwg" for i in range(layers) for s in SITES}
  tensors |= dict.fromkeys(ACTIVATIONS, "xg")
  counts = [_exponents(rng) for _ in range(99)]
  tensors |= {f"layers/{i}/{s}": "xg" for i in range(layers) for s in OF_LAYER}
  lines = [{"step": 0, "heldout/main/block_128/loss": 2.02, "heldout/main/bf16/loss": 2.0}]
  every = max(1, steps // snapshots)
  for step in range(1, steps + 1):
    row = {"step": step, "loss": 3 - step / steps + rng.normal() / 50, "grad_norm": rng.random()}
    lines.append({**row, "learning_rate": 1e-3, "data_wait_seconds": 0.01})
    if step % every == 0:
      # As numbers are in a run: all digits.
      lines.append({"step": step, "numerics": {
        name: {t: _summary(rng, "w" in of) for t in of} for name, of in tensors.items()
      }})  # fmt: skip
    if step % (every * counted) == 0:
      lines.append({"step": step, "exponents": {
        name: {t: counts[rng.integers(len(counts))] for t in of} for name, of in tensors.items()
      }})  # fmt: skip
  lines[-2]["numerics"]["head"]["x"]["snr_db"] = "inf"
  lines[-1]["exponents"]["layers/1/mlp/up"]["x"] = {"first_exponent": -48, "shares": []}
  alarms = [{"place": "layers/3/mlp/up/x", "text": "snr_db </script> low. Try: less"}]
  lines.append({"step": steps, "alarms": alarms})
  lines.append({"step": steps, "heldout/main/block_128/loss": 1.01, "heldout/main/bf16/loss": 1.0})
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (folder / "metrics.jsonl").write_text(text + '{"step": 10')  # a row that is being written
  gemms = dict.fromkeys(("fwd", "dgrad", "wgrad"), {"lhs": {"format": "e4m3"}, "rhs": None})
  site = {"from_step": 0, "site": "layers/mlp/up", "layers": layers, "m_n_k": [1, 2, 3],
          "recipe": "block_128", "definition": gemms,
          "backends": dict.fromkeys(gemms, "reference"), "notes": []}  # fmt: skip
  config = {"resolved": {"steps": 2 * steps, "global_batch": 4, "seq_len": 8},
            "changed": {"steps": 2 * steps}}  # fmt: skip
  origin = {"devices": "1 x cpu (cpu)", "commit": "c0ffee"}
  written = {"config": config, "sites": [site], "memory": MEMORY, "provenance": origin}
  for name, value in written.items():
    (folder / f"{name}.json").write_text(json.dumps(value))
  return lines


def _summary(rng, is_quantized):
  found = dict(zip(STATISTICS, rng.random(len(STATISTICS)).tolist()))
  found |= {name: unit * found[name] for name, unit in UNITS.items()}
  found["mean"] = 1e-5 * (found["mean"] - 0.5)
  return {k: v for k, v in found.items() if is_quantized or k not in OF_QUANTIZED}


def _exponents(rng, counted=24):
  """As of a normal distribution: each exponent below the largest has half as many elements."""
  shares = 2.0 ** -np.arange(counted)[::-1] * rng.uniform(0.3, 1, counted)
  shares[3] = 0
  shares = [float(f"{s:.3g}") for s in shares / shares.sum()]
  return {"first_exponent": int(rng.integers(-30, -20)), "shares": shares}


def sensitivity_result(layers=2, seed=0):
  """sensitivity.json with made-up numbers."""
  rng = np.random.default_rng(seed)

  def one(scale=1e-4):
    middle = scale * rng.random()
    return {of: [middle, middle / 2, 2 * middle] for of in ("loss_percent", "kl")}

  kinds = [s.rpartition("/")[2] for s in SITES]
  places = [(f"layers/{i}/{s}", i, k) for i in range(layers) for s, k in zip(SITES, kinds)]
  sites = [
    {"name": name, "layer": layer, "kind": kind,
     "estimated": {t: one() for t in ("x", "w", "both")},
     "measured": one() if i % 3 == 0 else None}
    for i, (name, layer, kind) in enumerate([*places, ("head", None, "head")])
  ]  # fmt: skip
  members = {"kinds": kinds, "layers": list(map(str, range(layers))), "tensors": ["x", "w"]}
  groups = [{"group": g, "name": n, **one(1e-2)} for g, names in members.items() for n in names]
  arms = [
    {"arm": arm, "bf16_flops": share, "report": one(1e-2), "runs_of_layers": 1 + i,
     "rules": [["head", "bf16"], ["layers/.*", "block_128"]]}
    for i, (arm, share) in enumerate({"chosen": 0.1, "first and last": 0.1, "all": 0.0}.items())
  ]  # fmt: skip
  return {
    "tokens": {"choose": 4096, "report": 4096}, "weights": {"step": 5}, "sites": sites,
    "groups": groups, "budgets": [{"budget": "90 % of FLOPs in FP8", "arms": arms}],
  }  # fmt: skip


def script(path: pathlib.Path):
  """The module that a file outside of any package is."""
  spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def write_steps(folder, losses, recipe, seed, seconds=1.0, heldout=(), **config):
  """The files of a run with these training losses; heldout: {precision: last loss}."""
  folder.mkdir()
  rows = [{"step": i, "loss": loss, "step_seconds": seconds} for i, loss in enumerate(losses, 1)]
  held = {f"heldout/main/{k}/loss": v for k, v in dict(heldout).items()}
  rows += [{"step": len(losses), **held}] * bool(held)
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  resolved = {"global_batch": 2, "seq_len": 8, "seed": seed, "optim.warmup_steps": 2,
              "precision.rules": [["layers/.*", recipe]], **config}  # fmt: skip
  (folder / "config.json").write_text(json.dumps({"resolved": resolved, "changed": {}}))
  (folder / "provenance.json").write_text(json.dumps({"data_fingerprint": f"data {seed}"}))
  return str(folder)


def write_rates(folder, arms, steps):
  """Runs of arms, {recipe: loss above bf16's}, at two rates with two seeds: their folders."""
  paths = []
  for rate in (1e-3, 1e-2):
    for seed in (0, 1):
      for recipe, more in arms.items():
        losses = (3 - np.arange(steps) / steps + more * (1 + seed) + 10 * rate).tolist()
        path, own = folder / f"{recipe}-{rate}-{seed}", {"optim.peak_lr": rate}
        paths.append(write_steps(path, losses, recipe, seed, **own))
  return paths
