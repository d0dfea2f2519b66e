"""The rules of the house that a machine judges well, read from the source without running it.

Every finding names its file and line. An exception stands in a table here, with its reason.
"""

import ast
import dataclasses
import functools
import graphlib
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging import requirements, utils

from fp8jax import recipes

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fp8jax"

# What a floor holds, and the floors below that it may import. Floor 5 is siblings: they do not
# import each other.
FLOORS = (
  ("axes errors formats mesh params state", ()),
  ("recipe recipes quant", (0,)),
  ("kernels", (0, 1)),
  ("ops", (0, 1, 2)),
  ("models", (0, 3)),
  ("checkpoint data metrics optim writers", (0, 1)),
  ("batches config diagnose evaluate report train", (0, 1, 2, 3, 4, 5)),
  ("jobs", (0, 1, 2, 3, 4, 5, 6)),
)
SIBLINGS = 5
FLOOR = {unit: floor for floor, (units, _) in enumerate(FLOORS) for unit in units.split()}
# Imports that the table forbids: the machinery counts FLOPs from a model's sizes.
IMPORTS = {("metrics", "fp8jax.models.config")}

# Names of distributions where they are not those of their modules.
DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint"}
# Extras are imported where they are used, but for the modules that are about nothing else.
EXTRAS_AT_THE_TOP = {("models/hf.py", "safetensors"), ("data/prepare.py", "array-record")}
BANNED = {"torch", "transformers", "pickle", "cloudpickle", "dill", "joblib", "shelve"}

# Where alone these are called. A differentiation rule that quantises, a product or an attention
# elsewhere would escape its recipe.
PLACES = {
  "custom_vjp": ("ops/dot.py", "ops/loss.py"),  # of the GEMM; of the loss, made of the same GEMMs
  "dot_general": ("ops/dot.py", "kernels/"),
  "dot_product_attention": ("ops/attention.py",),
  **dict.fromkeys(("custom_jvp", "dot", "einsum", "matmul", "tensordot", "vdot", "@"), ()),
}
# The environment is recorded with a run's results, never obeyed.
ENVIRONMENT = {"writers.py"}
MAX_LINES, MAX_FUNCTION = 400, 60
LONG = {"models/hf.py", "train.py"}


@dataclasses.dataclass(frozen=True)
class Source:
  """A parsed file and its name within the package, e.g. "ops/dot.py"."""

  name: str
  text: str
  tree: ast.Module

  def at(self, node: ast.AST) -> str:
    return f"fp8jax/{self.name}:{node.lineno}"

  @property
  def unit(self) -> str:
    return self.name.split("/")[0].removesuffix(".py")

  def walk(self, *kinds):
    return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


@dataclasses.dataclass(frozen=True)
class Import:
  """One module that a file imports; `is_top`: as soon as the file is."""

  source: Source
  node: ast.stmt
  module: str
  is_top: bool


@functools.cache
def _sources() -> list[Source]:
  paths = sorted(PACKAGE.rglob("*.py"))
  texts = [path.read_text() for path in paths]
  return [Source(p.relative_to(PACKAGE).as_posix(), t, ast.parse(t)) for p, t in zip(paths, texts)]


@functools.cache
def _imports() -> list[Import]:
  found = []
  for source in _sources():
    for node in source.walk(ast.Import, ast.ImportFrom):
      is_top = node in source.tree.body
      if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
      else:
        assert not node.level, f"{source.at(node)}: relative import"
        whole = [f"{node.module}.{alias.name}" for alias in node.names]
        modules = [name if _path_of(name) else node.module for name in whole]
      found += [Import(source, node, module, is_top) for module in dict.fromkeys(modules)]
  return found


def _path_of(module: str) -> str | None:
  """File of a module within the package, e.g. "ops/dot.py", or None."""
  stem = ROOT / module.replace(".", "/")
  for path in (stem.with_suffix(".py"), stem / "__init__.py"):
    if path.is_file() and path.is_relative_to(PACKAGE):
      return path.relative_to(PACKAGE).as_posix()
  return None


def _report(problems):
  problems = list(problems)
  assert not problems, "\n" + "\n".join(problems)


