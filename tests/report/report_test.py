"""Tables and specifications of a report against the JSONL itself, read another way."""

import html.parser
import json
import math
import pathlib
import re
import statistics
import types

import numpy as np
import pytest
import run_files

from fp8jax.errors import UserError
from fp8jax.jobs import report
from fp8jax.report import files, page, thin


def specs_of(page):
  return json.loads(re.search(r'id="specs">(.*?)</script>', page, re.DOTALL)[1])


def test_tables_hold_what_the_rows_say(tmp_path):
  lines = run_files.write_run(tmp_path, steps=20, snapshots=4, layers=3)
  run = files.read(str(tmp_path))
  losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
  assert dict(zip(run.curves["loss"].steps, run.curves["loss"].values)) == losses
  assert (run.step, run.tokens_per_step, run.recipe) == (20, 32, "block_128")
  assert run.device_line == "1 x cpu (cpu): FP8 products by reference (emulated: exact, slow)"
  assert [(e.step, e.kind, e.place) for e in run.events] == [(20, "alarm", "layers/3/mlp/up/x")]
  snapshots = [line for line in lines if "numerics" in line]
  assert list(run.snapshots.steps) == [line["step"] for line in snapshots]
  assert len(run.snapshots.cells) == 3 * (7 * 3 + 1) + 3 * (3 * 2) + 3 * 2
  for i, line in enumerate(snapshots):
    for j, cell in enumerate(run.snapshots.cells):
      name = cell.site if cell.layer is None else f"layers/{cell.layer}/{cell.site}"
      for statistic, value in line["numerics"][name][cell.tensor].items():
        assert run.snapshots.values[statistic][i, j] == float(value)


