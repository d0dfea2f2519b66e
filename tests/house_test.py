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

import guards
import pytest
from packaging import requirements, utils

from fp8jax import errors
from fp8jax.config import registry
from fp8jax.recipe import library

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fp8jax"

# The folders from the ground up. Each imports those below it; those on one floor do not import each
# other, except that `run` may ask what a compiled program says. "" is the vocabulary: single files.
FLOORS = (
  ("",), ("recipe",), ("quantization",), ("kernels",), ("ops",), ("models", "optim", "data"),
  ("phases",), ("step",), ("config",), ("compiled",), ("run",), ("ptq",), ("generation",),
  ("evaluation",), ("report",), ("export", "sensitivity", "rl"), ("search",), ("sweeps",),
  ("jobs", "integrations"),
)  # fmt: skip
# Keys of a configuration: declared in the folder that owns them, read by `config`, so that a
# settings.py lies on the floor of `step`, wherever its folder stands.
SETTINGS = "step"
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
VOCABULARY = {"__init__", "axes", "calls", "console", "errors", "formats", "grids", "hub", "keys",
              "mesh", "params", "patterns", "records", "statistics"}  # fmt: skip

# Where packages of an extra are imported at the top of a file; those of other extras are not. `pip
# install fp8jax` gives a library that imports none of these files.
EXTRAS_OF_FILES = {
  "train": ("console.py", "config/", "data/", "phases/", "run/", "jobs/", "sweeps/"),
  "flax": ("integrations/flax.py",),
  "report": (
    "report/charts.py",
    "report/compare_charts.py",
    "report/exponent_charts.py",
    "report/run_report.py",
    "rl/page.py",
    "sensitivity/page.py",
  ),
  "lm_eval": ("evaluation/lm_eval.py",),
}
# Names of distributions where they are not those of their modules.
DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint",
                 "vl_convert": "vl-convert-python", "PIL": "pillow"}  # fmt: skip
# Clients of services: an adapter calls them by name, tests have a stand-in, and nobody pins them.
UNPINNED = {"trackio", "wandb"}
BANNED = {"torch", "transformers", "pickle", "cloudpickle", "dill", "joblib", "shelve"}

# Where alone these are named. A product, a derivative or an attention elsewhere escapes its recipe.
PLACES = {
  # Derivatives of the GEMM; of the feed-forward layer and of the loss, made of the same GEMMs; of
  # compressed residuals; of parameters, whose gradients may have another format; of a kernel that
  # another library wrote; the identity that observes an activation; factors of one pass alone; an
  # invariant pass, differentiated as the plain one.
  "custom_vjp": tuple(
    f"ops/{n}.py"
    for n in (
      "convolution",
      "linear",
      "swiglu_mlp",
      "residuals",
      "prologue",
      "cross_entropy",
      "stored_params",
      "attention",
      "observe",
      "capture",
      "elementwise",
      "row_tiles",
    )
  ),
  # ptq/moments.py multiplies what a calibration saw, in float32, and nothing of a model.
  "dot_general": ("ops/products.py", "kernels/", "ptq/moments.py"),
  "dot_product_attention": ("ops/attention.py",),
  # Recorded with a run's results, never obeyed; what XLA asks before it compiles without a GPU; the
  # GPUs that a scheduler leaves to a sweep; a library's threads in worker processes.
  "environ": ("run/provenance.py", "compiled/aot.py", "run/machine.py", "data/encode.py"),
  "allow_pickle": (),
  "_src": (),  # JAX's private modules
  "custom_jvp": ("ops/derivative.py",),
  **dict.fromkeys(("dot", "einsum", "matmul", "tensordot", "vdot"), ()),
  "@": ("export/gate.py",),  # on the host, beside a client's products
}
LIBRARIES = ("jax", "jnp", "lax", "os")
# Private modules of a library of which pyproject.toml accepts exactly one version.
PRIVATE_IMPORTS = {"kernels/attention/tokamax_sm90.py": "tokamax._src.ops.attention"}
# Outside config/: they receive the ConfigDict of the command line and have it resolved.
READ_CONFIG_DICT = ("jobs/command_line.py", "jobs/dispatch.py", "jobs/table.py")
# Alarms, not targets: a file follows its subject, for one sitting; a kernel may be longer.
MAX_LINES, MAX_KERNEL_LINES, MAX_FUNCTION = 400, 600, 60

