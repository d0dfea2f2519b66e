"""Files of a workdir that are valid JSON of another shape: one line names file and field."""

import json
import math
import re

import pytest
import run_files

from fp8jax import records
from fp8jax.errors import UserError
from fp8jax.report import files
from fp8jax.run import checkpoint, metrics_writer, provenance, schemas, workdir

GONE = object()

# (file, its line, the place in the document, a value there, the message).
WHOLE = "expected a whole number"
FILES = [
  ("metrics.jsonl", 2, ["step"], "abc", f":2: field 'step' is 'abc', {WHOLE}; delete the line"),
  ("metrics.jsonl", 2, ["step"], 1e300, f":2: field 'step' is 1e+300, {WHOLE}"),
  ("metrics.jsonl", 2, ["step"], 2**31, f":2: field 'step' is 2147483648, {WHOLE} <= 2147483647"),
  ("metrics.jsonl", 2, ["step"], GONE, ":2: it has no field 'step'"),
  ("metrics.jsonl", 2, [], [1], ":2: holds [1], expected an object"),
  ("metrics.jsonl", 2, ["loss"], "low", ":2: field 'loss' is 'low', expected a number"),
  ("metrics.jsonl", 3, ["grad_norm"], "low", ":3: field 'grad_norm' is 'low', expected a number"),
  ("metrics.jsonl", 1, ["heldout/main/bf16/loss"], [], ":1: field 'heldout/main/bf16/loss' is []"),
  ("metrics.jsonl", 4, ["numerics"], [], ":4: field 'numerics' is [], expected an object"),
  ("metrics.jsonl", 4, ["numerics", "layers/2/mlp/up", "x", "rms"], "a",
   ":4: field 'numerics.layers/2/mlp/up.x.rms' is 'a', expected a number"),
  ("metrics.jsonl", 5, ["exponents", "head", "w"], {},
   ":5: field 'exponents.head.w' has no field 'first_exponent'"),
  ("metrics.jsonl", 5, ["alarms"], [{}], ":5: field 'alarms[0]' has no field 'text'"),
  ("config.json", 0, ["resolved"], 5, ": field 'resolved' is 5, expected an object; delete it"),
  ("config.json", 0, ["resolved", "seed"], "x", f": field 'resolved.seed' is 'x', {WHOLE}"),
  ("config.json", 0, ["resolved", "optim.peak_lr"], "high",
   ": field 'resolved.optim.peak_lr' is 'high', expected a number"),
  ("config.json", 0, ["resolved", "precision.rules"], [["head"]],
   ": field 'resolved.precision.rules[0]' is [\"head\"], expected a list of length 2"),
  ("sites.json", 0, [0, "layers"], GONE, ": field '[0]' has no field 'layers'"),
  ("sites.json", 0, [0, "definition", "fwd"], 1, ": field '[0].definition.fwd' is 1, expected an"),
  ("sites.json", 0, [], {}, ": holds {}, expected a list"),
  ("memory.json", 0, ["rows", 1, "kind"], 3, ": field 'rows[1].kind' is 3, expected text"),
  ("memory.json", 0, ["peak"], None, ": field 'peak' is null, expected a number"),
  ("provenance.json", 0, ["earlier"], 5, ": field 'earlier' is 5, expected a list"),
  ("summary.json", 0, ["step"], "x", f": field 'step' is 'x', {WHOLE}"),
  ("summary.json", 0, ["fp8_flops_share"], "x", ": field 'fp8_flops_share' is 'x', expected a"),
  # Divisors.
  ("refresh/after.json", 0, ["rows", 0, "scale"], 0, ": field 'rows[0].scale' is 0, expected a "),
  ("refresh/before.json", 0, ["rows", 0, "scale"], -2, ": field 'rows[0].scale' is -2, expected a"),
  ("refresh/before.json", 0, ["rows", 0, "scale"], math.inf, ": field 'rows[0].scale' is Infinity"),
  ("refresh/after.json", 0, ["rows", 0, "scale"], math.nan, ": field 'rows[0].scale' is NaN, exp"),
  ("config.json", 0, ["resolved", "seq_len"], 0, ": field 'resolved.seq_len' is 0, expected a who"),
  ("config.json", 0, ["resolved", "data.sources.main.weight"], 0,
   ": field 'data.sources.main.weight' is 0, expected a number >= 1.4"),
  ("nonfinite/report.json", 0, ["step"], "3", f": field 'step' is '3', {WHOLE}"),
  ("sensitivity/sensitivity.json", 0, ["sites"], [], ": field 'sites' is [], expected a list of l"),
  ("sensitivity/sensitivity.json", 0, ["budgets", 0, "arms", 1, "report", "kl"], [1, 2],
   ": field 'budgets[0].arms[1].report.kl' is [1, 2], expected a list of length 3"),
]  # fmt: skip


