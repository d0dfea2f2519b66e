"""Which runs are the same: flat configurations, their differences, what a resume accepts."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from fp8jax.config import registry
from fp8jax.config.files import Config
from fp8jax.errors import REMOVED
from fp8jax.keys import Affects
from fp8jax.models import config as model_config
from fp8jax.step.train_spec import TrainSpec


def flatten(c: Config) -> dict[str, Any]:
  """{"optim.peak_lr": 1e-3, ...}, JSON-able."""
  flat = {}

  def visit(prefix, node):
    for key, value in node.items():
      if isinstance(value, ConfigDict):
        visit(f"{prefix}{key}.", value)
      else:
        flat[f"{prefix}{key}"] = json.loads(json.dumps(value))

  visit("", c)
  return flat


def identity(spec: TrainSpec) -> dict[str, Any]:
  """The configuration with what "auto" and presets stand for: what a checkpoint remembers."""
  model = {f"model.{k}": v for k, v in spec.model.to_dict().items() if k != "init_std"}
  flat = {k: v for k, v in spec.flat.items() if not k.startswith("model.")}
  return (
    flat
    | json.loads(json.dumps(model))
    | {
      "precision.compute_dtype": spec.run.dtype.name,
      # By content: a table may move, but not change under its name.
      "precision.calibration": _digest(spec.calibration),
    }
  )


def _digest(path: str) -> str:
  """Of a file; "" of none."""
  if not path:
    return ""
  with open(os.path.expanduser(path), "rb") as f:
    return "sha256 " + hashlib.sha256(f.read()).hexdigest()[:16]


def _with_read_rope(flat: dict[str, Any]) -> dict[str, Any]:
  """A configuration whose rope has the original length that it computes with.

  Earlier versions stored None where a file left it out, and what a file stated where the type has
  no such option.
  """
  rope = flat.get("model.rope_scaling")
  if not isinstance(rope, dict):
    return flat
  original = rope.get("original_max_positions") or flat.get("model.max_positions")
  by_kind = {"yarn": original, "llama3": original, "linear": None, "default": None}
  if (kind := rope.get("kind")) not in by_kind:
    return flat
  return flat | {"model.rope_scaling": rope | {"original_max_positions": by_kind[kind]}}


def without_removed(flat: Mapping[str, Any]) -> dict[str, Any]:
  """A configuration of an earlier version without keys that are gone and say what holds now."""
  return {k: v for k, v in flat.items() if k not in REMOVED or REMOVED[k][1] not in (None, v)}


def _later(names: Collection[str]) -> dict[str, Any]:
  """Keys that a configuration of an earlier version lacks, at their defaults."""
  keys = (registry.KEYS[name] for name in names if name in registry.KEYS)
  return {one.name: json.loads(json.dumps(one.default)) for one in keys}


def diff(new: dict[str, Any], old: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
  """{key: (old value, new value)} where two flat configurations differ; absent is None.

  A key of earlier versions is a difference where its old value is not the one that is fixed now. A
  key that came later has its default in `old`, with which such versions computed; of an empty
  `old`, that of no run, it is absent.
  """
  new, old = (_with_read_rope(without_removed(flat)) for flat in (new, old))
  if old:
    old = _later(new.keys() - old.keys()) | old
  keys = sorted(new.keys() | old.keys())
  return {k: (old.get(k), new.get(k)) for k in keys if old.get(k) != new.get(k)}


def acceptable_changes(c: Config) -> set[str]:
  """Names for accept_changes: keys, also of sources that are gone, the data's content, the job."""
  gone = {k for k in c.checkpoint.accept_changes if str(k).startswith("data.sources.")}
  model = {f"model.{f.name}" for f in dataclasses.fields(model_config.ModelConfig)}
  return {"data", "job"} | gone | model | flatten(c).keys()


def refused_changes(changes: dict[str, Any], accepted, read: Collection[str] = ()) -> list[str]:
  """Those changed keys that alter the result of a resumed run and were not accepted.

  Args:
    read: keys that alter it because its policies decide by them, see policy.keys_read.
  """
  changed = (k for k, c in changes.items() if registry.affects(k, c) is Affects.RESULT or k in read)
  return [k for k in changed if k not in accepted]
