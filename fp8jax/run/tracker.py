"""Metrics for trackio or Weights & Biases, beside metrics.jsonl: one interface, theirs."""

import hashlib
import importlib
import os
from collections.abc import Mapping
from typing import Any


class Tracker:
  """Sends the numbers of each row; the account, the server and offline modes are the package's."""

  def __init__(self, package: str, workdir: str, config: Mapping[str, Any]):
    """Args: "trackio" or "wandb", the folder whose name the run gets, its configuration."""
    self._package = importlib.import_module(package)
    name = os.path.basename(os.path.abspath(workdir))
    # trackio resumes by the name, Weights & Biases by an id.
    own = hashlib.sha256(os.path.abspath(workdir).encode()).hexdigest()[:16]
    which = {"id": own} if package == "wandb" else {}
    self._package.init(project="fp8jax", name=name, config=dict(config), resume="allow", **which)

  def write(self, step: int, values: Mapping[str, Any]):
    numbers = {k: v for k, v in values.items() if isinstance(v, (int, float))}
    self._package.log(numbers, step=step)

  def close(self):
    self._package.finish()
