"""Kernels of ours that a run tries on its device before it trusts them."""

import jax
import rich.console

from fp8jax.compiled import fp8_gemms
from fp8jax.kernels import self_test
from fp8jax.optim import storage
from fp8jax.step import run_spec


def products(plan: run_spec.RunSpec, phase: int, out: rich.console.Console):
  """Stops before the first step of a phase if a kernel of ours is wrong on this device."""
  if count := self_test.products(fp8_gemms.uses(plan, phase)):
    out.print(f"kernels: {count} kinds of product tried on this device, all exact")


def optimizer(plan: run_spec.RunSpec, out: rich.console.Console):
  """The same for the kernel that moves parameters."""
  moved = [leaf for leaf in jax.tree.leaves(plan.leaves) if leaf.backend != "xla"]
  if moved:
    moments, is_pair = (
      storage.MOMENTS[plan.optim.moment_format],
      moved[0].master == storage.REMAINDER,
    )
    self_test.optimizer(moments.mu, moments.nu, is_pair=is_pair, dtype=moved[0].gradient_dtype)
    out.print("kernels: the optimizer's tried on this device, as close as its arithmetic")
