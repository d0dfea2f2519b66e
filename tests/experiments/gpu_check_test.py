"""experiments/gpu_check.py: its oracles see wrong results, a crash of one line costs that line
alone, and every shape that it uses lowers for an H200."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "experiments"))

from gpu_check import (  # noqa: E402
  check_adam,
  check_cast,
  check_gemm,
  check_quantize,
  driver,
  environment,
  launch,
  layer,
  measure,
  operands,
  plan,
  programs,
  records,
  report,
  run,
  time_gemm,
  time_stack,
  train,
  worker,
)

from fp8jax.kernels.adamw import api as adamw_api  # noqa: E402
from fp8jax.kernels.adamw import reference  # noqa: E402
from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib  # noqa: E402
from fp8jax.kernels.quantize import mosaic_sm90 as quantizer  # noqa: E402
from fp8jax.quantization import (  # noqa: E402
  quantize,
  quantized_tensor,
  scaled_matrix,
  tensor_stats,  # noqa: E402
)
from fp8jax.quantization.scaled_matrix import Entry  # noqa: E402

CONTEXT = worker.Context(is_dry=True, cupti=False, deadline=float("inf"))
# What a machine with a GPU lacks.
ABSENT = ("ml_collections", "grain", "array_record", "tensorflow", "tensorflow_datasets",
          "tensorboardX", "msgspec", "gguf", "gfloat", "pytest")  # fmt: skip
KEY = {"commit": "c", "sources": "s", "dry": False, "platform": "gpu", "device": "d", "jax": "j"}


# --- oracles -------------------------------------------------------------------------------------


def test_lattices_are_exact_in_fp8_and_sums_of_them_in_float32(rng):
  x = operands.lattice(rng, 200, 320)
  for tile in ((1, 128), (128, 128)):
    quant = dataclasses.replace(programs.BLOCK.fwd.lhs, tile=tile)
    np.testing.assert_array_equal(quantize.quantize(jnp.asarray(x), quant).dequantize(), x)
  a, b = operands.lattice(rng, 64, 1024), operands.lattice(rng, 64, 1024)
  magnitudes = operands.product(np.abs(a), np.abs(b))
  assert magnitudes.max() * 2.0**4 < 2**24  # sixteenths
  x = operands.normal(rng, 40, 300)
  np.testing.assert_array_equal(x, x.astype(jnp.bfloat16).astype(np.float32))


def _multiply(broken: str):
  """The product by XLA, as the kernel's entry point takes it, with an error."""

  def matmul(a, b, *, out_dtype, config=None, add_to=None):
    del config
    if broken == "scale":  # of the next row
      a = scaled_matrix.ScaledMatrix(a.data, jnp.roll(a.scale, 1, axis=0), a.tile)
    wide = [x.dequantize() for x in (a, b)]
    if broken == "step":  # the last 128 of K
      wide = [x[:, :-128] for x in wide]
    d = jnp.inner(*wide) + (0 if add_to is None or broken == "add" else add_to)
    assert add_to is None or add_to.dtype == out_dtype
    d = d.at[3, 5].set(jnp.nan) if broken == "nan" else d
    return d.astype(out_dtype)

  return matmul


@pytest.mark.parametrize("product, broken", [
  *(("wgrad", broken) for broken in ("", "scale", "step", "nan", "add")), ("fwd", ""),
  ("fwd", "add"),
])  # fmt: skip
def test_a_wrong_product_is_seen(monkeypatch, product, broken):
  monkeypatch.setattr(mosaic_sm90_lib, "matmul", _multiply(broken))
  values = dict(product=product, shape=(40, 64, 256), kind="adds")
  found = worker.measure(check_gemm.run, CONTEXT, values)
  assert found["status"] == ("wrong" if broken else "ok"), found
  # Normal numbers alone would show it too.
  rng = np.random.default_rng(0)
  x, y = operands.normal(rng, 40, 256), operands.normal(rng, 64, 256)
  want, magnitudes = operands.product(x, y), operands.product(abs(x), abs(y))
  got = want + 0.05 * np.linalg.norm(want) / 50 * rng.standard_normal(want.shape)
  assert check_gemm.compare(want, want, magnitudes, jnp.float32, exact=False)["norm_error"] == 0
  with pytest.raises(worker.Wrong, match="normal numbers"):
    check_gemm.compare(got, want, magnitudes, jnp.float32, exact=False)