ALPHABET = re.compile(r"(?<![\w.])([A-Z]) [a-z]")
EINSUM = re.compile(r"([A-Za-z]+),([A-Za-z]+)->([A-Za-z]+)")
SUFFIX = re.compile(r"[a-z]\w*?_([A-Z]+)")
# "What waits for the backward pass is w": a sentence whose subject is a riddle.
RIDDLE = re.compile(r"(?:\"\"\"|# |^ *|\. )(?:What|Who|Whose|Whoever|Whatever) [a-z]+ [a-z]")
PLACE_OF_ONE_MACHINE = re.compile(r"(?<![\w.}])/(home|root|Users|work|workspace)/[\w.]")


@dataclasses.dataclass(frozen=True)
class Source:
  """A parsed file and its name within the package, e.g. "ops/linear.py"."""

  name: str
  text: str
  tree: ast.Module

  @property
  def folder(self) -> str:
    return self.name.rpartition("/")[0].split("/")[0]

  def at(self, node: ast.AST) -> str:
    return f"fp8jax/{self.name}:{node.lineno}"

  def walk(self, *kinds):
    return (node for node in ast.walk(self.tree) if isinstance(node, kinds))


@functools.cache
def _sources() -> list[Source]:
  found = []
  for path in sorted(PACKAGE.rglob("*.py")):
    text = path.read_text()
    found.append(Source(path.relative_to(PACKAGE).as_posix(), text, ast.parse(text)))
  return found


def _imports():
  """(source, statement, module) of every import, also inside functions."""
  for source in _sources():
    for node in source.walk(ast.Import, ast.ImportFrom):
      modules = [alias.name for alias in node.names]
      if isinstance(node, ast.ImportFrom):
        origin = "." * node.level + (node.module or "")
        whole = [f"{origin}.{name}" for name in modules]
        modules = [name if _path_of(name) else origin for name in whole]
      yield from ((source, node, module) for module in dict.fromkeys(modules))


def _path_of(module: str) -> str | None:
  """File of a module within the package, e.g. "ops/linear.py", or None."""
  stem = ROOT / module.replace(".", "/")
  for path in (stem.with_suffix(".py"), stem / "__init__.py"):
    if path.is_file() and path.is_relative_to(PACKAGE):
      return path.relative_to(PACKAGE).as_posix()
  return None


def rule(find):
  """Makes a generator of problems a test that there are none."""

  @functools.wraps(find)
  def test():
    problems = list(find())
    assert not problems, "\n" + "\n".join(problems)

  return test


# --- imports -------------------------------------------------------------------------------------


def _floor(name: str) -> int:
  """Of a file, "ops/linear.py"."""
  folder, _, file = name.rpartition("/")
  return FLOOR[SETTINGS if file == "settings.py" else folder.split("/")[0]]


@rule
def test_imports_go_downward():
  found = {source.name.removesuffix(".py") for source in _sources() if not source.folder}
  assert found == VOCABULARY, "a new subject is a file in one of the folders"
  assert {source.folder for source in _sources()} == set(FLOOR)
  for source, node, module in _imports():
    if module == "fp8jax":
      yield f"{source.at(node)}: imports from the front door; name the module that has it"
    if not module.startswith("fp8jax.") or source.name == "__init__.py":
      continue
    path = _path_of(module) or ""
    here, there = map(_floor, (source.name, path))
    is_same = source.folder == path.rpartition("/")[0].split("/")[0]
    if there > here or (there == here and not is_same and not path.endswith("settings.py")):
      yield f"{source.at(node)}: {source.folder} imports {module}, which is not below it"


@rule
def test_rings_import_inward():
  """`pip install fp8jax` gives the first ring; the README shows all."""
  rows = re.findall(r"\*\*(\w+)\*\*([^;*]*)", (ROOT / "README.md").read_text())
  shown = {ring: set(re.findall(r"`(\w+)/`", folders)) for ring, folders in rows}
  assert {r: set(f) - {""} for r, f in guards.RINGS.items()} == {r: shown[r] for r in guards.RINGS}
  assert set().union(*guards.RINGS.values()) == set(FLOOR)
  ring_of = {folder: i for i, ring in enumerate(guards.RINGS.values()) for folder in ring}

  def ring(name):
    return ring_of[
      SETTINGS if name.endswith("/settings.py") else name[: name.rfind("/") + 1].split("/")[0]
    ]

  for source, node, module in _imports():
    if (path := _path_of(module)) and source.folder and ring(path) > ring(source.name):
      yield f"{source.at(node)}: {module} is of an outer ring"


