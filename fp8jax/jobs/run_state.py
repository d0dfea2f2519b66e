"""The state of a run beside its parameters: its recipes, its data, and what is checked."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import rich.console

from fp8jax.compiled import expected_gemms, fp8_gemms
from fp8jax.data import batch_sharding
from fp8jax.errors import UserError
from fp8jax.jobs import policy_runner
from fp8jax.kernels import self_test
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site_tree
from fp8jax.optim import storage
from fp8jax.phases import decide
from fp8jax.quantization import amax_history, tensor_stats
from fp8jax.run import alarms as run_alarms
from fp8jax.run import calibration as calibration_lib
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run import fp8_share
from fp8jax.step import gradients, layer_loop, quantized_once, train_spec, train_step
from fp8jax.step.state import State


class RunState:
  """The precision phase of a run, with the sites to train in and the checks before its steps.

  Attributes:
    policies: of the policies; its spec has the phases that they began.
    calibration: amaxes of precision.calibration's table, see calibration.read; or None.
    batches: of its data, as batch_sharding.TrainBatches.
    disturb: a fault for drills, see train.run.
    undo: the roll-back that policies ask for, until it is made.
    phase: of the step before; -1 before the first one and after a roll-back.
    sites: {whether loud: tree of the phase}; empty before the first phase.
    shares: of FP8, in the phase.
    watch: alarms of the phase.
    has_scales: whether a checkpoint's scales are those of its phase.
    has_same_alarms: whether the alarms of the run so far are these.
    requested: whether to stop before a step, as Interrupts.requested.
  """

  def __init__(
    self, policies: policy_runner.PolicyRunner, calibration, batches: batch_sharding.Batches,
    out: rich.console.Console, disturb=None,
  ):  # fmt: skip
    self.policies, self.calibration, self._out = policies, calibration, out
    self.batches, self.disturb = batches, disturb
    self.undo: decide.Undo | None = None
    # Recipes arrive with the sites, so that policies leave the function as it is.
    self._step_fn, self.phase = train_step.make_step(policies.spec, policies.teacher), -1
    self.sites: dict[bool, Any] = {}
    self.shares: dict[str, float] = {}
    self.watch = run_alarms.AlarmMonitor(self.spec.log.alarms, {})
    self.has_scales = self.has_same_alarms = False
    self.requested: Callable[[int], bool] = lambda step: False
    self._proven: train_spec.TrainSpec | None = None
    self._compiled: set[Any] = set()  # (rules, whether loud) of steps taken here

  @property
  def spec(self) -> train_spec.TrainSpec:
    """The configuration's, with the recipes that policies gave."""
    return self.policies.spec

  def feeds_by(self, step: int) -> str:
    """The kind of goodput's clock that the next batch after `step` steps takes."""
    del step
    return "data_wait"

  def next_batch(self, state: State, step: int):
    """(the host's batch of the step after `step` steps, its number).

    The batch is None where making it takes long, `requested` says to stop meanwhile, and nothing
    was changed.
    """
    del state
    return self.policies.next_batch(self.batches.iterator, step)

  def place(self, host):
    """A host's batch on the devices, as the step takes it."""
    return self.batches.spread.place(host)

  def enter(self, state: State, step: int, batch) -> State:
    """The state with which the phase of a step begins; sets the sites to train in.

    Scales that are not current begin from the calibration's table or the phase's own first batch,
    unless the state already belongs to the phase; interrupted or not, a run therefore takes the
    same steps.

    Args:
      step: steps taken.
      batch: of the step after them, placed.
    """
    spec, phase = self.spec, self.spec.phase(step)
    self._try_kernels(phase)
    here = spec.precision.phases[phase]
    is_first = step == here.start
    if step and is_first and not here.by_policy:
      self._out.print(f"step {step}: precision.schedule enters its phase {phase}")
    if self.has_scales and not is_first:
      pass  # resumed within the phase
    elif here.by_policy and is_first:
      state = self.policies.begin_phase(state, batch, step, phase)
    elif (known := self.of_table(step, phase)) is not None:
      state = self._of_table(known, state, batch, step, phase)
    else:
      state = self.policies.calibrated(state, batch, phase)
    self.policies.await_scales(state, step, phase)
    levels = {False: tensor_stats.QUIET, True: tensor_stats.LOUD}
    self.sites = {loud: spec.sites(phase=phase, statistics=s) for loud, s in levels.items()}
    self.phase, self.shares = phase, fp8_share.of_phase(spec, phase)
    recipes = site_tree.recipes_of(self.sites[False])
    self.watch = run_alarms.AlarmMonitor(spec.log.alarms, recipes)
    if spec.verify_fp8_gemms and self._proven is not spec:
      # Stops before the first step unless every GEMM has the precision of its recipe.
      for title, rows in fp8_gemms.every_step(spec, self._step_fn, state, batch, phase):
        self._out.print(fp8_gemms.table(rows, title))
      self._proven = spec
    return state

  def _of_table(self, known, state: State, batch, step: int, phase: int) -> State:
    """The state with the scales of a table, and with those of the batch where it has none."""
    if not (names := scaling_lib.unknown(self.spec.sites(phase=phase), known)):
      return dataclasses.replace(state, scaling_states=known)
    what = "gradients" if not scaling_lib.unknown(self.spec.sites(phase=phase), known, "xw") else ""
    self._out.print(
      f"step {step}: scales of {what or f'{len(names)} sites'} begin from the next batch: "
      "precision.calibration has none above 0 of this run's loss"
    )
    fresh = self.policies.calibrated(state, batch, phase)
    filled = {n: amax_history.filled(s, fresh.scaling_states[n]) for n, s in known.items()}
    return dataclasses.replace(fresh, scaling_states=filled)

  def of_table(self, step: int, phase: int) -> dict[str, Any] | None:
    """The scaling states that the calibration's table gives to the sites of a phase; None without.

    One that lacks a row for a recipe that a policy chose gives none, and says so.
    """
    if self.calibration is None:
      return None
    try:
      at = self.spec.sites(phase=phase), self.spec.run.layout
      return calibration_lib.scaling_states_of(self.calibration, *at)
    except UserError as e:
      self._out.print(f"step {step}: scales begin from the next batch: {e}")
      return None

  def _try_kernels(self, phase: int):
    """Stops before the first step of a phase if a kernel of ours is wrong on this device."""
    # Of a master in two the quantizer reads the BF16 half.
    is_split = any(x.master == storage.REMAINDER for x in jax.tree.leaves(self.spec.leaves))
    weights = jnp.bfloat16 if is_split else jnp.float32
    uses, spare = expected_gemms.uses(self.spec, phase), self.spec.run.layout.spare
    stacks = quantized_once.is_on(self.spec)
    saves = gradients.adds_in_place(self.spec) and layer_loop.writes_what_it_saves(self.spec)
    if count := self_test.products(uses, weights=weights, spare=spare, stacks=stacks, saves=saves):
      self._out.print(f"kernels: {count} kinds of product tried on this device, all exact")
    leaf = next((x for x in jax.tree.leaves(self.spec.leaves) if x.backend != "xla"), None)
    if leaf is not None and not self.sites:  # once
      moments = storage.moments(self.spec.optim.moment_format)
      is_pair = leaf.master == storage.REMAINDER
      self_test.optimizer(moments.mu, moments.nu, is_pair=is_pair, dtype=leaf.gradient_dtype)
      self._out.print("kernels: the optimizer's tried on this device, as close as its arithmetic")

  def kind_of_step(self, is_loud: bool) -> str:
    """The kind of goodput's clock that the next step is of: "compile" where it is a new program."""
    program = (self.spec.precision.phases[self.phase].rules, is_loud)
    is_new = program not in self._compiled
    self._compiled.add(program)
    return "compile" if is_new else "step"

  def take_step(self, state: State, batch, is_loud: bool):
    """(state, metrics) after a step on a placed batch."""
    scale = self.policies.rate_scale()
    return self._step_fn(state, batch, self.sites[is_loud], rate_scale=scale)

  def evaluator(self) -> Any:
    """Of held-out data, as evaluator.Evaluator."""
    return evaluator_lib.Evaluator(self.spec, self.policies.teacher)

  def remembered(self) -> dict[str, Any]:
    """More that a checkpoint's `meta` has, for `recall`; a search has its policy there."""
    return {}

  def recall(self, meta: Mapping[str, Any]):
    """Goes on as a checkpoint with this `meta`."""
