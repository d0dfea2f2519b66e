"""Guards of `make check`: facts of the project that change only with a reason beside them.

  python tests/guards.py                      compares; exit 1 with every fact that moved
  python tests/guards.py accept [PATTERN] --why "..."
                                              appends today's facts whose whole name matches, and
                                              the reason to each
  python tests/guards.py cpu [SECONDS.json]   compares the CPU time of a run of the tests, by file

tests/guards.json holds every fact's history, [value, reason] by [value, reason]: the first needs no
reason, later ones do. What is guarded: the golden values of tests/golden (any change), the lowered
program of configs/debug.py in every recipe by jax version (any change), the lines of every ring of
fp8jax/, the tolerances, of a file of tests its largest, and the marks that skip tests (growth). A
history is only appended to: the parent commit's is a beginning of today's.
"""

import ast
import collections
import hashlib
import json
import pathlib
import re
import subprocess
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
HISTORIES, CPU_BUDGET = HERE / "guards.json", HERE / "cpu_seconds.json"
CPU_RUN = ROOT / ".pytest_cache" / "cpu_seconds.json"
# In all; a file may take twice its own, and so much more than it: small files vary.
CPU_MOST, CPU_SLACK = 1300.0, 5.0
# In these any change needs a reason; in the others only growth does.
EXACT = ("golden", "program")
RINGS = {
  "library": ("", "recipe", "quantization", "kernels", "ops", "optim", "integrations"),
  "trainer": ("models", "data", "phases", "step", "config", "compiled", "run"),
  "lab": tuple("generation evaluation export sensitivity search report sweeps ptq rl".split()),
  "launcher": ("jobs",),
}
# Say the noun instead; `spec`, snapshot, firing, again are the field's.
WORDS = ("found", "plan", "look", "looks", "anew", "rung", "told")
# Marks, and functions of pytest, that leave a test out.
MARKS = ("slow", "skip", "skipif", "xfail", "importorskip", "gpu", "aot", "browser")


def golden() -> dict[str, str]:
  """{"golden step.json products/block_128": digest} of the files that tests compare with."""
  found = {}
  for path in sorted((HERE / "golden").rglob("*")):
    name = path.relative_to(HERE / "golden").as_posix()
    if path.is_dir() or path.suffix in (".py", ".pyc", ".md"):
      continue
    for key, value in _values(path):
      found[f"golden {name} {key}".rstrip()] = hashlib.sha256(value).hexdigest()[:16]
  return found


def _values(path: pathlib.Path):
  """(key, bytes) of a file: two levels of JSON, the arrays of an archive, or the whole."""
  if path.suffix == ".npz":
    with np.load(path) as arrays:
      yield from ((k, str(arrays[k].dtype).encode() + arrays[k].tobytes()) for k in arrays.files)
    return
  if path.suffix != ".json":
    yield "", path.read_bytes()
    return
  for key, value in _items(json.loads(path.read_text())):
    for below, inner in _items(value) if isinstance(value, (dict, list)) else [("", value)]:
      yield f"{key}/{below}".rstrip("/"), json.dumps(inner, sort_keys=True).encode()


def _items(value):
  return value.items() if isinstance(value, dict) else enumerate(value)