def test_imports_have_no_cycle():
  graph = {source.name: set() for source in _sources()}
  for source, _, module in _imports():
    if path := _path_of(module):
      graph[source.name].add(path)
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@rule
def test_only_the_front_door_exports_what_it_imports():
  for source, node, module in _imports():
    is_package = source.name.endswith("/__init__.py")
    if is_package or any(alias.asname == alias.name for alias in node.names):
      yield f"{source.at(node)}: re-exports {module}; only fp8jax/__init__.py does that"


@functools.cache
def _declared() -> tuple[dict, dict[str, dict]]:
  """Requirements of pyproject.toml by name: (core, {extra: those that core lacks})."""
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

  def by_name(lines, known):
    parsed = map(requirements.Requirement, lines)
    named = {utils.canonicalize_name(r.name): r for r in parsed if r.name != project["name"]}
    return {k: v for k, v in named.items() if k not in known}

  core = by_name(project["dependencies"], ())
  extras = project["optional-dependencies"]
  return core, {extra: by_name(lines, core) for extra, lines in extras.items()}


@rule
def test_imports_are_declared():
  core, extras = _declared()
  extra_of = {name: extra for extra, names in extras.items() for name in names}
  for source, node, module in _imports():
    top = module.split(".")[0]
    if top in BANNED:
      yield f"{source.at(node)}: {top} is never imported"
    if top in ("fp8jax", "") or top in sys.stdlib_module_names | BANNED:
      continue
    name = utils.canonicalize_name(DISTRIBUTIONS.get(top, top))
    if name in core:
      continue
    extra = extra_of.get(name)
    if not extra:
      yield f"{source.at(node)}: {name} is not among the dependencies in pyproject.toml"
    elif errors.EXTRAS.get(top) != extra:
      yield f"{source.at(node)}: {top} belongs to the extra {extra!r}; say so in errors.EXTRAS"
    if node in source.tree.body and not source.name.startswith(EXTRAS_OF_FILES.get(extra, ())):
      yield f"{source.at(node)}: {name} belongs to an extra; import it where it is used"


@rule
def test_imports_are_plain():
  """None is relative, none is private, and none is tried."""
  for source, node, module in _imports():
    is_pinned = module.startswith(PRIVATE_IMPORTS.get(source.name, "."))
    if module.startswith(".") or "._" in module and not is_pinned:
      yield f"{source.at(node)}: relative or private import"
  for source in _sources():
    for block in source.walk(ast.Try):
      inside = (n for n in ast.walk(block) if isinstance(n, (ast.Import, ast.ImportFrom)))
      yield from (f"{source.at(node)}: import inside `try`" for node in inside)


@rule
def test_test_files_do_not_import_each_other():
  """What several of them share stands in a module that is no test file: tests/harness.py."""
  paths = sorted((ROOT / "tests").rglob("*_test.py"))
  stems = {path.stem for path in paths}
  assert len(stems) == len(paths), "pytest imports test files by their names: each needs its own"
  for path in paths:
    for node in ast.walk(ast.parse(path.read_text())):
      names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
      names += [node.module] if isinstance(node, ast.ImportFrom) else []
      for name in stems & set(names):
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        yield f"{where}: imports {name}; move what both need to tests/harness.py"


@rule
def test_folders_of_tests_mirror_those_of_the_package():
  folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
  others = {"adversarial", "golden", "mutation", "cases", "walks", "experiments", "__pycache__"}
  for name in sorted(folders - set(FLOOR) - others):
    yield f"tests/{name}: fp8jax/ has no such folder"


