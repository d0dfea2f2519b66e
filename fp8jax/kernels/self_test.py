"""Kernels tried on the device at hand before a run trusts them: numbers whose products are exact.

A kernel is proven where it was written; drivers, compilers and chips differ. Seconds of work at the
start of a run tell a kernel that computes something else from one that trains.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.errors import UserError
from fp8jax.kernels import choose
from fp8jax.kernels.adamw import api as adamw_api
from fp8jax.kernels.gemm import mosaic_sm90 as mosaic_sm90_lib
from fp8jax.kernels.gemm import tile_config
from fp8jax.kernels.quantize import mosaic_sm90 as making
from fp8jax.kernels.quantize import prologues
from fp8jax.quantization import bf16_remainder, quantized_tensor, scaled_matrix
from fp8jax.quantization.scaled_matrix import Entry, ScaledMatrix
from fp8jax.recipe.gemm import Gemm
from fp8jax.recipe.quant import WHOLE, Quant

# Partial tiles along M and N, more tiles of any size than a Hopper has multiprocessors, so that
# programs go on to a second one, and more steps than the pipeline has stages. N is padded, and so
# are the columns of the matrix.
_SIZES = (2192, 1680, 1024)
_MATRIX = (400, 272)
# The prologues' functions, in NumPy.
_DEFINITIONS = {
  prologues.RMS_NORM: lambda x, scale, weight: (x * scale[:, None] * weight,),
  prologues.SWIGLU: lambda gate, up: (gate / (1 + np.exp(-gate)) * up,),
  prologues.SWIGLU_BACKWARD: lambda g, gate, up: (
    g * up * (1 + np.exp(-gate) * (1 + gate)) / (1 + np.exp(-gate)) ** 2,
    g * gate / (1 + np.exp(-gate)),
  ),
}


def products(
  uses: Mapping[tuple[str, Gemm], Collection[tuple[int, int, int]]], sizes=_SIZES, matrix=_MATRIX,
  weights=jnp.float32, spare: int = 0, stacks: bool = False, saves: bool = False,
) -> int:  # fmt: skip
  """Tries our kernels in everything that a run does with them; how many kinds of product.

  Args:
    uses: (backend, product) -> the (M, N, K) it is called with. Other backends are skipped.
    sizes, matrix: of what is tried, see `hopper` and `quantizer`.
    weights: dtype of those that the quantizer reads.
    spare: multiprocessors that a run's GEMMs leave free.
    stacks: whether a step quantizes the weights of all layers at once.
    saves: whether loops over layers have products write what they save where it is saved; products
      in BF16 are then tried, too.

  Raises:
    UserError: a kernel computes something else.
  """
  own = {use: shapes for use, shapes in uses.items() if use[0] in ("mosaic_sm90", "xla_sm90")}
  for (backend, gemm), shapes in own.items():
    if backend == "mosaic_sm90":
      hopper(gemm, shapes, sizes, weights, spare, saves)
  # In the order of the run, each once.
  for quant in dict.fromkeys(cast(Quant, q) for _, g in own for q in (g.lhs, g.rhs)):
    quantizer(quant, matrix, weights, stacks)
  for quant in dict.fromkeys(cast(Quant, g.lhs) for b, g in own if b == "mosaic_sm90"):
    producers(quant, matrix)
  if saves:
    _save_plain(matrix)
  return len(own)


def hopper(
  gemm: Gemm, shapes: Collection[tuple[int, int, int]] = (), sizes: tuple[int, int, int] = _SIZES,
  weights=jnp.float32, spare: int = 0, saves: bool = False,
) -> None:  # fmt: skip
  """Multiplies with the Hopper quantizer and GEMM, and in float64 on the host.

  Args:
    gemm: a product that kernels.gemm.mosaic_sm90 supports.
    shapes: M, N, K of a run; each one's tile configs are tried, and those of so few tiles that no
      program has a second one are tried themselves, over part of K: theirs is another program.
    sizes: M, N, K of what is multiplied, into BF16 and float32.
    weights: their dtype, where the product has one; activations and gradients are BF16.
    spare: multiprocessors that stay free.
    saves: see `products`.

  Raises:
    UserError: they differ; says where.
  """
  is_tiled = cast(Quant, gemm.rhs).tile[0] == tile_config.BLOCK
  # As runs have them: gradients of weights are float32.
  dtype = jnp.bfloat16 if is_tiled else jnp.float32
  # Into float32 also where rows are rotated back or a gain follows.
  both = (jnp.bfloat16, jnp.float32)
  tried = [(sizes, d) for d in both]
  tried += [(shape, d) for shape in sorted(shapes) for d in (both if is_tiled else (dtype,))]
  cores = max(mosaic_sm90_lib.num_cores() - spare, 1)
  ways = [(d, tile_config.best(*shape, is_tiled, d, cores=cores)) for shape, d in tried]
  b_dtype = weights if is_tiled else jnp.bfloat16
  multiply = functools.partial(_multiply, gemm, b_dtype=b_dtype, spare=spare, saves=saves)
  multiply(sizes, ways)
  for (m, n, k), d in tried[len(both) :]:
    config = tile_config.best(m, n, k, is_tiled, d, cores=cores)
    if tile_config.waves(config, m, n, cores) <= 1:
      multiply((m, n, min(k, 256 + k % tile_config.BLOCK)), [(d, config)])


def _multiply(
  gemm: Gemm, sizes: tuple[int, int, int], ways, b_dtype, spare: int, saves: bool
):  # fmt: skip
  """Multiplies matrices of M, N, K in each way, a dtype and a tile config; raises as `hopper`."""
  m, n, k = sizes
  a, b = _lattice(m, k), _lattice(n, k)
  lhs, rhs = cast(Quant, gemm.lhs), cast(Quant, gemm.rhs)
  # The right one as the weight gradient has it: contraction first.
  make = jax.jit(lambda a, b: (making.quantize_matrix(a, {1: lhs})[0][1],
                               making.quantize_matrix(b.T, {0: rhs})[0][0]))  # fmt: skip
  operands = make(jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, b_dtype))
  want, ways = np.inner(a.astype(np.float64), b.astype(np.float64)), [*dict.fromkeys(ways)]
  first = {dtype: config for dtype, config in reversed(ways)}
  for dtype, config in ways:
    how = dict(out_dtype=dtype, config=config, spare=spare)
    multiply = functools.partial(mosaic_sm90_lib.matmul, **how)
    got = np.asarray(jax.jit(multiply)(*operands).astype(jnp.float32))
    # Sums are exact in float32, so that BF16 is rounded once, here and there.
    rounded = want.astype(dtype).astype(np.float32)
    what = f"mosaic_sm90 multiplies {lhs} by {rhs} of {sizes} into {jnp.dtype(dtype)} with {config}"
    _refuse_if_wrong(got, rounded, what, _instead(rhs))
    if config is first[dtype]:
      _add(multiply, operands, want, dtype, (what, _instead(rhs)), saves)


def _add(
  multiply, operands: tuple[ScaledMatrix, ScaledMatrix], want: np.ndarray, dtype, words: tuple,
  saves: bool,
):  # fmt: skip
  """The same as a run's steps have it: B from the second of two layers, the product added to the
  first of two sums; of both TMA moves 64 columns at a time."""
  n = want.shape[1] - want.shape[1] % 64
  if n == 0:
    return
  a, b = operands
  tiles = scaled_matrix.num_tiles(n, b.tile[0])
  b = ScaledMatrix(b.data[:n], b.scale[:tiles], b.tile)
  stack = jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x), x]), b)
  before = jnp.asarray(_lattice(len(want), n), dtype)
  sums = jnp.stack([before, before])
  add = lambda a, b, sums, i: multiply(a, Entry(b, i), add_to=Entry(sums, 1 - i))  # noqa: E731
  got = np.asarray(jax.jit(add)(a, stack, sums, jnp.int32(1)).astype(jnp.float32))
  rounded = (want[:, :n] + np.asarray(before, np.float64)).astype(dtype).astype(np.float32)
  (what, instead), other = words, np.asarray(before, np.float32)
  _refuse_if_wrong(got[0], rounded, f"{what}, added to a layer's sum,", instead)
  _refuse_if_wrong(got[1], other, f"{what}, beside another layer,", instead)
  if saves:
    _save(lambda i: multiply(a, Entry(stack, i)), want[:, :n], dtype, what)


def _save_plain(sizes: tuple[int, int]):
  """`_save` of products in BF16, which are XLA's."""
  a = _lattice(*sizes)
  stack = jnp.asarray(np.stack([0 * a, a]), jnp.bfloat16)
  multiply = lambda i: jnp.inner(stack[1], stack[i])  # noqa: E731
  want = np.inner(a.astype(np.float64), a)
  _save(multiply, want, jnp.bfloat16, "XLA multiplies in bfloat16")


