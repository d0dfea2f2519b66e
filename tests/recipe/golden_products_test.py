"""The three products of every recipe on fixed operands: codes and scales bit for bit, sums nearly.
Of papers' recipes one of every kind of number, and logarithmic masters.

A whole step is no test of a recipe: rounding to nearest is chaotic within it (invariance_test.py),
so that the golden steps of different recipes lie within each other's budgets. What a recipe makes
of given operands is exact on any machine, and no two recipes make the same.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import zlib

import jax
import numpy as np
import oracle
import pytest
import tolerances
import variants

from fp8jax import formats
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.ops import dots
from fp8jax.ops import scaling as scaling_lib
from fp8jax.optim import storage
from fp8jax.quantization import amax_history
from fp8jax.recipe.gemm import PASSES, Gemm, Recipe
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.papers import PAPERS
from fp8jax.recipe.quant import Quant

# A grid of no dtype, in blocks; bits cut off; constant factors; logarithms.
_SOFT = Gemm(*[Quant(formats.by_name("e4m4"), (1, 32))] * 2, 32)
OTHERS = {"e4m4": Recipe("e4m4", _SOFT, _SOFT, _SOFT)} | {
  name: PAPERS[name] for name in ("mask_e8m4", "unit_scaling", "lns8")
}
NAMES = (*RECIPES, *OTHERS)
MASTERS = ("lns12",)
PATH = pathlib.Path(__file__).parents[1] / "golden" / "step.json"
# Tokens, in, out: partial tiles of 128; multiples of the 16 that Hadamard rotates.
TOKENS, IN, OUT = 144, 160, 32


def _operands():
  """x, w, g, float32: 7 bits under a power of two that changes along both axes.

  Sums of 16 of them are then exact, so that a rotated operand does not depend on their order.
  """
  rng = np.random.default_rng(zlib.crc32(b"golden products"))
  found = []
  for rows, columns in ((TOKENS, IN), (IN, OUT), (TOKENS, OUT)):
    bits = rng.integers(-127, 128, (rows, columns))
    exponents = rng.integers(-4, 4, (rows, 1)) + rng.integers(-4, 4, (1, columns))
    found.append(np.ldexp(bits, exponents - 6).astype(np.float32))
  return found


def products(recipe: str) -> dict:
  """What a recipe makes of `_operands()`, in JSON.

  Returns:
    operands: {"fwd.lhs": digest of codes, scales and tile} of every narrow operand.
    amaxes: what the next step's scales are made from, if not from its own operands.
    outputs: {"y", "dx", "dw": the norm, then sums with random signs}.
  """
  x, w, g = _operands()
  site = variants.single(OTHERS.get(recipe, recipe), matmul="reference")
  amaxes = np.array([np.abs(t).max() for t in (x, w, g)], np.float32)
  if site.recipe.is_stateful:
    # Past amaxes that are those of no operand; the largest of x saturate.
    scaling_state = amax_history.calibrated(site.recipe, np.float32([0.75, 1.1, 1.25]) * amaxes)
    site = dataclasses.replace(site, scaling_state=scaling_state)

  @jax.jit
  def run(x, w, g, site):
    made = []

    def watched(a, b, **how):
      made.append((a.in_one_piece(), b.in_one_piece()))
      return multiply(a, b, **how)

    multiply = gemm_api.scaled_matmul
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(gemm_api, "scaled_matmul", watched)
      y, pull = jax.vjp(lambda x, w, site: dots.dot("TD,DF->TF", x, w, site), x, w, site)
      dx, dw, seen = pull(g)
    scaling_states = scaling_lib.next_states(site, {site.name: seen.tap})
    return made, (y, dx, dw), {name: m.amax_3 for name, m in scaling_states.items()}

  made, outputs, scaling_states = jax.device_get(run(x, w, g, site))
  narrow = [p for p in PASSES if getattr(site.recipe, p).is_quantized]
  return {
    "operands": {
      f"{p}.{side}": _digest(operand.data, operand.scale, operand.tile)
      for p, pair in zip(narrow, made, strict=True)
      for side, operand in zip(("lhs", "rhs"), pair)
    },
    "amaxes": [float(a) for amax_3 in scaling_states.values() for a in amax_3],
    "outputs": dict(zip(("y", "dx", "dw"), map(oracle.sums, outputs))),
  }


def _digest(codes, scale, tile) -> str:
  codes, scale = np.ascontiguousarray(codes), np.ascontiguousarray(scale)
  kind = f"{codes.dtype} {codes.shape} {scale.dtype} {scale.shape} {tile}"
  return hashlib.sha256(kind.encode() + codes.tobytes() + scale.tobytes()).hexdigest()[:16]


def master(name: str) -> str:
  """Digest of codes, scale and tile of a master that is the weight of `_operands()`."""
  stored = jax.device_get(storage.store_master(_operands()[1], storage.MASTERS[name]))
  return _digest(stored.data, stored.scale, stored.quant.tile)


def differences(got: dict, want: dict) -> list[str]:
  """Names of what is not as in `want`."""
  found = [f"operand {k}" for k in {**got["operands"], **want["operands"]}
           if got["operands"].get(k) != want["operands"].get(k)]  # fmt: skip
  if got["amaxes"] != want["amaxes"]:
    found.append("amaxes")
  for name, sums in want["outputs"].items():
    limit = tolerances.GOLDEN_PRODUCT * sums[0]
    if not np.allclose(got["outputs"][name], sums, rtol=0, atol=limit):
      found.append(f"output {name}")
  return found


def _golden(part: str = "products") -> dict:
  return json.loads(PATH.read_text())[part]["recipes"]


# Of every idea the recipe that has most of it; the rest compile for ten seconds.
SAVED = [f"{name} saved" for name in ("block_128", "block_128_pow2", "tensor_delayed")]
QUICK = (
  "block_128_pow2 saved",
  "tensor_delayed_latest",
  "e4m3_static",
  "rowwise_gw_hp",
  "block_128",
  "nvfp4_sr_rht",
  "e4m4",
  "mask_e8m4",
  "unit_scaling",
)


@pytest.mark.parametrize(
  "recipe",
  [pytest.param(r, marks=[] if r in QUICK else [pytest.mark.slow]) for r in (*NAMES, *SAVED)],
)
def test_products_are_the_golden_ones(recipe):
  """The form of a residual changes no number."""
  assert not differences(products(recipe), _golden()[variants.split(recipe)[0]])


def test_no_recipe_passes_for_another():
  golden = _golden()
  assert tuple(golden) == NAMES, "python tests/golden/write_step.py --recipe NAME"
  for one, other in itertools.permutations(golden, 2):
    assert differences(golden[one], golden[other]), (one, other)


def test_logarithmic_masters_are_the_golden_ones():
  assert {name: master(name) for name in MASTERS} == _golden("masters")
