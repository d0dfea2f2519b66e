"""Faults put into the source one at a time: does a test see each of them?

  python tests/mutation/mutants.py draw        forty faults, the same ones every time -> drawn.json
  python tests/mutation/mutants.py draw 28 60  sixty more over all files, 28/0 to 28/59
  python tests/mutation/mutants.py run [3 r7]  the tests of each -> results.json; resumes; "28/"
                                               are those of that seed
  python tests/mutation/mutants.py table       results.md

A fault is a small change of one expression or statement, as in Jia & Harman 2011 (An Analysis and
Survey of the Development of Mutation Testing, §2). Why no library: mutmut 3 and cosmic-ray 8 make
every fault of a file (thousands here) and have one test command for all of them; this suite needs a
sample that a seed fixes, and minutes of tests per fault chosen by the file that it is in. A fault
belongs to a commit: that tree is what it is put into, and its files have the names of then.
"""

import ast
import collections
import copy
import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SEED, COUNT = 14, 40
TIMEOUT = 1500  # seconds per process; the slowest file takes 200 on two idle cores

# The files that join the parts, and the tests that should see a fault there, nearest first.
_STEP = ("step/train_step", "step/loss_scale", "jobs/recipe_schedule", "step/layerwise")
TESTS = {
  "fp8jax/step/train_step.py": (*_STEP, "step/invariance", "optim/masters"),
  "fp8jax/step/layerwise.py": ("step/layerwise", "compiled/memory"),
  "fp8jax/step/layer_loop.py": ("step/layerwise", "step/gradient_sums"),
  "fp8jax/step/quantized_once.py": ("step/quantized_once",),
  "fp8jax/ops/weight_operands.py": ("step/quantized_once",),
  "fp8jax/optim/update.py": (
    "optim/update",
    "step/train_step",
    "optim/masters",
    "step/layerwise",
  ),
  "fp8jax/optim/gradients.py": (
    "optim/masters",
    "step/train_step",
    "step/loss_scale",
    "step/invariance",
  ),
  "fp8jax/data/batch_sharding.py": ("step/train_step", "run/multiprocess"),
  "fp8jax/run/evaluator.py": (
    "step/train_step",
    "jobs/jobs",
    "step/loss_scale",
    "run/multiprocess",
  ),
  "fp8jax/jobs/train.py": (
    "step/train_step",
    "jobs/jobs",
    "jobs/user_errors",
    "jobs/resume",
    "jobs/continued_run",
    "run/calibration",
  ),
  "fp8jax/run/checkpoint.py": (
    "step/train_step",
    "jobs/resume",
    "jobs/jobs",
    "jobs/user_errors",
  ),
  "fp8jax/ops/collectives.py": ("step/train_step", "ops/linear_on_mesh", "step/invariance"),
  "fp8jax/data/loader.py": (
    "data/loader",
    "data/shuffle",
    "step/train_step",
    "data/damaged_files",
    "run/multiprocess",
  ),
  "fp8jax/data/window_index.py": ("data/shuffle", "data/damaged_files"),
  "fp8jax/phases/schedule.py": (
    "config/resolve",
    "config/precision",
    "jobs/recipe_schedule",
    "models/smooth_swiglu",
    "config/shipped_configs",
  ),
  "fp8jax/optim/optimizers.py": (
    "optim/optimizers",
    "optim/adam",
    "config/resolve",
    "optim/masters",
  ),
  "fp8jax/step/loss_scale.py": ("step/train_step", "config/resolve", "step/loss_scale"),
  "fp8jax/quantization/amax_history.py": (
    "step/train_step",
    "ops/linear",
    "quantization/amax_history",
  ),
  "fp8jax/compiled/fp8_gemms.py": (
    "compiled/fp8_gemms",
    "compiled/accumulation",
    "step/train_step",
  ),
  "fp8jax/compiled/expected_gemms.py": ("compiled/fp8_gemms", "compiled/accumulation"),
  "fp8jax/compiled/hlo.py": ("compiled/fp8_gemms", "compiled/accumulation"),
}