def _save(multiply, want: np.ndarray, dtype, what: str):
  """Loops over layers save what a product gives, and read it there (step/layer_loop.py): of layer 0
  zeros, of layer 1 what is wanted.

  Args:
    multiply: number of a layer -> product.
  """

  def filled():
    def step(carry):
      i, stack, read = carry
      stack = jax.lax.dynamic_update_index_in_dim(stack, multiply(i), i, 0)
      mine = jax.lax.dynamic_index_in_dim(jax.lax.optimization_barrier(stack), i, 0, False)
      return i + 1, stack, read.at[i].set(-mine)

    stack = jax.lax.empty((2, *want.shape), dtype)
    first = jnp.int32(0), stack, jnp.ones(stack.shape, dtype)
    return jax.lax.while_loop(lambda carry: carry[0] < 2, step, first)[1:]

  # As a step is compiled: XLA's other kernels for products have no slices.
  run = jax.jit(filled, compiler_options=choose.compiler_options(choose.current_device()))
  rounded = want.astype(dtype).astype(np.float32)
  for how, sign, made in zip(("saved by", "read in"), (1, -1), run()):
    for got, wanted in zip(sign * np.asarray(made.astype(jnp.float32)), (0 * rounded, rounded)):
      of_loop = f"{what}, {how} a loop,"
      _refuse_if_wrong(got, wanted, of_loop, "'full'", key="memory.remat_policy")


