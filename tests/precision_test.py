"""Precision over a run: phases, layers, memories, calibration; interrupted or not."""

import dataclasses
import functools
import json
import re

import jax
import jax.experimental
import numpy as np
import pytest

from configs import base, debug
from fp8jax.compiled import fp8_gemms
from fp8jax.config import alarms as config_alarms
from fp8jax.config import identity, resolve
from fp8jax.data import batch_sharding, loader
from fp8jax.errors import ConfigError, UserError
from fp8jax.jobs import train
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.ops import site as site_lib
from fp8jax.quantization import amax_history, quantize, tensor_stats
from fp8jax.recipe import schedule
from fp8jax.recipe.gemm import Gemm, Recipe
from fp8jax.recipe.library import E4M3, RECIPES
from fp8jax.recipe.quant import Delayed, Quant, Static
from fp8jax.run import alarms as run_alarms
from fp8jax.run import calibration, checkpoint, evaluator, preemption, startup
from fp8jax.step import train_step

SMALL = dict(num_layers=3, hidden_size=64, intermediate_size=96, num_heads=1, num_kv_heads=1)


def _config(recipe="tensor_delayed", **changes):
  c = base.get_config(recipe)
  c.model.update(SMALL)
  c.update_from_flattened_dict({
    "steps": 6, "global_batch": 2, "seq_len": 64, "eval.tokens": 64, "eval.batch": 2,
    "optim.warmup_steps": 1, "optim.decay_steps": 1, "checkpoint.every": 0,
    "log.tensorboard": False, "memory.loss_chunk": 64, **changes,
  })  # fmt: skip
  return c


def _plan(*args, **changes):
  return resolve.resolve(_config(*args, **changes), 1, choose.current_device())


def _train(workdir, *args, **changes):
  train.run(_plan(*args, **changes), str(workdir))


def _state(workdir, plan, step):
  saved = checkpoint.Checkpoints(str(workdir))
  state = jax.device_get(saved.restore(step, train_step.abstract_state(plan, step)))
  saved.close()
  return state


def _assert_equal(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


# --- a run, in one piece and in several ----------------------------------------------------------

BF16_LATE = {"precision.schedule": ((4, ((".*", "bf16"),)),)}
STATIC_LATE = {"precision.schedule": ((3, ((".*", "e4m3_static"),)),)}
STATIC_LATE_LAYERS = {
  "precision.schedule": ((3, (("head", "bf16"), ("layers/.*", "e4m3_static"))),)
}
NAMES = [f"attn/{n}" for n in "qkvo"] + [f"mlp/{n}" for n in ("gate", "up", "down")]


PIECES = {r: (r, {}) for r, recipe in RECIPES.items() if recipe.is_narrow}
PIECES |= {"to bf16": ("tensor_delayed", BF16_LATE), "to static": ("tensor_delayed", STATIC_LATE)}


@pytest.mark.parametrize("recipe, changes", PIECES.values(), ids=PIECES)
@pytest.mark.slow  # a mixture of recipes, killed: resume_test.py
def test_run_is_the_same_interrupted_and_evaluated(tmp_path, recipe, changes, monkeypatch):
  """Six steps, and six with an evaluation after each, stopped after the third."""
  _train(tmp_path / "whole", recipe, **changes)
  plan = _plan(recipe, **changes)
  for stop in (3, 6):
    monkeypatch.setattr(preemption.Interrupts, "requested", lambda _, step, stop=stop: step >= stop)
    _train(tmp_path / "parts", recipe, **changes, **{"eval.every": 1})
  whole, parts = (_state(tmp_path / name, plan, 6) for name in ("whole", "parts"))
  last = site_lib.flatten(plan.sites(phase=plan.phase(5))).values()
  assert bool(whole.memories) == any(s.recipe.is_stateful for s in last)
  _assert_equal(whole, parts)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["tensor_current", "tensor_delayed_latest"])
def test_resumed_with_another_recipe_begins_its_scales_anew(tmp_path, before, monkeypatch, capsys):
  """As many amaxes are remembered as there were steps since, and the first look."""
  with monkeypatch.context() as m:
    m.setattr(preemption.Interrupts, "requested", lambda _, step: step >= 4)
    _train(tmp_path, before)
  _train(tmp_path, **{"checkpoint.accept_changes": ("precision.rules",)})
  assert "other recipes made the scales of step 4; they are begun anew" in capsys.readouterr().out
  memories = _state(tmp_path, _plan(), 6).memories
  assert memories
  for memory in memories.values():
    counts = np.count_nonzero(memory.history_3H, axis=-1)
    assert np.all(counts == 1 + 6 - 4)