_SWAPPED = {
  ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
  ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
  ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
  ast.FloorDiv: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_OPPOSITE = {"min": "max", "minimum": "maximum", "any": "all", "first": "last", "floor": "ceil"}
_OPPOSITE |= {b: a for a, b in _OPPOSITE.items()}
# Arguments in another order raise in the first call of any test, or are the same (max, min).
_ORDERED = ("isinstance", "map", "partial", "getattr", "tree_map", "scan", "max", "min")


def _of_expression(node):
  """(operator's name, the changed node) for every fault that this expression can have."""

  def changed(kind, **fields):
    new = copy.deepcopy(node)
    for name, value in fields.items():
      setattr(new, name, value)
    return kind, new

  match node:
    case ast.Compare() if type(node.ops[0]) in _SWAPPED:
      yield changed("comparison", ops=[_SWAPPED[type(node.ops[0])](), *node.ops[1:]])
    case ast.BinOp() if type(node.op) in _SWAPPED:
      yield changed("arithmetic", op=_SWAPPED[type(node.op)]())
    case ast.BoolOp():
      for i in range(len(node.values)):
        rest = node.values[:i] + node.values[i + 1 :]
        yield "dropped term", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    case ast.UnaryOp():
      yield "dropped sign or not", node.operand
    case ast.IfExp():
      yield changed("swapped branches", body=node.orelse, orelse=node.body)
    case ast.Constant(value=bool()):
      yield changed("flipped constant", value=not node.value)
    case ast.Constant(value=int() | float()):
      yield changed("constant off by one", value=node.value + 1)
    case ast.Call():
      name = getattr(node.func, "attr", getattr(node.func, "id", ""))
      starred = any(isinstance(a, ast.Starred) for a in node.args[:2])
      if len(node.args) > 1 and not starred and name not in _ORDERED:
        yield changed("swapped arguments", args=[node.args[1], node.args[0], *node.args[2:]])
      for i in range(len(node.keywords)):
        yield changed("dropped keyword", keywords=node.keywords[:i] + node.keywords[i + 1 :])
      if name in _OPPOSITE and isinstance(node.func, ast.Attribute):
        yield changed("opposite function", func=ast.Attribute(node.func.value, _OPPOSITE[name]))
      elif name in _OPPOSITE:
        yield changed("opposite function", func=ast.Name(_OPPOSITE[name]))


def _walk(node):
  """(operator, node, text in its place) below a node; not of messages, annotations, docstrings."""
  match node:
    case ast.Raise() | ast.JoinedStr() | ast.arguments():
      return
    case ast.Expr(value=ast.Call(func=ast.Attribute(attr="print"))):
      return
    case ast.Expr(value=ast.Call()):
      yield "dropped call", node, "pass"
    case ast.AugAssign():
      yield "assigned instead", node, f"{ast.unparse(node.target)} = {ast.unparse(node.value)}"
    case ast.If() | ast.While():
      yield "negated condition", node.test, f"not ({ast.unparse(node.test)})"
    case ast.FunctionDef():
      for decorator in node.decorator_list:
        yield "dropped decorator", decorator, None
    case ast.expr():
      for kind, new in _of_expression(node):
        yield kind, node, f"({ast.unparse(new)})"
  for name, value in ast.iter_fields(node):
    if name not in ("annotation", "returns", "decorator_list"):
      for child in value if isinstance(value, list) else [value]:
        if isinstance(child, ast.AST):
          yield from _walk(child)


def candidates(file: str) -> list[dict]:
  """Every fault that a file can have, in the order of the source."""
  text = (ROOT / file).read_text()
  lines, found = text.splitlines(), []
  for kind, node, after in _walk(ast.parse(text)):
    source = lines[node.lineno - 1]
    before = ast.get_source_segment(text, node) or ""
    column = len(source.encode()[: node.col_offset].decode())  # ast counts bytes
    if after is None:
      before, after, column = "@" + before, "", column - 1
    found.append(dict(
      file=file, line=node.lineno, column=column, operator=kind, source=source, before=before,
      after=after,
    ))  # fmt: skip
  return found


def draw() -> list[dict]:
  """COUNT faults: the files in turn, of each any fault with the same chance; no line twice."""
  rng, drawn, files, commit = random.Random(SEED), [], [], _git("rev-parse", "HEAD")[:7]
  faults = {file: candidates(file) for file in TESTS}
  while len(drawn) < COUNT:
    files = files or rng.sample(list(TESTS), len(TESTS))
    one = rng.choice(faults[files[-1]])
    if not any((d["file"], d["line"]) == (one["file"], one["line"]) for d in drawn):
      drawn.append({"id": len(drawn), **one, "tests": TESTS[one["file"]], "commit": commit})
      files.pop()
  return drawn


def draw_from_all(seed: int, count: int) -> list[dict]:
  """So many faults, of so many files of fp8jax/, each with `tests_of` its file."""
  rng, commit, drawn = random.Random(seed), _git("rev-parse", "HEAD")[:7], []
  files = [f for f in _git("ls-files", "fp8jax/*.py").split() if not f.endswith("__init__.py")]
  for file in rng.sample(files, len(files)):
    if len(drawn) < count and (faults := candidates(file)):
      one = rng.choice(faults)
      drawn.append({"id": f"{seed}/{len(drawn)}", **one, "tests": tests_of(file), "commit": commit})
  return drawn


def tests_of(file: str) -> list[str]:
  """The tests of the mirrored folder and those that name the module, the quickest first."""
  module, folder = file.removesuffix(".py").replace("/", "."), file.split("/")[1:-1][:1]
  package, _, name = module.rpartition(".")
  named = re.compile(rf"{module}\b|from {package} import (\([^)]*|.*)\b{name}\b")
  seconds = {k: v for k, v in json.loads((ROOT / "tests/cpu_seconds.json").read_text()).items()}
  if re.search(rf"from {module} import|import {name}\b", (ROOT / "fp8jax/__init__.py").read_text()):
    folder = [*folder, "front_door_test.py"]
  if re.search(r"= key\(", (ROOT / file).read_text()):
    folder = [*folder, "registry_test.py"]  # the table of all keys
  if any(named.search(path.read_text()) for path in (ROOT / "fp8jax/jobs").glob("*.py")):
    folder = [*folder, "jobs_test.py"]  # what a whole run writes and prints
  paths = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*_test.py")]
  wanted = [p for p in paths if {p.parts[0], p.name} & {*folder}
            or named.search((ROOT / "tests" / p).read_text())]  # fmt: skip
  wanted.sort(key=lambda p: seconds.get(f"tests/{p}", 0.0))
  return [str(p).removesuffix("_test.py") for p in wanted]


def applied(fault: dict, text: str) -> str:
  """The file with its fault; it is looked for where the same line is now."""
  lines = text.splitlines(keepends=True)
  same = [i for i, line in enumerate(lines) if line.rstrip("\n") == fault["source"]]
  for i in sorted(same, key=lambda i: abs(i + 1 - fault["line"])):
    start = sum(map(len, lines[:i])) + fault["column"]
    if text[start:].startswith(fault["before"]):
      return text[:start] + fault["after"] + text[start + len(fault["before"]) :]
  raise LookupError(
    f"fault {fault['id']}: {fault['file']} has no line {fault['source']!r} any more"
  )


def judge(folder: pathlib.Path, tests, cache: str) -> tuple[str, str]:
  """("killed", first failure), ("survived", "") or ("timeout", test file) in a copy."""
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder)}
  # Most programs of most faults are the same.
  environment["JAX_COMPILATION_CACHE_DIR"] = cache
  command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider"]
  # Eight files per process: its imports take longer than many a file's tests.
  for batch in itertools.batched(tests, 8):
    files = [f"tests/{name}_test.py" for name in batch]
    try:
      done = subprocess.run(
        [*command, *files], cwd=folder, env=environment, text=True, capture_output=True,
        timeout=TIMEOUT,
      )  # fmt: skip
    except subprocess.TimeoutExpired:
      return "timeout", " ".join(files)
    if done.returncode in (1, 2):  # a failure, or an import that fails
      failed = [s for s in done.stdout.splitlines() if s.startswith(("FAILED", "ERROR"))]
      return "killed", (failed or files)[0].partition(" - ")[0].partition(" ")[2] or files[0]
    if done.returncode:
      raise RuntimeError(f"pytest {files} ended with {done.returncode}: {done.stdout[-2000:]}")
  return "survived", ""