def quantizer(
  quant: Quant, sizes: tuple[int, int] = _MATRIX, weights=jnp.float32, stacks: bool = False
) -> None:
  """Quantizes a matrix with the Hopper quantizer, in both orientations from one reading.

  Args:
    quant: of a product that kernels.gemm.mosaic_sm90 or xla_sm90 supports. One that weights may
      have, of no tiles of 1x128, is tried of a layer of a stack, too.
    sizes: rows, columns; of a layer whole 64 of them, which TMA moves.
    weights: dtype of layers.
    stacks: whether tiles of 128x128 are tried of all layers at once.

  Raises:
    UserError: what it stands for is another matrix; says where.
  """
  x = _lattice(*sizes)
  amax = jnp.float32(np.abs(x).max())
  make = jax.jit(lambda x: making.quantize_matrix(x, {1: quant, 0: quant}, amax)[0])
  tried: dict[str, tuple[np.ndarray, Any]] = {"": (x, jnp.asarray(x, jnp.bfloat16))}
  if quant.tile[0] != 1:
    x = x[:, : sizes[1] - sizes[1] % 64]
    # Beyond its rows come another layer's.
    layers = jnp.stack([jnp.asarray(x, weights), jnp.full(x.shape, 2 * amax, weights)])
    tried[" of a layer"] = x, Entry(layers, jnp.int32(0))
  for of, (x, given) in tried.items():
    _refuse_operands(make(given), x, quant, of)
  if stacks and quant.tile[0] not in (1, WHOLE):
    both, amaxes = jax.jit(lambda x: making.quantize_stack(x, {1: quant, 0: quant}))(layers)
    for i, want in enumerate(np.asarray(layers, np.float32)):
      made = {along: jax.tree.map(lambda leaf, i=i: leaf[i], o) for along, o in both.items()}
      _refuse_operands(made, want, quant, f" of layer {i} of all")
      seen, largest = (np.reshape(x, (1, 1)) for x in (amaxes[i], np.abs(want).max()))
      _refuse_if_wrong(seen, largest, "the Hopper quantizer finds amaxes of layers",
                       _instead(quant))  # fmt: skip


def _refuse_operands(made: dict[int, ScaledMatrix], x: np.ndarray, quant: Quant, of: str) -> None:
  for along, operand in made.items():
    what = f"the Hopper quantizer makes {quant}{of}"
    want = x if along == 1 else x.T
    _refuse_if_wrong(np.asarray(operand.dequantize()), want, what, _instead(quant))