@rule
def test_pins_cover_and_satisfy_the_dependencies():
  core, extras = _declared()
  pins = {}
  for number, line in enumerate((ROOT / "requirements.txt").read_text().splitlines(), 1):
    spec, _, reason = line.partition("#")
    if not spec.strip():
      continue
    pin = requirements.Requirement(spec.strip())
    pins[utils.canonicalize_name(pin.name)] = next(iter(pin.specifier))
    if [s.operator for s in pin.specifier] != ["=="] or not reason.strip():
      yield f"requirements.txt:{number}: needs name==version  # why"
  for name, wanted in functools.reduce(dict.__or__, extras.values(), core).items():
    if name not in pins and [s.operator for s in wanted.specifier] == ["=="]:
      continue  # pinned where it is declared: not installed for the default tests
    if name in UNPINNED:
      continue
    if name not in pins:
      yield f"requirements.txt: {name} of pyproject.toml is not pinned"
    elif not wanted.specifier.contains(pins[name].version, prereleases=True):
      yield f"requirements.txt: {name}{pins[name]} is outside {wanted} of pyproject.toml"


@rule
def test_only_config_reads_the_config_dict():
  """All others read the typed sections of TrainSpec."""
  for source, node, module in _imports():
    if module.split(".")[0] == "ml_collections" and source.folder != "config":
      yield f"{source.at(node)}: ml_collections belongs in config/"
  for source in _sources():
    if source.folder == "config" or source.name in READ_CONFIG_DICT:
      continue
    for node in source.walk(ast.Attribute):
      text = ast.unparse(node)
      if text.endswith(("plan.config", "files.Config")):
        yield f"{source.at(node)}: {text}; config/resolve.py makes a typed field of TrainSpec of it"


# --- precision -----------------------------------------------------------------------------------


@rule
def test_products_and_the_like_stay_in_their_places():
  def uses(source):
    for node in source.walk(ast.Attribute, ast.ImportFrom, ast.BinOp, ast.keyword):
      if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in LIBRARIES:
        yield node, node.attr
      elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
        yield from ((node, alias.name) for alias in node.names)
      elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield node, "@"
      elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        yield node.value, node.arg

  for source in _sources():
    for node, name in uses(source):
      if name in PLACES and not source.name.startswith(PLACES[name]):
        yield f"{source.at(node)}: {name} belongs in {', '.join(PLACES[name]) or 'no file'}"


@rule
def test_recipe_names_are_never_asked_about():
  """A name picks a recipe once, at the edge; what a recipe does is asked of its values."""
  for source in _sources():
    for node in source.walk(ast.Compare, ast.Call, ast.MatchValue):
      is_call = isinstance(node, ast.Call)
      if is_call and not ast.unparse(node.func).endswith(("startswith", "endswith")):
        continue
      for inner in ast.walk(node):
        is_name = isinstance(inner, ast.Constant) and inner.value in set(library.RECIPES)
        if is_name or ast.unparse(inner).endswith("recipe.name"):
          yield f"{source.at(node)}: asks for {ast.unparse(inner)}; ask the Recipe's fields instead"


@rule
def test_asserts_stay_in_tests():
  for source in _sources():
    for node in source.walk(ast.Assert):
      yield f"{source.at(node)}: raise an error that says what to do"


# --- letters -------------------------------------------------------------------------------------


def _suffix(node) -> str | None:
  """The letters of a name or an argument: BLD of x_BLD."""
  match = SUFFIX.fullmatch(getattr(node, "id", getattr(node, "arg", None)) or "")
  return match and match[1]


def _einsum(node) -> re.Match | None:
  """The letters of "BLD,DF->BLF"."""
  is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
  return EINSUM.fullmatch(node.value) if is_text else None


@rule
def test_letters_are_of_the_alphabet():
  """Every suffix, einsum and declaration above the kernels; a file may add letters it explains."""
  axes = ast.get_docstring(next(s.tree for s in _sources() if s.name == "axes.py"))
  table = [line for line in axes.splitlines() if line.startswith("  ")]
  alphabet = {letter for line in table for letter in ALPHABET.findall(line)}
  assert {"B", "D", "L", "S", "V"} < alphabet
  for source in _sources():
    own = re.findall(r"\b([A-Z]) is ", ast.get_docstring(source.tree) or "")
    for node in source.walk(ast.Name, ast.arg, ast.Constant, ast.Call):
      letters = _suffix(node) or ""
      if eqn := _einsum(node):
        letters = "".join(eqn.groups())
      if isinstance(node, ast.Call) and ast.unparse(node.func) == "Param":
        letters = node.args[0].value
      unknown = sorted(set(letters) - alphabet - set(own))
      if unknown and source.folder != "kernels":
        yield f"{source.at(node)}: {', '.join(unknown)} of {letters} is not in axes.py"