def _faults() -> list[dict]:
  """The drawn ones, and those of the review of commit 815647b, each with its tests."""
  return [f for name in ("drawn", "reviewed") for f in _read(name)]


def _read(name: str):
  at = HERE / f"{name}.json"
  return json.loads(at.read_text()) if at.exists() else {}


def run(only: list[str]):
  """Judges the faults that results.json lacks, or those named."""
  cache = tempfile.TemporaryDirectory(prefix="fault_cache_")
  done = _read("results")
  ids = [str(f["id"]) for f in _faults()]
  seeds = tuple(one for one in only if one.endswith("/"))
  wanted = {i for i in ids if i in only or (i not in done and (not only or i.startswith(seeds)))}
  for fault in [f for f in _faults() if str(f["id"]) in wanted]:
    start = time.time()
    with tempfile.TemporaryDirectory(prefix="fault_") as name:
      folder = _copy(pathlib.Path(name), fault["commit"])
      file = folder / fault["file"]
      text = file.read_text()
      file.write_text(applied(fault, text))
      verdict, test = judge(folder, fault["tests"], cache.name)
      file.write_text(text)
      stem = test.partition("::")[0].removeprefix("tests/").removesuffix("_test.py")
      if verdict == "killed" and judge(folder, [stem], cache.name)[0] != "survived":
        verdict = "fails without the fault"
    results = _read("results")
    results[str(fault["id"])] = dict(
      verdict=verdict, test=test, seconds=round(time.time() - start), commit=fault["commit"]
    )
    (HERE / "results.json").write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print(fault["id"], fault["file"], fault["line"], verdict, test, flush=True)