def producers(quant: Quant, sizes: tuple[int, int] = _MATRIX) -> None:
  """Computes norm, SwiGLU and its gradients on the way into the Hopper quantizer.

  Args:
    quant: with tiles, of the results, in both orientations.
    sizes: rows, columns.

  Raises:
    UserError: an element is further from float64's than its formats explain; says which.
  """
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
  for producer, definition in _DEFINITIONS.items():
    matrices = [normal(*sizes) for _ in range(producer.matrices)]
    factors = [normal(sizes[axis]).astype(jnp.float32) for axis in producer.factors]
    quants = ({1: quant, 0: quant},) * producer.results
    make = lambda m, f, p=producer, q=quants: making.quantize_produced(p, m, f, q, watched=True)  # noqa: E731
    wanted = definition(*(np.asarray(x, np.float64) for x in (*matrices, *factors)))
    for made, amax, want in zip(*jax.jit(make)(matrices, factors), wanted, strict=True):
      what = f"{producer.name} in the Hopper quantizer makes {quant}"
      largest = np.abs(want).max()
      # BF16's rounding, then the quantized format's; of small numbers that of its smallest one.
      slack = np.abs(want) * (2.0**-7 + 2.0 ** -(quant.format.mantissa_bits + 1))
      slack += largest * 2.0**-16
      for along, quantized in made.items():
        got = np.asarray(quantized.dequantize())
        _refuse_if_wrong(got if along == 1 else got.T, want, what, _instead(quant), slack)
      seen, want = (np.reshape(x, (1, 1)) for x in (amax, largest))
      _refuse_if_wrong(seen, want, f"{producer.name} finds amaxes", _instead(quant), 2**-7 * want)


def _instead(quant: Quant) -> str:
  is_tensor = quant.tile == (WHOLE, WHOLE)
  return "'xla'" if is_tensor else "'reference', which is slow and correct"


def optimizer(
  mu: Quant | None, nu: Quant | None, *, is_pair: bool, dtype, sizes=(4998, 1024)
) -> None:
  """Updates a parameter with the Hopper kernel and by the definition.

  Args:
    mu, nu: Quants of the moments; what kernels.adamw.mosaic_sm90 supports.
    is_pair: whether the master is in two.
    dtype: of the gradient.
    sizes: of the parameter; the default has some tiles for each warpgroup of the device.

  Raises:
    UserError: they differ by more than the hardware's functions explain; says where.
  """
  rng = np.random.default_rng(0)
  size = 2.0 ** rng.integers(-20, 0, (sizes[0], 1))
  g, m, v, p = (jnp.asarray(size * rng.standard_normal(sizes), jnp.float32) for _ in range(4))
  moments = (quantized_tensor.pack(x, q) if q else x for x, q in ((m, mu), (jnp.square(v), nu)))
  arrays = (g.astype(dtype), bf16_remainder.split(p) if is_pair else p, *moments)

  @functools.partial(jax.jit, static_argnums=1)
  def step(arrays, backend):
    by = dict(count=jnp.int32(3), rate=jnp.float32(0.25), b1=0.9, b2=0.95, eps=1e-8)
    master, *moments, squares = adamw_api.update(*arrays, **by, weight_decay=0.1, backend=backend)
    moments = (
      x.unpack() if isinstance(x, quantized_tensor.QuantizedTensor) else x for x in moments
    )
    return (
      bf16_remainder.to_float32(master) - bf16_remainder.to_float32(arrays[1]),
      *moments,
      squares,
    )

  got, want = (step(arrays, backend) for backend in ("mosaic_sm90", "reference"))
  for name, x, y in zip(("master", "mu", "nu", "squares"), got, want):
    # A code of E4M3 may be the next one: a hundredth of its group. A lost element is a tenth.
    x, y = (np.asarray(z, np.float64).reshape(-1, min(z.size, 128)) for z in (x, y))
    distance = np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)
    if not distance.max() < 0.05:
      raise UserError(
        f"kernels.optimizer: on this device {name} with mu={mu}, nu={nu} comes out wrong: group "
        f"{distance.argmax()} of 128 by {distance.max():.2g} of itself. Set "
        "kernels.optimizer='xla', and report this with `nvidia-smi` and `pip freeze`"
      )


def _refuse_if_wrong(
  got, want, what: str, instead: str, slack: float | np.ndarray = 0.0, key: str = "kernels.matmul"
) -> None:  # fmt: skip
  """Raises UserError if elements differ by more than `slack`: `what` was done wrongly."""
  wrong = np.argwhere(~(np.abs(got - want) <= slack))
  if len(wrong):
    i, j = wrong[0]
    raise UserError(
      f"{key}: on this device {what} wrongly: {len(wrong)} of {got.size} elements, the "
      f"first [{i}, {j}] {got[i, j]} instead of {want[i, j]}. Set {key}={instead}, and "
      "report this with `nvidia-smi` and `pip freeze`"
    )


def _lattice(rows: int, columns: int) -> np.ndarray:
  """float32 integers of which FP8 tiles in either direction are exact, whatever kind of scale.

  Every run of 15 holds every integer from -7 to 7; tiles of 128x128 differ by powers of two.
  """
  i, j = np.indices((rows, columns))
  power = (i // 128 + 2 * (j // 128)) % 5 - 2
  return (((7 * i + 13 * j) % 15 - 7) * 2.0**power).astype(np.float32)