@pytest.mark.parametrize("product", ["fwd", pytest.param("wgrad", marks=pytest.mark.slow)])
@pytest.mark.parametrize("off", [0, 1])
def test_a_wrong_layer_is_seen(monkeypatch, product, off):
  """The product by XLA, of the layer that was asked for or of the next one."""

  def matmul(a, b, *, out_dtype, config=None, add_to=None):
    del config
    if isinstance(b, Entry):
      b = Entry(b.stack, b.index + off).take()
    d = jnp.inner(a.dequantize(), b.dequantize())
    if add_to is None:
      return d.astype(out_dtype)
    return Entry(add_to.stack, add_to.index + off).plus(d)

  monkeypatch.setattr(mosaic_sm90_lib, "matmul", matmul)
  values = dict(product=product, shape=(40, 64, 256), kind="layers")
  found = worker.measure(check_gemm.run, CONTEXT, values)
  assert found["status"] == ("wrong" if off else "ok"), found
  # It is not timed; a layer that is copied out of its stack, or none, is the right one.
  timed = []
  monkeypatch.setattr(measure, "_time", lambda *args: timed.append(args) or {"ms": 2.0})
  ways = ("layers",) if off else plan.WAYS
  for kind in ways:
    found = worker.measure(time_stack.run, CONTEXT, values | {"kind": kind})
    assert found["status"] == ("wrong" if off else "ok"), (kind, found)
  assert len(timed) == (0 if off else len(ways))


def test_a_sum_that_reaches_another_layer_is_not_timed(monkeypatch):
  def matmul(a, b, *, out_dtype, config=None, add_to=None):
    return add_to.stack + jnp.inner(a.dequantize(), b.dequantize())

  monkeypatch.setattr(mosaic_sm90_lib, "matmul", matmul)
  values = dict(product="wgrad", shape=(40, 64, 256), kind="layers")
  assert worker.measure(time_stack.run, CONTEXT, values)["status"] == "wrong"


@pytest.mark.parametrize("broken", ["", "scale"])
def test_a_wrong_product_is_not_timed(monkeypatch, broken):
  monkeypatch.setattr(mosaic_sm90_lib, "matmul", _multiply(broken))
  timed = []
  monkeypatch.setattr(measure, "_time", lambda *args: timed.append(args) or {"ms": 2.0})
  values = dict(product="fwd", shape=(40, 128, 256))
  found = worker.measure(time_gemm.run, CONTEXT, values)
  assert found["status"] == ("wrong" if broken else "ok") and len(timed) == (not broken)
  if not broken:  # 2 M N K operations in 2 ms
    assert found["values"]["tflops"] == 2 * 40 * 128 * 256 / 2e-3 / 1e12


@pytest.mark.parametrize("broken", ["", "scales", "coarse", "element", "amax"])
def test_a_wrong_quantization_is_seen(monkeypatch, broken):
  def quantize_matrix(x, quants, watched):
    made = {along: quantize.quantize(x, q, contraction=along) for along, q in quants.items()}
    one = made[1]
    if broken == "scales":  # the end of one line written over the beginning of the next
      one = dataclasses.replace(one, scale=one.scale.at[:4, 1].set(1.0))
    if broken == "coarse":  # every element as it was, on a scale twice too large
      data = (one.data.astype(jnp.float32) / 2).astype(one.data.dtype)
      one = dataclasses.replace(one, data=data, scale=2 * one.scale)
    if broken == "element":
      one = dataclasses.replace(one, data=one.data.at[7, 9].set(one.data[7, 9] * 1.25 + 1))
    amax = tensor_stats.amax(x) * (0.5 if broken == "amax" else 1)
    return made | {1: one}, amax if watched else None

  monkeypatch.setattr(quantizer, "quantize_matrix", quantize_matrix)
  values = dict(shape=(128, 256), alongs=[1, 0], tensor="x", watched=True)
  found = worker.measure(check_quantize.run, CONTEXT, values)
  assert found["status"] == ("wrong" if broken else "ok"), found