def _git(*arguments) -> str:
  return subprocess.run(
    ["git", *arguments], cwd=ROOT, check=True, text=True, capture_output=True
  ).stdout.strip()


def _copy(folder: pathlib.Path, commit: str) -> pathlib.Path:
  archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
  subprocess.run(["tar", "-x"], cwd=folder, check=True, input=archive.stdout)
  if (ROOT / "assets").exists():
    (folder / "assets").symlink_to((ROOT / "assets").resolve())
  return folder


def table() -> str:
  """Markdown, with what is argued in equivalents.json."""
  results, argued, rows = _read("results"), _read("equivalents"), []
  counts = collections.defaultdict(collections.Counter)
  for fault in _faults():
    key = str(fault["id"])
    got = results.get(key, {"verdict": "not run", "test": ""})
    is_equivalent = key in argued and got["verdict"] != "killed"
    verdict = "equivalent" if is_equivalent else got["verdict"]
    counts[_draw_of(key)][verdict] += 1
    seen_by = argued[key] if is_equivalent else got["test"].replace("tests/", "")
    change = f"{fault['operator']}: `{_short(fault['before'])}` -> `{_short(fault['after'])}`"
    cells = (key, f"{fault['file']}:{fault['line']}", change, verdict, seen_by)
    rows.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
  head = ["| | where | fault | verdict | seen by, or why nothing can see it |", "|---" * 5 + "|"]
  said = [f"{name}: {_share(count)} ({dict(count)})" for name, count in counts.items()]
  said.append("Files and tests have the names that they had at the commit of the fault.")
  return "\n\n".join([*said, "\n".join(head + rows)]) + "\n"


def _draw_of(number) -> str:
  """Of which draw a fault is: reviewed, drawn (the first), or of a seed over all files."""
  number = str(number)
  if "/" in number:
    return f"seed {number.partition('/')[0]}"
  return "reviewed" if number.startswith("r") else "drawn"


def _share(count: collections.Counter) -> str:
  """Of those that a test can see."""
  visible = sum(count.values()) - count["equivalent"] - count["not run"]
  return f"{count['killed']} of {visible} killed"


def _short(text: str) -> str:
  text = " ".join(text.split())
  return text if len(text) < 90 else f"{text[:60]} ... {text[-25:]}"


if __name__ == "__main__":
  match sys.argv[1:]:
    case ["draw", *numbers]:
      drawn = draw_from_all(*map(int, numbers)) if numbers else draw()
      others = [f for f in _read("drawn") if _draw_of(f["id"]) != _draw_of(drawn[0]["id"])]
      (HERE / "drawn.json").write_text(json.dumps([*others, *drawn], indent=1) + "\n")
    case ["run", *only]:
      run(only)
    case ["table"]:
      (HERE / "results.md").write_text(table())
    case _:
      sys.exit(__doc__)