@pytest.mark.slow
def test_phases_to_come_are_shown_and_proven_before_the_first_step(tmp_path, monkeypatch, capsys):
  real, proven = fp8_gemms.strict, []

  def strict(plan, step_fn, state, batch, sites, phase):
    assert "learning_rate" not in (tmp_path / "metrics.jsonl").read_text()  # no step yet
    proven.append((phase, site_lib.flatten(sites)["head"].tap.shape[-1]))
    is_lowered = proven[-1] == (1, tensor_stats.QUIET)  # one of the four programs is enough
    return real(plan, step_fn, state, batch, sites, phase) if is_lowered else []

  monkeypatch.setattr(fp8_gemms, "strict", strict)
  _train(
    tmp_path, **STATIC_LATE, **{"precision.verify_fp8_gemms": True, "log.tensor_stats_every": 100}
  )
  assert proven == [(p, s) for p in (0, 1) for s in (tensor_stats.LOUD, tensor_stats.QUIET)]
  shown = capsys.readouterr().out
  assert "sites from step 3" in shown and "e4m3_static" in shown
  rows = json.loads((tmp_path / "sites.json").read_text())
  assert {(r["from_step"], r["recipe"]) for r in rows if r["site"] != "head"} >= {
    (0, "tensor_delayed"), (3, "e4m3_static"),
  }  # fmt: skip


@pytest.mark.slow
def test_phase_changes_the_recipe_at_its_step(tmp_path):
  """The last two steps in BF16 are BF16's steps from there, bit for bit."""
  _train(tmp_path / "run", **BF16_LATE, **{"checkpoint.every": 4})
  plan, wide = _plan(**BF16_LATE), _plan("bf16")
  state = _state(tmp_path / "run", plan, 4)
  rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
  losses = {r["step"]: r["loss"] for r in rows if "loss" in r}
  step = train_step.make_step(wide)
  spread = batch_sharding.BatchSharder(wide.run.layout, wide.microbatch)
  stream = loader.train_batches(wide.data, 2)
  hosts = [next(stream) for _ in range(6)]
  stream.close()
  for i in (4, 5):
    state = dataclasses.replace(state, memories={})
    state, values = step(state, spread.place(hosts[i]), wide.sites())
    assert float(values["loss"]) == losses[i + 1]


def _batches(plan, count):
  """(a state calibrated on the first, so many batches of training)."""
  spread = batch_sharding.BatchSharder(plan.run.layout, plan.microbatch)
  stream = loader.train_batches(plan.data, 2)
  hosts = [spread.place(next(stream)) for _ in range(count)]
  stream.close()
  return train_step.calibrate(plan, train_step.make_state(plan), hosts[0], 0), hosts


def test_delayed_scales_move_and_follow_what_was_seen():
  """The latest amax moves with every batch, a maximum where it is exceeded: at first, here."""
  rules = (("layers/.*/mlp/.*", "tensor_delayed_latest"), (".*", "tensor_delayed"))
  plan = _plan(**{"precision.rules": rules})
  step, sites = train_step.make_step(plan), plan.sites(statistics=tensor_stats.LOUD)
  length = {name: s.recipe.history for name, s in site_lib.flatten(sites).items()}
  assert set(length.values()) == {1, 1024}
  state, hosts = _batches(plan, 4)
  state = dataclasses.replace(state, memories=jax.tree.map(lambda x: x / 2, state.memories))
  first = jax.device_get(state.memories)
  past = {name: [memory.amax_3] for name, memory in first.items()}
  for host in hosts:
    state, values = step(state, host, sites)
    for name, memory in jax.device_get(state.memories).items():
      past[name].insert(0, np.asarray(values["seen"][name])[..., 0])
      window = np.stack(past[name][: length[name]], axis=-1)
      known = window.shape[-1]
      np.testing.assert_array_equal(memory.history_3H[..., :known], window)
      assert not memory.history_3H[..., known:].any()
      np.testing.assert_array_equal(memory.amax_3, window.max(-1))
  for name, memory in jax.device_get(state.memories).items():
    assert (memory.amax_3 != first[name].amax_3).all(), name


