"""What a step reports."""

import jax.numpy as jnp


def of_step(loss, grad_norm, update_norm, param_norm, learning_rate, is_finite):
  """Scalars of one optimizer step, still on device."""
  return {
    "loss": loss,
    "grad_norm": grad_norm,
    "update_norm": update_norm,
    "param_norm": param_norm,
    "learning_rate": jnp.asarray(learning_rate, jnp.float32),
    "is_finite": is_finite,
  }
