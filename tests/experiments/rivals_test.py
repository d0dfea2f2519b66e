"""The rivals of experiments/bench/kernels: which are listed and why, what their adapters hand over.

None of them can run here. A module of NumPy stands for each of their libraries; it refuses what
the real one is known to refuse, so that shapes, orders and scales are right or nothing comes out.
"""

import contextlib
import enum
import functools
import importlib
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.kernels.gemm import reference, xla

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
SIZES = (96, 256, 384)  # tokens, in, out


@pytest.fixture
def bench_kernels(monkeypatch, repository):
  """The modules of the benchmark: (rivals, rivals_te, rivals_torch, timing)."""
  names = ("rivals", "rivals_te", "rivals_torch", "timing")
  for folder in ("experiments/bench", "experiments/bench/kernels"):
    monkeypatch.syspath_prepend(str(repository / folder))
  for name in names:
    monkeypatch.delitem(sys.modules, name, raising=False)
  yield [importlib.import_module(name) for name in names]
  for name in names:
    sys.modules.pop(name, None)


def _install(monkeypatch, name: str, **contents):
  """A module of this name that has `contents`, and the packages around it."""
  module = types.ModuleType(name)
  vars(module).update(contents)
  monkeypatch.setitem(sys.modules, name, module)
  parent, _, child = name.rpartition(".")
  if parent:
    if parent not in sys.modules:
      _install(monkeypatch, parent)
    setattr(sys.modules[parent], child, module)
  return module


def _hide(monkeypatch):
  """As if nothing were installed."""
  for name in ("torch", "torchao", "transformer_engine"):
    monkeypatch.setitem(sys.modules, name, None)


def test_every_rival_is_listed_with_the_reason_why_it_is_absent(bench_kernels, monkeypatch):
  rivals, te, torch, _ = bench_kernels
  _hide(monkeypatch)
  found, absent = rivals.find(te.MAKERS | torch.MAKERS)
  assert not found and set(absent) == set(te.MAKERS | torch.MAKERS)
  assert all(why.startswith("not importable: ModuleNotFoundError") for why in absent.values())
  listed = rivals.parts([*rivals.own(), *found], absent)
  assert listed["block_ours"] == {"gemm": "yes", "layer": "yes"}
  assert listed["tensor_xla"] == {"gemm": "yes", "layer": "yes"}
  assert listed["tensor_ours"] == {"gemm": "cuBLASLt's, see tensor_xla", "layer": "yes"}
  assert listed["torch_block"] == dict.fromkeys(("gemm", "layer"), absent["torch_block"])


def test_our_sums_are_held_to_what_the_tensor_core_explains(rng, bench_kernels):
  """Every element, however far FP8 itself is from BF16."""
  rivals = bench_kernels[0]
  wide = (jnp.asarray(rng.standard_normal((64, 256)), jnp.bfloat16) for _ in range(2))
  a, b = rivals.narrow_operands(rivals.BLOCK, "wgrad")(*wide)
  x, y = (np.asarray(t.dequantize(), np.float64) for t in (a, b))
  magnitudes = np.abs(x[0]) @ np.abs(y[0])
  for off, is_right in ((2.0**-7, True), (2.0**-5, False), (np.nan, False)):
    d = jnp.asarray(x @ y.T, jnp.float32).at[0, 0].add(off * magnitudes)
    assert (rivals._sum_error(d, a, b) < 1) == is_right
  assert rivals.ours("wgrad", jnp.float32, None).is_ours


# --- a torch of NumPy ----------------------------------------------------------------------------


class Tensor:
  """An array with torch's names."""

  def __init__(self, array):
    self.array = np.asarray(array)
    self.shape = self.array.shape

  def t(self):
    return Tensor(self.array.T)

  def contiguous(self):
    return Tensor(np.ascontiguousarray(self.array))

  def view(self, dtype):
    return Tensor(self.array.view(dtype))

  def float(self):
    return Tensor(self.array.astype(np.float32))

  def detach(self):
    return self

  cpu = detach

  def numpy(self):
    return self.array

  def __matmul__(self, other):
    return Tensor(self.array.astype(np.float32) @ other.array.astype(np.float32))

  @property
  def is_rows(self):
    return self.array.flags.c_contiguous

  @property
  def is_columns(self):
    return self.array.flags.f_contiguous


