"""Formats, casts and scales against ml_dtypes, gfloat, integers and torchao: every check of
tests/golden/conformance.py, which prints them as a table."""

import numpy as np
import pytest
from golden import conformance

from fp8jax import formats
from fp8jax.formats import BF16, E2M1, E3M4, E4M3, E5M2, E8M0, F16, F32

CHECKS = dict(conformance.checks())


# One function gives the scales of all formats, from their largest numbers.
_SLOW = [
  (name, check) for name, check in CHECKS
  if name not in ("e4m3", "e2m1") and check.startswith(("1x32", "scale e4m3_over_f32"))
]  # fmt: skip


@pytest.mark.parametrize(
  "check",
  [pytest.param(c, marks=[pytest.mark.slow] * (c in _SLOW), id=" ".join(c)) for c in CHECKS],
)
def test_conformance_has_no_mismatch(check):
  inputs, mismatches = CHECKS[check]()
  assert inputs >= 16 and mismatches == 0


@pytest.mark.parametrize("name", conformance.GFLOAT_BLOCKS)
def test_pow2_differs_from_torchao_only_where_torchao_breaks_its_own_rule(name):
  is_same, is_wrong = conformance.mx_torchao(name, "rceil")
  np.testing.assert_array_equal(is_same, ~is_wrong)
  amax = np.abs(conformance.golden()["x"]).max(1)[is_wrong].astype(np.float64)
  one_ulp_above = np.frexp(amax / formats.FORMATS[name].max)[0]
  assert 0 < len(amax) < 20 and np.all(one_ulp_above < 0.5 * (1 + 2.0**-22))


def test_formats_limits():
  """Spelled out, so that a dtype that changes its meaning is noticed."""
  table = {
    # max, smallest normal, smallest, bits, mantissa, emax, emin, inf, nan, narrow
    E4M3: (448.0, 2.0**-6, 2.0**-9, 8, 3, 8, -6, False, True, True),
    E5M2: (57344.0, 2.0**-14, 2.0**-16, 8, 2, 15, -14, True, True, True),
    E3M4: (15.5, 2.0**-2, 2.0**-6, 8, 4, 3, -2, True, True, True),
    E2M1: (6.0, 1.0, 0.5, 4, 1, 2, 0, False, False, True),
    E8M0: (2.0**127, 2.0**-127, 2.0**-127, 8, 0, 127, -127, False, True, False),
    BF16: ((2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, 16, 7, 127, -126, True, True, False),
    F16: (65504.0, 2.0**-14, 2.0**-24, 16, 10, 15, -14, True, True, False),
    F32: ((2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 32, 23, 127, -126, True, True, False),
  }
  # The others: tests/quantization/formats_test.py.
  assert [f for f in formats.FORMATS.values() if f in table] == list(table)
  for f, want in table.items():
    assert formats.FORMATS[f.name] is f
    got = (f.max, 2.0**f.min_exponent, f.smallest, f.bits, f.mantissa_bits, f.max_exponent)
    assert (*got, f.min_exponent, f.has_inf, f.has_nan, f.is_low_bit) == want, f
    with np.errstate(all="ignore"):
      codes = np.arange(2 ** min(f.bits, 16), dtype=np.uint16)
      if f.bits <= 16:
        values = codes.astype(np.uint8 if f.bits <= 8 else np.uint16).view(f.dtype)
        values = values.astype(np.float64)
        assert (np.isinf(values).any(), np.isnan(values).any()) == (f.has_inf, f.has_nan)