@rule
def test_suffixes_agree_with_their_letters():
  """y_BLF = dot("BLD,DF->BLF", x_BLD, ...) and constrain(x_BLD, "BLD", ...)."""
  for source in _sources():
    for node in source.walk(ast.Call):
      function = ast.unparse(node.func).split(".")[-1]
      if function == "dot" and (eqn := _einsum(node.args[0])):
        if _suffix(node.args[1]) not in (None, eqn[1]):
          yield f"{source.at(node)}: {node.args[1].id} is read as {eqn[1]}"
      if function == "constrain" and isinstance(node.args[1], ast.Constant):
        if _suffix(node.args[0]) not in (None, node.args[1].value):
          yield f"{source.at(node)}: {node.args[0].id} is placed as {node.args[1].value}"
    for node in source.walk(ast.Assign):
      value = node.value
      while isinstance(value, ast.Call) and ast.unparse(value.func) == "checkpoint_name":
        value = value.args[0]
      eqn = _einsum(value.args[0]) if isinstance(value, ast.Call) and value.args else None
      if eqn and _suffix(node.targets[0]) not in (None, eqn[3]):
        yield f"{source.at(node)}: {node.targets[0].id} is made as {eqn[3]}"


# --- files ---------------------------------------------------------------------------------------


@rule
def test_files_and_classes_say_what_they_are():
  for source in _sources():
    if source.text.strip() and not ast.get_docstring(source.tree):
      yield f"fp8jax/{source.name}:1: no docstring"
    for node in source.walk(ast.ClassDef):
      if not node.name.startswith("_") and not ast.get_docstring(node):
        yield f"{source.at(node)}: {node.name} has no docstring"


@rule
def test_sentences_have_a_noun_as_subject():
  """Subject, verb, object: no docstring or comment has a sentence about "what" or "who" does."""
  for path in [*(PACKAGE / s.name for s in _sources()), *(ROOT / "configs").glob("*.py")]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
      if match := RIDDLE.search(line):
        yield f"{path.relative_to(ROOT)}:{number}: {match[0].strip()} ...: name the thing"


@rule
def test_files_and_functions_are_short():
  for source in _sources():
    lines = len(source.text.splitlines())
    most = MAX_KERNEL_LINES if source.folder == "kernels" else MAX_LINES
    if lines > most:
      yield f"fp8jax/{source.name}:{lines}: more than {most} lines; split it by subject"
    for node in source.walk(ast.FunctionDef):
      if node.end_lineno - node.lineno >= MAX_FUNCTION:
        yield f"{source.at(node)}: {node.name} has more than {MAX_FUNCTION} lines"


@rule
def test_configs_say_what_they_are():
  paths = [*(ROOT / "configs").glob("*.py"), *(ROOT / "experiments").glob("*/config.py")]
  assert paths
  for path in paths:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    for label in ("what:", "command:", "hardware:", "expected:"):
      if f"\n{label}" not in text:
        yield f"{path.relative_to(ROOT)}:1: its docstring has no line {label!r}"


@rule
def test_every_config_key_is_read():
  read = set()
  for source in _sources():
    read |= {node.attr for node in source.walk(ast.Attribute)}
    read |= {node.value for node in source.walk(ast.Constant)}
    if not source.name.endswith("settings.py"):  # fields of model and optim, read by their names
      read |= {ast.unparse(node.target) for node in source.walk(ast.AnnAssign)}
  for name in registry.KEYS:
    if name.rpartition(".")[2] not in read:
      yield f"{name}: nothing under fp8jax/ reads this key"


@rule
def test_tracked_files_name_no_place_of_one_machine():
  listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
  if listed.returncode:
    pytest.skip("not a git checkout")
  for name in filter(None, listed.stdout.split("\0")):
    try:
      lines = (ROOT / name).read_text().splitlines()
    except (UnicodeDecodeError, FileNotFoundError):  # binary; deleted but not yet committed
      continue
    for number, line in enumerate(lines, 1):
      if match := PLACE_OF_ONE_MACHINE.search(line):
        yield f"{name}:{number}: {match[0]}"