@pytest.mark.parametrize("broken", ["", "order", "amax"])
def test_wrong_weights_of_all_layers_are_seen(monkeypatch, broken):
  def quantize_stack(x, quants):
    make = lambda one: {a: quantize.quantize(one, q, contraction=a) for a, q in quants.items()}  # noqa: E731
    made, amaxes = jax.lax.map(make, x[::-1] if broken == "order" else x), jnp.abs(x).max((1, 2))
    return made, amaxes[::-1] if broken == "amax" else amaxes

  monkeypatch.setattr(quantizer, "quantize_stack", quantize_stack)
  values = dict(shape=(128, 128), alongs=[0, 1], tensor="w", layers=True, at_once=True)
  found = worker.measure(check_quantize.run, CONTEXT, values | {"watched": True})
  assert found["status"] == ("wrong" if broken else "ok"), found


@pytest.mark.parametrize("broken", ["", "saturates", "rounds", "scales"])
def test_a_wrong_cast_is_seen(monkeypatch, broken):
  def quantize_matrix(x, quants, **given):
    made = {}
    for along, quant in quants.items():
      one = quantize.quantize(x, quant, contraction=along, **given)
      if broken == "saturates":  # a conversion alone: infinities are NaN, or stay
        wide = (x if along == 1 else x.T) / one.scale[0, 0]
        one = dataclasses.replace(one, data=wide.astype(one.data.dtype))
      if broken == "rounds":  # 8.5, half way, to its odd neighbour
        odd = one.data.view(jnp.uint8) + ((x if along == 1 else x.T) == 8.5 * check_cast.GIVEN)
        one = dataclasses.replace(one, data=odd.astype(jnp.uint8).view(one.data.dtype))
      if broken == "scales":
        one = dataclasses.replace(one, scale=2 * one.scale)
      made[along] = one
    return made, None

  monkeypatch.setattr(quantizer, "quantize_matrix", quantize_matrix)
  found = worker.measure(
    check_cast.run, CONTEXT, dict(shape=(128, 256), format="e4m3", scale="given")
  )
  assert found["status"] == ("wrong" if broken else "ok"), found


@pytest.mark.parametrize("broken", ["", "nu", "decay", "lost"])
@pytest.mark.parametrize("preset", ["float32", "sqrt_v"])
def test_a_wrong_update_is_seen(monkeypatch, broken, preset):
  class Broken:
    @staticmethod
    def update(gradient, master, mu, nu, by, is_applied, rule):
      if broken == "decay":
        rule = rule._replace(weight_decay=0.0) if hasattr(rule, "_replace") else (
          dataclasses.replace(rule, weight_decay=0.0))  # fmt: skip
      new, m, v, squares = reference.update(gradient, master, mu, nu, by, is_applied, rule)
      if broken == "nu":  # as it was
        v = nu
      if broken == "lost":
        wide = m.unpack() if isinstance(m, quantized_tensor.QuantizedTensor) else m
        wide = wide.at[5, 9:11].set(0)
        m = m.repack(wide) if isinstance(m, quantized_tensor.QuantizedTensor) else wide
      return new, m, v, squares

  monkeypatch.setitem(adamw_api.BACKENDS, "mosaic_sm90", Broken)
  values = dict(preset=preset, is_pair=False, dtype="float32", shape=(24, 256))
  found = worker.measure(check_adam.run, CONTEXT, values)
  assert found["status"] == ("wrong" if broken else "ok"), found


# --- processes -----------------------------------------------------------------------------------

FAKE = """
import os, time
def run(context, how):
  if how == "crash":
    os.kill(os.getpid(), 11)
  if how == "hang":
    time.sleep(60)
  if how == "error":
    raise RuntimeError("no such kernel")
  return {"how": how}
"""


def _call(tmp_path, lines, stage="gemm", minutes=0.5):
  (tmp_path / "fake_family.py").write_text(FAKE)
  families = [plan.Family("fake", stage, "fake_family", 10, lines)]
  flags = driver.arguments(["--out", str(tmp_path), "--minutes", str(minutes)])
  env = driver.environment(flags, str(tmp_path))
  # A device that several processes share, and one that a single process times.
  shares = [driver.memory(plan.Family("", s, "", 1, {})) for s in ("correctness", "layer")]
  assert [s["XLA_PYTHON_CLIENT_PREALLOCATE"] for s in shares] == ["false", "true"]
  return driver.Call(flags, families, env, KEY, time.monotonic())


