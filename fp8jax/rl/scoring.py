"""Log-probabilities of a batch's targets as training's forward pass has them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.compiled import aot
from fp8jax.kernels import choose
from fp8jax.models import lora, transformer
from fp8jax.step import train_step
from fp8jax.step.train_spec import TrainSpec

_INPUTS = ("tokens_BL", "targets_BL", "positions_BL", "segments_BL")


def logp(
  spec: TrainSpec, t: float, params, sites, part, is_base: bool = False,
  before_each: Callable[[], None] = lambda: None,
) -> np.ndarray:  # fmt: skip
  """float32 [B, L] log-probabilities at a temperature, a microbatch at a time.

  Args:
    params: also of the reference.
    part: int32 [B, L] of _INPUTS.
    is_base: whether they have no adapters, whatever the run's.
    before_each: is called before every microbatch, and may raise.
  """
  cfg, run = lora.without(spec.model) if is_base else spec.model, spec.run
  program, made = _program(spec), []
  for n in range(0, len(part["tokens_BL"]), spec.microbatch):
    before_each()
    rows = slice(n, n + spec.microbatch)
    batch = {k: jax.device_put(part[k][rows], run.layout.act_sharding("BL")) for k in _INPUTS}
    made.append(np.asarray(program(params, sites, batch, cfg=cfg, run=run, t=t)))
  return np.concatenate(made)


def lower(spec: TrainSpec, devices, t: float):
  """The program of `logp`, lowered for devices that need not be here."""
  rows, everywhere = aot.places(spec, devices, "BL")
  params = aot.put(train_step.abstract_state(spec, 1).params, everywhere)
  tokens = jax.ShapeDtypeStruct((spec.microbatch, spec.data.seq_len), jnp.int32, sharding=rows)
  of_model = dict(cfg=spec.model, run=spec.run, t=t)
  sites = aot.put(spec.sites(), everywhere)
  return _program(spec).lower(params, sites, dict.fromkeys(_INPUTS, tokens), **of_model)


def _program(spec: TrainSpec):
  return choose.program(_score, spec.device, ("cfg", "run", "t"))


def _score(params, sites, batch, *, cfg, run, t):
  h_BLD = transformer.hidden(params, sites, batch, cfg, run)
  of_head = (params, sites, batch["targets_BL"])
  return transformer.log_probs(h_BLD, *of_head, cfg, run, t)[0]
