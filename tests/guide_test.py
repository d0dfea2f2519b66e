"""README.md and experiments/guide: short, linked to files that exist, true where code says so."""

import importlib.util
import pathlib
import re

import pytest

from fp8jax.recipe.library import RECIPES

ROOT = pathlib.Path(__file__).resolve().parent.parent
GUIDE = ROOT / "experiments" / "guide"
PAGES = [ROOT / "README.md", *sorted(GUIDE.glob("*.md"))]


def _script(name: str):
  spec = importlib.util.spec_from_file_location(name, GUIDE / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_of_a_page_lead_to_files(path):
  links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
  gone = [x for x in links if not x.startswith("http") and not (path.parent / x).exists()]
  assert not gone


def test_readme_is_one_page_with_every_recipe():
  lines = (ROOT / "README.md").read_text().splitlines()
  assert len(lines) <= 140
  assert not [line for line in lines if len(line) > 160]
  named = set(re.findall(r"`(\w+)`", "\n".join(lines)))
  assert not set(RECIPES) - named, "README.md's table of recipes lacks these"


def test_tables_of_the_guide_are_those_of_the_code():
  tables = _script("tables")
  pages = {path.name: path.read_text() for path in sorted(GUIDE.glob("*.md"))}
  assert set(re.findall(r"<!-- table: (\w+)", "".join(pages.values()))) == set(tables.TABLES)
  stale = [name for name, page in pages.items() if tables.current(page) != page]
  assert not stale, "python experiments/guide/tables.py"


def test_picture_of_a_linear_layer_names_the_formats_of_its_recipe():
  svg = (GUIDE / "linear_layer.svg").read_text()
  shown = re.findall(r"<text[^>]*>([^<]*)</text>|<tspan[^>]*>([^<]*)</tspan>", svg)
  shown = [first or second for first, second in shown]
  labels = _script("linear_layer").labels()
  for label in set(labels):
    assert shown.count(label) >= labels.count(label), "python experiments/guide/linear_layer.py"


def test_blocks_of_the_readme_run():
  """One after the other, as a reader would run them."""
  page, scope = (ROOT / "README.md").read_text(), {}
  for block in re.findall(r"```python\n(.*?)```", page, re.S):
    exec(block, scope)
  assert scope["dw"].dtype == "float32" and scope["y"].shape == (64, 512)
