"""The benchmarks' programs from end to end in little, and that a wrong answer is not timed."""

import importlib.util
import json
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import run_files


def _six_products() -> float:
  """Relative error, in float64, of six FP8 products in a row with an E5M2 operand each.

  So many lie behind the gradients of q and k; their errors are independent and add by squares.
  """

  def rounded(x, dtype):
    scale = float(ml_dtypes.finfo(dtype).max) / np.abs(x).max()
    return (x * scale).astype(dtype).astype(np.float64) / scale

  a, b = np.random.default_rng(0).standard_normal((2, 256, 256))
  got = rounded(a, ml_dtypes.float8_e5m2) @ rounded(b, ml_dtypes.float8_e4m3fn)
  return 6**0.5 * float(np.linalg.norm(got - a @ b) / np.linalg.norm(a @ b))


def _lines(repository, name: str, *flags: str) -> dict:
  """What `--dry` prints, by line."""
  command = [sys.executable, f"experiments/bench/{name}/run.py", "--dry", *flags]
  done = subprocess.run(command, capture_output=True, text=True, cwd=repository)
  assert done.returncode == 0, done.stderr[-3000:]
  found = (line.partition(" ") for line in done.stdout.splitlines() if " {" in line)
  return {line: json.loads(rest) for line, _, rest in found if rest.strip().startswith("{")}


@pytest.mark.slow
def test_bench_step_runs_from_end_to_end(repository):
  lines = _lines(repository, "step")
  recipes = ("bf16", "tensor_current", "block_128", "block_128_pow2")
  cases = ("layer_7b", "step_1p5b", "step_7b")
  assert set(lines) >= {f"{case}/{recipe}" for case in cases for recipe in recipes}
  for recipe in recipes[1:]:
    # FP8 it is: as far from BF16 as its formats explain, and no nearer.
    assert all(0.02 < e < _six_products() for e in lines[f"layer_7b/{recipe}"]["errors"].values())
    assert lines[f"step_1p5b/{recipe}"]["loss"] != lines["step_1p5b/bf16"]["loss"]


@pytest.mark.slow
def test_bench_kernels_runs_from_end_to_end(repository):
  lines = _lines(repository, "kernels")
  products = [f"gemm/dry/{p}/block_ours" for p in ("fwd", "dgrad", "wgrad")]
  fused = [f"quantize/{p}/{by}" for p in ("rms_norm", "swiglu", "swiglu_backward")
           for by in ("ours", "xla")]  # fmt: skip
  fused += [f"grouped/{p}/{by}" for p in ("fwd", "dgrad", "wgrad") for by in ("bf16", "block_ours")]
  layers = [f"layer/dry/{r}" for r in ("bf16", "tensor_xla", "tensor_ours", "block_ours")]
  apart = [f"isolation/dry/dry/{p}/{by}/xla" for p in ("packed", "whole") for by in ("fwd", "both")]
  assert set(lines) >= {"ceiling/copy", "quantize/dry/both", *products, *fused, *layers, *apart}
  rates = {"gb_per_s", "tflops", "share_of_copy", "share_of_bf16", "x_bf16", "error"}
  assert all(rates <= set(lines[name]) for name in (*products, *layers))


def test_bench_generate_writes_the_share_of_the_peers_tokens(repository, tmp_path, monkeypatch):
  run = run_files.script(repository / "experiments/bench/generate/run.py")
  turn = {"seconds": [2.0, 4.0], "cpu_seconds": [8.0], "tokens": [[1, 2, 3], [4, 5, 6]]}
  peer = turn | dict(torch="2", transformers="5", threads=2, cpus=2, tokens=[[1, 2, 3], [4, 5, 0]])
  monkeypatch.setattr(run, "HERE", tmp_path)
  monkeypatch.setattr(run, "_measure", lambda arm, *_: peer if arm == run.PEER else turn)
  monkeypatch.chdir(repository)  # main does, too
  run.main(["--oracle=python", "--turns=1", "--arms=0"])
  results = json.loads((tmp_path / "results.json").read_text())
  line = results["lines"]["fp8jax float32, batch 8"]
  assert line["tokens_per_second"] == 2.0 and line["equal_tokens"] == round(5 / 6, 4)
  assert results["provenance"]["peer"]["torch"] == "2" and results["provenance"]["commit"]


def test_a_layers_budget_is_the_error_of_its_formats(bench_step):
  assert 0.95 * bench_step.LAYER_BUDGET < _six_products() < bench_step.LAYER_BUDGET


@pytest.fixture
def bench_step(monkeypatch, repository):
  """The module, and the modules beside it that it imports as long as it is here."""
  monkeypatch.syspath_prepend(str(repository / "experiments" / "bench"))
  path = repository / "experiments" / "bench" / "step" / "run.py"
  spec = importlib.util.spec_from_file_location("bench_step", path)
  module = importlib.util.module_from_spec(spec)
  monkeypatch.setitem(sys.modules, spec.name, module)
  before = list(sys.path)
  spec.loader.exec_module(module)
  sys.path[:] = before
  return module


@pytest.mark.parametrize("broken", ["y", "dx", "up", "nan", ""])
def test_a_layer_whose_products_are_zero_is_not_timed(rng, bench_step, monkeypatch, broken):
  """Also where what it adds to its input is small."""
  x, g, y, dx, dw = (jnp.asarray(rng.standard_normal((8, 16)), jnp.float32) for _ in range(5))

  def program(y, dx, dw):
    out = (x + 1e-2 * y, ({"mlp": {"up": dw}}, g + 1e-2 * dx))
    return bench_step.Program(lambda *_: out, (None, x, g, None), lambda o, out: (o, out), 1.0)

  monkeypatch.setattr(bench_step, "layer_program", lambda case, recipe: program(y, dx, dw))
  ours = {"y": 1.05 * y, "dx": 1.05 * dx, "dw": 1.05 * dw}
  name = {"up": "dw", "nan": "dw"}.get(broken, broken)
  if not broken:
    errors = bench_step.layer_errors(None, program(**ours))
    assert set(errors) == {"y", "dx", "mlp/up"} and all(0.04 < e < 0.06 for e in errors.values())
    return
  ours[name] = jnp.full_like(x, jnp.nan) if broken == "nan" else jnp.zeros_like(x)
  with pytest.raises(ValueError, match=f"{'up' if name == 'dw' else name}.*is not timed"):
    bench_step.layer_errors(None, program(**ours))
