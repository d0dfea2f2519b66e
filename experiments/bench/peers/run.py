"""Ours beside qwix, flax.linen.fp8_ops, torchao and MaxText, on the same CPU and the same inputs.

command: python experiments/bench/peers/run.py [--scratch=FOLDER] [matmul] [train]

Makes a virtual environment for every peer under FOLDER the first time, and says which it cannot
make. Prints tables, puts them into README.md and writes results/results.json, with provenance.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2]), str(HERE.parent)]

import explain  # noqa: E402
import inputs  # noqa: E402
import numpy as np  # noqa: E402
import timing  # noqa: E402
import train  # noqa: E402

SAME = ("jax", "jaxlib", "flax", "numpy")  # at our own versions, so that only the library differs
TORCHAO = ("torch==2.13.0", "torchao==0.18.0", "numpy==2.4.6")
QWIX, MAXTEXT = "qwix==0.1.8", "maxtext[tpu]==0.2.5"


# --- environments --------------------------------------------------------------------------------


def environments(scratch, parts):
  """{peer: its Python, or the reason why there is none}."""
  from importlib import metadata

  same = [f"{name}=={metadata.version(name)}" for name in SAME]
  found = {"fp8jax": pathlib.Path(sys.executable), "flax": pathlib.Path(sys.executable)}
  if "matmul" in parts:
    found["qwix"] = _environment(scratch / "qwix", sys.executable, [[QWIX, *same]])
    # torch has CPU wheels for Python 3.11 on PyPI, none for later ones.
    found["torchao"] = _environment(scratch / "torchao", _interpreter("3.11"), [TORCHAO])
  if "train" in parts:
    # Its 240 packages are too much for pip's resolver.
    found["maxtext"] = _environment(scratch / "maxtext", sys.executable, [["uv"], ["uv", MAXTEXT]])
  for peer, python in found.items():
    if isinstance(python, str):
      print(f"skipped {peer}: {python}", flush=True)
  return found


def _interpreter(version):
  """Path of a Python that runs and has this version, or None."""
  for path in filter(None, (shutil.which(f"python{version}"), shutil.which("python3"))):
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True)
    if done.stdout.strip() == version:
      return path
  return None


def _environment(folder, interpreter, installs):
  """Its Python; or why it cannot be made. An install that starts with uv is done by uv."""
  python, mark = folder / "bin" / "python", folder / "complete"
  wanted = json.dumps([list(i) for i in installs])
  if mark.exists() and mark.read_text() == wanted:
    return python
  if interpreter is None:
    return "no such Python here"
  print(f"making {folder.name} ...", flush=True)
  shutil.rmtree(folder, ignore_errors=True)
  commands = [[interpreter, "-m", "venv", folder]]
  for packages in installs:
    if packages[0] == "uv" and len(packages) > 1:
      commands.append([folder / "bin" / "uv", "pip", "install", "--python", python, *packages[1:]])
    else:
      commands.append([python, "-m", "pip", "install", *packages])
  for command in commands:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
      lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
      return f"{' '.join(map(str, command[1:]))}: {lines[-1]}"
  mark.write_text(wanted)
  return python


# --- matrix products -----------------------------------------------------------------------------


def bench_matmul(scratch, pythons, seconds):
  """Values, times and explanations of all products."""
  arrays, source = inputs.make(), scratch / "inputs.npz"
  np.savez(source, **arrays)
  found, about = {}, {}
  for peer in ("fp8jax", "flax", "qwix", "torchao"):
    if isinstance(pythons[peer], str):
      continue
    print(f"{peer} ...", flush=True)
    target = scratch / f"{peer}.npz"
    command = [pythons[peer], HERE / f"peer_{peer}.py", source, target, seconds]
    subprocess.run(list(map(str, command)), check=True, stderr=subprocess.DEVNULL)
    with np.load(target) as made:
      found[peer] = dict(made.items())
    about[peer] = json.loads(str(found[peer].pop("about")))
  print("comparing ...", flush=True)
  times = {peer: _times(f) for peer, f in found.items()}
  return {"about": about, "milliseconds": times, **explain.explain(arrays, found)}


def _times(found):
  """{configuration: {case: {what: {median, min, calls}}}} in milliseconds."""
  result = {}
  for name, values in found.items():
    case, configuration, what = name.split("/")
    if what in ("forward", "both"):
      result.setdefault(configuration, {}).setdefault(case, {})[what] = {
        "median": round(1e3 * float(np.median(values)), 3),
        "min": round(1e3 * float(values.min()), 3),
        "calls": len(values),
      }
  return result


# --- tables --------------------------------------------------------------------------------------


def matmul_tables(result):
  """Markdown: errors and times; differences."""
  errors, times = result["relative_error"], result["milliseconds"]
  head = ["by", "configuration", *(f"error of {w}" for w in explain.PRODUCTS)]
  head += [f"{what} {case}" for case in inputs.SHAPES for what in ("y", "y, dx, dw")]
  rows = []
  for peer, configurations in errors.items():
    for name, by_case in configurations.items():
      cells = [peer, f"`{name}`"]
      error = by_case[ERRORS_OF]
      cells += [f"{error[w]:.4f}" if w in error else "" for w in explain.PRODUCTS]
      for case in inputs.SHAPES:
        found = times[peer][name][case]
        measured = (found.get(what) for what in ("forward", "both"))
        cells += [f"{t['median']:.1f} ({t['min']:.1f})" if t else "" for t in measured]
      rows.append(cells)
  return _table(head, rows), _table(DIFFERENCES, map(_difference, result["pairs"]))


ERRORS_OF = "1024x1024x1024"
DIFFERENCES = (
  "ours", "peer", "codes that differ", "NumPy, our rule: ours", "NumPy, its rule: peer's",
  "largest difference of y", "dx", "dw", "left under its rule",
)  # fmt: skip


def _difference(pair):
  cases = pair["cases"].values()
  differ = (sum(c["codes_that_differ"].values()) for c in cases)
  ours = (c["our_codes_missed_by_our_rule"] for c in cases)
  theirs = (c["peers_codes_missed_by_rule"][c["rule"]] for c in cases)
  cells = [f"`{pair['ours']}`", f"{pair['peer']} `{pair['theirs']}`"]
  cells += [" / ".join(f"{n:,}" for n in numbers) for numbers in (differ, ours, theirs)]
  products = [[c["products"][w] for c in cases if w in c["products"]] for w in explain.PRODUCTS]
  for found in products:
    numbers = (p["largest_difference"] for p in found)
    cells.append(" / ".join(f"{n:.0e}" if n else "0" for n in numbers))
  left = max(p["peer_to_numpy_with_its_rule"] for found in products for p in found)
  return [*cells, f"{left:.0e}"]


MEAN = "tokens_per_second_mean"


def train_table(rows):
  """Markdown."""
  head = ("by", "run", "compute", "tokens/s, median step", "mean of all steps")
  cells = (
    (r["by"], r["run"], r["compute"], *(f"{r[k]:,}" for k in ("tokens_per_second", MEAN)))
    for r in rows
  )
  return (_table(head, cells),)


def _table(head, rows):
  lines = [head, ["---"] * len(head), *rows]
  return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def publish(part, tables):
  """Prints tables and puts them into README.md, between its marks."""
  path = HERE / "README.md"
  text = path.read_text()
  for number, table in enumerate(tables):
    print(f"\n{table}", flush=True)
    before, mark, rest = text.partition(f"<!-- {part} {number} -->\n")
    if mark:
      text = before + mark + table + rest[rest.index("<!-- end -->") :]
  path.write_text(text)


# --- all -----------------------------------------------------------------------------------------


def provenance(start, load, pythons):
  cpu = pathlib.Path("/proc/cpuinfo")
  lines = cpu.read_text().splitlines() if cpu.exists() else []
  models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
  return {
    **timing.provenance("seed", seed=inputs.SEED),
    "command": "python experiments/bench/peers/run.py " + " ".join(sys.argv[1:]),
    "cpu": models[0] if models else None,
    "skipped": {p: reason for p, reason in pythons.items() if isinstance(reason, str)},
    "peers": [QWIX, *TORCHAO, MAXTEXT],
    "load_average_before": load,
    "load_average_after": os.getloadavg(),
    "seconds": round(time.time() - start),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  default = pathlib.Path(tempfile.gettempdir()) / "fp8jax_peers"
  parser.add_argument("--scratch", type=pathlib.Path, default=default, help="for environments")
  parser.add_argument("--seconds", type=float, default=0.4, help="of calls per measurement")
  parser.add_argument("parts", nargs="*", metavar="PART", help="matmul, train; default both")
  args = parser.parse_args()
  parts = args.parts or ["matmul", "train"]
  if unknown := set(parts) - {"matmul", "train"}:
    parser.error(f"no part named {', '.join(sorted(unknown))}")
  scratch = args.scratch.resolve()
  scratch.mkdir(parents=True, exist_ok=True)
  pythons = environments(scratch, parts)
  path = HERE / "results" / "results.json"
  results = timing.read(path)
  for part in parts:
    start, load = time.time(), os.getloadavg()
    if part == "matmul":
      results[part] = bench_matmul(scratch, pythons, args.seconds)
      tables = matmul_tables(results[part])
    else:
      python = pythons["maxtext"]
      results[part] = {"rows": train.bench(scratch, None if isinstance(python, str) else python)}
      tables = train_table(results[part]["rows"])
    results[part]["provenance"] = provenance(start, load, pythons)
    timing.write(path, results, indent=1)
    publish(part, tables)


if __name__ == "__main__":
  main()
