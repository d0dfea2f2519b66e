"""Kernels of ours, tried on the device before the first step that uses them."""

import jax
import rich.console

from fp8jax.compiled import fp8_gemms
from fp8jax.kernels import self_test
from fp8jax.optim import storage
from fp8jax.step import run_spec


def run(plan: run_spec.RunSpec, phase: int, out: rich.console.Console, with_optimizer: bool):
  """Stops before the first step of a phase if a kernel of ours is wrong on this device."""
  if count := self_test.products(fp8_gemms.uses(plan, phase)):
    out.print(f"kernels: {count} kinds of product tried on this device, all exact")
  if not with_optimizer:
    return
  moved = [leaf for leaf in jax.tree.leaves(plan.leaves) if leaf.backend != "xla"]
  if moved:
    moments, is_pair = (
      storage.MOMENTS[plan.optim.moment_format],
      moved[0].master == storage.REMAINDER,
    )
    self_test.optimizer(moments.mu, moments.nu, is_pair=is_pair, dtype=moved[0].gradient_dtype)
    out.print("kernels: the optimizer's tried on this device, as close as its arithmetic")