def programs() -> dict[str, str]:
  """{"program 0.12.0.1 block_128": digest} of the StableHLO, without places in the source."""
  sys.path.insert(0, str(ROOT))
  import jax

  from configs import debug
  from fp8jax.compiled import aot
  from fp8jax.config import resolve
  from fp8jax.kernels.choose import Device
  from fp8jax.recipe import library

  found = {}
  for recipe in library.RECIPES:
    spec = resolve.resolve(debug.get_config(recipe), 1, Device("cpu"))
    text = aot.lower(spec, jax.devices("cpu")[:1]).as_text()
    found[f"program {jax.__version__} {recipe}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
  return found


def lines() -> dict[str, float]:
  """{"lines lab": lines of Python}; "lines all" is fp8jax/ as a whole."""
  ring_of = {folder: ring for ring, folders in RINGS.items() for folder in folders}
  found: collections.Counter[str] = collections.Counter()
  for path in (ROOT / "fp8jax").rglob("*.py"):
    folder = path.relative_to(ROOT / "fp8jax").parts[0] if path.parent.name != "fp8jax" else ""
    count = len(path.read_text().splitlines())
    found[f"lines {ring_of[folder]}"] += count
    found["lines all"] += count
  return dict(found)


def words() -> dict[str, float]:
  """{"word found": times in fp8jax/}: names that say nothing, and terms that nobody else uses."""
  text = "\n".join(path.read_text() for path in (ROOT / "fp8jax").rglob("*.py"))
  return {f"word {w}": float(len(re.findall(rf"\b{w}\b", text))) for w in WORDS}


def tolerances() -> dict[str, float]:
  """{"tolerance GEMM_DIFFERENCE e4m3": bound} of tests/tolerances.py, {"tolerance FILE rtol":
  largest number} of the tests themselves."""
  sys.path[:0] = [str(ROOT), str(HERE)]
  import tolerances as module

  found = {}
  for name, value in vars(module).items():
    if name.isupper():
      many = value.items() if isinstance(value, dict) else enumerate(np.ravel(value))
      found |= {f"tolerance {name} {key}": float(bound) for key, bound in many}
  for path in HERE.rglob("*_test.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.keyword) and node.arg in ("rtol", "atol", "rel", "abs"):
        name = f"tolerance {path.relative_to(HERE).as_posix()} {node.arg}"
        numbers = [x.value for x in ast.walk(node.value) if isinstance(x, ast.Constant)]
        numbers = [float(x) for x in numbers if type(x) in (int, float)]
        found[name] = max([found.get(name, 0.0), *numbers])
  return found


def marks() -> dict[str, float]:
  """{"mark slow": count} of the places that leave tests out."""
  found = dict.fromkeys((f"mark {mark}" for mark in MARKS), 0.0)
  for path in HERE.rglob("*_test.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
      mark = text.rpartition(".")[2]
      if mark in MARKS and text in (f"pytest.mark.{mark}", f"pytest.{mark}"):
        found[f"mark {mark}"] += 1
  return found


def today() -> dict[str, str | float]:
  """Every guarded fact."""
  return golden() | programs() | lines() | words() | tolerances() | marks()


def moved(facts, histories) -> dict[str, str]:
  """{fact: what moved} of the facts that need a reason, or a place in the histories."""
  found = {}
  for name, value in facts.items():
    history, kind = histories.get(name), name.split()[0]
    if history is None:
      found[name] = "is new"
    elif kind in EXACT and value != history[-1][0]:
      found[name] = f"was {history[-1][0]}, is {value}"
    elif kind not in EXACT and value > history[-1][0]:
      found[name] = f"was {history[-1][0]:g} at most, is {value:g}"
  versions = {name.split()[1] for name in facts if name.startswith("program ")}
  for name in histories.keys() - facts.keys():
    is_other = name.startswith("program ") and name.split()[1] not in versions
    if histories[name][-1][0] is not None and not is_other:
      found[name] = "is gone"
  return found


def without_reason(histories, before) -> list[str]:
  """Histories with a later value and no reason, or whose beginning was changed after `before`."""
  found = [
    f"{name}: {entry[0]} has no reason"
    for name, history in histories.items()
    for last, entry in zip(history, history[1:])
    if not entry[1].strip() and (name.split()[0] in EXACT or entry[0] > last[0])
  ]
  for name, history in before.items():
    if histories.get(name, [])[: len(history)] != history:
      found.append(f"{name}: its history was rewritten; append to it instead")
  return found


def _before() -> dict:
  """The histories of the parent commit, or of this one while it is being edited."""
  name = HISTORIES.relative_to(ROOT).as_posix()
  shown = subprocess.run(["git", "show", f"HEAD:{name}"], cwd=ROOT, capture_output=True, text=True)
  if shown.returncode == 0 and shown.stdout == HISTORIES.read_text():
    shown = subprocess.run(
      ["git", "show", f"HEAD^:{name}"], cwd=ROOT, capture_output=True, text=True
    )
  return json.loads(shown.stdout) if shown.returncode == 0 else {}


def cpu(path: pathlib.Path, budget: dict[str, float]) -> list[str]:
  """The files, and the sum, that took more CPU time than their budget, in words.

  Args:
    path: {test file: CPU seconds} of a run of the default suite, written by tests/conftest.py.
    budget: {test file: CPU seconds} on an idle machine.
  """
  taken = json.loads(path.read_text())
  found = []
  if sum(taken.values()) > CPU_MOST:
    found.append(f"all tests: {sum(taken.values()):.0f} CPU-seconds, at most {CPU_MOST:.0f}")
  for name, seconds in sorted(taken.items()):
    most = 2 * budget.get(name, 0.0) + CPU_SLACK
    if seconds > most:
      found.append(f"{name}: {seconds:.1f} CPU-seconds, at most {most:.1f}")
  return found


def main(arguments: list[str]) -> int:
  if arguments[:1] == ["cpu"]:
    path = pathlib.Path(arguments[1]) if len(arguments) > 1 else CPU_RUN
    problems = cpu(path, json.loads(CPU_BUDGET.read_text()))
    print("\n".join(problems) or f"CPU time of the tests: within {CPU_BUDGET.name}")
    return bool(problems)
  histories = json.loads(HISTORIES.read_text()) if HISTORIES.exists() else {}
  facts = today()
  changes = moved(facts, histories)
  if arguments[:1] == ["accept"]:
    *patterns, flag, why = arguments[1:] if len(arguments) > 2 else ("", "", "")
    if flag != "--why" or not why.strip() or len(patterns) > 1:
      print('guards: accept [PATTERN] --why "the reason, and the bound that holds"')
      return 2
    pattern = re.compile(*patterns or [".*"])
    changes = {name: how for name, how in changes.items() if pattern.fullmatch(name)}
    for name in changes:
      history = histories.setdefault(name, [])
      history.append([facts.get(name), why if history else ""])
    for name in filter(pattern.fullmatch, facts.keys() - moved(facts, histories).keys()):
      if facts[name] != histories[name][-1][0]:  # a bound that shrinks
        histories[name].append([facts[name], ""])
    text = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(histories.items()))
    HISTORIES.write_text("{\n" + text + "\n}\n")
    print(f"{len(changes)} facts accepted")
    return 0
  problems = [f"{name} {how}" for name, how in changes.items()]
  if problems:
    problems.append('meant: python tests/guards.py accept --why "the reason, and the bound"')
  problems += without_reason(histories, _before())
  print("\n".join(problems) or f"{len(facts)} guarded facts as in {HISTORIES.name}")
  return bool(problems)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
