"""Paired continued pre-training: BF16 and block_128 from the same weights on the same batches.

Both arms take every step in lockstep, so that any number of steps is paired. Each step has three
losses on the batch that is about to be learned:

  bf16             the BF16 arm, forward in BF16
  block_128        the FP8 arm, forward in FP8
  block_128_bf16   the FP8 arm's parameters, forward in BF16

training_difference = block_128_bf16 - bf16: what training in FP8 does to the parameters.
forward_difference = block_128 - block_128_bf16: what the FP8 forward pass alone does to the loss.
"""

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8jax import params as params_lib
from fp8jax.kernels import choose
from fp8jax.models import presets, transformer
from fp8jax.models.config import ComputeConfig, ModelConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from gpu_check import batches as batches_lib
from gpu_check import measure
from gpu_check.worker import Context

RECIPES = ("bf16", "block_128")
ADAM = dict(b1=0.9, b2=0.95, weight_decay=0.1)
DRY = dataclasses.replace(
  presets.DEBUG, vocab_size=256, hidden_size=128, intermediate_size=128, num_layers=1, num_heads=2,
  num_kv_heads=1, head_dim=64,
)  # fmt: skip


def run(
  context: Context, is_dry: bool, model: str = "", batches: str = "", steps: int = 200,
  batch: int = 8, peak_lr: float = 5e-5,
) -> dict[str, Any]:  # fmt: skip
  """The differences with their spread, and all losses.

  Args:
    model: a Hugging Face folder; "" draws random weights of SmolLM2-135M's shape.
    batches: an .npz of batches.write.
    steps: at most; fewer if time is up, which the result says.
    batch: sequences per step.
    peak_lr: after a linear warm-up of a twentieth of the steps.
  """
  windows, text = batches_lib.read(batches)
  if len(windows) < batch:
    raise ValueError(f"{batches} has {len(windows)} sequences, fewer than --batch={batch}")
  cfg = DRY if is_dry else hf_config.read_config(model) if model else presets.SMOLLM2_135M
  if windows.max() >= cfg.vocab_size:
    raise ValueError(f"{batches} has token {windows.max()} of {cfg.vocab_size}")
  if model and not is_dry:
    params, _ = hf_weights.load_params(model, cfg)
  else:
    params = params_lib.init(jax.random.key(0), transformer.params(cfg), cfg.dims)
  arms = Arms(cfg, (batch, windows.shape[1] - 1), steps, peak_lr, params)
  losses = _train(context, arms, windows, steps, batch)
  return {
    "weights": "of the folder given" if model and not is_dry else "random",
    "text": text, "steps": len(losses["bf16"]), "steps_asked": steps,
    "tokens_per_step": batch * (windows.shape[1] - 1), "peak_lr": peak_lr,
    "backends": arms.backends, **differences(losses), "losses": losses,
  }  # fmt: skip


def _train(context: Context, arms: "Arms", windows, steps: int, batch: int):
  losses: dict[str, list[float]] = {"bf16": [], "block_128": [], "block_128_bf16": []}
  for rows in _order(len(windows), batch, steps):
    if losses["bf16"] and time.monotonic() > context.deadline:
      break
    for name, value in arms.step(windows[rows]).items():
      losses[name].append(value)
    if len(losses["bf16"]) % 10 == 1:
      print(len(losses["bf16"]), {k: round(v[-1], 4) for k, v in losses.items()}, flush=True)
  return losses


def _order(num: int, batch: int, steps: int):
  """Rows of each step: a new permutation every epoch, its remainder dropped."""
  rng, left = np.random.default_rng(0), np.zeros(0, np.int64)
  for _ in range(steps):
    left = left if len(left) >= batch else rng.permutation(num)
    yield left[:batch]
    left = left[batch:]


