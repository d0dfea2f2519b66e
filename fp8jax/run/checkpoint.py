"""Checkpoints: Orbax, asynchronous and atomic, with the data position and the configuration.

A checkpoint holds the parameters, the scaling states, and, apart from them, the rest of the
State (so that evaluation and export read only what they need), the loader's position on every
process, and a JSON of the resolved configuration and the data's fingerprint. Restoring takes
shardings from the abstract tree, so a run continues on another mesh.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import absl.logging
import grain
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from fp8jax import records
from fp8jax.errors import MAKE_ROOM, UserError, not_written, one_line
from fp8jax.quantization import amax_history
from fp8jax.run import schemas
from fp8jax.step.state import State

# Of the keys in `meta` and the names of most arrays; raised where either changes.
_LAYOUT = 4


@dataclasses.dataclass
class _OnSchedule(checkpoint_managers.PreservationPolicy):
  """Keeps the newest `keep` of every `every` steps, and the newest of all.

  An interruption saves a checkpoint between them. It takes the place of none, so that a run that
  was interrupted has the same checkpoints to go back to as one that was not.
  """

  keep: int
  every: int

  def should_preserve(self, checkpoints, *, context):
    del context
    steps = [c.step for c in checkpoints]
    kept = {*[s for s in steps if s % self.every == 0][-self.keep :], *steps[-1:]}
    return [s in kept for s in steps]


class Checkpoints:
  """The checkpoints of a working directory."""

  def __init__(self, workdir: str, keep: int = 2, every: int = 0):
    """
    Args:
      keep: so many of the newest stay.
      every: counts as `keep` those of every so many steps alone, see _OnSchedule; 0 counts all.
    """
    kept: Any = {"max_to_keep": keep}
    if every:
      kept = {"preservation_policy": _OnSchedule(keep, every)}
    try:
      workdir.encode()
    except UnicodeEncodeError as e:  # bytes that are no text here
      raise UserError(
        f"--workdir={workdir!a} is no text in this locale ({sys.getfilesystemencoding()}), and "
        "checkpoints need UTF-8: set PYTHONUTF8=1, or name another one"
      ) from e
    self._manager = ocp.CheckpointManager(
      os.path.join(os.path.abspath(workdir), "checkpoints"),
      options=ocp.CheckpointManagerOptions(create=True, **kept),
      handler_registry=_handlers(),
    )

  def steps(self) -> list[int]:
    """Steps with a complete checkpoint, oldest first."""
    return sorted(self._manager.all_steps())

  def find(self, wanted: int = -1) -> int:
    """`wanted`, or the newest for -1.

    Raises:
      FileNotFoundError: no such checkpoint; says which there are.
    """
    steps = self.steps()
    if not steps:
      where = self._manager.directory
      raise FileNotFoundError(
        f"{where} holds no checkpoint; train first, or name another --workdir"
      )
    if wanted == -1:
      return steps[-1]
    if wanted not in steps:
      raise FileNotFoundError(f"no checkpoint of step {wanted}; there are {steps}")
    return wanted

  def save(self, step: int, state: State, iterator, meta: dict[str, Any]):
    """Starts writing; returns once the state may be donated again.

    Args:
      iterator: grain iterator, positioned after the batch of `step`.
      meta: JSON-able description of the run.
    """
    if step in self.steps():
      return
    self.check_room(state)
    items: dict[str, Any] = dict(
      params=ocp.args.PyTreeSave(state.params),
      rest=ocp.args.PyTreeSave(_rest(state)),
      data=grain.checkpoint.CheckpointSave(iterator),
      meta=ocp.args.JsonSave({**meta, "layout": _LAYOUT}),
    )
    if state.scaling_states:  # Orbax refuses an empty tree
      items["scaling_states"] = ocp.args.PyTreeSave(_as_tree(state.scaling_states))
    with self._writing():
      self._manager.save(step, args=ocp.args.Composite(**items))

  def meta(self, step: int) -> dict[str, Any]:
    """The meta that `save` was given.

    Raises:
      UserError: the checkpoint is damaged, or its layout is another version's.
    """
    meta = self._restore(step, meta=ocp.args.JsonRestore())["meta"]
    if not isinstance(meta, dict) or meta.pop("layout", 1) == _LAYOUT:
      where = f"the checkpoint {self._manager.directory / str(step)}: meta"
      records.check(meta, schemas.Checkpoint, where, self._without(step))
      return meta
    raise self._of_another_version(step, "whose configuration keys have other names")

  def _of_another_version(self, step: int, why: str) -> UserError:
    return UserError(
      f"the checkpoint of step {step} in {self._manager.directory} is of another version of "
      f"fp8jax, {why}. Go on with the version that wrote it (commit in provenance.json), export it "
      "there, or train again in another --workdir"
    )

  def _restore(self, step: int, accepted: Sequence[str] = (), **items):
    """Reads parts of a checkpoint.

    Args:
      accepted: keys of the configuration that differ from the checkpoint's.

    Raises:
      UserError: it holds other arrays than these; or Orbax cannot read those that it holds: names
        the folder, the reason and the older checkpoints.
    """
    folder = self._manager.directory / str(step)
    wanted = {
      name: _arrays(item.item) for name, item in items.items()
      if isinstance(item, ocp.args.StandardRestore)
    }  # fmt: skip
    _drop_late_callbacks()
    try:
      handler = ocp.StandardCheckpointHandler()
      stored = {name: _arrays(handler.metadata(folder / name)) for name in wanted}
      handler.close()
      if stored == wanted:
        return self._manager.restore(step, args=ocp.args.Composite(**items))
    except jax.errors.JaxRuntimeError:
      raise  # of the device: out of memory, say
    except Exception as e:
      reason = one_line(e)[:300] or type(e).__name__
      raise UserError(
        f"the checkpoint {folder} cannot be read ({', '.join(items)}): {reason}; "
        f"{self._without(step)}"
      ) from e
    if any(_is_older(stored[name], wanted[name]) for name in stored):
      raise self._of_another_version(step, "which did not say how codes are to be read")
    begin = (
      "begin with its weights in another --workdir: "
      f"--config.init.workdir={folder.parent.parent} --config.init.weights_only=True"
    )
    if any(key.startswith("model.") and not key.startswith(_BEGUN) for key in accepted):
      begin = "begin in another --workdir: its weights are of another model"
    several = "all of " * (len(accepted) > 1)
    raise UserError(
      f"the checkpoint {folder} holds another state than this configuration's: "
      f"{_difference(stored, wanted)}. "
      + f"checkpoint.accept_changes cannot accept {several}{', '.join(accepted)}. " * bool(accepted)
      + f"Train on as it was; or {begin}"
    )

  def _without(self, step: int) -> str:
    """The way to go on without the checkpoint of a step."""
    older = [s for s in self.steps() if s < step]
    then = f"step {older[-1]}" if older else "the beginning: there is no older checkpoint"
    folder = self._manager.directory
    aside = folder.parent / f"damaged_{step}"
    return f"to go on from {then}, move it away: mv {folder / str(step)} {aside}"

  def restore_params(self, step: int, abstract):
    """Parameters alone, placed as the abstract tree says."""
    return self._restore(step, params=ocp.args.StandardRestore(_placed(abstract)))["params"]

  def restore_scaling_states(self, step: int, abstract) -> dict[str, amax_history.ScalingState]:
    """The scaling states after `step`, like `abstract`."""
    if not abstract:
      return {}
    placed = _placed(_as_tree(abstract))
    tree = self._restore(step, scaling_states=ocp.args.StandardRestore(placed))["scaling_states"]
    return {name: amax_history.ScalingState(**tree[_as_key(name)]) for name in abstract}

  def restore(
    self, step: int, abstract: State, iterator=None, accepted: Sequence[str] = ()
  ) -> State:
    """The whole state, placed as `abstract` says; moves `iterator` to where it was.

    Args:
      accepted: keys of the configuration that differ from the checkpoint's, for the message that
        it holds another state.
    """
    items: dict[str, Any] = {
      "params": ocp.args.StandardRestore(_placed(abstract.params)),
      "rest": ocp.args.StandardRestore(_placed(_rest(abstract))),
    }
    if iterator is not None:
      items["data"] = grain.checkpoint.CheckpointRestore(iterator)
    restored = self._restore(step, accepted, **items)
    scaling_states = self.restore_scaling_states(step, abstract.scaling_states)
    return State(params=restored["params"], scaling_states=scaling_states, **restored["rest"])

  def drop_after(self, step: int):
    """Deletes the checkpoints after a step that the run goes back to."""
    self.wait()
    for later in reversed(self.steps()):
      if later > step:
        self._manager.delete(later)

  def check_room(self, state: State):
    """Refuses a state, or its shapes, for whose checkpoint the disk has no room.

    Raises:
      UserError: says how much is needed and how much is free.
    """
    needed = sum(_bytes_here(x) for x in jax.tree.leaves(state))
    free = shutil.disk_usage(self._manager.directory).free
    if free < needed:
      raise UserError(
        f"a checkpoint needs {needed / 1e6:,.0f} MB and {self._manager.directory} has "
        f"{free / 1e6:,.0f} MB free; lower checkpoint.keep, or {MAKE_ROOM} {self._origin()}"
      )

  def wait(self):
    """Returns when everything started is on disk; raises UserError if it cannot be."""
    with self._writing():
      self._manager.wait_until_finished()

  def close(self):
    with self._writing():
      self._manager.close()

  @contextlib.contextmanager
  def _writing(self):
    """Turns what Orbax raises where it cannot write into a UserError."""
    try:
      yield
    except jax.errors.JaxRuntimeError:
      raise  # of the device
    except (ValueError, RuntimeError, OSError) as e:
      mend = "mend that, and the same command goes on"
      message = not_written(f"a checkpoint in {self._manager.directory}", e, mend)
      raise UserError(f"{message} {self._origin()}") from e

  def _origin(self) -> str:
    steps = self.steps()
    return f"from step {steps[-1]}" if steps else "from the beginning"


# Adapters and a head may begin with the weights of a run that has none.
_BEGUN = ("model.lora", "model.reward_head")
# Written at a time, as Orbax's standard handler has it.
_AT_ONCE_GB = 96


def _handlers():
  """Of every item: arrays are written as they are.

  zstd takes 8 % off trained weights and moments, and five times the CPU (experiments/bench/cpu).
  """
  registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
  for name in ("params", "scaling_states", "rest"):
    saves = ocp.PyTreeCheckpointHandler(use_compression=False, save_concurrent_gb=_AT_ONCE_GB)
    registry.add(name, ocp.args.PyTreeSave, saves)
    registry.add(name, ocp.args.StandardRestore, ocp.StandardCheckpointHandler())
  return registry


def _arrays(tree) -> dict[str, str]:
  """{path: "float32[4, 8]"} of a tree of arrays, their shapes, or what Orbax says of them."""
  return {
    ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path):
      f"{x.dtype}{list(x.shape)}"
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }  # fmt: skip


def _is_older(stored: dict[str, str], wanted: dict[str, str]) -> bool:
  """Whether arrays of codes differ in their names alone, which did not say how they are read."""
  codes = {(path.partition(".data_")[0], kind) for path, kind in wanted.items() if ".data_" in path}
  return any(
    path.endswith(".data") and (path.removesuffix(".data"), kind) in codes
    for path, kind in stored.items()
  )


def _difference(stored: dict[str, dict[str, str]], wanted: dict[str, dict[str, str]]) -> str:
  """The first array that differs: "opt.mu is float32[2] there and absent here"."""
  for name in stored:
    there, here = stored[name], wanted[name]
    for path in sorted(there.keys() | here.keys()):
      if there.get(path) != here.get(path):
        sides = f"{there.get(path, 'absent')} there and {here.get(path, 'absent')} here"
        return f"{name}.{path} is {sides}"
  return ""


class _NoTraceback(logging.Filter):
  """Drops errors that Orbax logs: it raises each of them too, and four threads log the same."""

  def filter(self, record: logging.LogRecord) -> bool:
    return not ("orbax" in record.pathname and record.levelno >= logging.ERROR)


absl.logging.get_absl_logger().addFilter(_NoTraceback())


@functools.cache
def _drop_late_callbacks():
  """Reads of arrays that end after one has failed find the loop of Orbax closed: no news.

  Those that fail themselves are logged when their tasks are collected; the first one is raised.
  """
  others = sys.unraisablehook
  logging.getLogger("asyncio").addFilter(
    lambda record: "tensorstore_spec" not in record.getMessage()
  )

  def hook(unraisable):
    if str(unraisable.exc_value) != "Event loop is closed":
      others(unraisable)

  sys.unraisablehook = hook


def _bytes_here(x) -> int:
  """Bytes that a process writes of an array, uncompressed: one copy of the shards it holds."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return 0
  shape = x.sharding.shard_shape(x.shape) if x.sharding else x.shape
  indices = x.sharding.addressable_devices_indices_map(x.shape).values() if x.sharding else [()]
  return len(set(map(str, indices))) * math.prod(shape) * x.dtype.itemsize


def _placed(abstract):
  """Puts arrays without a sharding on this device: Orbax would look for the saving devices."""
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here), abstract
  )


def _rest(state: State) -> dict[str, Any]:
  names = [f.name for f in dataclasses.fields(state) if f.name not in ("params", "scaling_states")]
  return {name: getattr(state, name) for name in names}


def _as_key(name: str) -> str:
  return name.replace("/", ".")  # a key becomes part of a path


def _as_tree(scaling_states) -> dict[str, Any]:
  return {
    _as_key(name): {"amax_3": m.amax_3, "history_3H": m.history_3H}
    for name, m in scaling_states.items()
  }