def test_a_line_that_ends_its_process_costs_itself_alone(tmp_path):
  lines = {f"gemm/{how}": {"how": how} for how in ("first", "crash", "error", "last")}
  call = _call(tmp_path, lines)
  call.run()
  found = records.read(call.path, KEY)
  status = {name.removeprefix("gemm/"): found[name]["status"] for name in lines}
  assert status == {"first": "ok", "crash": "begun", "error": "failed", "last": "ok"}
  assert found["gemm/error"]["why"] == "RuntimeError: no such kernel"
  # With the others, then alone; never again in this call.
  begun = [r for r in call.path.read_text().splitlines() if "begun" in r and "gemm/crash" in r]
  assert len(begun) <= 3
  before = call.path.read_text().count('"ok"')
  call.run()  # resumes: measures nothing again, tries the one that crashed once more
  assert call.path.read_text().count('"ok"') == before
  page = report.page(call.families, found, KEY)
  assert "| gemm/crash | ended their process | its process ended in this line: fake.log |" in page
  assert driver.exit_status(call.families, found) == 0  # no correctness line among them
  checks = [plan.Family("f", "correctness", "m", 1, {"correctness/crash": {}})]
  for state, status in (("ok", 0), ("wrong", 1), ("begun", 1), ("failed", 1), ("", 2)):
    of_line = {"correctness/crash": {"status": state}} if state else {}
    assert driver.exit_status(checks, of_line) == status


def test_a_line_that_hangs_is_killed_and_listed(tmp_path, monkeypatch):
  monkeypatch.setattr(driver, "GRACE", 1.0)
  call = _call(tmp_path, {"gemm/hang": {"how": "hang"}, "gemm/after": {"how": "x"}}, minutes=0.06)
  start = time.monotonic()
  call.run()
  assert time.monotonic() - start < 20
  found = records.read(call.path, KEY)
  assert found["gemm/hang"]["status"] == "begun" and "gemm/after" not in found
  assert "| gemm/after | not run | time did not reach it |" in report.page(
    call.families, found, KEY
  )


def test_a_signal_ends_the_subprocess_too(tmp_path):
  call = _call(tmp_path, {"gemm/hang": {"how": "hang"}})
  thread = threading.Thread(target=call.run)
  thread.start()
  while not call.processes or "begun" not in (call.path.read_text() if call.path.exists() else ""):
    time.sleep(0.05)
  (process,) = call.processes
  with pytest.raises(SystemExit) as e:
    call.stop(signal.SIGTERM, None)
  thread.join(20)
  assert e.value.code == 143 and process.returncode == -signal.SIGKILL and not thread.is_alive()


def test_records_survive_a_kill(tmp_path):
  path = tmp_path / "results.jsonl"
  records.append(path, {"line": "a", "key": KEY, "status": "ok", "values": {"ms": 1.0}})
  records.append(path, {"line": "b", "key": KEY, "status": "begun"})
  with open(path, "a") as f:
    f.write('{"line": "c", "key": ')  # killed while it wrote
  records.append(path, {"line": "d", "key": KEY | {"commit": "other"}, "status": "ok"})
  found = records.read(path, KEY)
  assert set(found) == {"a", "b"}
  assert records.unfinished(["b", "a", "c"], found) == ["c", "b"]
  assert records.read(path, KEY | {"commit": "other"}).keys() == {"d"}


def test_without_a_gpu_it_says_what_is_missing(tmp_path):
  with pytest.raises(SystemExit, match="no GPU.*--dry") as e:
    driver.main(["--out", str(tmp_path)])
  assert e.value.code != 0 and "jax[cuda13]" in str(e.value)


# --- the page ------------------------------------------------------------------------------------


