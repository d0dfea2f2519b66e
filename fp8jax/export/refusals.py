"""Why an export has no matrices, or other codes than those that are there: the messages."""

from collections.abc import Mapping

from fp8jax.export import served
from fp8jax.models.hf import schemes
from fp8jax.models.hf.schemes import COMPRESSED, FINE_GRAINED, Scheme
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import CURRENT, Quant

# The remedy where static scales of activations are missing.
TABLE = "export.input_scales to a table of --job=calibrate of this model"


def by(shape: tuple[int, ...]) -> str:
  return "x".join(map(str, shape))


def nothing(scheme: Scheme, unquantized: Mapping[str, str]) -> str:
  reasons = ", ".join(list(dict.fromkeys(unquantized.values()))[:3])
  fix = "export.format='hf-bf16'"
  if scheme.label == "block":
    fix = f"export.format='compressed-tensors' with export.strategy='channel', or {fix}"
  return f"export.format: no matrix of this model would be quantized ({reasons}); set {fix}"


def other_codes(of: tuple[str, str, str], quant: Quant, scheme: Scheme) -> str:
  """Codes would change: the message, with the formats that keep them."""
  whose, changed, why = of
  if changed:
    return (
      f"export.format: with precision.smooth_swiglu='channel', or folded, {changed} is not the "
      "weight whose codes training multiplied; set export.requantize=True to requantize it, or "
      "export.format='hf-bf16'"
    )
  has, theirs = f"{whose} multiplied weights as", "those of training"
  if whose == "the folder":
    has, theirs = f"{whose} holds weights as", "the folder's"
  again = f"export.requantize=True to requantize them as {scheme.weight}"
  if scheme.inputs and scheme.inputs.source != CURRENT:
    again += f", and {TABLE}"
  if why:
    return f"export.format: {has} {quant}: {why}. Set export.format='hf-bf16', or {again}"
  keeping = [f"export.format={name!r}" for name in _keeping(quant)]
  if "export.format='hf-fp8-block'" in keeping and scheme.method == FINE_GRAINED:
    keeping = ["export.scale_fmt='auto'"]  # it is the scales that do not suit
  if "export.format='compressed-tensors'" in keeping and scheme.method == COMPRESSED:
    keeping = ["export.strategy='auto'"]
  keeping = keeping or ["export.format='hf-bf16'"]
  return (
    f"export.format: {has} {quant}, and this format has {scheme.weight}: the codes would not be "
    f"{theirs}. Set {' or '.join(keeping)} to keep the weights as they are, or {again}"
  )


def _keeping(quant: Quant) -> list[str]:
  """The formats that hold matrices quantized so, "hf-fp8-block"."""
  held = schemes.fp8(FINE_GRAINED).holds(quant)
  try:
    made = served.container(quant, None)
  except ValueError:
    made = ""
  return ["hf-fp8-block"] * held + ["compressed-tensors"] * bool(made)


def unlike(fused: Mapping[str, Quant]) -> str:
  """Matrices that servers multiply as one are quantized in several ways."""
  named = ", ".join(f"{name} is {quant}" for name, quant in fused.items())
  return f"servers multiply them as one, and {named}; give them one recipe in precision.rules"


def quantized_already(name: str, quant: Quant | None, recipe: Recipe) -> str:
  return (
    f"export.format: the folder is quantized already, {name} as {quant}, and recipe "
    f"{recipe.name!r} asks for {recipe.fwd.rhs}: start from the unquantized model, or set "
    "export.requantize=True to quantize the rounded weights again"
  )
