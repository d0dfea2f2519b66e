"""results.jsonl: one record per line of the file, appended and flushed, readable after a kill.

A record is {"line", "key", "status", "values" or "why", "seconds", "time"}. Statuses:

  ok       measured; a correctness line passed
  wrong    a result is not what the oracle says; nothing was timed
  failed   an exception; `why` is its first line
  absent   a rival that the machine does not have; `why` says what is missing
  cut      a run that its time limit ended; a second call measures it again
  begun    written before a line is measured: a line that stays so ended its process

`key` names what the results belong to: commit, sources, device, jax. Other records are ignored.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
FINISHED = ("ok", "wrong", "failed", "absent")


def append(path: pathlib.Path, record: dict[str, Any]):
  """Adds one record, whole or not at all. Several processes may append to one file."""
  text = json.dumps({**record, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
  if path.exists() and (end := path.read_bytes()[-1:]) and end != b"\n":
    text = "\n" + text  # a process was killed while it wrote
  with open(path, "ab", buffering=0) as f:
    f.write((text + "\n").encode())
    os.fsync(f.fileno())


def read(path: pathlib.Path, key: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """Line -> its latest record under `key`. A record that was cut off is skipped."""
  found = {}
  for text in path.read_text().splitlines() if path.exists() else ():
    try:
      record = json.loads(text)
    except json.JSONDecodeError:
      continue
    if isinstance(record, dict) and "line" in record and record.get("key") == key:
      found[record["line"]] = record
  return found


def unfinished(names, found: dict[str, dict[str, Any]]) -> list[str]:
  """Names without a result; those that ended their process come last."""
  left = [n for n in names if found.get(n, {}).get("status") not in FINISHED]
  return sorted(left, key=lambda n: n in found)


def sources() -> str:
  """Hash of the program: the package and what this script runs."""
  digest = hashlib.sha256()
  folders = ("fp8jax", "configs", "experiments/gpu_check", "experiments/bench/kernels")
  files = [ROOT / "experiments" / "bench" / "timing.py", ROOT / "experiments" / "gpu_check.py"]
  files += [ROOT / "launch.py", ROOT / "experiments" / "2026_hopper" / "arms.py"]
  files += [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
  for path in sorted(files):
    digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
  return digest.hexdigest()[:16]


def commit() -> str:
  """Of the checkout; "unknown" where there is none, as in a copy of the files."""
  command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
  except (OSError, subprocess.TimeoutExpired):
    return "unknown"
  return done.stdout.strip() if done.returncode == 0 else "unknown"
