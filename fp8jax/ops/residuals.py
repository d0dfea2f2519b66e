"""What waits for the backward pass in a narrow copy, other than the inputs of GEMMs (recipes' own).

The forward pass computes with the tensor itself, and so does what is observed there. Whatever the
backward pass needs it for, it has the copy: the derivative of the operation that read the tensor,
and what that gave where it is computed again. A gradient is then off by the copy's rounding, 2^-4
of every element at most for E4M3 under a group's scale, and the loss by nothing.

Source: COAT (arXiv:2410.19313 §5), whose forward pass reads the copies too: its gradients are those
of what it computed, and every layer adds their rounding to the loss. Its scales are BF16 numbers,
ours powers of two, a byte less for every group of 16.
"""

import dataclasses
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.formats import BF16, E4M3
from fp8jax.ops import stored_params
from fp8jax.quantization import quantized_tensor
from fp8jax.recipe.quant import Quant, Scale

# By which a policy of rematerialization keeps these copies (see jax.ad_checkpoint.checkpoint_name).
NAME = "kept"

# By name, for configurations.
QUANTS: dict[str, Quant | None] = {
  "none": None,
  # Differentiation as it is keeps several float32 arrays of a plain norm or SwiGLU.
  "bf16": Quant(BF16, scale=Scale.NONE),
  # COAT's groups along channels: 1.0625 bytes per element.
  "e4m3_16": Quant(E4M3, (1, 16), Scale.POW2),
  # As long as the tiles of block-scaled GEMMs: 1.008 bytes.
  "e4m3_128": Quant(E4M3, (1, 128), Scale.POW2),
}


@dataclasses.dataclass(frozen=True)
class ResidualFormats:
  """Formats of residuals; None saves them unquantized.

  Attributes:
    norm_inputs: inputs of norms.
    gate_up: gate and up, the inputs of silu(gate) * up.
    layer_inputs: the input of a layer, where remat "full" saves nothing else.
  """

  norm_inputs: Quant | None = None
  gate_up: Quant | None = None
  layer_inputs: Quant | None = None

  @property
  def gate_up_group(self) -> int:
    """Channels of gate and up that share a scale; 1 where none do."""
    return max(self.gate_up.tile[1], 1) if self.gate_up is not None else 1


def keep(x, quant: Quant):
  """x as it waits: a QuantizedTensor, named NAME."""
  return jax.tree.map(lambda t: checkpoint_name(t, NAME), quantized_tensor.pack(x, quant))


def restored(kept, dtype):
  """What `keep` was given, within its rounding; anything else as it is."""
  return kept.unpack().astype(dtype) if isinstance(kept, quantized_tensor.QuantizedTensor) else kept


def from_narrow_input(function: Callable, quant: Quant) -> Callable:
  """function(x, *rest), differentiated by computing it again from a narrow copy of x.

  Nothing else of it waits for the backward pass. Its sites observe what they see there.

  Args:
    function: (x, *rest) -> an array of x's dtype; all that it depends on is among its arguments.
    quant: how x waits.
  """

  @jax.custom_vjp
  def run(x, *rest):
    return function(x, *rest)

  def forward(x, *rest):
    return function(x, *rest), (keep(x, quant), stored_params.without_grad_placeholders(rest))

  def backward(residuals, g):
    kept, rest = residuals
    # jax.checkpoint's name for what is computed again: the proof of the step looks for it.
    with jax.named_scope("rematted_computation"):
      _, pull = jax.vjp(
        function, restored(kept, g.dtype), *stored_params.with_grad_placeholders(rest)
      )
    return pull(g)

  run.defvjp(forward, backward)
  return run