class Event:
  def __init__(self, enable_timing):
    assert enable_timing

  def record(self):
    pass

  synchronize = record

  def elapsed_time(self, end):
    return 50.0


class ScalingType(enum.Enum):
  BlockWise1x128, BlockWise128x128 = range(2)


def _multiply(a, b, scale_a, scale_b, dtype):
  """Dequantized; every scale is repeated over its tile."""
  wide = []
  for x, scale in ((a, scale_a), (b, scale_b)):
    scale = scale.array.reshape(scale.shape or (1, 1))
    for axis in range(2):
      scale = np.repeat(scale, -(-x.shape[axis] // scale.shape[axis]), axis)
    wide.append(x.array.astype(np.float32) * scale[: x.shape[0], : x.shape[1]])
  return Tensor((wide[0] @ wide[1]).astype(dtype))


def _scaled_mm(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
  """What PyTorch's documentation and checks ask for."""
  assert a.is_rows and b.is_columns and isinstance(use_fast_accum, bool)
  m, n = a.shape[0], b.shape[1]
  shapes = scale_a.shape, scale_b.shape
  assert shapes in (((1, 1), (1, 1)), ((m, 1), (1, n))), shapes
  assert shapes == ((1, 1), (1, 1)) or out_dtype == ml_dtypes.bfloat16
  return _multiply(a, b, scale_a, scale_b, out_dtype)


def _blocks_mm(a, b, *, scale_a, scale_recipe_a, scale_b, scale_recipe_b, output_dtype):
  """cuBLASLt's: scales with the rows of an operand side by side, tiles of K in fours."""
  (m, k), n = a.shape, b.shape[1]
  assert a.is_rows and b.is_columns and scale_recipe_a is ScalingType.BlockWise1x128
  assert scale_a.shape == (m, k // 128) and scale_a.is_columns
  assert scale_b.is_columns
  if scale_recipe_b is ScalingType.BlockWise1x128:
    assert scale_b.shape == (n, k // 128)
    return _multiply(a, b, scale_a, scale_b.t(), output_dtype)
  assert scale_b.shape == (-(-k // 512) * 4, n // 128)
  return _multiply(a, b, scale_a, Tensor(scale_b.array[: k // 128]), output_dtype)


def _tiles_kernel(a, b, a_s, b_s, out_dtype, of_rows: bool):
  """torchao's own assertions."""
  assert a.is_rows and b.is_columns and a_s.is_columns
  assert b_s.is_rows if of_rows else b_s.is_columns
  (m, k), n = a.shape, b.shape[1]
  assert a_s.shape == (m, k // 128) and b_s.shape == (k // 128, n if of_rows else n // 128)
  return _multiply(a, b, a_s, b_s, out_dtype)


def _pad(x, widths, value):
  before, after = widths
  return Tensor(np.pad(x.array, ((0, 0), (before, after)), constant_values=value))


@pytest.fixture
def fake_torch(monkeypatch):
  _hide(monkeypatch)
  for name in ("torchao", "torch"):
    monkeypatch.delitem(sys.modules, name)
  cuda = types.SimpleNamespace(
    is_available=lambda: True, get_device_capability=lambda: (9, 0), synchronize=lambda: None,
    Event=Event, get_device_name=lambda: "a fake",
  )  # fmt: skip
  functional = types.SimpleNamespace(scaled_mm=_blocks_mm, ScalingType=ScalingType, pad=_pad)
  prototype = "torchao.prototype.blockwise_fp8_training.kernels"
  _install(monkeypatch, prototype, **{
    "triton_fp8_gemm_1x128_128x128": functools.partial(_tiles_kernel, of_rows=False),
    "triton_fp8_gemm_1x128_128x1": functools.partial(_tiles_kernel, of_rows=True),
  })  # fmt: skip
  return _install(
    monkeypatch, "torch", __version__="2.10", cuda=cuda, from_dlpack=Tensor, _scaled_mm=_scaled_mm,
    nn=types.SimpleNamespace(functional=functional), float8_e4m3fn=E4M3, float8_e5m2=E5M2,
    float32=np.float32, bfloat16=ml_dtypes.bfloat16, compile=lambda f: f,
  )  # fmt: skip


def _product(rng, product: str):
  """(a [M, K], b [N, K], dtype of the result) of one product."""
  tokens, inner, outer = SIZES[0] + 32 * (product == "wgrad"), *SIZES[1:]
  m, n, k = {"fwd": (tokens, outer, inner), "dgrad": (tokens, inner, outer),
             "wgrad": (inner, outer, tokens)}[product]  # fmt: skip
  a, b = (jnp.asarray(rng.standard_normal((r, k)), jnp.bfloat16) for r in (m, n))
  return a, b, jnp.float32 if product == "wgrad" else jnp.bfloat16


@pytest.mark.parametrize("product", ["fwd", pytest.param("dgrad", marks=pytest.mark.slow), "wgrad"])
def test_gemms_of_torch_get_the_operands_that_they_want(rng, bench_kernels, fake_torch, product):
  rivals, _, torch, timing = bench_kernels
  a, b, out = _product(rng, product)
  bench = timing.Bench(None, False, {"lines": {}})
  for name in ("torch_bf16", "torch_tensor", "torch_rowwise", "torch_block", "torchao_block"):
    rival = torch.MAKERS[name]()
    assert rival.name == name
    line = rivals.measure(bench, rival, rival.gemm(product, out), [(a, b)], rivals.gemm_in_float32)
    assert line == {"ms": 25.0, "spread_ms": 0.0, "error": line.get("error")}
    # The very numbers that ours multiplies, but for the rounding of the result.
    recipe = {"torch_tensor": rivals.TENSOR, "torch_rowwise": torch.ROWWISE}.get(name, rivals.BLOCK)
    if name != "torch_bf16":
      spec = getattr(recipe, product)
      multiply = (reference if isinstance(spec.accumulate, int) else xla).scaled_matmul
      want = multiply(*rivals.narrow_operands(recipe, product)(a, b), spec.accumulate, jnp.float32)
      call = rival.gemm(product, out)
      got = torch.to_jax(call.run(*call.prepare(a, b)))
      np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=1e-5 * np.abs(want).max())


def test_what_a_library_lacks_is_the_reason(bench_kernels, fake_torch, monkeypatch):
  rivals, te, torch, _ = bench_kernels
  monkeypatch.delattr(fake_torch, "_scaled_mm")
  monkeypatch.delattr(fake_torch.nn.functional, "ScalingType")
  _, absent = rivals.find(te.MAKERS | torch.MAKERS)
  assert absent["torch_tensor"] == "API not found: torch of version 2.10 has no _scaled_mm"
  assert "has no nn.functional.ScalingType" in absent["torch_block"]
  assert "not importable" in absent["te_torch_block"] and "torchao_block" not in absent
  parts = rivals.parts([torch.MAKERS["torchao_block"]()], {})["torchao_block"]
  assert parts["gemm"] == "yes" and parts["layer"].startswith("not importable")
  monkeypatch.setattr(fake_torch.cuda, "get_device_capability", lambda: (8, 0))
  assert "needs a Hopper GPU" in rivals.find(torch.MAKERS)[1]["torch_bf16"]
  monkeypatch.setattr(fake_torch.cuda, "is_available", lambda: False)
  assert "needs a GPU" in rivals.find(torch.MAKERS)[1]["torch_bf16"]


def test_a_rival_that_is_wrong_or_breaks_is_not_timed(rng, bench_kernels, fake_torch, monkeypatch):
  rivals, _, torch, timing = bench_kernels
  bench = timing.Bench(None, True, {"lines": {}})
  a, b, out = _product(rng, "fwd")

  def line():
    rival = torch.MAKERS["torch_tensor"]()
    return rivals.measure(bench, rival, rival.gemm("fwd", out), [(a, b)], rivals.gemm_in_float32)

  right = line()
  assert 0.01 < right["error"] < rivals.BUDGET["fp8"] and right["ms"]
  for function, why in (
    (lambda *args, **how: Tensor(_scaled_mm(*args, **how).array * 1.1), "away from the float32"),
    (lambda *args, **how: Tensor(_scaled_mm(*args, **how).array * np.nan), "nan away"),
    (lambda *args: None, "TypeError"),
  ):
    monkeypatch.setattr(fake_torch, "_scaled_mm", function)
    assert list(wrong := line()) == ["failed"] and why in wrong["failed"]


# --- a Transformer Engine of JAX -----------------------------------------------------------------


def _fake_te(monkeypatch, modes):
  guards = []

  @contextlib.contextmanager
  def global_shard_guard(resource):
    guards.append(resource)
    yield
    guards.pop()

  class Quantizers:
    @staticmethod
    def create(count, *, scaling_mode, q_dtype, q_layout):
      assert count == 1 and q_layout == "rows"
      return q_dtype

    @staticmethod
    def create_set(*, scaling_mode, fwd_dtype, bwd_dtype, is_2x2x):
      assert is_2x2x
      return fwd_dtype, bwd_dtype

  def quantize(x, *, flatten_axis, quantizer):
    assert guards and flatten_axis == -1
    return x.astype(quantizer)

  def gemm(a, b, *, contracting_dims):
    assert guards and contracting_dims == ((1,), (1,)) and a.dtype.itemsize == 1
    return (a.astype(jnp.float32) @ b.astype(jnp.float32).T).astype(jnp.bfloat16)

  def dense(x, kernel, *, contracting_dims, quantizer_set):
    assert guards and contracting_dims == ((1,), (0,)) and quantizer_set == (E4M3, E5M2)
    return x @ kernel

  name = "transformer_engine.jax"
  _install(
    monkeypatch, f"{name}.quantize", ScalingMode=enum.Enum("ScalingMode", modes),
    QuantizeLayout=types.SimpleNamespace(ROWWISE="rows"), QuantizerFactory=Quantizers,
  )  # fmt: skip
  _install(monkeypatch, f"{name}.dense", dense=dense)
  _install(monkeypatch, f"{name}.cpp_extensions", quantize=quantize, gemm=gemm)
  _install(
    monkeypatch, f"{name}.sharding", MeshResource=object, global_shard_guard=global_shard_guard
  )


def test_transformer_engine_multiplies_and_times_like_ours(rng, bench_kernels, monkeypatch):
  rivals, te, _, timing = bench_kernels
  _hide(monkeypatch)
  monkeypatch.delitem(sys.modules, "transformer_engine")
  modes = ["NO_SCALING", "DELAYED_TENSOR_SCALING", "CURRENT_TENSOR_SCALING", "MXFP8_BLOCK_SCALING"]
  _fake_te(monkeypatch, modes)
  assert all("needs a GPU" in why for why in rivals.find(te.MAKERS)[1].values())
  gpu = types.SimpleNamespace(platform="gpu", device_kind="a fake")
  monkeypatch.setattr(
    te, "jax", types.SimpleNamespace(devices=lambda: [gpu], jit=jax.jit, vjp=jax.vjp)
  )
  found, absent = rivals.find(te.MAKERS)
  assert [r.name for r in found] == ["te_jax_delayed", "te_jax_current"]
  assert "ScalingMode has no BLOCK, but CURRENT_TENSOR_SCALING" in absent["te_jax_block"]
  bench = timing.Bench(None, True, {"lines": {}})
  for product in ("fwd", "dgrad", "wgrad"):
    a, b, out = _product(rng, product)
    call = found[0].gemm(product, out)
    line = rivals.measure(bench, found[0], call, [(a, b)], rivals.gemm_in_float32)
    assert line["ms"] > 0 and line["error"] > 0.01
  tokens, inner, outer = SIZES
  x, w, g = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in
             ((tokens, inner), (inner, outer), (tokens, outer)))  # fmt: skip
  operands = (x, w.astype(jnp.float32), g)
  line = rivals.measure(bench, found[1], found[1].layer(), [operands], rivals.layer_in_float32)
  assert line["ms"] > 0 and line["error"] < 0.01
  _fake_te(monkeypatch, [*modes, "FP8_BLOCK_SCALING"])
  assert [r.name for r in rivals.find(te.MAKERS)[0]] == list(te.MAKERS)
