"""Forms of residuals, which the memory section of a configuration chooses.

The input of a GEMM is saved as it is, or as the operand of the weight gradient (GemmInput): the
numbers are the same. Inputs of norms, gate and up, and inputs of layers are saved as they are or
compressed by a Quant (ResidualFormats). The forward pass computes with the tensor itself. The
backward pass has the compressed copy: it differentiates the operation that read the tensor there,
and computes its result again from there. A gradient is then off by the copy's rounding, at most
2^-4 of every element for E4M3 under a group's scale. The loss is exact.

Source: COAT (arXiv:2410.19313 §5), whose forward pass reads the copies too: its gradients are those
of what it computed, and every layer adds their rounding to the loss. Its scales are BF16 numbers,
ours powers of two, a byte less for every group of 16.
"""

import dataclasses
import enum
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.formats import BF16, E2M1, E4M3
from fp8jax.ops import stored_params
from fp8jax.quantization import quantized_tensor
from fp8jax.recipe.quant import Quant, Scale

# Name of compressed copies for remat policies (see jax.ad_checkpoint.checkpoint_name).
NAME = "compressed"
# Name of the result of a product where that is a residual as it is (step/halves.py).
PRODUCT = "product"


class GemmInput(enum.Enum):
  """Form in which the input of a linear layer is a residual."""

  # x, unquantized; the sources of x if it is a fused prologue.
  UNQUANTIZED = "none"
  # X_WGRAD alone, quantized in the forward pass. Transformer Engine saves it for every recipe,
  # DeepSeek-V3 (arXiv:2412.19437, section 3.3.3) for its linears.
  WGRAD_OPERAND = "quantized"


# Compressions by name, for configurations.
QUANTS: dict[str, Quant | None] = {
  "none": None,
  # As they are where the compute dtype is BF16; linear layers' inputs are made of them once more.
  "bf16": Quant(BF16, scale=Scale.NONE),
  # COAT's groups along channels: 1.0625 bytes per element.
  "e4m3_16": Quant(E4M3, (1, 16), Scale.POW2),
  # As long as the tiles of block-scaled GEMMs: 1.008 bytes.
  "e4m3_128": Quant(E4M3, (1, 128), Scale.POW2),
  # OCP MXFP4 (arXiv:2603.02731 keeps activations in it around FP8 products): 0.53 bytes. An element
  # is off by up to 2^-2 of itself, which that paper finds harmless beside FP8.
  "mxfp4": Quant(E2M1, (1, 32), Scale.FLOOR),
}


@dataclasses.dataclass(frozen=True)
class ResidualFormats:
  """Formats of residuals; None saves them unquantized.

  Attributes:
    norm_inputs: inputs of norms.
    gate_up: gate and up, the inputs of silu(gate) * up.
    layer_inputs: the input of a layer, for remat "full", which saves nothing else.
    gemm_inputs: inputs of linear layers.
  """

  norm_inputs: Quant | None = None
  gate_up: Quant | None = None
  layer_inputs: Quant | None = None
  gemm_inputs: GemmInput = GemmInput.UNQUANTIZED


def compress(x, quant: Quant | None):
  """x as a QuantizedTensor, its arrays named NAME; as it is without a Quant."""
  return x if quant is None else named(quantized_tensor.pack(x, quant), NAME)


def named(tree, name: str):
  """The tree, every array named for remat policies."""
  return jax.tree.map(lambda t: checkpoint_name(t, name), tree)


def product(y, name: str):
  """The result of a product, named for remat policies and as the residual that it may become."""
  return checkpoint_name(checkpoint_name(y, name), PRODUCT)


def decompress(x, dtype):
  """The array that a QuantizedTensor of `compress` stands for; anything else as it is."""
  return x.unpack().astype(dtype) if isinstance(x, quantized_tensor.QuantizedTensor) else x


def from_compressed_input(function: Callable, quant: Quant, dtype) -> Callable:
  """function(x, *rest), recomputed in the backward pass from a compressed copy of x.

  The copy is the only residual. The sites observe the recomputation.

  Args:
    function: (x, *rest) -> anything; all that it depends on is among its arguments.
    quant: compresses x.
    dtype: of x.
  """

  @jax.custom_vjp
  def run(x, *rest):
    return function(x, *rest)

  def forward(x, *rest):
    saved = jax.tree.map(stored_params.residual_view, rest, is_leaf=stored_params.is_stored)
    return function(x, *rest), (compress(x, quant), saved)

  def backward(residuals, g):
    copy, rest = residuals
    # jax.checkpoint's name for recomputation: the check of FP8 GEMMs looks for it.
    with jax.named_scope("rematted_computation"):
      _, pull = jax.vjp(
        function, decompress(copy, dtype), *stored_params.with_grad_placeholders(rest)
      )
    return pull(g)

  run.defvjp(forward, backward)
  return run
