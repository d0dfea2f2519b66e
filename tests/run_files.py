"""Folders of runs with made-up numbers: what a report reads."""

import json

import numpy as np

LAYERS, SITES = 30, ("attn/k", "attn/o", "attn/q", "attn/v", "mlp/down", "mlp/gate", "mlp/up")
STATISTICS = ("amax", "underflow", "saturation", "smallest_scale", "largest_scale", "snr_db",
              "kurtosis", "rms", "nonfinite", "variance", "amax_drift")  # fmt: skip
MEMORY = {"declared": 3 * 2**30, "peak": 2**32, "rows": [
  {"kind": "masters", "declared": 2**30, "compiled": None, "note": ""},
  {"kind": " part of another", "declared": 7, "compiled": None, "note": ""},
]}  # fmt: skip


def write_run(folder, steps=1000, looks=100, layers=LAYERS, seed=0):
  """The files of a run with random numbers: SmolLM2's sites, every step, `looks` looks."""
  rng = np.random.default_rng(seed)
  names = ["head"] + [f"layers/{i}/{s}" for i in range(layers) for s in SITES]
  lines = [{"step": 0, "heldout/main/block_128/loss": 2.02, "heldout/main/bf16/loss": 2.0}]
  every = max(1, steps // looks)
  for step in range(1, steps + 1):
    row = {"step": step, "loss": 3 - step / steps + rng.normal() / 50, "grad_norm": rng.random()}
    lines.append({**row, "learning_rate": 1e-3, "data_wait_seconds": 0.01})
    if step % every == 0:
      # As numbers are in a run: all digits.
      lines.append({"step": step, "numerics": {
        name: {t: dict(zip(STATISTICS, rng.random(len(STATISTICS)).tolist())) for t in "xwg"}
        for name in names
      }})  # fmt: skip
  lines[-1]["numerics"]["head"]["x"]["snr_db"] = "inf"
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