def test_history_follows_transformer_engine():
  """Roll, insert, reduce; 0 and what is not finite keep the scale. Against a loop in NumPy."""
  tensor = Quant(E4M3, source=Delayed(steps=3))
  latest = Quant(E4M3, source=Delayed(steps=1, reduce="latest"))
  fixed = Quant(E4M3, source=Static())
  recipe = Recipe("mixed", Gemm(tensor, latest), Gemm(fixed, latest), Gemm(tensor, fixed))
  seen = [(4, 1, 9), (2, 0, 9), (1, 3, 9), (np.inf, np.nan, 9), (1, 0, 9), (0.5, 2, 9), (0, 0, 9)]
  memory = amax_history.calibrated(recipe, np.float32([3, 2, 5]))
  past = [3.0]
  want = np.array([3.0, 2.0, 5.0])
  for amaxes in seen:
    memory = jax.jit(lambda m, s: amax_history.update(m, s, recipe))(memory, np.float32(amaxes))
    past = [amaxes[0] if np.isfinite(amaxes[0]) else 0.0, *past][:3]
    want[0] = max(past) or want[0]
    want[1] = amaxes[1] if np.isfinite(amaxes[1]) and amaxes[1] else want[1]
    np.testing.assert_array_equal(memory.amax_3, want.astype(np.float32))
  assert memory.history_3H.shape == (3, 3)


# --- which layer gets what -----------------------------------------------------------------------


def test_first_and_last_layers_and_single_sites_can_be_excepted():
  rules = (("layers/.*/attn/[kv]", "bf16"), ("layers/1/mlp/up", "rowwise"), (".*", "block_128"))
  plan = _plan(**{"precision.rules": rules, "precision.last_bf16": 1})
  names = {name: r.name for name, r in site_lib.recipes_of(plan.sites()).items()}
  assert names["layers/0/attn/q"] == names["layers/1/mlp/down"] == names["head"] == "block_128"
  assert names["layers/0/attn/k"] == names["layers/1/attn/v"] == "bf16"
  assert names["layers/1/mlp/up"] == "rowwise"
  assert {n for k, n in names.items() if k.startswith("layers/2/")} == {"bf16"}
  rows = startup.site_rows(plan)
  assert [r["layers"] for r in rows if r["site"].endswith("/up")] == [1, 1, 1]


def test_table_of_sites_says_that_a_folded_weight_has_no_past():
  plan = _plan("tensor_delayed", **{"precision.smooth_swiglu": "channel"})
  rows = {row["site"]: row["definition"] for row in startup.site_rows(plan)}
  sources = {
    name: [d["fwd"][side]["source"]["kind"] for side in ("lhs", "rhs") if d["fwd"][side]]
    for name, d in rows.items()
  }
  assert sources["layers/mlp/down"] == ["delayed", "current"]
  assert sources["layers/mlp/up"] == ["delayed"] * 2


MISTAKES = {
  "step": ({"precision.schedule": ((0, ((".*", "bf16"),)),)}, "starts at step 0; phases start in"),
  "late": ({"precision.schedule": ((6, ((".*", "bf16"),)),)}, "before the last, steps=6"),
  "form": ({"precision.schedule": (((".*", "bf16"),),)}, "is no pair of a first step and rules"),
  "recipe": ({"precision.schedule": ((3, ((".*", "bf61"),)),)}, "did you mean 'bf16'"),
  "unused": ({"precision.schedule": ((3, ((".*", "bf16"), ("x", "bf16"))),)}, "decides nothing"),
  "layers": ({"precision.first_bf16": 2, "precision.last_bf16": 2}, "more layers than the model's"),
  "negative": ({"precision.first_bf16": -1}, "must be at least 0"),
  "all": ({"precision.first_bf16": 3}, "decides nothing"),
  "smooth": ({"precision.smooth_swiglu": "chanel"}, "did you mean 'channel'"),
  "merge": (
    {"precision.smooth_swiglu": "token", "export.fold_smooth_batches": 1},
    "which no weight can hold",
  ),
  "alarm": ({"log.alarms": (("underflo", ">", 1.0),)}, "statistics are saturation"),
  "loss scale": ({"precision.compute_dtype": "float16"}, "set loss_scale.kind='dynamic'"),
  "start": ({"loss_scale.start": 3.0}, "must be a power of two"),
}


