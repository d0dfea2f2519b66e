"""Rivals in PyTorch: its own scaled GEMMs, torchao's training, Transformer Engine's.

Never run on a GPU. Written after the public API of PyTorch 2.13, torchao 0.18 and Transformer
Engine 2; another version whose names differ is listed as absent, one that behaves otherwise fails
its check and is not timed.

GEMMs multiply the very operands that ours do: made by JAX, handed over by DLPack. Layers have what
their library recommends: compiled by torch.compile (torchao), eager (Transformer Engine, whose
kernels are fused). Their weights and weight gradients are BF16 where ours are float32, which spares
them bytes.
"""

import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import rivals
import timing
from rivals import Absent, Call, Rival, need, without

from fp8jax.recipe import library

ROWWISE = library.RECIPES["rowwise"]
_NO_GEMM = "its GEMM has no public name of its own"
_NO_LAYER = "PyTorch has no layer of it"


def _torch(*names: str):
  torch = need("torch", "from_dlpack", *names)
  if not torch.cuda.is_available():
    raise Absent("needs a GPU: torch.cuda.is_available() says no")
  if torch.cuda.get_device_capability() != (9, 0):
    raise Absent(f"needs a Hopper GPU, not {torch.cuda.get_device_name()}")
  return torch


def time(bench: timing.Bench, function, *sets) -> dict[str, float]:
  """timing.Bench.time, by events of CUDA."""
  torch = need("torch")

  def elapsed(calls: int) -> float:
    """Milliseconds per call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for i in range(calls):
      function(*sets[i % len(sets)])
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls

  elapsed(2 * len(sets))  # compiles and chooses kernels
  calls = timing.num_calls(bench, len(sets), elapsed(1) / 1e3)
  rounds = [elapsed(calls) for _ in range(timing.num_rounds(bench))]
  return {"ms": statistics.median(rounds), "spread_ms": max(rounds) - min(rounds)}


def to_jax(x):
  """By way of the host, where every type has a name that both sides know."""
  return jnp.asarray(x.detach().float().cpu().numpy())


def _rival(name: str, gemm, layer, precision: str = "fp8") -> Rival:
  return Rival(name, gemm, layer, time, to_jax, precision, compile=lambda run: run)


def _hand_over(torch, x):
  """An array of JAX as a tensor; FP8 as bytes that are renamed."""
  if jnp.dtype(x.dtype).itemsize > 1:
    return torch.from_dlpack(x)
  data = torch.from_dlpack(jax.lax.bitcast_convert_type(x, jnp.uint8))
  return data.view(getattr(torch, jnp.dtype(x.dtype).name))


def _operands(torch, recipe, product: str, a, b):
  """(A [M, K], its scales, B' [K, N] column by column, its scales): as `recipe` has them."""
  narrow = rivals.narrow_operands(recipe, product)(a, b)
  (a, a_scale), (b, b_scale) = (
    (_hand_over(torch, x.data), _hand_over(torch, x.scale)) for x in narrow
  )
  return a, a_scale, b.t(), b_scale


def _columns(x):
  """The same matrix, column by column in memory."""
  return x.t().contiguous().t()


# --- PyTorch -------------------------------------------------------------------------------------


def _bf16() -> Rival:
  torch = _torch()

  def gemm(product, out):
    del product, out
    return Call(lambda a, b: tuple(_hand_over(torch, x) for x in (a, b)), lambda a, b: a @ b.t())

  return _rival("torch_bf16", gemm, without(_NO_LAYER), "bf16")


def _scaled_mm(name: str, recipe) -> Rival:
  """torch._scaled_mm with one scale per tensor or per row."""
  torch = _torch("_scaled_mm")

  def gemm(product, out):
    # Rows and columns take BF16 out alone. Fast accumulation where torchao has it: forward.
    is_wide = out == jnp.float32 and recipe is rivals.TENSOR
    dtype = torch.float32 if is_wide else torch.bfloat16
    fast = product == "fwd"

    def prepare(a, b):
      a, a_scale, b, b_scale = _operands(torch, recipe, product, a, b)
      return a, b, a_scale.contiguous(), b_scale.t().contiguous()

    def run(a, b, scale_a, scale_b):
      return torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast
      )

    return Call(prepare, run)

  return _rival(name, gemm, without(_NO_LAYER))