# --- imports -------------------------------------------------------------------------------------


def test_imports_go_downward():
  units = {source.unit for source in _sources()} - {"__init__"}
  assert units == set(FLOOR), "a module or folder is on no floor, or gone: see FLOORS"

  def problems():
    for i in _imports():
      if not i.module.startswith("fp8jax.") or (i.source.unit, i.module) in IMPORTS:
        continue
      unit, other = i.source.unit, i.module.split(".")[1]
      here, there = FLOOR[unit], FLOOR[other]
      is_same = unit == other or (here == there and here != SIBLINGS)
      if not is_same and there not in FLOORS[here][1]:
        yield f"{i.source.at(i.node)}: {unit} (floor {here}) imports {i.module} (floor {there})"

  _report(problems())


def test_imports_have_no_cycle():
  graph = {source.name: set() for source in _sources()}
  for i in _imports():
    if path := _path_of(i.module):
      graph[i.source.name].add(path)
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@functools.cache
def _declared() -> tuple[dict, dict]:
  """Requirements of pyproject.toml by name: (core, extras); the GPU's wheels are jax's own."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  extras = [line for lines in project["optional-dependencies"].values() for line in lines]

  def by_name(lines):
    parsed = map(requirements.Requirement, lines)
    return {utils.canonicalize_name(r.name): r for r in parsed if r.name != project["name"]}

  core = by_name(project["dependencies"])
  return core, {k: v for k, v in by_name(extras).items() if k not in core}


def test_imports_are_declared():
  core, extras = _declared()

  def problems():
    for i in _imports():
      top = i.module.split(".")[0]
      if top == "fp8jax" or (top in sys.stdlib_module_names and top not in BANNED):
        continue
      name = utils.canonicalize_name(DISTRIBUTIONS.get(top, top))
      if top in BANNED:
        yield f"{i.source.at(i.node)}: {top} is never imported"
      elif name not in core | extras:
        yield f"{i.source.at(i.node)}: {name} is not among the dependencies in pyproject.toml"
      elif name in extras and i.is_top and (i.source.name, name) not in EXTRAS_AT_THE_TOP:
        yield f"{i.source.at(i.node)}: {name} belongs to an extra; import it where it is used"

  _report(problems())


def test_imports_are_plain():
  """None is tried, none is private, and nothing unpickles."""

  def problems():
    for source in _sources():
      for block in source.walk(ast.Try):
        inside = (n for n in ast.walk(block) if isinstance(n, (ast.Import, ast.ImportFrom)))
        yield from (f"{source.at(node)}: import inside `try`" for node in inside)
      for node in source.walk(ast.Attribute):
        if node.attr == "_src":
          yield f"{source.at(node)}: private module of JAX"
      for node in source.walk(ast.keyword):
        if node.arg == "allow_pickle" and getattr(node.value, "value", None) is not False:
          yield f"{source.at(node.value)}: a pickle may hold any program"
    yield from (f"{i.source.at(i.node)}: private module" for i in _imports() if "._" in i.module)

  _report(problems())


def test_pins_cover_and_satisfy_the_dependencies():
  core, extras = _declared()
  pins, problems = {}, []
  for number, line in enumerate((ROOT / "requirements.txt").read_text().splitlines(), 1):
    spec, _, reason = line.partition("#")
    if not spec.strip():
      continue
    pin = requirements.Requirement(spec.strip())
    pins[utils.canonicalize_name(pin.name)] = next(iter(pin.specifier))
    if [s.operator for s in pin.specifier] != ["=="] or not reason.strip():
      problems.append(f"requirements.txt:{number}: needs name==version  # why")
  for name, wanted in (core | extras).items():
    if name not in pins:
      problems.append(f"requirements.txt: {name} of pyproject.toml is not pinned")
    elif not wanted.specifier.contains(pins[name].version, prereleases=True):
      problems.append(f"requirements.txt: {pins[name]} is outside {wanted} of pyproject.toml")
  _report(problems)


# --- precision -----------------------------------------------------------------------------------


def test_products_are_made_in_their_places():
  def uses(source):
    for node in source.walk(ast.Attribute):
      if ast.unparse(node).split(".")[0] in ("jax", "jnp", "lax"):
        yield node, node.attr
    for node in source.walk(ast.ImportFrom):
      if node.module.split(".")[0] == "jax":
        yield from ((node, alias.name) for alias in node.names)
    for node in source.walk(ast.BinOp):
      if isinstance(node.op, ast.MatMult):
        yield node, "@"

  _report(
    f"{source.at(node)}: {name} belongs in {', '.join(PLACES[name]) or 'ops/dot.py, as its dot'}"
    for source in _sources()
    for node, name in uses(source)
    if name in PLACES and not source.name.startswith(PLACES[name])
  )


def test_recipe_names_are_never_asked_about():
  """A name picks a recipe once, at the edge; what a recipe does is asked of its values."""

  def mentions(node):
    for inner in ast.walk(node):
      if isinstance(inner, ast.Constant) and inner.value in set(recipes.RECIPES):
        yield repr(inner.value)
      if isinstance(inner, ast.Attribute) and ast.unparse(inner).endswith("recipe.name"):
        yield ast.unparse(inner)

  def is_question(node):
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if is_method and node.func.attr in ("startswith", "endswith"):
      return True
    return isinstance(node, (ast.Compare, ast.MatchValue))

  _report(
    f"{source.at(node)}: asks for {', '.join(mentions(node))}; ask the Recipe's fields instead"
    for source in _sources()
    for node in source.walk(ast.Compare, ast.Call, ast.MatchValue)
    if is_question(node) and any(mentions(node))
  )


def test_environment_and_asserts_stay_out():
  def problems():
    for source in _sources():
      for node in source.walk(ast.Attribute):
        if node.attr in ("environ", "getenv") and source.name not in ENVIRONMENT:
          yield f"{source.at(node)}: a choice belongs in the config, not in the environment"
      for node in source.walk(ast.Assert):
        yield f"{source.at(node)}: raise an error that says what to do"

  _report(problems())


# --- letters -------------------------------------------------------------------------------------

ALPHABET = re.compile(r"(?<![\w.])([A-Z]) [a-z]")
EINSUM = re.compile(r"([A-Za-z]+),([A-Za-z]+)->([A-Za-z]+)")
SUFFIX = re.compile(r"[a-z]\w*?_([A-Z]+)")


def _suffix(node) -> str | None:
  """The letters of a name: BLD of x_BLD."""
  match = SUFFIX.fullmatch(node.id) if isinstance(node, ast.Name) else None
  return match and match[1]


@functools.cache
def _alphabet() -> set[str]:
  tree = next(s.tree for s in _sources() if s.name == "axes.py")
  table = [x for x in ast.get_docstring(tree).splitlines() if x.startswith("  ")]
  return {letter for line in table for letter in ALPHABET.findall(line)}


def test_letters_are_of_the_alphabet():
  """Every suffix, einsum and declaration above the kernels; a file may add letters it explains."""
  assert {"B", "D", "L", "S", "V"} < _alphabet()

  def uses(source):
    for node in source.walk(ast.Name, ast.arg):
      if match := SUFFIX.fullmatch(node.id if isinstance(node, ast.Name) else node.arg):
        yield node, match[1]
    for node in source.walk(ast.Constant):
      if isinstance(node.value, str) and EINSUM.fullmatch(node.value):
        yield node, "".join(EINSUM.fullmatch(node.value).groups())
    for node in source.walk(ast.Call):
      if isinstance(node.func, ast.Name) and node.func.id == "Param":
        yield node, node.args[0].value

  def problems():
    for source in _sources():
      own = re.findall(r"\b([A-Z]) is ", ast.get_docstring(source.tree) or "")
      for node, letters in uses(source):
        unknown = sorted(set(letters) - _alphabet() - set(own))
        if unknown and source.unit != "kernels":
          yield f"{source.at(node)}: {', '.join(unknown)} of {letters} is not in axes.py"

  _report(problems())


def test_suffixes_agree_with_their_letters():
  """y_BLF = dot("BLD,DF->BLF", x_BLD, ...) and constrain(x_BLD, "BLD", ...)."""

  def calls(node):
    """(name of the function, its arguments) of a call whose letters are spelled out."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    strings = [a.value for a in node.args if isinstance(a, ast.Constant)]
    return function, node.args, "".join(s for s in strings if isinstance(s, str))

  def problems():
    for source in _sources():
      for node in source.walk(ast.Call):
        function, args, text = calls(node)
        match = EINSUM.fullmatch(text)
        if match and function == "dot":
          if _suffix(args[1]) not in (None, match[1]):
            yield f"{source.at(node)}: {args[1].id} is read as {match[1]} in {text!r}"
        if function == "constrain" and _suffix(args[0]) not in (None, text):
          yield f"{source.at(node)}: {args[0].id} is placed as {text}"
      for node in source.walk(ast.Assign):
        value = node.value
        while isinstance(value, ast.Call) and calls(value)[0] == "checkpoint_name":
          value = value.args[0]
        match = EINSUM.fullmatch(calls(value)[2]) if isinstance(value, ast.Call) else None
        if match and _suffix(node.targets[0]) not in (None, match[3]):
          yield f"{source.at(node)}: {node.targets[0].id} is made as {match[3]}"

  _report(problems())