def test_every_prediction_is_of_a_line_and_every_kernel_has_one():
  lines = {name for family in plan.families() for name in family.lines}
  found = report.predictions()
  assert {p.line for p in found} <= lines
  assert all(p.low <= p.predicted <= p.high and p.field in report.FIELDS for p in found)
  predicted = {p.line for p in found}
  wanted = [n for n in lines if n.startswith(("quantize/", "prologue/", "adam/", "ceiling/"))]
  wanted += [n for n in lines if n.startswith("gemm/") and n.endswith("/default")]
  wanted += [n for n in lines if n.startswith("stack/") or n.endswith(("_micro", "_once"))]
  assert set(wanted) <= predicted
  assert len({(p.line, p.field) for p in found}) == len(found)
  # Sections are newest first; the older row stays in the notebook and is not shown.
  table = "| " + " | ".join(report.COLUMNS) + " |\n|---|\n"
  older, newer = (f"{report.TITLE}{end}\n{table}" for end in ("", ", again"))
  text = f"\n## {newer}| a | ms | 2 | 1 | 3 | ms |\n"
  text += f"\n## {older}| a | ms | 4 | 3 | 5 | ms |\n| b | ms | 6 | 5 | 7 | ms |\n"
  assert [(p.line, p.predicted) for p in report.predictions(text)] == [("a", 2.0), ("b", 6.0)]
  with pytest.raises(ValueError, match="no section"):
    report.predictions("## another\n| figure |\n")


def test_the_page_holds_figures_against_predictions():
  ok = lambda **values: {"status": "ok", "values": values}  # noqa: E731
  found = {
    "ceiling/copy": ok(tb_per_s=4.0, ms=1.0), "quantize/both": ok(tb_per_s=2.0, ms=1.0),
    "layer/bf16": ok(ms=20.7), "layer/block_128": ok(ms=16.9), "train/7b/bf16": ok(step_ms=90.0),
    "train/7b/bf16_micro": ok(step_ms=360.0), "train/7b/block_128_pow2_once": ok(step_ms=300.0),
    "stack/fwd/copied": ok(ms=3.0), "stack/fwd/layers": ok(ms=2.0),
    "correctness/gemm_groups/fwd/2000x1536x1024": {"status": "wrong", "why": "lattice: 3 of 4"},
  }  # fmt: skip
  text = report.page(plan.families(), found, KEY)
  assert "| quantize/both | share_of_copy | 0.5 | 0.82 | 0.75 to 0.9 | of a copy | below |" in text
  assert "| layer/block_128 | x_bf16 | 1.225 | 1.16 | 1.08 to 1.25 | times BF16 | within |" in text
  assert "| train/7b/block_128_pow2_once | x_bf16 | 1.2 |" in text  # of as many tokens
  assert "| stack/fwd/layers | x_copied | 1.5 |" in text
  assert "| adam/coat | share_of_copy | not measured |" in text
  assert "| correctness/gemm_groups/fwd/2000x1536x1024 | wrong | lattice: 3 of 4 |" in text
  assert "| rival/deep_gemm/p3 | not run | time did not reach it |" in text


def test_the_plan_fits_its_minutes_and_prints(capsys):
  families = driver.selected(driver.arguments(["--plan"]))
  assert sum(f.wall_seconds for f in families) + plan.RESERVE <= 60 * plan.MINUTES
  assert [f.stage for f in families] == sorted((f.stage for f in families), key=plan.STAGES.index)
  names = [name for f in families for name in f.lines]
  assert len(names) == len(set(names))
  assert all(len(f.lines) <= 8 or f.name == "gemm_p2" for f in families if f.stage == "gemm")
  assert driver.main(["--plan"]) == 0
  text = capsys.readouterr().out
  assert all(name in text for name in names) and "1545 s  report.md" in text


def test_the_command_for_fifteen_minutes_fits_them():
  """That of gpu_check.py; the guide has the same. Its first families are the correctness of what
  its others time."""
  words = (ROOT / "experiments" / "gpu_check.py").read_text().split('"""')[1]
  command = words.partition("--minutes 15 --families")[2].partition("\n\n")[0]
  names = command.replace("\\", " ").split()
  guide = (ROOT / "experiments" / "guide" / "gpu.md").read_text()
  assert names == guide.partition("--minutes 15 --families")[2].partition("```")[0].replace(
    "\\", " ").split()  # fmt: skip
  families = driver.selected(driver.arguments(["--plan", "--families", *names]))
  assert [f.name for f in families] == names  # in the order in which they run
  assert sum(f.wall_seconds for f in families) + plan.RESERVE <= 60 * 15
  lines = {name for f in families for name in f.lines}
  new = ("stack/", "gemm/7b_up", "gemm/7b_down", "layer/", "gemm/p2/", "quantize/",
         "correctness/gemm_layers/")  # fmt: skip
  assert {n for f in plan.families() for n in f.lines if n.startswith(new)} <= lines
  assert {f"train/7b/{n}" for n in plan.TRAINED if n.endswith(("_micro", "_once"))} <= lines