@pytest.mark.parametrize("changes, message", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_named(changes, message):
  with pytest.raises(ConfigError, match=message):
    _plan(**changes)


def test_at_names_the_phase_of_every_step():
  phases = tuple(schedule.Phase(start, ()) for start in (0, 3, 5))
  assert [schedule.Precision(phases).at(s) for s in range(7)] == [0, 0, 0, 1, 1, 2, 2]


def test_recipe_by_name_takes_numbers_of_delayed_scales():
  plan = _plan("tensor_delayed(steps=16, margin=1)")
  recipe = site_lib.flatten(plan.sites())["layers/mlp/up"].recipe
  (x,) = recipe.uses()["x"]
  assert x.source == Delayed(steps=16, reduce="max", margin=1) and recipe.history == 16
  assert recipe.name == "tensor_delayed(steps=16, margin=1)"
  for name, message in (
    ("tensor_delayed(step=16)", "'step=16' is none of steps=1024, reduce=max, margin=0"),
    ("tensor_delayed(steps=many)", "'steps=many' is none of"),
    ("tensor_delayed(reduce=mean)", "must be 'max' or 'latest'"),
    ("block_128(steps=2)", "block_128 has no delayed scales"),
    ("tensor_delayed(steps=2", "did you mean 'tensor_delayed'"),
  ):
    with pytest.raises(ConfigError, match=message):
      _plan(name)


# --- calibration ---------------------------------------------------------------------------------


def test_calibration_is_a_table_that_scales_start_from(tmp_path):
  plan = _plan("e4m3_static")
  params = train_step.make_state(plan).params
  spread = batch_sharding.BatchSharder(plan.run.layout, plan.microbatch)
  stream = loader.train_batches(plan.data, 2)
  hosts = [spread.place(next(stream)) for _ in range(2)]
  stream.close()
  table = calibration.run(plan, params, hosts, step=7, fingerprint="abc")
  assert len(table["rows"]) == 3 * (7 * 3 + 1) and table["batches"] == 2
  one = next(r for r in table["rows"] if (r["site"], r["tensor"]) == ("layers/1/mlp/up", "w"))
  assert (one["step"], one["data"], one["recipe"]) == (7, "abc", "e4m3_static")
  assert one["amax"] == np.abs(params["layers"]["mlp"]["up"][1]).max()
  assert one["scale"] == pytest.approx(one["amax"] / 448, rel=1e-6)
  one["amax"] = 7.5  # by hand
  path = tmp_path / "table.json"
  path.write_text(json.dumps(table))
  memories = calibration.memories(calibration.read(str(path)), plan.sites())
  assert float(memories["layers/mlp/up"].amax_3[1, 1]) == 7.5
  _train(tmp_path / "run", "e4m3_static", **{"precision.calibration": str(path)})
  state = _state(tmp_path / "run", plan, 6)
  _assert_equal(state.memories, memories)  # static: never moved


@pytest.mark.parametrize(
  "text, message",
  [
    ("{}", "is no table of --job=calibrate"),
    ('{"format": "fp8jax calibration 1", "rows": [{"site": "a", "tensor": "x"}]}', "amax=None"),
    ('{"format": "fp8jax calibration 1", "rows": [{"amax": 1, "tensor": "y"}]}', "needs a site"),
  ],
)
def test_broken_table_is_refused(tmp_path, text, message):
  (tmp_path / "t.json").write_text(text)
  with pytest.raises(UserError, match=message):
    calibration.read(str(tmp_path / "t.json"))


def test_table_of_another_model_is_refused():
  with pytest.raises(UserError, match="no row for site layers/0/attn"):
    calibration.memories({("head", "x"): 1.0}, _plan("e4m3_static").sites())
  rows = {(f"layers/{i}/{m}", t): 1.0 for i in range(3) for m in NAMES for t in "xwg"}
  del rows["layers/1/mlp/up", "g"]
  with pytest.raises(UserError, match="no row for site layers/1/mlp/up, tensor g"):
    calibration.memories(rows, _plan("e4m3_static").sites())


def test_calibration_reaches_later_phases_and_is_refused_where_nothing_starts_from_it(tmp_path):
  path = tmp_path / "t.json"
  rows = [
    {"site": f"layers/{i}/{m}", "tensor": t, "amax": 2.0 + i}
    for i in range(3) for m in NAMES for t in "xwg"
  ]  # fmt: skip
  path.write_text(json.dumps({"format": calibration.FORMAT, "rows": rows}))
  late = _plan("bf16", **STATIC_LATE_LAYERS)
  first, second = calibration.begin(late, str(path))
  assert not first
  np.testing.assert_array_equal(second["layers/mlp/up"].amax_3, [[2] * 3, [3] * 3, [4] * 3])
  train.run(
    _plan("bf16", **STATIC_LATE_LAYERS, **{"precision.calibration": str(path)}), str(tmp_path)
  )
  _assert_equal(_state(tmp_path, late, 6).memories, second)
  with pytest.raises(UserError, match="nothing starts from it"):
    calibration.begin(_plan("block_128"), str(path))


def _write_table(path, factor):
  rows = [
    {"site": f"layers/{i}/{m}", "tensor": t, "amax": factor * (2.0 + i)}
    for i in range(3) for m in NAMES for t in "xwg"
  ]  # fmt: skip
  rows += [{"site": "head", "tensor": t, "amax": factor} for t in "xwg"]
  path.write_text(json.dumps({"format": calibration.FORMAT, "rows": rows}))


def test_another_table_on_resume_is_refused_and_applied_where_accepted(
  tmp_path, monkeypatch, capsys
):
  """Tables are compared by content: one that was edited under its name is another."""
  path = tmp_path / "t.json"
  _write_table(path, 1.0)
  changes = {"model.num_layers": 1, "precision.calibration": str(path)}
  monkeypatch.setattr(train._Run, "_evaluate", lambda *_: True)
  run = functools.partial(_train, tmp_path / "run", "e4m3_static")
  last = [2]
  monkeypatch.setattr(preemption.Interrupts, "requested", lambda _, step: step >= last[0])
  run(**changes)
  plan = _plan("e4m3_static", **{"model.num_layers": 1})
  before = _state(tmp_path / "run", plan, 2).memories
  _write_table(path, 4.0)
  with pytest.raises(ConfigError, match=r"precision.calibration was .* at step 2 and is .* now"):
    run(**changes)
  with pytest.raises(ConfigError, match=r"precision.calibration was .* at step 2 and is '' now"):
    run(**changes | {"precision.calibration": ""})
  changes |= {"checkpoint.accept_changes": ("precision.calibration",)}
  last[0] = 3
  capsys.readouterr()
  run(**changes)
  assert "step 2: scales begin anew from the table" in capsys.readouterr().out
  after = _state(tmp_path / "run", plan, 3).memories
  _assert_equal(after, jax.tree.map(lambda x: 4 * x, before))
  unchanged = identity.identity(_plan("e4m3_static", **changes))
  path.rename(tmp_path / "moved.json")
  changes["precision.calibration"] = str(tmp_path / "moved.json")
  assert identity.identity(_plan("e4m3_static", **changes)) == unchanged


# --- watching ------------------------------------------------------------------------------------


def test_statistics_equal_numpy(rng):
  x = (rng.standard_normal((32, 64)) * np.exp(3 * rng.standard_normal((32, 64)))).astype(np.float32)
  x[3, 4], x[5] = np.nan, 0.0
  quant = Quant(E4M3, source=Static())
  scale = np.float32(4.0) * np.float32(1 / 448)
  narrow = quantize.quantize(x, quant, amax=np.float32(4.0))
  got = tensor_stats.summary(tensor_stats.statistics(x, narrow, quant))
  good = np.where(np.isnan(x), 0, x).astype(np.float64)
  back = np.clip(good / scale, -448, 448).astype(np.float32).astype(E4M3.dtype).astype(np.float64)
  back = back * scale
  assert np.isnan(got["amax"]) and got["nonfinite"] == 1
  assert got["rms"] == pytest.approx(np.sqrt((good**2).mean()), rel=1e-5)
  assert got["underflow"] == ((good != 0) & (back == 0)).sum() / (good != 0).sum()
  assert got["saturation"] == (np.abs(good) > 464 * scale).sum() / good.size
  want = (good**4).mean() / (good**2).mean() ** 2
  assert got["kurtosis"] == pytest.approx(want, rel=1e-5) and want > 30
  assert got["smallest_scale"] == got["largest_scale"] == scale
  want = 10 * np.log10((good**2).sum() / ((back - good) ** 2).sum())
  assert got["snr_db"] == pytest.approx(want, abs=1e-3)


def test_statistics_of_parts_combine(rng):
  x = rng.standard_normal((64, 32)).astype(np.float32)
  parts = [tensor_stats.statistics(part, None, None) for part in (x[:16], x[16:])]
  whole = tensor_stats.statistics(x, None, None)
  np.testing.assert_allclose(tensor_stats.combine(*parts), whole, rtol=1e-6)
  np.testing.assert_allclose(tensor_stats.combine_all(np.stack(parts), 0), whole, rtol=1e-6)
  np.testing.assert_array_equal(
    tensor_stats.combine(tensor_stats.nothing((tensor_stats.LOUD,)), parts[0]), parts[0]
  )


def test_loud_step_reports_and_alarms_once(tmp_path, capsys):
  rules = (("snr_db", "<", 60.0, "layers/0/mlp/up/x"), ("saturation", ">", 2.0))
  _train(tmp_path, "block_128", **{"log.tensor_stats_every": 2, "log.alarms": rules})
  rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  looks = {r["step"]: r["numerics"] for r in rows if "numerics" in r}
  # The step after 2 and after 4 steps; the first one too.
  assert list(looks) == [1, 3, 5] and len(looks[1]) == 22
  up = looks[3]["layers/0/mlp/up"]["x"]
  assert 25 < up["snr_db"] < 40 and up["saturation"] == 0 and up["amax"] > 0
  assert "alignment" not in up and 2 < up["kurtosis"] < 10
  assert 0 < looks[3]["layers/2/mlp/down"]["x"]["alignment"] < 1
  said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1: ")]
  assert len(said) == 1 and "layers/0/mlp/up/x: snr_db" in said[0] and "Try: " in said[0]


def test_quiet_and_loud_are_exactly_two_traces(monkeypatch):
  plan = _plan("tensor_delayed")
  count = 0
  original = transformer.loss

  def counting(*args):
    nonlocal count
    count += 1
    return original(*args)

  monkeypatch.setattr(transformer, "loss", counting)
  step = train_step.make_step(plan)
  state, hosts = _batches(plan, 5)
  count = 0
  sites = {n: plan.sites(statistics=n) for n in (tensor_stats.QUIET, tensor_stats.LOUD)}
  for i, host in enumerate(hosts):
    state, _ = step(state, host, sites[tensor_stats.LOUD if i % 2 else tensor_stats.QUIET])
  assert count == 2


def _calls_of_the_host(traced) -> set[str]:
  """Primitives of a traced program that ask the host for something."""
  return set(re.findall(r"\w*(?:callback|infeed|outfeed|debug_print)\w*", str(traced.jaxpr)))


@pytest.mark.parametrize(
  "statistics", [tensor_stats.QUIET, tensor_stats.LOUD], ids=["quiet", "loud"]
)
def test_step_never_calls_the_host(statistics):
  plan = resolve.resolve(debug.get_config(), 1, choose.current_device())
  state = train_step.abstract_state(plan, 1)
  batch = {
    name: jax.ShapeDtypeStruct((plan.global_batch, plan.data.seq_len), dtype)
    for name, dtype in (
      ("tokens_BL", np.int32), ("targets_BL", np.int32), ("weights_BL", np.float32),
      ("positions_BL", np.int32), ("segments_BL", np.int32),
    )
  }  # fmt: skip
  traced = train_step.make_step(plan).trace(state, batch, plan.sites(statistics=statistics))
  assert not _calls_of_the_host(traced)


def test_calls_of_the_host_are_found():
  like = jax.ShapeDtypeStruct((), np.float32)
  calls = (
    lambda x: jax.debug.print("{}", x),
    lambda x: jax.debug.callback(print, x),
    lambda x: jax.pure_callback(np.sin, like, x),
    lambda x: jax.experimental.io_callback(np.sin, like, x),
  )
  for call in calls:

    def layers(x, call=call):
      return jax.lax.scan(lambda c, _: (c, call(c)), x, length=2)

    assert _calls_of_the_host(jax.jit(layers).trace(like)), call


def test_alarm_rings_again_after_silence():
  alarms = config_alarms.read_alarms((("underflow", ">", 0.3),))
  look = run_alarms.AlarmMonitor(alarms, {"a": RECIPES["block_128"]})
  numerics = {"a": {t: {"underflow": 0.5} for t in "xwg"}}
  quiet = {"a": {t: {"underflow": 0.1} for t in "xwg"}}
  first = look.lines(1, numerics)
  assert len(first) == 3 and "a/x: underflow 50.00%, above 30.00%. Try: " in first[0]
  assert not look.lines(2, numerics) and not look.lines(3, quiet)
  assert len(look.lines(4, numerics)) == 3


@pytest.mark.slow
def test_microbatches_round_by_chances_of_their_own():
  """The same text twice: with the same chances the mean of two gradients would be the one."""
  one = _plan("nvfp4_sr_rht", **{"model.num_layers": 1})
  two = _plan("nvfp4_sr_rht", **{"model.num_layers": 1, "global_batch": 4, "grad_accum_steps": 2})
  stream = loader.train_batches(one.data, 2)
  host = next(stream)
  stream.close()
  params = train_step.make_state(one).params

  @jax.jit
  def gradients(params, batch, sites):
    plan = one if batch["tokens_BL"].ndim == 2 else two
    return train_step.gradients(plan, params, sites, batch)[1]["layers"]["mlp"]

  of_one = gradients(params, host, one.sites())
  twice = {k: np.stack([x, x]) for k, x in host.items()}
  of_two = gradients(params, twice, two.sites())
  for a, b in zip(jax.tree.leaves(of_one), jax.tree.leaves(of_two)):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    assert 0.01 < np.linalg.norm(a - b) / np.linalg.norm(a) < 1


# --- from another run ----------------------------------------------------------------------------


def test_decay_from_the_checkpoint_of_another_run_is_the_whole_run(tmp_path, monkeypatch, capsys):
  """A stable phase, then decay alone from its checkpoint: bit for bit warm-up, hold and decay."""
  monkeypatch.setattr(train._Run, "_evaluate", lambda *_: True)
  monkeypatch.setattr(startup, "print_end", lambda *_: None)
  shared = {"model.num_layers": 1, "optim.schedule": "wsd", "optim.warmup_steps": 2}
  _train(tmp_path / "whole", **shared, **{"optim.decay_steps": 2})
  stable = {"steps": 4, "optim.decay_steps": 0}
  _train(tmp_path / "stable", **shared, **stable)
  decay = shared | {
    "optim.warmup_steps": 0, "optim.decay_steps": 2, "init.workdir": str(tmp_path / "stable"),
  }  # fmt: skip
  with pytest.raises(ConfigError, match="optim.warmup_steps was 2 at step 4 and is 0 now"):
    _train(tmp_path / "decay", **decay)
  changes = ("steps", "optim.warmup_steps", "optim.decay_steps")
  decay["checkpoint.accept_changes"] = changes
  with pytest.raises(FileNotFoundError, match="no checkpoint of step 3; there are .4."):
    _train(tmp_path / "decay", **decay, **{"init.step": 3})
  _train(tmp_path / "decay", **decay)
  assert "continuing the run in" in capsys.readouterr().out
  plan = _plan(**shared)
  whole, parts = (_state(tmp_path / name, plan, 6) for name in ("whole", "decay"))
  assert whole.memories
  _assert_equal(whole, parts)
  missing = {"init.workdir": str(tmp_path / "nowhere")}
  with pytest.raises(FileNotFoundError, match="nowhere' holds no checkpoint"):
    _train(tmp_path / "other", **shared, **missing)
  assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
  "names, recipes",
  [
    (("recipe", "bf16"), {"tensor_delayed": None, "bf16": "bf16"}),
    (("recipe",), {"tensor_delayed": None}),
    (("bf16",), {"bf16": "bf16"}),
  ],
)
def test_evaluated_precisions_are_those_of_the_config(names, recipes):
  assert evaluator.precisions(_plan(**{"eval.precisions": names})) == recipes
  assert evaluator.precisions(_plan("bf16", **{"eval.precisions": names})) == {"bf16": None}