# --- files ---------------------------------------------------------------------------------------


def test_files_and_classes_say_what_they_are():
  def problems():
    for source in _sources():
      if source.text.strip() and not ast.get_docstring(source.tree):
        yield f"fp8jax/{source.name}:1: no docstring"
      for node in source.walk(ast.ClassDef):
        if not node.name.startswith("_") and not ast.get_docstring(node):
          yield f"{source.at(node)}: {node.name} has no docstring"

  _report(problems())


def test_files_and_functions_are_short():
  def problems():
    for source in _sources():
      lines = len(source.text.splitlines())
      if lines > MAX_LINES and source.name not in LONG:
        yield f"fp8jax/{source.name}:{lines}: more than {MAX_LINES} lines; split it by subject"
      for node in source.walk(ast.FunctionDef):
        if node.end_lineno - node.lineno >= MAX_FUNCTION:
          yield f"{source.at(node)}: {node.name} has more than {MAX_FUNCTION} lines"

  _report(problems())


def test_configs_say_what_they_are():
  paths = [*(ROOT / "configs").glob("*.py"), *(ROOT / "experiments").glob("*/config.py")]
  assert paths
  _report(
    f"{path.relative_to(ROOT)}:1: its docstring has no line {label!r}"
    for path in paths
    for label in ("what:", "command:", "hardware:", "expected:")
    if f"\n{label}" not in (ast.get_docstring(ast.parse(path.read_text())) or "")
  )