def test_times_are_of_the_kernel_alone():
  own = "scaled_matmul_mosaic_gpu_kernel"
  traces = [[("wrapped_transpose", 5.0), (own, ms), (own, ms)] for ms in (1.0, 2.0, 4.0)]
  found = measure.of_traces(traces, 2, own=True)
  assert found["ms"] == 2.0 and found["spread_ms"] == 3.0 and found["all_kernels_ms"] == 4.5
  assert measure.of_traces(traces, 2, own=False)["ms"] == 4.5
  with pytest.raises(ValueError, match="2 launches .* in 3 calls"):
    measure.of_traces(traces, 3, own=True)
  with pytest.raises(ValueError, match="no kernel"):
    measure.of_traces(None, 1, own=False)


@pytest.mark.parametrize(
  "report_of_ptxas, registers, fate",
  [
    ("(C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain", 149, "ignored"),
    ("Compiling entry function", 168, "honoured"),
  ],
)
def test_the_fate_of_setmaxnreg_is_read(report_of_ptxas, registers, fate):
  text = f"setmaxnreg.inc.sync.aligned.u32 232;\nptxas info : {report_of_ptxas}\n"
  text += f"8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nUsed {registers} "
  text += "registers, used 16 barriers\nResources(smem_scratch_bytes=200704, ...)"
  want = {"setmaxnreg": fate, "registers": registers, "spilled_bytes": 16}
  assert environment.read_resources(text) == want | {"shared_memory_bytes": 200704}
  with pytest.raises(ValueError, match="report is missing"):
    environment.read_resources("")


# --- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss, oracle, verdict", [
  (3.2, 3.055, ""), (3.21, 3.055, "on the CPU 3.055"), (float("nan"), 3.055, "nan, on the CPU"),
  (None, 3.055, "None"), (3.2, None, "on the CPU None"),
])  # fmt: skip
def test_a_run_is_held_against_the_cpu(loss, oracle, verdict):
  first = {"step": 0, "heldout/main/block_128/loss": 5.2, "heldout/main/bf16/loss": 5.2}
  last = {"step": 12, "heldout/main/block_128/loss": loss, "heldout/main/bf16/loss": 3.05}
  if not verdict:
    assert run.judge([first, last], "block_128", oracle)["held_out"] == loss
    return
  with pytest.raises(worker.Wrong, match=verdict):
    run.judge([first, last], "block_128", oracle)


def test_steps_are_timed_between_those_that_compile_and_the_traced_one():
  seconds = [100, 2, 1, 1, 1, 1, 3, 5, 4, 1.5, 1, 1]  # of steps 1 to 12; 7 to 9 are the trace's
  ends = np.cumsum(seconds)
  row = {"tokens_per_second": 50.0, "step_seconds": 2.0, "mfu": 0.1, "memory_peak_gib": 3.5}
  rows = [{"step": 0, "heldout/main/loss": 5.0}] + [
    {"step": n + 1, "loss": 5.0, "elapsed_seconds": float(end), **row} for n, end in enumerate(ends)
  ]
  values = train.judge(rows)
  assert (values["step_ms"], values["spread_ms"], values["steps"]) == (1000.0, 500.0, 6)
  assert (values["tokens_per_second"], values["mfu"], values["memory_gib"]) == (100.0, 0.2, 3.5)
  assert values["seconds_to_step_1"] == 100.0
  rows[-1]["loss"] = "nan"
  with pytest.raises(worker.Wrong, match="nan"):
    train.judge(rows)


def test_a_run_that_is_cut_counts_if_it_has_steps_enough(monkeypatch):
  rows = [{"step": n, "loss": 5.0, "elapsed_seconds": float(n), "tokens_per_second": 1.0,
           "step_seconds": 1.0} for n in range(1, 12)]  # fmt: skip

  def cut(count):
    def run(*_, **__):
      raise worker.Cut("launch.py was out of time", rows[:count])

    monkeypatch.setattr(launch, "run", run)
    return worker.measure(lambda context: train.run(context, "c.py:a", 15), CONTEXT, {})

  assert cut(9) == {"status": "cut", "why": "launch.py was out of time"}  # steps 4, 5 and 6
  assert cut(10)["values"]["steps"] == 4 and "cut" not in records.FINISHED


