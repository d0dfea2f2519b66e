"""Recommended formats and margins of series of amaxes and counts whose answers are known."""

import json

import numpy as np
import pytest

from fp8jax.formats import E4M3, E5M2
from fp8jax.recipe import rules
from fp8jax.report import files, recommend, run_report

UP = float(np.nextafter(2.0, 3.0))


def counts(span, tail=0.0):
  """Exponents: all elements in `span` octaves but a share `tail` in one below."""
  return {"first_exponent": -20, "shares": [tail] * (tail > 0) + [(1 - tail) / span] * span}


@pytest.mark.parametrize(
  "amaxes, delayed, static",
  [
    ([3.0] * 8, 0, 0),
    ([3.0, 3.0, 1.0, 0.1, 3.0, 2.0, 3.0, 3.0], 0, 0),  # the history holds a dip
    ([3.0, 6.0] + [1.0] * 6, 1, 1),  # a factor of two, to the bit
    ([1.0, UP] + [1.0] * 6, 2, 2),
    ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], 1, 7),
    ([8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0, 0),
    ([1.0, np.nan, 0.0, 4.0, np.inf, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2, 2),
  ],
)
def test_margin_holds_every_amax_by_those_before_it(amaxes, delayed, static):
  got = recommend.of_series("layers/0/mlp/up", "x", np.array(amaxes), [counts(4)])
  assert (got.delayed, got.static, got.octaves) == (delayed, static, 4 + delayed)
  a = [x for x in amaxes if np.isfinite(x) and x > 0]
  assert got.snapshots == len(a) and got.amax[2] == np.log2(max(a))
  assert got.amax[0] == pytest.approx(np.median(np.log2(a)))
  for i in range(1, len(a)):
    assert a[i] <= max(a[:i]) * 2**got.delayed


@pytest.mark.parametrize(
  "span, tail, format",
  [(18, 0.0, "e4m3"), (19, 0.0, "e5m2"), (18, 0.01, "e4m3"), (18, 0.0101, "e5m2"),
   (32, 0.0, "e5m2"), (33, 0.0, "bf16")],
)  # fmt: skip
def test_format_has_as_many_octaves_as_the_elements(span, tail, format):
  got = recommend.of_series("a", "x", np.ones(8), [counts(3), counts(span, tail)])
  assert got.format == format
  # By ml_dtypes: from the largest number to the smallest one.
  for f, wanted in ((E4M3, 18), (E5M2, 32)):
    grid = np.arange(256).astype(np.uint8).view(f.dtype).astype(np.float64)
    grid = np.unique(np.floor(np.log2(grid[np.isfinite(grid) & (grid > 0)])))
    assert recommend.octaves_of(f) == len(grid) == wanted


def test_too_few_snapshots_or_no_counts_are_no_recommendation():
  few = recommend.of_series("a", "x", np.ones(recommend.LEAST_SNAPSHOTS - 1), [counts(4)])
  assert (few.delayed, few.static, few.octaves, few.format) == (None, None, None, "")
  none = recommend.of_series(
    "a", "x", np.ones(recommend.LEAST_SNAPSHOTS), [counts(4) | {"shares": []}]
  )
  assert (none.delayed, none.octaves, none.format) == (0, None, "")
  assert "fewer than 8 snapshots" in str(recommend.table([few]))
  assert "no exponents counted" in str(recommend.table([none]))
  assert recommend.precision_rules([few], (("a", "bf16"),)) == ""


def test_rules_of_a_run_s_report_are_those_of_its_sites(tmp_path):
  """Layer 1's input grows and its gradient is wide; layer 2 was seen twice, and keeps its rule."""
  rows = [{"step": s, "loss": 1.0} for s in range(1, 9)]
  for s in range(1, 9):
    numerics, exponents = {}, {}
    for name in ("head", "layers/0/mlp/up", "layers/1/mlp/up", "layers/2/mlp/up", "layers/1/res"):
      if name != "layers/2/mlp/up" or s < 3:
        amax = 4.0 if name == "layers/1/mlp/up" and s == 5 else 1.0
        tensors = "xg" if name.endswith("res") else "xwg"
        numerics[name] = {t: {"amax": amax if t == "x" else 1.0} for t in tensors}
        exponents[name] = {t: counts(30 if t == "g" else 10) for t in tensors}
    rows += [{"step": s, "numerics": numerics}, {"step": s, "exponents": exponents}]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  own = [["head", "bf16"], ["layers/.*", "block_128"]]
  (tmp_path / "config.json").write_text(json.dumps({"resolved": {"precision.rules": own}}))
  pytest.importorskip("altair")
  sections = run_report.sections(files.read(str(tmp_path)))
  (section,) = [s for s in sections if s.title.startswith("Recommended")]
  stated = {}
  exec(section.text.replace("c.precision.rules", "rules"), stated)
  assert stated["rules"] == (
    ("layers/0/mlp/up", "tensor_delayed"), ("layers/1/mlp/up", "tensor_delayed(margin=2)"),
    ("head", "bf16"), ("layers/.*", "block_128"),
  )  # fmt: skip
  names = ["head", *(f"layers/{i}/mlp/up" for i in range(3))]
  assert rules.match(names, stated["rules"])["layers/2/mlp/up"] == "block_128"
  ((columns, lines),) = section.tables
  by = {line[:2]: dict(zip(columns, line)) for line in lines}
  assert by.keys() == {(s, t) for s in ("mlp/up", "head") for t in "xwg"}
  assert by["mlp/up", "x"]["snapshots"] == 2 and by["head", "g"]["format"] == "e5m2"
  assert "from 8 snapshots at steps 1 to 8" in section.note
