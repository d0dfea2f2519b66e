"""The matrix products of a program, read from its HLO text.

Every product is traced under a scope "site:product" (ops/products.py), which XLA hands on, in the
metadata of instructions, to whatever comes of it: a cuBLAS call, a fusion that Triton compiles, a
kernel of ours. Executions are counted: a loop's body as often as the loop runs, so that it does not
matter how XLA unrolls it.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class GemmKey:
  """Which products of the program: one of a site's three, in the forward pass or computed again."""

  site: str
  product: str
  is_recompute: bool = False

  def __str__(self):
    return f"{self.site} {self.product}" + " (recompute)" * self.is_recompute


NO_SITE = GemmKey("no site", "")


@dataclasses.dataclass(frozen=True)
class HloGemm:
  """An instruction that multiplies matrices.

  Attributes:
    key: whose it is; NO_SITE if no site's.
    is_fp8: whether the matrix unit is given FP8; on CPU, whether the dot is.
    times: executions per run of the program.
    work: multiply-adds per execution.
    kernel: what multiplies, e.g. "cuBLASLt".
    text: operands and result, e.g. "bf16[64,32] x bf16[16,32] -> f32[64,16]".
    why: why FP8 operands are not multiplied as such, if they are not.
    depth: K of the product.
    accumulate: "fast" or "precise", see recipe.Accumulation; "" for a kernel of ours.
  """

  key: GemmKey
  is_fp8: bool
  times: int
  work: int
  kernel: str
  text: str
  why: str = ""
  depth: int = 0
  accumulate: str = ""


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_ASSIGNED = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ?([\w\-]+)\(")
# Not a loop's condition: it multiplies nothing.
_CALLED = re.compile(
  r"(?:calls|to_apply|body|branch_computations|called_computations)=(\{[^}]*\}|[^, ]+)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_SCOPE = re.compile(r"(?:^|[/(])((?:layers/(?:[^/:()]+/)*)?[^/:()]+):(fwd|dgrad|wgrad)(?=[/)]|$)")
_NARROW = "f8e"  # dtypes of FP8 operands
_RECOMPUTED = "rematted_computation"  # jax.checkpoint's scope
_CUBLAS = {
  "__cublas$lt$matmul$f8": "cuBLASLt FP8",
  "__cublas$lt$matmul": "cuBLASLt",
  "__cublas$gemm": "cuBLAS",
}


@dataclasses.dataclass
class Instruction:
  """One line: name = shape opcode(operands), rest."""

  name: str
  shape: str
  opcode: str
  operands: list[str]
  rest: str

  def attribute(self, pattern: str) -> str:
    match = re.search(pattern, self.rest)
    return match[1] if match else ""

  @property
  def op_name(self) -> str:
    return self.attribute(r'op_name="([^"]*)"')

  @property
  def called(self) -> list[str]:
    """Computations that it runs."""
    values = (match[1].strip("{}") for match in _CALLED.finditer(self.rest))
    return [name.strip().lstrip("%") for value in values for name in value.split(",")]


@dataclasses.dataclass(frozen=True)
class _Inside:
  """Properties that an instruction inherits from the loop, call or fusion around it.

  Attributes:
    times: executions.
    key: whose the loop or call is. Sites may share the body of a loop, which then has the name of
      one of them.
    is_recompute: whether any name on the way here says so.
    fusion: the outermost fusion.
  """

  times: int = 1
  key: GemmKey | None = None
  is_recompute: bool = False
  fusion: Instruction | None = None


def gemms(text: str, platform: str) -> list[HloGemm]:
  """Every product of matrices in a program.

  Args:
    text: HLO with metadata: on GPU compiled; on CPU lowered, because XLA:CPU has no FP8 arithmetic
      and widens every operand.
    platform: "cpu" or "gpu".
  """
  return list(Program(text, platform).visit())


class Program:
  """HLO text as computations of instructions."""

  def __init__(self, text: str, platform: str = "gpu"):
    self.platform, self.entry = platform, ""
    self.computations: dict[str, dict[str, Instruction]] = collections.defaultdict(dict)
    self.multiplies: dict[str, bool] = {}
    here: dict[str, Instruction] = {}
    for line in text.splitlines():
      if match := _ASSIGNED.match(line):
        here[match[1]] = _instruction(match[1], match[2])
      elif match := _HEADER.match(line):
        here = self.computations[match[2]]
        self.entry = match[2] if match[1] else self.entry

  def visit(self, name: str = "", inside: _Inside = _Inside()) -> Iterator[HloGemm]:
    """Products of a computation, by default the program."""
    for i in self.computations[name or self.entry].values():
      again = inside.is_recompute or _RECOMPUTED in i.op_name
      scope = _SCOPE.search(i.op_name)
      # Recomputation in a backward pass may name its gradients so too: these are never repeated.
      key = inside.key or (
        GemmKey(scope[1], scope[2], again and scope[2] == "fwd") if scope else None
      )
      if product := self._product(i, name or self.entry, inside, key):
        yield product
      callees = [callee for callee in i.called if self._multiplies(callee)]
      if not callees:
        continue
      times = inside.times * (self.trips(i) if i.opcode == "while" else 1)
      fusion = inside.fusion or (i if i.opcode == "fusion" else None)
      # A fusion has the name of any instruction that was fused.
      is_named = i.opcode in ("while", "call", "conditional")
      for callee in callees:
        yield from self.visit(
          callee, _Inside(times, key if is_named else inside.key, again, fusion)
        )

  def _multiplies(self, name: str) -> bool:
    """Whether a computation may multiply matrices, itself or in what it calls."""
    if name not in self.multiplies:
      self.multiplies[name] = any(
        i.opcode in ("dot", "custom-call") or any(map(self._multiplies, i.called))
        for i in self.computations[name].values()
      )
    return self.multiplies[name]

  def computes_products(self, i: Instruction) -> bool:
    """Whether an instruction multiplies matrices, itself or in what it calls."""
    target = i.attribute(r'custom_call_target="([^"]*)"')
    is_call = i.opcode == "custom-call" and (target in _CUBLAS or _SCOPE.search(i.op_name))
    return bool(i.opcode == "dot" or is_call) or any(
      self._multiplies(name) and any(map(self.computes_products, self.computations[name].values()))
      for name in i.called
    )

  def trips(self, loop: Instruction) -> int:
    """How often a loop runs: as XLA says, or else the constant that it counts up to."""
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
      return int(known)
    condition = self.computations[loop.attribute(r"condition=%?([\w.\-]+)")]
    for i in condition.values():
      if i.opcode == "compare" and "direction=LT" in i.rest:
        bound = condition[i.operands[1]]
        if bound.opcode == "constant":
          return int(bound.operands[0])
    return 1

  def _product(self, i: Instruction, name: str, inside: _Inside, key) -> HloGemm | None:
    target = i.attribute(r'custom_call_target="([^"]*)"')
    if i.opcode != "dot" and not (i.opcode == "custom-call" and (target in _CUBLAS or key)):
      return None
    table = self.computations[name]
    shapes = [table[o].shape.partition("{")[0] for o in i.operands if o in table]
    if i.opcode == "dot" or target in _CUBLAS:
      shapes = shapes[:2]
      depth, accumulate = _contracted(shapes[0], i), _accumulate(i)
      work = math.prod(_extents(i.shape)) * depth
    else:
      # A kernel of ours: of its FP8 operands, both contraction-last; scales are none.
      shapes = [s for s in shapes if s.startswith(_NARROW) and len(_extents(s)) > 1][:2]
      if len(shapes) < 2:
        return None
      depth, accumulate = _extents(shapes[1])[-1], ""
      work = math.prod(_extents(shapes[0])) * _extents(shapes[1])[-2]
    is_fp8, why = all(s.startswith(_NARROW) for s in shapes), ""
    kernel = _CUBLAS.get(target, target)
    if i.opcode == "dot":
      kernel = "dot"
      if self.platform != "cpu":
        kernel, why = _compiled_by(i, inside.fusion)
    result = i.shape.lstrip("(").partition("{")[0]
    return HloGemm(
      key or NO_SITE, is_fp8 and not why, inside.times, work, kernel,
      f"{' x '.join(shapes)} -> {result}", why if is_fp8 else "", depth, accumulate,
    )  # fmt: skip


def _accumulate(i: Instruction) -> str:
  """How a dot or a cuBLAS call accumulates FP8 operands on a GPU: "fast" or "precise".

  XLA's rule (gemm_rewriter.cc, Triton's emitter): an algorithm says so by its name; without one,
  operands that both have the default precision are accumulated fast.
  """
  algorithm = i.attribute(r'[" ]algorithm"?[=:]"?(\w+)').lower()
  if algorithm not in ("", "alg_unset"):
    return "fast" if "fast_accum" in algorithm else "precise"
  listed = i.attribute(r'operand_precision"?[=:][{\[]([^\]}]*)').replace('"', "").lower()
  return "precise" if set(listed.split(",")) - {"", "default"} else "fast"


def _compiled_by(dot: Instruction, fusion: Instruction | None) -> tuple[str, str]:
  """(what compiles a dot for GPU, why it would not multiply FP8 operands as they are)."""
  kind = fusion.attribute(r'"kind":"([^"]*)"') if fusion else ""
  if fusion is None or "triton" not in kind:
    return kind or "dot", "" if kind else "it is a loop of scalar operations"
  tiles, depth = (
    [int(n) for n in x.attribute(r'"sizes":\[([^\]]*)\]').replace('"', "").split(",") if n]
    for x in (fusion, dot)
  )
  if len(tiles) < 2 or not depth:
    return "Triton", "its tiles are not known"
  (m, n), warps = tiles[-2:], int(fusion.attribute(r'"num_warps":"?(\d+)') or 0)
  # Tiles are of the fusion's result, which may be the product's transpose or something else.
  rows = _extents(dot.shape)[-2:]
  if _extents(fusion.shape)[-2:] != rows or rows[0] == rows[1]:
    m, n = min(m, n), max(m, n)
  # Seen in the PTX of tiles from 16x8x16 to 128x128x128: below these, and with other numbers of
  # warps, FP8 operands are converted and mma.f32.f16.f16 multiplies them, on sm_90.
  if m % 64 == 0 and n % 16 == 0 and depth[-1] % 32 == 0 and warps % 4 == 0:
    return "Triton FP8", ""
  return "Triton", (
    f"Triton's tiles of {m}x{n}x{depth[-1]} with {warps} warps are too small for Hopper's FP8 "
    "instruction (64x16x32 with 4), so that it multiplies in FP16; "
    "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false leaves this to cuBLASLt"
  )


def _instruction(name: str, text: str) -> Instruction:
  """Of "f32[2,3]{1,0} dot(%a, %b), metadata=...", or with the shape of a tuple in parentheses."""
  end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
  match = _OPCODE.match(text, end)
  if match is None:
    return Instruction(name, text[:end], "", [], text[end:])
  close = _closing(text, match.end() - 1)
  # With or without its shape, or a comment, an operand ends in its name; a constant is its value.
  operands = [re.split(r" |\*/", o)[-1].lstrip("%") for o in text[match.end() : close].split(", ")]
  return Instruction(name, text[:end], match[1], operands, text[close:])


def _closing(text: str, start: int) -> int:
  """Where the parenthesis that opens at `start` closes."""
  depth = 0
  for match in re.compile(r"[()]").finditer(text, start):
    depth += 1 if match[0] == "(" else -1
    if depth == 0:
      return match.start()
  return len(text) - 1


def _extents(shape: str) -> list[int]:
  """Of an array, or of the first one of a tuple."""
  match = _ARRAY.search(shape)
  return [int(n) for n in match[2].split(",") if n] if match else []


def _contracted(lhs: str, i: Instruction) -> int:
  """K of a dot or of a cuBLAS call."""
  listed = i.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
  listed = listed or i.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]').replace('"', "")
  extents = _extents(lhs)
  return math.prod(extents[int(axis)] for axis in listed.split(",") if axis)
