"""quantization_config of config.json: which matrices of a folder are quantized, and how.

compressed-tensors has groups of targets, each with a scheme, and a list of modules that none of
them takes; DeepSeek's and ModelOpt's methods have one scheme. Names of modules, regular expressions
("re:...") and the class "Linear" are targets, in this order of preference.

Sources: compressed-tensors 0.20 (quant_args.py, quant_scheme.py, match.py); transformers 5.24
FineGrainedFP8Config; NVIDIA ModelOpt's hf_quant_config.json; vLLM 0.32 for both names of skipped
modules.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from fp8jax.errors import UserError
from fp8jax.formats import E2M1, E4M3, INT4, INT8
from fp8jax.models.hf import schemes
from fp8jax.models.hf.schemes import COMPRESSED, FINE_GRAINED, HEAD, MODELOPT, SCALE_FMTS, Scheme
from fp8jax.recipe.quant import CURRENT, WHOLE, Quant, Scale, Static

MODELOPT_FILE = "hf_quant_config.json"
MIXED = "mixed-precision"


@dataclasses.dataclass(frozen=True)
class Quantization:
  """The quantization_config of config.json, written and read.

  Attributes:
    method: quant_method.
    groups: (targets, scheme) of each, in order.
    ignored: modules that no group takes.
    kv_cache: whether keys and values have scales.
  """

  method: str
  groups: tuple[tuple[tuple[str, ...], Scheme], ...]
  ignored: tuple[str, ...] = ()
  kv_cache: bool = False

  def scheme(self, weight: str) -> Scheme | None:
    """Of the linear layer with this weight, "X.weight"; None where it is not quantized."""
    module = weight.removesuffix(".weight")
    if any(_rank(module, target) is not None for target in self.ignored):
      return None
    found = [
      (rank, number)
      for number, (targets, _) in enumerate(self.groups)
      for target in targets
      if (rank := _rank(module, target)) is not None
    ]
    return self.groups[min(found)[1]][1] if found else None


def _rank(module: str, target: str) -> int | None:
  """The preference of a target that a linear module matches; None for another."""
  if target == module:
    return 0
  if target.startswith("re:"):
    return 1 if re.match(target[3:], module) else None
  return 2 if target == "Linear" else None


# --- writing -------------------------------------------------------------------------------------


def to_config(
  of: Mapping[str, Scheme], unquantized: list[str], scale_fmt: str = "float32",
  kv_cache: bool = False, head: str = HEAD,
) -> dict[str, Any]:  # fmt: skip
  """quantization_config.

  Args:
    of: {weight's name: scheme}, all of one quant_method.
    unquantized: names of the other linear modules, e.g. "model.layers.0.mlp.up_proj".
    scale_fmt: of SCALE_FMTS, which FINE_GRAINED states.
    kv_cache: whether the folder has scales of keys and values.
    head: name of the model's, which is never quantized.
  """
  ignored, first = [head, *unquantized], next(iter(of.values()))
  if first.method == FINE_GRAINED:
    # transformers and vLLM each read one of the two names of the skipped modules.
    pow2 = {"scale_fmt": "ue8m0"} if scale_fmt == "ue8m0" else {}
    return {
      "quant_method": FINE_GRAINED, "fmt": "e4m3", "activation_scheme": "dynamic",
      "weight_block_size": list(first.weight.tile), **pow2,
      "modules_to_not_convert": ignored, "ignored_layers": ignored,
    }  # fmt: skip
  if first.method == MODELOPT:
    args = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    inputs = None if first.inputs is None else args
    group = {"targets": ["Linear"], "weights": args, "input_activations": inputs}
    algorithm = "W4A16_NVFP4" if inputs is None else "NVFP4"
    return {
      "quant_method": MODELOPT, "quant_algo": algorithm, "config_groups": {"group_0": group},
      "ignore": ignored, "kv_cache_scheme": _KV_CACHE if kv_cache else None,
    }  # fmt: skip
  members: dict[str, list[str]] = {}
  groups = {}
  for name, scheme in of.items():
    group = _group_of(scheme)
    members.setdefault(str(group), []).append(name.removesuffix(".weight"))
    groups[str(group)] = group
  # Of several groups each names its modules, so that a matrix is in one alone.
  for key, names in members.items():
    groups[key] = {"targets": names if len(groups) > 1 else ["Linear"], **groups[key]}
  formats = {group["format"] for group in groups.values()}
  return {
    "quant_method": COMPRESSED, "format": formats.pop() if len(formats) == 1 else MIXED,
    "quantization_status": "compressed",
    "config_groups": {f"group_{i}": group for i, group in enumerate(groups.values())},
    "ignore": ignored, "kv_cache_scheme": _KV_CACHE if kv_cache else None,
  }  # fmt: skip


def group(scheme: Scheme) -> str:
  """A scheme's entry in config.json: servers multiply alike where it is equal."""
  return str(_group_of(scheme))


_COMMON = {"num_bits": 8, "type": "float", "symmetric": True}
_KV_CACHE = _COMMON | {"strategy": "tensor", "dynamic": False}


def _group_of(scheme: Scheme) -> dict[str, Any]:
  """Of compressed-tensors, without targets."""
  weights = _args(scheme.weight, scheme.tile) | {"dynamic": False}
  group = {"weights": weights}
  if scheme.inputs is not None:
    inputs = _args(scheme.inputs, scheme.inputs.tile)
    if scheme.inputs.source == CURRENT and scheme.inputs.tile == (1, WHOLE):
      inputs["strategy"] = "token"
    inputs["dynamic"] = "local" if "tensor_group" in inputs.values() else not scheme.static_inputs
    group["input_activations"] = inputs
  return group | {"format": scheme.container}


def _args(q: Quant, tile: tuple[int, int]) -> dict[str, Any]:
  """QuantizationArgs without `dynamic`."""
  kind = "int" if q.format in (INT4, INT8) else "float"
  args: dict[str, Any] = {"num_bits": q.format.bits, "type": kind, "symmetric": True}
  if tile == (WHOLE, WHOLE) or tile == (1, WHOLE):
    return args | {"strategy": "tensor" if tile[0] == WHOLE else "channel"}
  if tile[0] != 1:
    return args | {"strategy": "block", "block_structure": list(tile)}
  args |= {"strategy": "group", "group_size": tile[1]}
  if q.scale is Scale.E4M3_OVER_F32:
    args |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
  elif tile[1] == 32 and kind == "float":
    args["scale_dtype"] = "torch.uint8"
  return args


def modelopt_file(config: Mapping[str, Any]) -> dict[str, Any]:
  """The content of hf_quant_config.json, of the quantization_config that `to_config` made."""
  kv = "FP8" if config["kv_cache_scheme"] else None
  of_all = {"quant_algo": config["quant_algo"], "kv_cache_quant_algo": kv, "group_size": 16}
  return {
    "producer": {"name": "fp8jax"}, "quantization": of_all | {"exclude_modules": config["ignore"]}
  }  # fmt: skip


# --- reading -------------------------------------------------------------------------------------


def of_config(c: Mapping[str, Any], where: str) -> Quantization | None:
  """The schemes that a parsed config.json states; None without quantization_config.

  Raises:
    UserError: a scheme that is not read; names the key.
  """
  stated = c.get("quantization_config")
  if stated is None:
    return None
  method = stated.get("quant_method") if isinstance(stated, Mapping) else None
  readers = {FINE_GRAINED: _fine_grained, COMPRESSED: _compressed, MODELOPT: _modelopt}
  if not isinstance(method, str) or method not in readers:
    raise UserError(
      f"{where}: quantization_config={stated!r} is not supported; known quant_methods: "
      f"{', '.join(readers)}"
    )
  return readers[method](stated, f"{where}: quantization_config")


def _fine_grained(stated: Mapping[str, Any], where: str) -> Quantization:
  _expect(stated, {"fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)}, where)
  block = _block(stated.get("weight_block_size"), f"{where}: weight_block_size")
  scale_fmt = stated.get("scale_fmt") or "float32"
  if scale_fmt not in (*SCALE_FMTS, "float"):
    raise UserError(f"{where}: scale_fmt={scale_fmt!r}, expected one of {', '.join(SCALE_FMTS)}")
  fmt = "ue8m0" if scale_fmt == "ue8m0" else "float32"
  # Which modules are skipped is seen by their dtype: writers name them in several ways.
  return Quantization(
    FINE_GRAINED, ((("Linear",), schemes.fp8(FINE_GRAINED, "block", fmt, block)),)
  )


def _modelopt(stated: Mapping[str, Any], where: str) -> Quantization:
  _expect(stated, {"quant_algo": ("NVFP4", "W4A16_NVFP4")}, where)
  inputs = schemes.NVFP4_INPUTS if stated["quant_algo"] == "NVFP4" else None
  scheme = Scheme(MODELOPT, schemes.NVFP4, inputs)
  ignored, kv = stated.get("ignore") or (), stated.get("kv_cache_scheme") is not None
  # Its patterns are those of a shell.
  ignored = tuple("re:" + re.escape(str(i)).replace(r"\*", ".*") + "$" for i in ignored)
  return Quantization(MODELOPT, ((("Linear",), scheme),), ignored, kv)


def _compressed(stated: Mapping[str, Any], where: str) -> Quantization:
  known = tuple(name for name in schemes.CONTAINERS if "-" in name)
  _expect(stated, {"format": (*known, MIXED)}, where)
  if transforms := stated.get("transform_config"):
    raise UserError(
      f"{where}: transform_config={str(transforms)[:80]}: rotations while the model runs are not "
      "supported; quantize without them (R1 and R2 alone, which weights hold)"
    )
  groups = stated.get("config_groups")
  if not isinstance(groups, Mapping) or not groups:
    raise UserError(f"{where}: config_groups={groups!r}, expected groups of Linear layers")
  made = []
  for name, group in groups.items():
    of = f"{where}: {name}"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
      raise UserError(f"{where}: config_groups lacks weights; fetch the file again")
    container = group.get("format") or stated["format"]
    _expect({"format": container}, {"format": known}, of)
    weight = _quant(weights, f"{of}: weights")
    _expect(group, {"output_activations": (None,)}, of)
    inputs = group.get("input_activations")
    inputs = None if inputs is None else _inputs(inputs, f"{of}: input_activations")
    made.append((tuple(map(str, group.get("targets") or ())), Scheme(container, weight, inputs)))
  ignored = tuple(map(str, stated.get("ignore") or ()))
  return Quantization(
    COMPRESSED, tuple(made), ignored, stated.get("kv_cache_scheme") is not None
  )  # fmt: skip


_FORMATS = {("float", 8): E4M3, ("float", 4): E2M1, ("int", 8): INT8, ("int", 4): INT4}


def _quant(args: Any, where: str) -> Quant:
  """Of QuantizationArgs."""
  if not isinstance(args, Mapping):
    raise UserError(f"{where}={args!r}, expected QuantizationArgs of compressed-tensors")
  _expect(args, {"symmetric": (True, None)}, where)
  kind = str(args.get("type")), int(args.get("num_bits") or 0)
  if kind not in _FORMATS:
    known = ", ".join(f"{t} of {n} bits" for t, n in _FORMATS)
    raise UserError(f"{where}: {kind[0]} of {kind[1]} bits is not supported, expected {known}")
  allowed = ("tensor", "channel", "token", "block", "group", "tensor_group")
  _expect(args, {"strategy": allowed}, where)
  strategy, scale = args["strategy"], Scale.F32
  tile = {"tensor": (WHOLE, WHOLE), "channel": (1, WHOLE), "token": (1, WHOLE)}.get(strategy)
  if strategy == "block":
    tile = _block(args.get("block_structure"), f"{where}: block_structure")
  if tile is None:
    _, size = tile = _block([1, args.get("group_size")], f"{where}: group_size")
    if kind[0] == "float" and size == 16:
      scale = Scale.E4M3_OVER_F32
    elif kind[0] == "float" and size == 32:
      scale = Scale.EVEN if kind[1] == 4 else Scale.POW2  # mxfp_utils.py: up above 1.75 * 2^n
  return Quant(_FORMATS[kind], tile, scale, is_joint=scale is Scale.E4M3_OVER_F32)


def _inputs(args: Any, where: str) -> Quant:
  """Of activations, whose scale of a tensor may be stored."""
  quant = _quant(args, where)
  whole, is_local = quant.tile == (WHOLE, WHOLE), quant.scale is Scale.E4M3_OVER_F32
  is_static = whole and not args.get("dynamic") or is_local
  return dataclasses.replace(quant, source=Static(), is_joint=False) if is_static else quant


def _expect(stated: Mapping[str, Any], allowed: Mapping[str, tuple], where: str):
  for key, values in allowed.items():
    if stated.get(key) not in values:
      known = ", ".join(repr(v) for v in values if v is not None)
      raise UserError(f"{where}: {key}={stated.get(key)!r} is not supported, expected {known}")


def _block(value, where: str) -> tuple[int, int]:
  is_pair = isinstance(value, (list, tuple)) and len(value) == 2
  if not is_pair or not all(type(n) is int and 0 < n <= 1 << 20 for n in value):
    raise UserError(f"{where}={value!r}, expected two positive integers such as [128, 128]")
  return value[0], value[1]
