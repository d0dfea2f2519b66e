"""Results as JSON lines, each written at once: an interrupted job goes on from them."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from fp8jax import params as params_lib
from fp8jax import records
from fp8jax.errors import UserError
from fp8jax.ops import site_tree
from fp8jax.run import schemas
from fp8jax.sensitivity.settings import Sensitivity
from fp8jax.step.train_spec import TrainSpec

FORMAT = "fp8jax sensitivity 1"
_REMEDY = "move the file away, or name another folder as --out"
_AGAIN = f"delete the line to measure it again, or {_REMEDY}"


class Records:
  """Results by name. The first line of the file says of what they are."""

  def __init__(self, path: str, header: Mapping[str, Any]):
    """
    Args:
      path: of the file, which is made if it is not there.
      header: everything that results depend on, JSON-able.

    Raises:
      UserError: the file is another study's, or damaged; says what differs.
    """
    stated = json.loads(records.to_json({"format": FORMAT, **header}))
    lines = records.rows(path, dict[str, Any], _AGAIN)
    _, there = next(lines, ("", None))
    if different := [
      f"{k} was {there.get(k)!r} and is {stated.get(k)!r}"
      for k in sorted((there or stated).keys() | stated.keys())
      if there is not None and there.get(k) != stated.get(k)
    ]:
      raise UserError(f"{path} holds results of something else: {'; '.join(different)}. {_REMEDY}")
    self._found: dict[str, Any] = {}
    for number, (_, record) in enumerate(lines, 2):
      records.check(record, schemas.Measurement, f"{path}:{number}", _AGAIN)
      self._found[record["name"]] = record["value"]
    self._file = records.appending(path)
    if there is None:
      records.append(self._file, stated)

  def get(self, name: str, make: Callable[[], Any]) -> Any:
    """The result of this name; the first time it is made and written."""
    if name not in self._found:
      self._found[name] = make()
      records.append(self._file, {"name": name, "value": self._found[name]})
    return self._found[name]

  def __len__(self) -> int:
    return len(self._found)


def header(spec: TrainSpec, params, sites, fingerprint: str, states) -> dict[str, Any]:
  """Everything that a measurement depends on."""
  recipes = {name: recipe.to_dict() for name, recipe in site_tree.recipes_of(sites).items()}
  return {
    "model": spec.model.to_dict(),
    "weights": params_lib.digest(params),
    "recipes": hashlib.sha256(repr(sorted(recipes.items())).encode()).hexdigest()[:16],
    "scales": params_lib.digest(states),
    "data": fingerprint,
    "windows": [spec.of(Sensitivity).tokens, spec.eval.batch, spec.data.seq_len],
    "compute": [spec.run.dtype.name, spec.kernels.matmul, spec.run.attention,
                spec.run.smooth_swiglu],
    "seed": spec.seed,
  }  # fmt: skip