# --- loss scale ----------------------------------------------------------------------------------


def test_loss_scale_halves_at_overflow_and_doubles_after_growth():
  plan = _plan("bf16", **{"loss_scale.kind": "dynamic", "loss_scale.growth_interval": 2})
  step = train_step.make_step(plan)
  spread = batch_sharding.BatchSharder(plan.run.layout, plan.microbatch)
  stream = loader.train_batches(plan.data, 2)
  host = next(stream)
  stream.close()
  bad = dict(host, weights_BL=np.full_like(host["weights_BL"], np.inf))
  state, scales = train_step.make_state(plan), []
  for batch in (host, host, host, bad, host):
    state, values = step(state, spread.place(batch), plan.sites())
    scales.append(float(values["loss_scale"]))
  assert scales == [256, 256, 512, 512, 256] and int(state.skipped) == 1
  assert not bool(state.halted)


def test_a_run_goes_on_after_its_loss_scale_met_an_overflow(tmp_path, monkeypatch, capsys):
  place, calls = batch_sharding.BatchSharder.place, []

  def poisoned(self, host):
    calls.append(host)
    bad = len(calls) == 4  # the second step's, after the evaluation's and the calibration's
    weights = np.full_like(host["weights_BL"], np.inf) if bad else host["weights_BL"]
    return place(self, dict(host, weights_BL=weights))

  monkeypatch.setattr(batch_sharding.BatchSharder, "place", poisoned)
  summary = train.run(_plan("bf16", **{"loss_scale.kind": "dynamic"}), str(tmp_path))
  assert summary["step"] == 6 and summary["skipped_updates"] == 1
  assert "update skipped" in capsys.readouterr().out