def changed(value, place, new):
  """The document with another value at a place."""
  if not place:
    return new
  node = value
  for key in place[:-1]:
    node = node[key]
  if new is GONE:
    del node[place[-1]]
  else:
    node[place[-1]] = new
  return value


@pytest.fixture
def run(tmp_path):
  run_files.write_run(tmp_path, steps=4, snapshots=2, layers=3)
  for folder in ("nonfinite", "sensitivity", "refresh"):
    (tmp_path / folder).mkdir()
  names = {k: f"refresh/{k}.json" for k in ("before", "after")}
  whole_lines = (tmp_path / "metrics.jsonl").read_text().rpartition("\n")[0]
  refresh = json.dumps({"step": 4, "refresh": names})
  (tmp_path / "metrics.jsonl").write_text(f"{whole_lines}\n{refresh}\n")
  row = {"site": "head", "tensor": "x", "amax": 448.0}
  tables = {
    name: {"format": "1", "rows": [{**row, "scale": float(1 + i)}]}
    for i, name in enumerate(names.values())
  }
  others = tables | {
    "summary.json": {"step": 4}, "nonfinite/report.json": {"step": 3},
    "sensitivity/sensitivity.json": run_files.sensitivity_result(),
  }  # fmt: skip
  for name, value in others.items():
    (tmp_path / name).write_text(json.dumps(value))
  ((refresh),) = files.read(str(tmp_path)).refreshes
  assert refresh.scales == (("head/x", 1.0, 2.0),)
  return tmp_path


@pytest.mark.parametrize("name, line, place, value, message", FILES)
def test_a_field_of_another_type_is_named(run, name, line, place, value, message):
  path = run / name
  if line:
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps(changed(json.loads(lines[line - 1]), place, value))
    text = "\n".join(lines)
  else:
    text = json.dumps(changed(json.loads(path.read_text()), place, value))
  path.write_text(text)
  with pytest.raises(UserError, match=f"^{re.escape(str(path) + message)}"):
    files.read(str(run))


def test_bytes_that_are_no_text_are_named_with_their_line(run):
  for name, message in (("metrics.jsonl", ":2 is no JSON"), ("memory.json", ":2 is not UTF-8")):
    path = run / name
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"{", b"{\n", 1) if name == "memory.json" else whole)
    lines = path.read_bytes().split(b"\n")
    lines[1] = b'{"step": 1, "a": "\xff"}'
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=re.escape(str(path) + message)):
      files.read(str(run))
    path.write_bytes(whole)


def test_a_resumed_run_names_them_too(tmp_path):
  (tmp_path / "provenance.json").write_text('{"earlier": 5}')
  with pytest.raises(
    UserError, match="provenance.json: field 'earlier' is 5, expected a list; ren"
  ):
    provenance.history(str(tmp_path), 5, {})
  for name in ("summary", "config"):
    (tmp_path / f"{name}.json").write_text('{"step": "x", "resolved": {}}')
  (tmp_path / "provenance.json").write_text('{"data_fingerprint": "d"}')
  with pytest.raises(UserError, match="summary.json: field 'step' is 'x', expected a whole number"):
    workdir.finished(str(tmp_path), {"steps": 3}, "d")
  (tmp_path / "metrics.jsonl").write_text('{"step": "1", "loss": 2}\n')
  with pytest.raises(UserError, match="metrics.jsonl:1: field 'step' is '1'"):
    metrics_writer.Metrics(str(tmp_path), 1, {}, False)


def test_rows_of_an_evaluation_that_is_made_again_are_dropped(tmp_path):
  """Of held-out text or of tasks alone, with what policies did after it."""
  rows = [
    {"step": 0, "heldout/a/bf16/loss": 2.0}, {"step": 1, "loss": 2.0, "accuracy_of": 1.0},
    {"step": 1, "accuracy": 0.5, "accuracy/a": 0.5}, {"step": 1, "actions": []},
    {"step": 2, "loss": 1.0},
  ]  # fmt: skip
  path = tmp_path / "metrics.jsonl"
  for evaluated, step, kept in ((("0", "1"), 2, rows), (("0",), 1, rows[:2]), ((), 1, rows[1:2])):
    path.write_text("".join(records.to_json(row, None) + "\n" for row in rows))
    metrics_writer.Metrics(str(tmp_path), step, evaluated, False).close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept


