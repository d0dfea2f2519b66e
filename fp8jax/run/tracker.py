"""Metrics for trackio or Weights & Biases, beside metrics.jsonl: one interface, theirs."""

import importlib
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any


class Tracker:
  """Sends the numbers of each row; the account, the server and offline modes are the package's."""

  def __init__(self, package: str, workdir: str, config: Mapping[str, Any]):
    """Args: "trackio" or "wandb", the folder whose name the run gets, its configuration."""
    self._package = importlib.import_module(package)
    name = os.path.basename(os.path.abspath(workdir))
    # trackio resumes by the name, Weights & Biases by an id.
    which = {"id": _id_of(workdir)} if package == "wandb" else {}
    self._package.init(project="fp8jax", name=name, config=dict(config), resume="allow", **which)

  def write(self, step: int, values: Mapping[str, Any]):
    numbers = {k: v for k, v in values.items() if isinstance(v, (int, float))}
    self._package.log(numbers, step=step)

  def close(self):
    self._package.finish()


def _id_of(workdir: str) -> str:
  """The id that the run in this folder drew when it began."""
  path = pathlib.Path(workdir, "wandb_id")
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(uuid.uuid4().hex + "\n", encoding="ascii")
  return path.read_text(encoding="ascii").strip()