def test_loss_scale_leaves_the_gradients_as_they_are():
  """A power of two in float32: exact. Clipping, which divides by the norm, would hide a factor."""
  plain = _plan("bf16", **{"optim.grad_clip_norm": 0.0})
  scaled = _plan("bf16", **{"optim.grad_clip_norm": 0.0, "loss_scale.kind": "dynamic"})
  spread = batch_sharding.BatchSharder(plain.run.layout, plain.microbatch)
  stream = loader.train_batches(plain.data, 2)
  host = spread.place(next(stream))
  stream.close()
  states = [
    train_step.make_step(p)(train_step.make_state(p), host, p.sites())[0] for p in (plain, scaled)
  ]
  _assert_equal(states[0].opt, states[1].opt)


# Every source of scales; the head's gradient is made narrow before any factor on the loss.
ALL_SOURCES = {
  "precision.rules": (
    (".*/attn/.*", "tensor_delayed(steps=3)"), (".*/up", "tensor_delayed_latest"),
    ("head|.*/gate", "e4m3_static"), (".*", "tensor_current"),
  ),
  "model.num_layers": 1,
}  # fmt: skip


def _steps(plan, hosts):
  """The state after these batches, the first of which calibrates, and the loss scales."""
  state, step, scales = train_step.make_state(plan), train_step.make_step(plan), []
  for i, host in enumerate(hosts):
    if i == 0:
      state = train_step.calibrate(plan, state, host, 0)
    state, values = step(state, host, plan.sites())
    scales.append(float(values.get("loss_scale", 1.0)))
  return jax.device_get(state), scales


