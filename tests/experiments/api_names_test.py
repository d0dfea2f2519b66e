"""Scripts and notebooks name what fp8jax has, and call its functions with the arguments they take.

Most of them run for minutes, and no default test starts them.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import pathlib
import re
import types

import pytest

import fp8jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("experiments", "configs")


def _sources(path: pathlib.Path) -> list[str]:
  """The Python of a script, or of a notebook: its cells together, and each file that one writes."""
  if path.suffix == ".py":
    return [path.read_text()]
  cells = json.loads(path.read_text())["cells"]
  code = ["".join(c["source"]) + "\n" for c in cells if c["cell_type"] == "code"]
  written = [cell for cell in code if cell.startswith("%%writefile")]
  together = "".join(cell for cell in code if cell not in written)
  return [re.sub(r"^[%!].*", "", source, flags=re.M) for source in (together, *written)]


def problems(source: str) -> list[str]:
  """Names that fp8jax lacks and calls that its functions refuse, in words.

  A name of fp8jax that the file also gives to something else is passed over.
  """
  tree, texts, bound = ast.parse(source), [], {}
  nodes = list(ast.walk(tree))
  for node in nodes:
    for alias in node.names if isinstance(node, ast.Import) else ():
      if alias.name.split(".")[0] == "fp8jax":
        module = importlib.import_module(alias.name)
        bound[alias.asname or "fp8jax"] = module if alias.asname else fp8jax
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fp8jax":
      module = importlib.import_module(str(node.module))
      for alias in node.names:
        name = alias.asname or alias.name
        try:
          own = f"{node.module}.{alias.name}"
          is_there = hasattr(module, alias.name)
          bound[name] = getattr(module, alias.name) if is_there else importlib.import_module(own)
        except ModuleNotFoundError as e:
          if e.name == own:
            texts.append(f"line {node.lineno}: {node.module} has no {alias.name}")
  others = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
  others |= {n.arg for n in nodes if isinstance(n, ast.arg)}
  bound = {name: value for name, value in bound.items() if name not in others}

  def value_of(node):
    if isinstance(node, ast.Name):
      return bound.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(of := value_of(node.value), types.ModuleType):
      return getattr(of, node.attr, None)
    return None

  for node in nodes:
    if isinstance(node, ast.Attribute) and isinstance(of := value_of(node.value), types.ModuleType):
      if not hasattr(of, node.attr):
        texts.append(f"line {node.lineno}: {of.__name__} has no {node.attr}")
    f = value_of(node.func) if isinstance(node, ast.Call) else None
    if inspect.isfunction(inspect.unwrap(f)) or dataclasses.is_dataclass(f):
      names = [k.arg for k in node.keywords]
      if None in names or any(isinstance(a, ast.Starred) for a in node.args):
        continue
      try:
        inspect.signature(f).bind(*node.args, **dict.fromkeys(names))
      except TypeError as e:
        texts.append(f"line {node.lineno}: {f.__name__}: {e}")
  return texts


@pytest.mark.parametrize("folder", FOLDERS)
def test_scripts_and_notebooks_name_what_is_there(folder):
  paths = [p for suffix in ("py", "ipynb") for p in (ROOT / folder).rglob(f"*.{suffix}")]
  assert len(paths) > 10
  found = [
    f"{path.relative_to(ROOT)}, {text}"
    for path in sorted(paths) for source in _sources(path) for text in problems(source)
  ]  # fmt: skip
  assert not found, "\n".join(found)


@pytest.mark.parametrize("line, text", [
  ("from fp8jax.ops import linears", "line 1: fp8jax.ops has no linears"),
  ("from fp8jax.ops import linear\nlinear.missing", "line 2: fp8jax.ops.linear has no missing"),
  ("from fp8jax.optim import schedule as s\ns.schedule()",
   "line 2: schedule: missing a required argument: 'optim'"),
  ("from fp8jax.optim.schedule import schedule\nschedule(1, step=2)",
   "line 2: schedule: got an unexpected keyword argument 'step'"),
  ("from fp8jax.optim import schedule as s\ns.schedule(*[1, 2])", None),
  ("import fp8jax\nfp8jax.dots(1)", "line 2: fp8jax has no dots"),
  ("import fp8jax.optim.schedule as s\ns.sch", "line 2: fp8jax.optim.schedule has no sch"),
  ("from fp8jax import Quant\nQuant(1, nothing=1)",
   "line 2: Quant: got an unexpected keyword argument 'nothing'"),
  ("from fp8jax.recipe.quant import WHOLE", None),
])  # fmt: skip
def test_what_is_missing_is_named(line, text):
  assert problems(line) == ([text] if text else [])