def _scaled_mm_of_blocks() -> Rival:
  """cuBLASLt's block scales, by torch.nn.functional.scaled_mm."""
  torch = _torch("nn.functional.scaled_mm", "nn.functional.ScalingType.BlockWise128x128")
  functional = torch.nn.functional
  rows, tiles = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128

  def gemm(product, out):
    del out
    how_b = rows if product == "wgrad" else tiles

    def prepare(a, b):
      a, a_scale, b, b_scale = _operands(torch, rivals.BLOCK, product, a, b)
      if product == "wgrad":
        return a, b, _columns(a_scale), _columns(b_scale)
      # [K / 128, N / 128] column by column, K / 128 a multiple of 4: cuBLASLt's.
      b_scale = functional.pad(b_scale, (0, -b_scale.shape[1] % 4), value=1.0).contiguous()
      return a, b, _columns(a_scale), b_scale.t()

    def run(a, b, scale_a, scale_b):
      return functional.scaled_mm(
        a, b, scale_a=scale_a, scale_recipe_a=rows, scale_b=scale_b, scale_recipe_b=how_b,
        output_dtype=torch.bfloat16,
      )  # fmt: skip

    return Call(prepare, run)

  return _rival("torch_block", gemm, without(_NO_LAYER))


# --- layers --------------------------------------------------------------------------------------


def _layer(torch, make: Callable) -> Call:
  """`make`: nn.Linear without bias -> x -> y."""

  def prepare(x, w, g):
    weight = _hand_over(torch, w.T.astype(jnp.bfloat16))
    linear = torch.nn.Linear(*w.shape, bias=False, device="cuda", dtype=torch.bfloat16)
    linear.weight = torch.nn.Parameter(weight)
    x, g = _hand_over(torch, x).requires_grad_(), _hand_over(torch, g)
    return make(linear), linear.weight, x, g

  def run(forward, weight, x, g):
    y = forward(x)
    dx, dw = torch.autograd.grad(y, (x, weight), g)
    return y, dx, dw.t()

  return Call(prepare, run)


def _torchao(recipe: str) -> Rival:
  """torchao's float8 training, compiled."""
  torch = _torch("compile")
  float8 = need("torchao.float8", "convert_to_float8_training", "Float8LinearConfig")
  config = float8.Float8LinearConfig.from_recipe_name(recipe)

  def make(linear):
    model = float8.convert_to_float8_training(torch.nn.Sequential(linear), config=config)
    if type(model[0]) is type(linear):
      raise Absent("torchao left the layer as it was")
    return torch.compile(model)

  gemm = without("its GEMM is torch._scaled_mm: torch_tensor, torch_rowwise")
  return _rival(f"torchao_{recipe}", gemm, lambda: _layer(torch, make))


def _torchao_block() -> Rival:
  """torchao's prototype for Hopper: Triton kernels, 1x128 and 128x128."""
  torch, prototype = _torch(), "torchao.prototype.blockwise_fp8_training"
  of_tiles, of_rows = "triton_fp8_gemm_1x128_128x128", "triton_fp8_gemm_1x128_128x1"
  kernels = need(f"{prototype}.kernels", of_tiles, of_rows)

  def gemm(product, out):
    multiply = getattr(kernels, of_rows if product == "wgrad" else of_tiles)
    dtype = torch.float32 if out == jnp.float32 else torch.bfloat16

    def prepare(a, b):
      a, a_scale, b, b_scale = _operands(torch, rivals.BLOCK, product, a, b)
      b_scale = b_scale.t()  # [K / 128, N / 128] column by column
      return a, b, _columns(a_scale), b_scale.contiguous() if product == "wgrad" else b_scale

    return Call(prepare, functools.partial(multiply, out_dtype=dtype))

  def layer():
    multiply = need(f"{prototype}.linear", "fp8_blockwise_mm").fp8_blockwise_mm.apply
    return _layer(torch, lambda linear: lambda x: multiply(x, linear.weight, 128))

  return _rival("torchao_block", gemm, layer)


def _transformer_engine(name: str, recipe: str) -> Rival:
  torch = _torch()
  te = need("transformer_engine.pytorch", "Linear", "fp8_autocast")
  made = getattr(need("transformer_engine.common.recipe", recipe), recipe)()

  def make(linear):
    inner = te.Linear(
      linear.in_features, linear.out_features, bias=False, params_dtype=torch.bfloat16
    )
    inner.weight = linear.weight

    def forward(x):
      with te.fp8_autocast(enabled=True, fp8_recipe=made):
        return inner(x)

    return forward

  return _rival(name, without(_NO_GEMM), lambda: _layer(torch, make))


MAKERS: dict[str, Callable[[], Rival]] = {
  "torch_bf16": _bf16,
  "torch_tensor": lambda: _scaled_mm("torch_tensor", rivals.TENSOR),
  "torch_rowwise": lambda: _scaled_mm("torch_rowwise", ROWWISE),
  "torch_block": _scaled_mm_of_blocks,
  "torchao_tensorwise": lambda: _torchao("tensorwise"),
  "torchao_rowwise": lambda: _torchao("rowwise"),
  "torchao_block": _torchao_block,
  "te_torch_delayed": lambda: _transformer_engine("te_torch_delayed", "DelayedScaling"),
  "te_torch_current": lambda: _transformer_engine("te_torch_current", "Float8CurrentScaling"),
  "te_torch_block": lambda: _transformer_engine("te_torch_block", "Float8BlockScaling"),
}
