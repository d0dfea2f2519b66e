"""What waits for the backward pass of the layers, from the configuration alone.

Every tensor that the models and `ops` keep, by kind: the policy of rematerialization says whether,
recipes and `memory` in which form. The compiled step is held against it (account.py). What waits
around the loss, once and not per layer, is not here.

Letters: T is tokens of a microbatch on one device.
"""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import params as params_lib
from fp8jax.models import transformer
from fp8jax.ops import gemm_spec, quantized_inputs
from fp8jax.ops import site as site_lib
from fp8jax.ops.fused import prologue
from fp8jax.ops.fused.prologue import Prologue
from fp8jax.ops.gemm_spec import Role
from fp8jax.ops.residuals import GemmInput
from fp8jax.quantization import quantized_tensor
from fp8jax.recipe.quant import WHOLE, Quant
from fp8jax.step import run_spec

_HLO = {
  "float32": "f32", "float16": "f16", "bfloat16": "bf16", "uint8": "u8",
  "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2", "float4_e2m1fn": "f4e2m1fn",
}  # fmt: skip
# What differentiation keeps of basic.rms_norm and basic.silu_mul as they stand: float32 arrays of
# the result's shape.
_OF_PLAIN_NORM, _OF_PLAIN_SWIGLU = 3, 5


@dataclasses.dataclass(frozen=True)
class SavedTensor:
  """One kind of what waits, in one dtype, of all layers together.

  Attributes:
    kind: what it is.
    dtype: as compiled programs call it.
    size: elements on one device.
    nbytes: their bytes.
  """

  kind: str
  dtype: str
  size: int
  nbytes: int


def runs(plan: run_spec.RunSpec) -> list[tuple[int, int]]:
  """(first, one past the last) of layers that multiply alike, each a loop of its own."""
  found = []
  for sites in plan.sites()["layers"]:
    first, stop = next(iter(site_lib.flatten(sites).values())).layers
    found.append((first, stop))
  return found


def of_layers(plan: run_spec.RunSpec) -> list[SavedTensor]:
  """What waits of all layers, first phase's recipes."""
  found: collections.Counter[tuple[str, Any]] = collections.Counter()
  for sites, (first, stop) in zip(plan.sites()["layers"], runs(plan), strict=True):
    for key, size in _Layer(plan, sites).kept().items():
      found[key] += size * (stop - first)
  return [
    SavedTensor(kind, _HLO.get(str(dtype), str(dtype)), size, size * dtype.itemsize)
    for (kind, dtype), size in found.items()
  ]