@pytest.mark.parametrize("has, status", [(0.0, "ok"), (79.6, "absent"), (139.8, "ok")])
def test_a_run_needs_its_memory(monkeypatch, has, status):
  rows = [{"step": n, "loss": 5.0, "elapsed_seconds": float(n), "tokens_per_second": 1.0,
           "step_seconds": 1.0} for n in range(1, 12)]  # fmt: skip
  monkeypatch.setattr(launch, "run", lambda *_, **__: rows)
  monkeypatch.setattr(environment, "memory_gib", lambda: has)
  values = dict(config="c.py:a", steps=11, gib=80.0)  # 79.6 GiB are an H100's
  found = worker.measure(train.run, CONTEXT, values)
  assert found["status"] == status and ("80.0 GiB" in found.get("why", "")) == (status == "absent")


def test_time_between_kernels_is_seen():
  found = layer.of_events([("a", 1e6, 2e6), ("b", 4e6, 1e6), ("a", 5e6, 1e6)])
  assert (found["busy_ms"], found["span_ms"], found["launches"]) == (4.0, 5.0, 3)
  assert found["kernels_ms"] == {"a x2": 3.0, "b x1": 1.0}
  with pytest.raises(ValueError, match="no events"):
    layer.of_events([])


def test_products_that_are_not_fp8_are_refused():
  line = '  %d = f32[4,4] dot(%a, %b), metadata={op_name="jit(f)/q:fwd/dot_general"}\n'
  text = "ENTRY main {\n  %a = TYPE[4,8] parameter(0)\n  %b = TYPE[4,8] parameter(1)\n" + line + "}"
  of = lambda dtype: layer.products(text.replace("TYPE", dtype), "cpu", "block_128")  # noqa: E731
  assert of("f8e4m3fn") == {"fp8": 1, "wide": 0}
  with pytest.raises(worker.Wrong, match="1 products are not FP8"):
    of("bf16")


# --- the whole, dry ------------------------------------------------------------------------------


def _without_packages(tmp_path) -> dict[str, str]:
  """The environment of a Python that cannot import ABSENT."""
  (tmp_path / "sitecustomize.py").write_text(
    "import sys\nfor name in " + repr(ABSENT) + ":\n  sys.modules[name] = None\n"
  )
  return os.environ | {"PYTHONPATH": str(tmp_path)}


def test_a_layer_and_a_step_are_built_without_absent_packages(tmp_path):
  code = f"""
import sys, jax; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "experiments")!r}]
sys.path += {[str(ROOT / "experiments" / "bench" / name) for name in ("", "kernels")]!r}
from gpu_check import plan, layer
import importlib
for family in plan.families():
  importlib.import_module(family.module)
from fp8jax.kernels import choose as backend
function, arguments, sites = layer.build("bf16", 64, layer.DRY, backend.current_device())
print(type(sites["mlp"]["up"]).__name__, jax.eval_shape(function, *arguments, sites)[0].shape)
try:
  import grain
except ImportError:
  print("no grain")
"""
  command, env = [sys.executable, "-c", code], _without_packages(tmp_path)
  done = subprocess.run(command, capture_output=True, text=True, env=env)
  assert done.stdout.splitlines() == ["Site (1, 64, 128)", "no grain"], done.stderr[-3000:]


def _dry(tmp_path, *flags: str):
  """(exit status, line -> record, what it prints), in a Python without the packages in ABSENT."""
  command = [sys.executable, "experiments/gpu_check.py", "--dry", "--out", str(tmp_path / "out")]
  env = _without_packages(tmp_path)
  done = subprocess.run([*command, *flags], capture_output=True, text=True, cwd=ROOT, env=env)
  text = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
  found = {record["line"]: record for record in map(json.loads, text)}
  logs = "".join(path.read_text() for path in (tmp_path / "out").glob("*.log"))
  return done.returncode, found, done.stdout + done.stderr + logs


