"""Pallas and its Mosaic GPU backend, imported by the first kernel that is made.

A program for a CPU makes none, and spares the second of its start that these imports take.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import mosaic_gpu as plgpu
else:

  class _Imported:
    """A module that is imported when one of its names is read."""

    def __init__(self, name: str):
      self._name = name

    def __getattr__(self, name: str):
      return getattr(importlib.import_module(self._name), name)

  pl = _Imported("jax.experimental.pallas")
  plgpu = _Imported("jax.experimental.pallas.mosaic_gpu")

__all__ = ["pl", "plgpu"]