class _Layer:
  """One layer of a plan, in the recipes of its sites."""

  def __init__(self, plan: run_spec.RunSpec, sites):
    self.run, self.model, self.sites = plan.run, plan.model, sites
    self.dims = {**plan.model.dims, "B": plan.microbatch, "L": plan.data.seq_len}
    self.declared = transformer.params(plan.model)["layers"]
    self.tokens = plan.tokens_per_device
    self.found: collections.Counter[tuple[str, Any]] = collections.Counter()

  def kept(self) -> collections.Counter:
    """{(kind, dtype): elements}."""
    run, model = self.run, self.model
    d, f = self.local("D"), self.local("F")
    if run.remat == "full":
      self.copy("inputs of layers", (d,), run.residuals.layer_inputs)
      return self.found
    # With copies of what norms read, nothing needs the stream itself.
    if run.remat != "none" and run.residuals.norm_inputs is None:
      self.add("inputs of layers", d)
    x = self.tensor("BLD")
    h = prologue.rms_norm(
      x, jax.ShapeDtypeStruct((d,), jnp.float32), model.norm_eps, save=run.residuals.norm_inputs
    )
    self.linears("attn", ("BLD,DHK->BLHK", "BLD,DGK->BLGK", "BLD,DGK->BLGK"), "qkv", h, "norms")
    self.attention()
    self.linears("attn", ("BLHK,HKD->BLD",), "o", self.tensor("BLHK"), "")
    self.linears("mlp", ("BLD,DF->BLF", "BLD,DF->BLF"), ("gate", "up"), h, "norms")
    gate = self.tensor("BLF")
    h = prologue.silu_mul(gate, gate, save=run.residuals.gate_up)
    if run.remat != "none" and run.residuals.gate_up is None:
      self.add("gate and up", 2 * f)
    self.linears("mlp", ("BLF,FD->BLD",), ("down",), h, "gate and up")
    return self.found

  def attention(self):
    run, model = self.run, self.model
    heads, groups, size = self.local("H"), self.local("G"), model.head_dim
    if model.qk_norm and run.residuals.norm_inputs is not None:
      self.copy("norms", (heads, size), run.residuals.norm_inputs)
      self.copy("norms", (groups, size), run.residuals.norm_inputs)
    elif model.qk_norm and run.remat == "none":
      self.add("norms", _OF_PLAIN_NORM * (heads + groups) * size, jnp.float32)
    self.add("queries, keys, values", (heads + 2 * groups) * size)
    is_fused = run.attention == "cudnn"
    # Its own derivative; what `o` contracts for its weight; `o` computed again.
    needs = {"none": is_fused, "linears": True, "quantized": run.residuals.norm_inputs is None}
    o = self.sites["attn"]["o"]
    saves_operand = o.save is GemmInput.WGRAD_OPERAND and o.recipe.wgrad.is_narrow
    if needs[run.remat] or not saves_operand:
      self.add("attention's output", heads * size)
    if run.remat == "none":
      self.add("softmax: statistics", heads * (1 if is_fused else 2), jnp.float32)
      if not is_fused:
        self.add("softmax: probabilities", heads * self.dims["L"], jnp.float32)
        self.add("softmax: probabilities", heads * self.dims["L"])

  def linears(self, group: str, eqns, names, x, kind: str):
    """What linears that share x keep of it; what it is made of, called `kind`, if it is later."""
    sites = [self.sites[group][name] for name in names]
    ws = [
      jax.ShapeDtypeStruct(params_lib.shape(self.declared[group][name], self.dims)[1:], jnp.float32)
      for name in names
    ]
    plans = gemm_spec.make_specs(eqns, x, ws, sites)
    width = math.prod(self.local(c) for c in plans[0].letters.contracted)
    is_copied = isinstance(x, Prologue) and x.save is not None
    narrow = {
      quantized_inputs.operand_key(plan, n, (Role.X_WGRAD,)): plan.quant(Role.X_WGRAD)
      for n, plan in enumerate(plans) if plan.saves_operand
    }  # fmt: skip
    for quant in narrow.values():
      if quant is not None and (self.run.remat in ("none", "quantized") or is_copied):
        self.operand(width, quant)
    if not isinstance(x, Prologue):
      return
    if is_copied:
      for source in x.sources:
        if source.shape == x.shape:
          self.copy(kind, (width,), x.save)
      return
    if self.run.remat != "none":
      return
    matrices = sum(source.shape == x.shape for source in x.sources)
    if quantized_inputs.can_fuse_input(plans, x):
      self.add(kind, matrices * width)
      return
    plain = _OF_PLAIN_NORM if matrices == 1 else _OF_PLAIN_SWIGLU
    self.add(kind, plain * width, jnp.float32)
    if not all(plan.saves_operand for plan in plans):
      self.add("inputs of linears", width)

  def operand(self, width: int, quant: Quant):
    """The narrow operand [width, T] of a weight gradient, and its scales."""
    rows, run = quant.tile
    scales = (1 if rows == WHOLE else -(-width // rows)) * (
      1 if run == WHOLE else -(-self.tokens // run)
    )
    self.found["inputs of linears", quant.format.dtype] += width * self.tokens
    self.found["inputs of linears", jnp.dtype(jnp.float32)] += scales

  def copy(self, kind: str, width: tuple[int, ...], quant: Quant | None):
    """[T, *width] as `kept.keep` has it; without a Quant in the compute dtype."""
    if quant is None:
      self.add(kind, math.prod(width))
      return
    x = jax.ShapeDtypeStruct((self.tokens, *width), self.run.dtype)
    for leaf in jax.tree.leaves(jax.eval_shape(lambda x: quantized_tensor.pack(x, quant), x)):
      self.found[kind, leaf.dtype] += leaf.size

  def add(self, kind: str, width: int, dtype=None):
    """[T, width], default in the compute dtype."""
    self.found[kind, jnp.dtype(dtype or self.run.dtype)] += width * self.tokens

  def local(self, letter: str) -> int:
    return self.dims[letter] // self.run.layout.size(self.run.layout.act_axes(letter))

  def tensor(self, letters: str):
    return jax.ShapeDtypeStruct(tuple(self.dims[c] for c in letters), self.run.dtype)