def test_past_and_static_scales_follow_the_loss_scale_exactly():
  """Powers of two: a run under a loss scale that grows and halves is the run without one."""
  plain = _plan(**ALL_SOURCES, **{"optim.on_nonfinite": "skip"})
  scaled = _plan(**ALL_SOURCES, **{"loss_scale.kind": "dynamic", "loss_scale.growth_interval": 1})
  hosts = _batches(plain, 6)[1]
  bad = dict(hosts[3], weights_BL=np.full_like(hosts[3]["weights_BL"], np.inf))
  hosts = [*hosts[:3], bad, *hosts[3:]]
  (a, _), (b, scales) = _steps(plain, hosts), _steps(scaled, hosts)
  assert scales == [256, 512, 1024, 2048, 1024, 2048, 4096]
  assert int(a.skipped) == int(b.skipped) == 1
  for part in ("params", "opt", "memories"):
    _assert_equal(getattr(a, part), getattr(b, part))


@pytest.mark.parametrize("factor", [2.0**15, 2.0**-9])
def test_statistics_of_a_multiple_are_the_rescaled_ones(factor):
  """Powers of two: exactly, in NumPy's float32; gradients are seen under a loss scale."""
  x = np.random.default_rng(0).standard_normal((32, 256), np.float32)
  x[0, 0] = 0
  quant = RECIPES["block_128"].dgrad.lhs
  one, other = (
    tensor_stats.statistics(y, quantize.quantize(y, quant=quant, contraction=1), quant)
    for y in (x, x * np.float32(factor))
  )
  np.testing.assert_array_equal(tensor_stats.rescaled(one, factor), other)