def test_what_a_killed_process_left_of_a_file_is_written_over(tmp_path):
  (tmp_path / "summary.json.part").write_text("{")
  provenance.write_json(str(tmp_path), "summary.json", {})
  assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


META = {
  "config": {"steps": 3}, "data_fingerprint": "d", "readers": {}, "weights_dtype": "bfloat16",
  "documents": {"empty": 1}, "evaluations": {"0": {"main": {"bf16": {"loss": 2.0}}}},
  "seconds": {"step": 1.5},
  "policy": {"losses": [2.0], "recipes": [[3, {"head": "bf16"}]]},
}  # fmt: skip


@pytest.mark.parametrize(
  "place, value, message",
  [
    (["documents"], 5, "field 'documents' is 5, expected an object"),
    (["documents", "empty"], "x", "field 'documents.empty' is 'x', expected a whole number"),
    (["evaluations", "0"], [], "field 'evaluations.0' is [], expected an object"),
    (["config"], [], "field 'config' is [], expected an object"),
    (["config"], GONE, "it has no field 'config'"),
    (["seconds", "step"], "x", "field 'seconds.step' is 'x', expected a number"),
    (["policy", "losses"], 5, "field 'policy.losses' is 5, expected a list"),
    (["policy", "recipes", 0], [3], "field 'policy.recipes[0]' is [3], expected a list of length"),
  ],
)
def test_meta_of_a_checkpoint_is_checked(tmp_path, place, value, message):
  saved = checkpoint.Checkpoints(str(tmp_path))
  metas = META, changed(json.loads(json.dumps(META)), place, value)
  for step, meta in enumerate(metas, 1):
    items = dict(meta=checkpoint.ocp.args.JsonSave({**meta, "layout": checkpoint._LAYOUT}))
    saved._manager.save(step, args=checkpoint.ocp.args.Composite(**items))  # noqa: SLF001
  saved.wait()
  assert saved.meta(1) == META
  with pytest.raises(UserError, match=re.escape(message)) as e:
    saved.meta(2)
  folder = tmp_path / "checkpoints"
  assert f"to go on from step 1, move it away: mv {folder}/2 {tmp_path}/damaged_2" in str(e.value)
  saved.close()


def test_types_name_only_fields_that_a_writer_writes():
  """PolicyState.to_json, which a checkpoint holds, is of its type."""
  made = schemas.decide.PolicyState(
    (2.0,),
    {"p": {"s": (True, False)}},
    {"p": {"s": ("", 3)}},
    undone=(schemas.decide.Event(1, "a", "b"),),
  )
  records.check(json.loads(json.dumps(made.to_json())), schemas.decide.PolicyState, "policy", "")
  with pytest.raises(UserError, match=r"policy: field 'away.p.s\[1\]' is 'x', expected a whole"):
    plain = json.loads(json.dumps(made.to_json()))
    records.check(
      changed(plain, ["away", "p", "s", 1], "x"), schemas.decide.PolicyState, "policy", ""
    )


@pytest.mark.parametrize(
  "rows, origin, said",
  [
    ([1, 2, 3, 4, 5, 6], 0, ""),
    ([4, 5, 6], 3, ""),  # init.workdir's run had the others
    ([4, 5, 6], None, ""),
    ([], None, ""),
    ([4, 5, 6], 0, "has no row of steps 1 to 3: the curves have a hole there"),
    ([], 0, "has no row of steps 1 to 6"),
    ([1, 2, 4], 0, "has no row of steps 3, 5 to 6"),
    ([2, 4, 6], None, "has no row of steps 3, 5:"),
    ([2, 4], 0, "has no row of steps 1, 3, 5 to 6:"),
  ],
)
def test_holes_of_a_curve_are_told(tmp_path, rows, origin, said):
  path = tmp_path / "metrics.jsonl"
  evaluated = [{"step": 3, "heldout/main/bf16/loss": 2.0}]
  path.write_text(
    "".join(json.dumps(r) + "\n" for r in [*({"step": s, "loss": 2} for s in rows), *evaluated])
  )
  lines = metrics_writer.holes(str(tmp_path), origin, 6)
  assert len(lines) == bool(said) and said in "".join(lines)