@pytest.mark.parametrize("n", [1, 7, 399, 400, 401, 1999])
def test_thinned_curve_has_means_and_extremes_of_consecutive_steps(n):
  values = np.sin(np.arange(n)) + 2
  values[n // 2] = math.nan
  steps = np.arange(1, n + 1)
  found = thin.curve(files.Curve(steps, values))
  assert len(found.mean) <= 400 and found.steps[-1] == n and found.per_point == -(-n // 400)
  for k, last in enumerate(found.steps):
    first = found.steps[k - 1] if k else 0
    part = [v for s, v in zip(steps, values) if first < s <= last and math.isfinite(v)]
    if part:
      assert found.mean[k] == pytest.approx(statistics.fmean(part), rel=1e-12)
      assert (found.low[k], found.high[k]) == (min(part), max(part))
    else:
      assert math.isnan(found.mean[k])


@pytest.mark.parametrize("cells, most", [(0, 100), (1000, 40), (10**6, 2)])
def test_chosen_snapshots_keep_both_ends(cells, most):
  snapshots = files.Snapshots(np.arange(1, 1001), tuple(range(cells)), {})
  picked = thin.chosen(snapshots)
  assert len(picked) == most and (picked[0], picked[-1]) == (0, 999)
  assert max(np.diff(picked)) - min(np.diff(picked)) <= 1


def test_folder_without_a_run_is_refused_with_the_remedy(tmp_path):
  with pytest.raises(UserError, match=r"no folder of a run: there is no .*metrics\.jsonl; name"):
    files.read(str(tmp_path))
  with pytest.raises(UserError, match="--job=report --workdir=runs/NAME"):
    report.run("", [])


@pytest.mark.slow
def test_report_of_100_snapshots_at_smollm2_is_small_offline_and_true(tmp_path):
  pytest.importorskip("altair")
  lines = run_files.write_run(tmp_path, counted=5)
  path = tmp_path / "report.html"
  assert report.run(str(tmp_path), []) == str(path)
  page = path.read_text()
  assert len(page.encode()) < 5_000_000
  # Nothing is loaded from anywhere: the program and the data are inside.
  markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
  assert not re.search(r"<script[^>]*src|url\(|@import", page.split("<script>")[0])
  assert not re.search(r'(src|href)="(?!data:,")', markup)
  assert "snr_db &lt;/script&gt; low" in page and page.count("</script>") == 3
  assert "step 1000 of 2000, not finished" in page and "A point is the mean of 3 steps" in page
  specs = specs_of(page)
  assert set(specs) >= {"loss", "gap", "learning_rate", "grad_norm", "data_wait", "heat_maps",
                        "exponents", "scale_ranges", "memory"}  # fmt: skip
  gap = [row["percent"] for layer in specs["gap"]["layer"][1:2] for row in layer["data"]["values"]]
  assert gap == [1, 1]
  heat = specs["heat_maps"]
  snapshots = [line for line in lines if "numerics" in line]
  shown = [row["step"] for row in heat["datasets"]["looks"]]
  assert 45 <= len(shown) <= 100 and {10, 1000} <= set(shown) <= {
    line["step"] for line in snapshots
  }
  assert f"{len(shown)} of 100 snapshots, evenly spread" in page
  cells = heat["concat"][0]["transform"][3]["from"]["data"]["values"]
  row = heat["datasets"]["looks"][-1]
  for cell in cells:
    site, tensor = cell["tensor"].rsplit(" ", 1)
    name = site if cell["layer"] == "–" else f"layers/{cell['layer']}/{site}"
    for statistic in (
      "snr_db", "underflow", "saturation", "amax", "kurtosis", "mean", "variance", "amax_drift",
      "snr_drift",
    ):  # fmt: skip
      shown = row[statistic][cell["cell"] - 1]
      value = snapshots[-1]["numerics"][name][tensor].get(statistic, "inf")
      assert shown is None if value == "inf" else shown == pytest.approx(value, rel=5e-3)
  # Panels share no scale of colour, and none depends on the snapshot that is shown.
  assert heat["resolve"]["scale"]["color"] == "independent" and len(heat["concat"]) == 9
  for panel in heat["concat"]:
    low, *_, high = (
      panel["encoding"]["color"]["scale"]["domain"]
      if "scale" in panel["encoding"]["color"]
      else panel["encoding"]["color"]["condition"]["scale"]["domain"]
    )
    assert low < high
  steps = {row["step"] for row in specs["exponents"]["datasets"]["exponents"]}
  assert 10 <= len(steps) < 20 and {"50", "1000"} <= steps
  assert f"Snapshots: {len(steps)} of 20." in page
  bars = specs["memory"]["data"]["values"]
  assert {(b["kind"], b["side"]): b["gib"] for b in bars} == {
    ("masters", "declared"): 1, ("peak", "declared"): 3, ("peak", "compiled"): 4}  # fmt: skip


class Parsed(html.parser.HTMLParser):
  """The scripts of a page, and the other elements that begin in it."""

  def __init__(self, text):
    super().__init__()
    self.scripts, self.begun, self._inside = [], [], False
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self._inside = tag == "script"
    if self._inside:
      self.scripts.append("")
    else:
      self.begun.append(tag)

  def handle_endtag(self, tag):
    self._inside = False

  def handle_data(self, data):
    if self._inside:
      self.scripts[-1] += data


@pytest.mark.parametrize(
  "name", ["<!--<script>", "</script><script>alert(1)//", '"><img onerror=alert(1)>', "a & b<b>"]
)
def test_a_page_has_its_own_elements_alone_whatever_a_name_is(name):
  chart = {"title": name, "data": {"values": [{name: name}]}}
  section = page.Section(name, name, {"loss": chart}, [((name,), [(name,)])], name)
  text = page.render(name, [section], "const program = 1;")
  plain = page.render("x", [page.Section("x", "x", {"loss": {}}, [(("x",), [("x",)])], "x")], "")
  parsed = Parsed(text)
  assert parsed.begun == Parsed(plain).begun and len(parsed.scripts) == 3
  assert json.loads(parsed.scripts[0]) == {"loss": chart}
  # With it a script would not end at its end tag (HTML: "script data double escaped state").
  assert all("<!--" not in script for script in parsed.scripts)


def test_control_characters_of_names_are_shown():
  section = page.Section(
    "a\x1b[31mb", "c\x00", tables=[(("d\x7f",), [("\udce9\x9b",)])], text="e\n\tf"
  )
  text = page.render("g\rh", [section], "")
  for shown in ("a␛[31mb", "c␀", "d␡", "<td>��</td>", "<pre>e\n\tf</pre>", "<title>g␍h</title>"):
    assert shown in text
  text.encode()


def test_pages_that_cannot_be_written_are_named_without_errnos(tmp_path):
  (tmp_path / "report.html").mkdir()
  with pytest.raises(
    UserError, match="report.html cannot be written: Is a directory; name another"
  ):
    page.write(str(tmp_path / "report.html"), "text")
  assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_report_that_cannot_be_drawn_is_said_and_fails_nothing(tmp_path, monkeypatch):
  said = page.attempt(str(tmp_path))
  assert said.startswith("no report.html: ") and "metrics.jsonl" in said or "fp8jax[report]" in said

  def missing(name):
    raise ModuleNotFoundError("No module named 'altair'", name="altair")

  monkeypatch.setattr(page.importlib, "import_module", missing)
  assert "pip install 'fp8jax[report]'" in page.attempt(str(tmp_path))


def test_report_at_the_end_shows_the_sensitivity_of_the_folder(tmp_path):
  pytest.importorskip("altair")
  run_files.write_run(tmp_path, steps=4, snapshots=2, layers=3)
  (tmp_path / "sensitivity").mkdir()
  result = json.dumps(run_files.sensitivity_result())
  (tmp_path / "sensitivity" / "sensitivity.json").write_text(result)
  assert page.attempt(str(tmp_path), report.others).startswith("report: ")
  text = (tmp_path / "report.html").read_text()
  assert text.index("<h2>Sensitivity of sites</h2>") < text.index("<h2>Provenance</h2>")


def without_data(spec):
  """A specification with the number of rows in place of its data."""
  if isinstance(spec, dict):
    return {
      k: len(v)
      if k in ("values", "looks", "exponents") and isinstance(v, list)
      else without_data(v)
      for k, v in spec.items()
      if k != "$schema"
    }
  return [without_data(v) for v in spec] if isinstance(spec, list) else spec


def of_run(tmp_path):
  from fp8jax.report import charts, exponent_charts

  run_files.write_run(tmp_path, steps=20, snapshots=4, layers=3)
  run = files.read(str(tmp_path))
  return {
    "loss": charts.loss(run),
    "gap": charts.gap(run),
    "grad_norm": charts.metric(run, "grad_norm", "gradient norm", scale="log"),
    "heat_maps": charts.heat_maps(run.snapshots),
    "scale_ranges": exponent_charts.scale_ranges(run.snapshots),
    "memory": charts.memory(run),
    "exponents": exponent_charts.heat_maps(run.exponents),
  }


def of_sensitivity(_):
  from fp8jax.sensitivity import page as sensitivity_page

  result = run_files.sensitivity_result()
  groups = {group: sensitivity_page.groups(result, group) for group in ("kinds", "layers")}
  arms = {of: sensitivity_page.arms(result["budgets"][0], of) for of in ("kl", "loss_percent")}
  return {
    "heat_map": sensitivity_page.heat_map(result),
    "agreement": sensitivity_page.agreement(result),
    "picture": sensitivity_page.picture(result),
    **groups,
    **arms,
  }


def of_comparison(tmp_path):
  from fp8jax.report import compare, compare_charts

  arms = {"bf16": 0.0, "block_128": 0.01, "block_128(accumulate=32)": 0.02}
  found = compare.compare(run_files.write_rates(tmp_path, arms, 16))
  names = ("differences", "intervals", "rates", "losses")
  return {name: getattr(compare_charts, name)(found) for name in names}


def test_alarms_say_what_was_done_about_them(tmp_path):
  """k snapshots may pass before a policy acts; a new ring of the alarm is a row of its own."""
  pytest.importorskip("altair")
  from fp8jax.report import run_report

  def alarm(step, place, statistic):
    return files.Event(step, "alarm", place, f"{statistic} 3, above 2. Try: less")

  actions = [
    files.Event(6, "action", "layers/3/mlp/up", "switch_recipe(to='bf16', k=3): has 'bf16' now"),
    files.Event(4, "action", "layers/.*", "refresh(every=2): scales start over"),
    files.Event(9, "action", "layers/.*", "refresh(alarm='snr_db'): scales start over"),
  ]
  alarms = [
    alarm(2, "layers/3/mlp/up/x", "snr_db"), alarm(8, "layers/3/mlp/up/x", "snr_db"),
    alarm(2, "layers/3/mlp/up/w", "underflow"), alarm(2, "head/x", "snr_db"),
  ]  # fmt: skip
  switched, refreshed = (f"step {e.step}: {e.text}" for e in (actions[0], actions[2]))
  done = [run_report._done_about(e, alarms, actions) for e in alarms]
  assert done == [switched, refreshed, switched, "nothing"]


@pytest.mark.parametrize("more", [0, 1])
def test_events_beyond_the_most_that_are_shown_are_counted(more):
  pytest.importorskip("altair")
  from fp8jax.report import run_report

  most = run_report.MAX_EVENTS
  alarms = [files.Event(i, "alarm", "head/x", "snr_db 3") for i in range(most + more)]
  section = run_report._events(types.SimpleNamespace(events=alarms))
  said = f"The first {most} of {most + 1} alarms; metrics.jsonl has all. "
  assert section.note == "No policy acted on these alarms: nothing was changed. " + said * more
  ((columns, rows),) = section.tables
  assert [row[0] for row in rows] == [*range(most)] and len(columns) == len(rows[0]) == 4


def test_a_damaged_list_of_sites_is_named(tmp_path):
  run_files.write_run(tmp_path, steps=4, snapshots=2, layers=3)
  (tmp_path / "sites.json").write_text('[{"site": ')
  with pytest.raises(UserError, match="sites.json is not JSON.*delete it"):
    files.read(str(tmp_path))


def test_rows_of_a_chart_are_plain_json():
  """Integers whole, whatever made them; other numbers with few digits; no number, none."""
  pytest.importorskip("altair")
  from fp8jax.report import charts

  large = 2**53 + 1
  given = (large, np.int64(large), np.int32(-3), np.float32(1 / 3), 2 / 3, np.inf, "a", None)
  values = charts.rows(x=given).values
  text = '9007199254740993 9007199254740993 -3 0.333 0.667 null "a" null'
  assert " ".join(json.dumps(v["x"]) for v in values) == text
  assert charts.table("x y", [(1, "a"), (2, "b")]).values == [
    {"x": 1, "y": "a"},
    {"x": 2, "y": "b"},
  ]


GOLDEN = [(of_run, "report"), (of_sensitivity, "sensitivity"), (of_comparison, "compare")]


@pytest.mark.parametrize("make, name", GOLDEN, ids=[name for _, name in GOLDEN])
def test_specifications_are_golden_and_keep_vega_lites_schema(make, name, tmp_path, repository):
  alt = pytest.importorskip("altair")
  from fp8jax.report import charts

  made = make(tmp_path)
  assert all(isinstance(chart, alt.TopLevelMixin) for chart in made.values())
  specs = {name: without_data(charts.spec(chart)) for name, chart in made.items()}
  path = repository / "tests" / "golden" / f"{name}_specs.json"
  if not path.exists():
    path.write_text(json.dumps(specs, indent=1, sort_keys=True) + "\n")
    pytest.fail(f"{path} was missing and has been written: look at the pictures, run this again")
  # A changed picture: look at it, delete the file, and run this test twice.
  assert json.loads(path.read_text()) == specs


def test_exponents_of_a_picked_tensor_are_drawn_as_the_rows_say(tmp_path):
  """The marks of the picture, which Vega computes from the specification."""
  pytest.importorskip("altair")
  import vl_convert

  from fp8jax.report import charts, exponent_charts

  lines = run_files.write_run(tmp_path, steps=4, snapshots=4, layers=3)
  exponents = files.read(str(tmp_path)).exponents
  spec = charts.spec(exponent_charts.heat_maps(exponents))
  spec["datasets"] = {"exponents": exponent_charts.values(exponents)}
  for param in spec["params"]:
    param["value"] = {"tensor": "mlp/up x", "look": 3, "of_layer": "1"}[param["name"]]
  marks = re.findall(r'aria-label="(layer|step): (\d+); exponent: (-?\d+); share: ([^;"]+)',
                     vl_convert.vegalite_to_svg(spec))  # fmt: skip
  drawn = {(by, int(place), int(e)): float(share) for by, place, e, share in marks}
  assert len(drawn) == len(marks)
  rows = {line["step"]: line["exponents"] for line in lines if "exponents" in line}
  counts = {("layer", i): rows[4][f"layers/{i}/mlp/up"]["x"] for i in range(3)}
  counts |= {("step", step): row["layers/1/mlp/up"]["x"] for step, row in rows.items()}
  expected = {
    (*place, of["first_exponent"] + k): share
    for place, of in counts.items() for k, share in enumerate(of["shares"]) if share
  }  # fmt: skip
  assert drawn.keys() == expected.keys() and len(expected) > 100
  # A picture's label has one digit, its data a decibel.
  for key, share in expected.items():
    assert drawn[key] == pytest.approx(share, rel=0.7)
  (row,) = [row for row in spec["datasets"]["exponents"]
            if row["tensor"] == "mlp/up x" and row["look"] == 3]  # fmt: skip
  for place, layer in enumerate(row["layer"]):
    of = counts["layer", int(layer)]
    levels = [-10 * math.log10(share) if share else None for share in of["shares"]]
    assert row["first"][place] == of["first_exponent"] and len(levels) == len(row["level"][place])
    for level, got in zip(levels, row["level"][place], strict=True):
      assert got == level if level is None else abs(got - level) <= 0.5


def test_statistics_of_parameters_and_groups_are_heat_maps(tmp_path):
  """Rows are parameters, columns layers; a group has no layer."""
  pytest.importorskip("altair")
  stats = ("grad_norm", "update_norm", "param_norm", "update_ratio", "nonfinite")
  one = lambda i: dict(zip(stats, (i + 0.5, 0.25, 8.0, 0.25 / 8, i)))  # noqa: E731
  snapshots = {
    3: {"layers/0/mlp/up": one(1), "layers/1/mlp/up": one(2), "embed": one(3)},
    6: {
      "layers/1/mlp/up": one(4),
      "clip layers/.*": one(5),
      "embed": one(6) | {"grad_norm": "inf"},
    },
  }
  rows = [{"step": s, "loss": 1.0} for s in snapshots]
  rows += [{"step": s, "param_stats": of} for s, of in snapshots.items()]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  maps = specs_of(pathlib.Path(report.run(str(tmp_path), [])).read_text())["param_maps"]
  assert len(maps["concat"]) == len(stats)
  cells = maps["concat"][0]["transform"][3]["from"]["data"]["values"]
  found = {
    (row["step"], c["tensor"], c["layer"]): [row[s][c["cell"] - 1] for s in stats]
    for row in maps["datasets"]["looks"] for c in cells
  }  # fmt: skip
  assert found[3, "mlp/up", "1"] == [2.5, 0.25, 8, 0.0312, 2]
  assert found[6, "clip layers/.*", "–"][0] == 5.5 and found[6, "mlp/up", "0"] == [None] * 5
  assert found[6, "embed", "–"] == [None, 0.25, 8, 0.0312, 6]