def _small_layers(state):
  """The state with weights of layers so small that gradients inside them leave float16."""

  def smaller(path, x):
    return x * 0.05 if path[0].key == "layers" else x

  return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(smaller, state.params))


def test_float16_trains_under_a_loss_scale_where_gradients_underflow_without():
  """Four steps against float32's: losses, and how far the first weight of the MLP came."""
  losses, moved = {}, {}
  for dtype, kind in (("float32", "none"), ("float16", "none"), ("float16", "dynamic")):
    scaling = {"loss_scale.kind": kind, "loss_scale.start": 2.0**15}
    plan = _plan("bf16", **{"model.num_layers": 1, "optim.warmup_steps": 0, **scaling})
    # float16 without a loss scale is refused in a configuration.
    plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, dtype=np.dtype(dtype)))
    _, hosts = _batches(plan, 4)
    state, step = _small_layers(train_step.make_state(plan)), train_step.make_step(plan)
    before = np.asarray(state.params["layers"]["mlp"]["gate"])
    each = []
    for host in hosts:
      state, values = step(state, host, plan.sites())
      each.append(float(values["loss"]))
    assert int(state.skipped) == 0
    losses[dtype, kind] = np.asarray(each)
    moved[dtype, kind] = np.asarray(state.params["layers"]["mlp"]["gate"]) - before
  want = ("float32", "none")
  errors = {
    k: np.linalg.norm(v - moved[want]) / np.linalg.norm(moved[want]) for k, v in moved.items()
  }
  # Adam divides by the gradients' own size, so that each weighs as much, however far it rounds.
  assert errors["float16", "dynamic"] < 0.15 and errors["float16", "none"] > 0.6
  np.testing.assert_allclose(losses["float16", "dynamic"], losses[want], rtol=1e-4)


def test_float16_starts_from_the_largest_loss_scale_that_does_not_overflow():
  """Calibration halves it; scales are then those of the gradients, as float32 has them."""
  changes = ALL_SOURCES | {"loss_scale.kind": "dynamic", "loss_scale.start": 2.0**24}
  found = {}
  for dtype in ("float32", "float16"):
    plan = _plan(**changes, **{"precision.compute_dtype": dtype})
    state, _ = _batches(plan, 1)
    found[dtype] = jax.device_get(state)
  assert float(found["float32"].loss_scale["scale"]) == 2.0**24
  assert 2.0**8 < float(found["float16"].loss_scale["scale"]) < 2.0**24
  for name, memory in found["float16"].memories.items():
    np.testing.assert_allclose(memory.amax_3, found["float32"].memories[name].amax_3, rtol=0.02)