def test_a_dry_run_checks_reports_and_resumes(tmp_path):
  flags = ("--families", "quantize_rows", "rival_torch_bf16")
  status, found, text = _dry(tmp_path, *flags)
  assert status == 0, text
  assert found["correctness/quantize_rows/full"]["values"]["lattice_wrong"] == 0
  assert found["rival/torch_bf16/p3"]["status"] == "absent"
  page = (tmp_path / "out" / "report.md").read_text()
  assert "Dry run on a CPU" in page and "| rival/torch_bf16/p3 | absent |" in page
  before = (tmp_path / "out" / "results.jsonl").read_text()
  assert _dry(tmp_path, *flags)[0] == 0
  assert (tmp_path / "out" / "results.jsonl").read_text() == before


@pytest.mark.slow
def test_everything_runs_dry(tmp_path):
  status, found, text = _dry(tmp_path, "--minutes", "60")
  assert status == 0, text
  names = {name for family in plan.families(is_dry=True) for name in family.lines}
  assert set(found) == names
  assert found["environment/versions"]["values"]["packages"]["jax"] == jax.__version__
  trained = ("run/", "train/")
  needs_more = ("rival/", *trained)  # packages than are there
  wrong = {n: r for n, r in found.items() if r["status"] != "ok" and not n.startswith(needs_more)}
  assert not wrong
  assert all("--wheels" in r["why"] for n, r in found.items() if n.startswith(trained))
  assert all(0.02 < e < layer.BUDGET for e in found["layer/block_128"]["values"]["errors"].values())


# --- an H200 that is not there -------------------------------------------------------------------


def lower_all() -> dict[str, str]:
  """Line -> why its program does not lower for an H200, "" if it does; without a GPU."""
  from gpu_check import ceilings
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    platform="cuda", topology="1x1x1",
    target_config=(ROOT / "fp8jax" / "compiled" / "topologies" / "h200.txtpb").read_text(),
  )  # fmt: skip
  there = jax.sharding.SingleDeviceSharding(topology.devices[0])
  hopper = programs_device()

  def lower(program: programs.Program):
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)  # noqa: E731
    arguments = jax.tree.map(place, program.arguments)
    jax.jit(program.function, donate_argnums=range(program.donates)).lower(*arguments)

  def build(family: plan.Family, values):
    values = dict(values)
    if family.module.endswith(("check_gemm", "time_gemm", "time_stack")):
      return programs.gemm(**values)
    if family.module.endswith("check_adam"):
      return programs.adam_update(**values)
    if family.module.endswith("check_quantize"):
      return (programs.prologue if "producer" in values else programs.quantize)(**values)
    if family.module.endswith("check_cast"):
      return programs.cast(**values)
    if family.module.endswith("time_elementwise"):
      return programs.BUILDERS[values.pop("kind")](**values)
    if family.module.endswith("ceilings"):
      return ceilings.build(**values)
    if family.stage == "layer":
      model = layer.MODELS[values.pop("model")]
      function, arguments, sites = layer.build(**values, model=model, device=hopper)
      return programs.Program(function, (*arguments, sites))
    return None

  found = {}
  for family in plan.families():
    for name, values in family.lines.items():
      try:
        if (program := build(family, values)) is not None:
          lower(program)
          found[name] = ""
      except Exception as e:
        found[name] = f"{type(e).__name__}: {e}"[:300]
  return found


def programs_device():
  from fp8jax.kernels import choose

  return choose.Device("gpu", 90)


@pytest.mark.aot
def test_every_shape_lowers_for_an_h200():
  paths = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "experiments", "kernels"))]
  code = f"import sys, json; sys.path[:0] = {paths!r}; "
  code += "import gpu_check_test as t; print(json.dumps(t.lower_all()))"
  env = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}
  env.pop("XLA_FLAGS", None)
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
  assert done.returncode == 0, done.stderr[-4000:]
  found = json.loads(done.stdout.splitlines()[-1])
  without = (
    "environment/",
    "rival/",
    "run/",
    "train/",
  )  # JAX compiles these elsewhere, or not at all
  lines = {n for f in plan.families() for n in f.lines if not n.startswith(without)}
  assert set(found) == lines
  assert not {name: why for name, why in found.items() if why}