def test_every_config_key_is_read():
  read = set()
  for source in _sources():
    read |= {n.attr for n in source.walk(ast.Attribute)}
    read |= {n.target.id for n in source.walk(ast.AnnAssign) if isinstance(n.target, ast.Name)}
    read |= {n.value for n in source.walk(ast.Constant) if isinstance(n.value, str)}
  tree = ast.parse((ROOT / "configs" / "base.py").read_text())
  targets = [t for n in ast.walk(tree) if isinstance(n, ast.Assign) for t in n.targets]
  keys = [t for t in targets if isinstance(t, ast.Attribute)]
  assert len(keys) > 50
  _report(
    f"configs/base.py:{key.lineno}: nothing under fp8jax/ reads {ast.unparse(key)}"
    for key in keys
    if key.attr not in read
  )


def test_tracked_files_name_no_place_of_one_machine():
  listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
  if listed.returncode:
    pytest.skip("not a git checkout")
  place = re.compile(r"(?<![\w.}])/(home|root|Users|work|workspace)/[\w.]")

  def problems():
    for name in filter(None, listed.stdout.split("\0")):
      try:
        lines = (ROOT / name).read_text().splitlines()
      except (UnicodeDecodeError, FileNotFoundError):  # binary; deleted but not yet committed
        continue
      for number, line in enumerate(lines, 1):
        if match := place.search(line):
          yield f"{name}:{number}: {match[0]}"

  _report(problems())
