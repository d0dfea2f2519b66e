"""Optax transformations whose state is narrow: `fp8jax.optim.scale_by_adam`, `scale_by_lion`."""

from fp8jax.optim.adam import scale_by_adam as scale_by_adam
from fp8jax.optim.adam import scale_by_lion as scale_by_lion
