"""fp8jax: train language models in FP8 with JAX."""

__version__ = "0.1.0"
