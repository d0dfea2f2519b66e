"""Which products servers have: from a recipe's forward product to a folder's scheme.

Sources: the presets of compressed-tensors 0.20 (quant_scheme.py), as llm-compressor writes them,
and the products that vLLM 0.32 has kernels for.
"""

import dataclasses

from fp8jax.formats import E2M1, E4M3, E4M3_240, INT4, INT8
from fp8jax.models.hf.schemes import BLOCK, COMPRESSED, MODELOPT, NVFP4_INPUTS, POWERS, Scheme
from fp8jax.recipe.quant import WHOLE, Quant, Scale, Static

# Why no server multiplies a format's weights, by name.
_UNSERVED = {
  "e5m2": "the kernels of servers multiply weights in E4M3; take fp8_dynamic",
  "e3m4": "no container and no server has E3M4; take fp8_dynamic or int8",
  "e3m4_30": "no container and no server has E3M4; take fp8_dynamic or int8",
}
_OTHER = (
  "servers multiply weights of 8 bits (take fp8_dynamic, int8 or mxfp8_ste) and of 4 (take w4a16, "
  "mxfp4a16 or nvfp4a16)"
)


# Of activations that are quantized like their weights, by container.
_TILES = {
  "mxfp8-quantized": (E4M3, 32), "mxfp4-pack-quantized": (E2M1, 32),
  "nvfp4-pack-quantized": (E2M1, 16),
}  # fmt: skip


def scheme(w: Quant, x: Quant | None, method: str = COMPRESSED) -> Scheme:
  """The scheme of the forward product of x [tokens, in] and w [out, in].

  Activations whose scale is the current one of their tensor are scaled by token, as servers do.

  Raises:
    ValueError: servers have no such product; says why and what to take.
  """
  name = container(w, x)
  inputs = _inputs(name, w, x)
  if method == MODELOPT and name != "nvfp4-pack-quantized":
    raise ValueError(
      f"export.format='modelopt' holds NVFP4 alone, not {w}; take "
      "export.format='compressed-tensors'"
    )
  return Scheme(MODELOPT if method == MODELOPT else name, w, inputs)


def _inputs(container: str, w: Quant, x: Quant | None) -> Quant | None:
  """The activations that servers multiply such weights by."""
  if x is None:
    if container == "float-quantized":
      raise ValueError(f"servers multiply {w} by E4M3, not by 16 bits; take fp8_dynamic or mxfp8")
    return None
  x = dataclasses.replace(x, format=E4M3 if x.format == E4M3_240 else x.format)
  tiles = _TILES | ({container: (E4M3, 128)} if w.tile == BLOCK else {})
  if container in tiles:
    format, size = tiles[container]
    if (x.format, x.tile) != (format, (1, size)):
      raise ValueError(f"servers multiply {w} by {format} 1x{size}, not by {x}")
    if x.scale is Scale.E4M3_OVER_F32:
      return NVFP4_INPUTS
    # No folder says how: readers scale blocks of activations by rules of their own, those of 128
    # in float32, those of MX by powers of two (compressed-tensors: mxfp_utils.py).
    of_mx = Scale.EVEN if format == E2M1 else Scale.POW2
    return Quant(format, (1, size), of_mx if size == 32 else Scale.F32)
  own = INT8 if w.format == INT8 else E4M3
  if x.format != own or x.tile[1] != WHOLE:
    raise ValueError(f"servers multiply {w} by {own} of a token or a tensor, not by {x}")
  if not isinstance(x.source, Static):
    return Quant(own, (1, WHOLE))
  return Quant(own, source=Static())


def container(w: Quant, x: Quant | None) -> str:
  """The container that such weights have in compressed-tensors; raises as `scheme`."""
  is_float = w.scale in (Scale.F32, *POWERS)
  if w.transform or w.rounds_randomly:
    raise ValueError(f"no server rotates or draws: {w}; quantize the weights without")
  if w.format in (E4M3, E4M3_240):
    if w.tile in ((WHOLE, WHOLE), (1, WHOLE), BLOCK) and is_float:
      return "float-quantized"
    if w.tile == (1, 32) and w.scale in POWERS:
      return "mxfp8-quantized"
  elif w.format in (INT4, INT8):
    is_grouped = w.tile[0] == 1 and w.tile[1] in (WHOLE, 32, 64, 128)
    # INT4 by E4M3 too: compressed-tensors reads it in either container, vLLM in this one alone.
    if is_float and is_grouped and (x is None or w.format == INT4):
      return "pack-quantized"
    if is_float and w.tile in ((WHOLE, WHOLE), (1, WHOLE)):
      return "int-quantized"
  elif w.format == E2M1:
    if w.tile == (1, 32) and w.scale in POWERS:
      return "mxfp4-pack-quantized"
    if w.tile in ((1, 16), (16, 16)) and w.scale is Scale.E4M3_OVER_F32:
      return "nvfp4-pack-quantized"
  else:
    raise ValueError(f"weights in {w.format}: {_UNSERVED.get(w.format.name, _OTHER)}")
  raise ValueError(f"no container has scales of {w}: {_OTHER}")