class Arms:
  """Both arms: parameters, optimizer states and compiled functions."""

  def __init__(self, cfg: ModelConfig, shape: tuple[int, int], steps: int, peak_lr: float, params):
    self.backends = {}
    warmup = max(1, steps // 20)
    schedule = optax.join_schedules(
      [optax.linear_schedule(peak_lr / warmup, peak_lr, warmup), optax.constant_schedule(peak_lr)],
      [warmup],
    )
    self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, **ADAM))
    self.state, self.steps = {}, {}
    for recipe in RECIPES:
      step, value, sites = build(cfg, shape, recipe, self.optimizer, choose.current_device())
      named = site_lib.flatten(sites)
      self.backends[recipe] = sorted({b for s in named.values() for b in s.backends})
      jit = functools.partial(jax.jit, compiler_options=measure.options())
      own = jax.tree.map(jnp.copy, params)
      self.state[recipe] = (own, self.optimizer.init(own))
      self.steps[recipe] = (jit(step, donate_argnums=(0, 1)), sites)
      if recipe == "bf16":
        self.evaluate = functools.partial(_evaluate, jit(value), sites)

  def step(self, tokens: np.ndarray) -> dict[str, float]:
    """The three losses on a batch, which both arms then learn."""
    batch = make_batch(tokens)
    found = {"block_128_bf16": self.evaluate(self.state["block_128"][0], batch)}
    for recipe in RECIPES:
      step, sites = self.steps[recipe]
      *state, found[recipe] = step(*self.state[recipe], sites, batch)
      self.state[recipe] = tuple(state)
    return {name: float(value) for name, value in found.items()}


def _evaluate(loss, sites, params, batch):
  return loss(params, sites, batch)


def build(cfg: ModelConfig, shape, recipe: str, optimizer, device: choose.Device):
  """(step, loss, sites): step (params, state, sites, batch) -> (params, state, loss).

  Args:
    shape: sequences and their length.
    recipe: of all linear layers; the head is in BF16, as in the shipped configurations.
  """
  tokens = shape[0] * shape[1]
  rules = (("head", "bf16"), ("layers/.*", recipe))
  sites = site_tree.build_sites(
    transformer.site_params(cfg),
    cfg.dims,
    rules,
    backends=site_tree.Backends(device=device, tokens=tokens),
  )
  attention = "cudnn" if device.platform == "gpu" else "xla"
  execution = ComputeConfig(
    dtype=jnp.dtype(jnp.bfloat16), attention=attention, loss_chunk=min(512, shape[1])
  )

  def loss(params, sites, batch):
    return transformer.loss(params, sites, batch, cfg, execution) / tokens

  def step(params, state, sites, batch):
    value, gradient = jax.value_and_grad(loss)(params, sites, batch)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value

  return step, loss, sites


def make_batch(tokens: np.ndarray) -> dict[str, Any]:
  """Windows [B, L + 1] as the model takes them; documents may attend to each other."""
  positions = np.broadcast_to(np.arange(tokens.shape[1] - 1, dtype=np.int32), tokens[:, 1:].shape)
  return {
    "tokens_BL": tokens[:, :-1], "targets_BL": tokens[:, 1:],
    "weights_BL": np.ones(positions.shape, np.float32), "positions_BL": positions,
  }  # fmt: skip


def differences(losses: dict[str, list[float]]) -> dict[str, float]:
  """Means of the paired differences and half-widths of their 95 % intervals.

  The first step is left out of the first: both arms are the same there. The interval takes steps
  as independent; neighbours are not quite, so that it is too narrow rather than too wide.
  """
  x = {name: np.asarray(values, np.float64) for name, values in losses.items()}
  pairs = {
    "training_difference": (x["block_128_bf16"] - x["bf16"])[1:],
    "forward_difference": x["block_128"] - x["block_128_bf16"],
  }
  found = {}
  for name, values in pairs.items():
    if len(values) == 0:
      continue
    found[name] = float(values.mean())
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    found[f"{name}_interval"] = float(half)
  return found
