"""TrainSpec: the resolved, checked configuration, typed."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from fp8jax import params as params_lib
from fp8jax.data import config as data_config_lib
from fp8jax.kernels import choose
from fp8jax.models import attention_gqa, lora, transformer
from fp8jax.models import config as model_config
from fp8jax.ops import site_tree
from fp8jax.optim import fused_adamw, optimizers, update
from fp8jax.phases import schedule
from fp8jax.quantization import tensor_stats
from fp8jax.recipe import library
from fp8jax.recipe import rules as rules_lib
from fp8jax.step import layerwise, settings

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class TrainSpec:
  """A run, resolved: what launch jobs work from.

  Attributes:
    declaration: tree of Param.
    run: how the model executes, layout included.
    precision: recipes, phase by phase.
    device: hardware that backends are chosen for.
    microbatch: sequences per microbatch over all devices.
    global_batch: sequences per optimizer step over all devices.
    grad_accum_steps: microbatches per optimizer step.
    steps: optimizer steps in the whole run.
    seed: of initial weights, of the order of documents and of stochastic rounding.
    verify_fp8_gemms: whether the compiled step is checked against the recipes before step 0.
    calibration: path of the table that delayed and static scales start from; "" for none.
    init, kernels, loss_scale, distill, weights, eval, checkpoint, log: the sections of that name.
    sections: those of the job alone, see `of`.
    flat: the configuration as plain values, {"optim.peak_lr": 1e-3, ...}: recorded with every
      result, and compared by a resumed run.
  """

  model: model_config.ModelConfig
  declaration: Any
  run: model_config.ComputeConfig
  precision: schedule.Precision
  optim: optimizers.OptimizerConfig
  data: data_config_lib.DataConfig
  device: choose.Device
  microbatch: int
  global_batch: int
  grad_accum_steps: int
  steps: int
  seed: int
  verify_fp8_gemms: bool
  calibration: str
  init: settings.Init
  kernels: settings.Kernels
  loss_scale: settings.LossScale
  distill: settings.Distill
  weights: settings.Weights
  eval: settings.Eval
  checkpoint: settings.Checkpoint
  log: settings.Log
  sections: Mapping[type, Any]
  flat: Mapping[str, Any] = dataclasses.field(repr=False)

  def of(self, section: type[S]) -> S:
    """A section of the job, e.g. of(Export)."""
    return self.sections[section]

  @property
  def plain(self) -> "TrainSpec":
    """The same without precision.invariant: scales chosen from a batch are of all of it."""
    return dataclasses.replace(self, run=dataclasses.replace(self.run, is_invariant=False))

  def with_recipe(self, name: str) -> "TrainSpec":
    """The same with this recipe in the layers, as --config=FILE:RECIPE."""
    rules = (*(lora.RULES if self.model.lora else ()), ("head", "bf16"), ("layers/.*", name))
    return dataclasses.replace(self, precision=schedule.Precision((schedule.Phase(0, rules),)))

  def phase(self, step: int) -> int:
    """Index of the precision phase that the step after `step` steps belongs to."""
    return self.precision.at(step)

  def sites(
    self, recipe: str | None = None, *, phase: int = 0, statistics: int = tensor_stats.QUIET
  ):
    """The tree of sites.

    Args:
      recipe: all sites in this named recipe; None takes the config's rules. In "bf16" a site keeps
        its gains, which are a part of the model.
      statistics: tensor_stats.QUIET, or LOUD to watch everything, activations too.
    """
    rules = self.precision.phases[phase].rules
    if recipe == library.BF16.name:
      plain = tuple((pattern, rules_lib.unquantized(name)) for pattern, name in rules)
      has_gains = any(name != recipe for _, name in plain)
      rules = plain if has_gains else ((".*", recipe),)
    elif recipe is not None:
      rules = ((".*", recipe),)
    return site_tree.build_sites(
      transformer.site_params(self.model),
      self.model.dims,
      rules,
      self.run.layout,
      backends=site_tree.Backends(self.kernels.matmul, self.device, self.tokens_per_device),
      statistics=statistics,
      save=self.run.residuals.gemm_inputs,
      activations=transformer.activations(self.model),
    )

  @functools.cached_property
  def leaves(self):
    """Tree of optim.optimizers.ParamOptimizer: storage and update of every parameter."""
    base = self.model.lora.base if self.model.lora else "bf16"
    leaves = optimizers.leaves(self.optim, self.declaration, self.seed, base)
    params = params_lib.abstract(self.declaration, self.model.dims, self.run.layout)
    if self.optim.in_backward:
      layerwise.check(leaves, params)
    why_not = fused_adamw.excluded(self.optim, self.log.param_stats)
    return update.with_backends(leaves, params, self.device, self.kernels.optimizer, why_not)

  @property
  def num_devices(self) -> int:
    """Devices that the run computes on: those of its mesh, all processes' together."""
    mesh_ = self.run.layout.mesh
    return 1 if mesh_ is None else mesh_.size

  @property
  def attention(self) -> choose.Choice | choose.Refusal:
    """The choice of the attention that `run` has, with its notes."""
    is_isolated = not self.data.cross_document
    size = (max(self.microbatch, self.eval.batch), self.data.seq_len, is_isolated)
    problem = attention_gqa.problem(self.model, self.run, self.device, *size)
    return choose.attention(problem, "xla" if self.run.attention_recipe else self.kernels.attention)

  @property
  def tokens_per_step(self) -> int:
    """Tokens of one optimizer step over all devices."""
    return self.global_batch * self.data.seq_len

  @property
  def tokens_per_device(self) -> int:
    """Tokens of one microbatch on one device."""
    layout = self.run.layout
    return self.microbatch * self.data.seq_len // layout.size(layout.act_axes("B"))
