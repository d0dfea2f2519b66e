"""The GEMMs of a step by its spec: a row for every product of every site, recomputed ones included.

How the products are accumulated is part of a row (recipe.Accumulation). compiled/fp8_gemms.py holds
a program against the rows.
"""

import collections
import dataclasses
import math

from fp8jax.compiled import hlo, saved_tensors
from fp8jax.formats import E4M3, E5M2
from fp8jax.kernels import choose
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.kernels.gemm import xla
from fp8jax.models import invariant, transformer
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.recipe import rules
from fp8jax.recipe.gemm import PASSES, Gemm, accumulate_name
from fp8jax.step.train_spec import TrainSpec

_CUBLAS_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class GemmRow:
  """A product of a site: expected in the program, and found there.

  Attributes:
    recipe: name of the site's.
    size: (M, N, K) of the product on one device; of the first chunk for the head.
    expected: FP8 GEMMs per step and device; 0 where the recipe does not quantize, and where a
      backend emulates the matrix unit without one.
    work: their multiply-adds.
    padded: the same with every extent rounded up to cuBLASLt's multiple.
    is_emulated: no matrix unit multiplies it: FP8 carries the numbers of its format, of which there
      are more, or float32 does, and nothing is expected; or the backend emulates a matrix unit.
    most: how often the work may be done: twice where XLA is free to do the forward product once for
      itself and its recomputation, which have no loops around them that would keep them apart.
    fp8: FP8 GEMMs found, in units of the spec's: its number of them did exactly its work.
    calls: FP8 GEMMs found, executions.
    done: their multiply-adds.
    unquantized: executions of GEMMs with operands of more than 8 bits.
    instead: the first of these.
    why: why one with FP8 operands is among these.
    shared: the site whose GEMM also is this one's, "" for none.
    accumulate: the recipe's, see gemm.accumulate_name; "" where it does not quantize.
    accumulates: what the FP8 GEMMs found do, see hlo.HloGemm.
    depth: the largest K of these, of those that XLA has written.
  """

  key: hlo.GemmKey
  recipe: str
  backend: str
  size: tuple[int, int, int]
  expected: int = 0
  work: int = 0
  padded: int = 0
  is_emulated: bool = False
  most: int = 1
  fp8: int = 0
  calls: int = 0
  done: int = 0
  unquantized: int = 0
  kernels: tuple[str, ...] = ()
  instead: str = ""
  why: str = ""
  shared: str = ""
  accumulate: str = ""
  accumulates: tuple[str, ...] = ()
  depth: int = 0

  @property
  def accumulates_otherwise(self) -> str:
    """How FP8 GEMMs that were found accumulate, if not as the recipe says; else "".

    A kernel of ours promotes partial sums: no text says so, and its own tests do.
    """
    if not self.accumulate:
      return ""
    if self.accumulate.isdecimal():
      return f"{self.depth} products in one sum" * (self.depth > _padded(int(self.accumulate)))
    others = [how for how in self.accumulates if how != self.accumulate]
    return repr(others[0] or "promoted") if others else ""

  @property
  def is_multiplied(self) -> bool:
    """Whether the GEMMs of the spec are there, whatever their accumulation."""
    return self.fp8 == self.expected and not (self.unquantized and self.accumulate)

  @property
  def is_proven(self) -> bool:
    return self.is_multiplied and not self.accumulates_otherwise


def expected(spec: TrainSpec, phase: int = 0) -> list[GemmRow]:
  """A row for every product of every site, recomputed ones included, nothing found yet."""
  declared = site_tree.find_sites(transformer.site_params(spec.model))
  recomputed = saved_tensors.recomputed_sites(spec.model, spec.run)
  rows = []
  for name, site in site_lib.flatten(spec.sites(phase=phase)).items():
    param = declared[rules.path_of(name)]
    is_recomputed = rules.path_of(name) in recomputed
    # XLA unrolls the loop over a single layer.
    is_loop = len(site.layer_names) > 1
    passes = [p for p in PASSES if p != "wgrad" or param.trainable]
    products = [(p, False) for p in passes] + [("fwd", True)] * (is_recomputed and is_loop)
    if spec.run.is_invariant:  # the recomputation alone is the recipe's plain forward pass
      is_read = is_recomputed or not site.layers
      products = [(p, False) for p in passes if p != "fwd" or is_read]
    times, named = calls(spec, site), [(name, *one) for one in products]
    if spec.run.is_invariant:  # a tile of each: the length of their loop is no part of a program
      named.append((invariant.product_name(name), "fwd", False))
    for key, product, again in named:
      tiles = [(invariant.ROWS, n) for _, n in times]
      sizes = [
        (site_tree.local_size(param, spec.model.dims, spec.run.layout, t).of(product), n)
        for t, n in (times if key == name else tiles)
      ]
      gemm, backend = getattr(site.recipe, product), site.backends[PASSES.index(product)]
      multiplier = gemm_api.BACKENDS[backend]
      row = GemmRow(
        hlo.GemmKey(key, product, again), site.recipe.name, backend, sizes[0][0],
        # The product of a weight that alone is quantized is in 16 bits anywhere.
        is_emulated=gemm.multiplies_codes
        and (
          any(q.format not in (E4M3, E5M2) for q in (gemm.lhs, gemm.rhs) if q)
          or backend in gemm_api.WITH_VALUES
        ),
      )  # fmt: skip
      if xla.is_fp8(gemm) and backend not in gemm_api.WITH_VALUES:
        dots = sum(
          n * multiplier.num_dots(choose.GemmProblem(*mnk, gemm, spec.device)) for mnk, n in sizes
        )
        row = dataclasses.replace(
          row,
          expected=dots,
          work=sum(n * math.prod(mnk) for mnk, n in sizes),
          padded=sum(n * math.prod(map(_padded, mnk)) for mnk, n in sizes),
          is_emulated=row.is_emulated or not dots,
          accumulate=accumulate_name(gemm.accumulate),
          most=2 if product == "fwd" and is_recomputed and not is_loop else 1,
        )
      rows.append(row)
  return rows


def uses(spec: TrainSpec, phase: int = 0) -> dict[tuple[str, Gemm], set[tuple[int, int, int]]]:
  """(backend, quantized product) -> the sizes on one device that the step calls it with."""
  sizes = collections.defaultdict(set)
  for row in expected(spec, phase):
    if row.expected:
      gemm = getattr(rules.recipe_by_name(row.recipe), row.key.product)
      sizes[row.backend, gemm].add(row.size)
  return sizes


def calls(spec: TrainSpec, site: site_lib.Site) -> list[tuple[int, int]]:
  """(tokens on a device, calls per step) of a site."""
  times = spec.grad_accum_steps
  if not transformer.gemm_sites(spec.model)[rules.path_of(site.name)].is_chunked:
    return [(spec.tokens_per_device, times * len(site.layer_names))]
  length, chunk = spec.data.seq_len, spec.run.loss_chunk
  sequences = spec.tokens_per_device // length
  whole, rest = divmod(length, chunk)
  calls = [(sequences * chunk, times * whole), (sequences * rest, times)]
  return [(tokens, n) for tokens, n in calls if tokens and n]


def _padded(extent: int) -> int:
  return -(-extent // _CUBLAS_MULTIPLE) * _CUBLAS_MULTIPLE
