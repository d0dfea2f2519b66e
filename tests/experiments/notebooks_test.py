"""The notebooks of experiments/notebooks: executed from top to bottom, as Colab does."""

import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import time

import pytest

from fp8jax.config import named, resolve
from fp8jax.kernels import choose
from fp8jax.ops import site_tree
from fp8jax.recipe import rules

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "notebooks"
NAMES = ("01_first_run", "02_numerics", "03_your_model", "04_your_recipe")
# A sign in its output that a notebook has reached its end.
LAST = {
  "01_first_run": "nvfp4",
  "02_numerics": "layers/1/mlp/down/x saturate",
  "03_your_model": "hf-bf16",
  "04_your_recipe": "verdicts of runs of 8,192 tokens",
}
# Instead of the cell that says what a notebook may cost.
BUDGET = 'STEPS, SEEDS, PUBLISHED = 4, 2, ("halo_int8_2", "nvfp4_sr_rht")'


def _cells(name):
  return json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]


def _is_install(cell):
  return "install" in cell["metadata"].get("tags", ())


def _environment(repository, folder):
  """That of a kernel: one device, the clone on its path, Jupyter's own files in `folder`."""
  kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONWARNINGS")}
  path = os.pathsep.join((str(repository), os.environ.get("PYTHONPATH", "")))
  jupyter = {k: str(folder / "jupyter") for k in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
  return {**kept, **jupyter, "PYTHONPATH": path, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def _execute(name, repository, folder) -> str:
  """Runs every cell but the one that installs; returns all text that they wrote."""
  import nbclient  # extra `dev`
  import nbformat

  book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
  for cell in book.cells:
    if "budget" in cell["metadata"].get("tags", ()):
      cell["source"] = BUDGET
  client = nbclient.NotebookClient(
    book, timeout=600, skip_cells_with_tag="install", resources={"metadata": {"path": str(folder)}}
  )
  client.execute(env=_environment(repository, folder))
  outputs = [o for cell in book.cells for o in cell.get("outputs", ())]
  assert not any(o["output_type"] == "error" for o in outputs)
  drawn = sum("image/svg+xml" in o.get("data", ()) for o in outputs)
  assert drawn == sum("display(SVG" in cell["source"] for cell in book.cells) > 0
  # Standard output, and rich's consoles, which display in a notebook. Warnings come at any time.
  outputs = [o for o in outputs if o.get("name") != "stderr"]
  return "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)


def test_notebooks_are_committed_without_outputs_and_install_alike():
  installs = []
  assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)
  for name in NAMES:
    for cell in _cells(name):
      source = "".join(cell["source"])
      assert not cell.get("outputs") and cell.get("execution_count") is None
      assert _is_install(cell) or len(source.splitlines()) <= 30, source
      installs += [source] * _is_install(cell)
  assert len(installs) == len(NAMES) and len(set(installs)) == 1
  compile(installs[0], "install", "exec")


def test_the_recipe_of_the_notebook_is_twenty_lines_and_its_arms_can_start(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(rules, "_OWN", {})
  code = ["".join(c["source"]) for c in _cells("04_your_recipe") if c["cell_type"] == "code"]
  magic = "%%writefile your_recipe.py\n"
  (recipe,) = (source.removeprefix(magic) for source in code if source.startswith(magic))
  assert len(recipe.splitlines()) <= 20
  for source in code:
    compile(source.removeprefix(magic), "cell", "exec")
  (budget,) = (source for source in code if "PUBLISHED = (" in source)
  published: dict = {}
  exec(budget, published)
  assert len(set(published["PUBLISHED"])) == 8
  pathlib.Path("your_recipe.py").write_text(recipe)
  own = runpy.run_path("your_recipe.py")
  assert rules.recipe_by_name(own["NAME"]).fwd == own["MINE"].fwd
  for arm in (own["NAME"], *published["PUBLISHED"]):
    c = named.load(f"your_recipe.py:{arm}", {"kernels.matmul": "dequantized"})
    spec = resolve.resolve(c, 1, choose.current_device())
    assert arm in {r.name for r in site_tree.recipes_of(spec.sites()).values()}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter's packages
@pytest.mark.parametrize("name", NAMES[1:])
def test_notebook_runs_from_top_to_bottom(name, repository, tmp_path):
  text = _execute(name, repository, tmp_path)
  assert LAST[name] in text.splitlines()[-1]
  if name == "04_your_recipe":  # every recipe has its floor, a number above 0
    rows = re.findall(r"^ *(\S+) +2 .*\] +(\S+)  ", text, re.M)
    assert len(rows) == 3 and all(float(floor) > 0 for _, floor in rows), text


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_first_run_goes_on_after_its_kernel_is_gone(repository, tmp_path):
  """The session is lost once a checkpoint is there; the notebook is then run from the top."""
  code = ["".join(c["source"]) for c in _cells(NAMES[0]) if c["cell_type"] == "code"]
  kernel = subprocess.Popen(
    [sys.executable, "-c", "\n".join(code[1:])], cwd=tmp_path, stdout=subprocess.DEVNULL,
    env=_environment(repository, tmp_path),
  )  # fmt: skip
  saved = tmp_path / "fp8jax_runs" / "first_run" / "checkpoints" / "20" / "commit_success.txt"
  while not saved.exists():
    assert kernel.poll() is None, "it ended before its first checkpoint"
    time.sleep(0.05)
  kernel.send_signal(signal.SIGKILL)
  kernel.wait()
  text = _execute(NAMES[0], repository, tmp_path)
  assert "resuming from step 20" in text or "resuming from step 40" in text
  assert "is finished: step 60" in text and LAST[NAMES[0]] in text.splitlines()[-1]
