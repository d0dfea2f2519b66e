"""The tensors of Hugging Face folders, read from safetensors; pickles never are."""

import functools
import glob
import json
import math
import os
import struct
from collections.abc import Callable
from typing import cast

import ml_dtypes
import numpy as np

from fp8jax import hub
from fp8jax.errors import UserError, inside
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import scheme_config, schemes
from fp8jax.models.hf.schemes import Scheme

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_DTYPE_OF = schemes.DTYPES | {CODES[name]: dtype for name, dtype in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def _open_file(path: str):
  import safetensors  # extra `hf`

  try:
    return safetensors.safe_open(path, "numpy")
  except safetensors.SafetensorError as e:
    raise UserError(f"{path} is no whole safetensors file ({e}); fetch it again") from e


# (name, codes, scheme) of a quantized weight -> float32 [out, in].
Values = Callable[[str, schemes.Codes, Scheme], np.ndarray]


class Folder:
  """The safetensors of a folder, by tensor name. Opens files as needed, one tensor at a time."""

  def __init__(self, folder: str, file: str = "", values: Values | None = None):
    """
    Args:
      folder: or an id of the Hugging Face hub.
      file: name of the one file to read, of adapters; "" for those of a model.
      values: of quantized matrices; None: code * scale.
    """
    self.folder, self.quantization, self._values = hub.local(folder), None, values
    index = os.path.join(self.folder, INDEX)
    if file:
      with _open_file(os.path.join(self.folder, file)) as f:
        self.files = dict.fromkeys(f.keys(), file)
      return
    if os.path.exists(index):
      listed = hf_config.read_json(self.folder, os.path.basename(index)).get("weight_map")
      if not isinstance(listed, dict) or any(not isinstance(f, str) for f in listed.values()):
        raise UserError(f"{index} has no weight_map from tensors to files; fetch it again")
      for file in set(listed.values()):
        inside(self.folder, file, f"{index}: weight_map")
      single = os.path.join(self.folder, SINGLE)
      if os.path.exists(single) and SINGLE not in listed.values():
        raise UserError(
          f"{single} and {index} are two sets of weights, of which transformers reads the first "
          "and vLLM the second; remove one of them"
        )
      self.files = listed
    else:
      self.files = {}
      for path in sorted(glob.glob(os.path.join(glob.escape(self.folder), "*.safetensors"))):
        with _open_file(path) as f:
          names_here = dict.fromkeys(f.keys(), os.path.basename(path))
        if twice := sorted(self.files.keys() & names_here):
          raise UserError(
            f"{path} and {self.files[twice[0]]!r} beside it both have {twice[0]}: two sets of "
            "weights; remove one of them"
          )
        self.files |= names_here
    # None where no config.json is: whoever reads the model then says so.
    path = os.path.join(self.folder, "config.json")
    stated = hf_config.read_json(self.folder, "config.json") if os.path.isfile(path) else {}
    self.quantization = scheme_config.of_config(stated, path)
    if not self.files:
      folder = glob.escape(self.folder)
      pickles = [p for end in ("bin", "pt*") for p in glob.glob(f"{folder}/*.{end}")]
      hint = (
        f"{os.path.basename(pickles[0])} is a pickle, which is never read: convert it with "
        "transformers' save_pretrained"
        if pickles
        else "expected model.safetensors or model.safetensors.index.json; fetch the model again, "
        "or name another folder"
      )
      raise FileNotFoundError(f"no safetensors in {self.folder!r}; {hint}")
    missing = sorted(
      {f for f in self.files.values() if not os.path.isfile(os.path.join(self.folder, f))}
    )
    if missing:
      raise FileNotFoundError(f"{index} names {missing[0]!r}, which is not in the folder")

  def open(self, name: str):
    return _open_file(os.path.join(self.folder, self.files[name]))

  def read(self, name: str) -> np.ndarray:
    """A tensor as it is stored, of FP8 the codes."""
    (shape, code), start = self.described[name], self._starts[name]
    if start is None:
      with self.open(name) as f:
        return f.get_tensor(name)
    # Safetensors' NumPy reader knows no FP8, and takes a millisecond to open a file.
    dtype, path = np.dtype(_DTYPE_OF[code]), os.path.join(self.folder, self.files[name])
    data = np.fromfile(path, np.uint8, math.prod(shape) * dtype.itemsize, offset=start)
    return data.view(dtype).reshape(shape)

  def scheme(self, weight: str) -> Scheme | None:
    """How a linear layer's weight, "X.weight", is stored; None: as numbers of 16 or 32 bits."""
    scheme = self.quantization and self.quantization.scheme(weight)
    is_wide = weight in self.described and self.described[weight][1] in CODES.values()
    if scheme is None or not is_wide:
      return scheme
    name = scheme.codes_name(weight)
    return scheme if name != weight and name in self.described else None

  def read_codes(self, weight: str) -> schemes.Codes:
    """The codes and scales of a weight that has a scheme.

    Raises:
      UserError: damaged scales, by name.
    """
    scheme = cast(Scheme, self.scheme(weight))
    return scheme.unpacked(self.read, weight, f"{self.folder!r}: ")

  def read_float(self, name: str) -> np.ndarray:
    """A weight as numbers: of a quantized matrix its values in float32, else as it is stored."""
    scheme = self.scheme(name) if name.endswith("_proj.weight") else None
    if scheme is None:
      return self.read(name)
    of, codes = self._values, self.read_codes(name)
    return of(name, codes, scheme) if of else schemes.dequantize(codes, scheme.tile)

  @functools.cached_property
  def _starts(self) -> dict[str, int | None]:
    """{name: offset in its file} of the tensors that NumPy can read; None for others."""
    starts = {}
    for file in sorted(set(self.files.values())):
      with open(os.path.join(self.folder, file), "rb") as f:
        (size,) = struct.unpack("<Q", f.read(8))  # of the header, which `described` has checked
        header = json.loads(f.read(size))
      for name, entry in header.items():
        is_known = name != "__metadata__" and entry["dtype"] in _DTYPE_OF
        if self.files.get(name, file) == file:
          starts[name] = 8 + size + entry["data_offsets"][0] if is_known else None
    return starts

  @functools.cached_property
  def described(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype code)} from the headers alone."""
    shapes = {}
    for file in sorted(set(self.files.values())):
      path = os.path.join(self.folder, file)
      with _open_file(path) as f:
        for name in f.keys():
          if self.files.get(name, file) == file:
            part = f.get_slice(name)
            shapes[name] = (tuple(part.get_shape()), part.get_dtype())
      lost = sorted(n for n, where in self.files.items() if where == file and n not in shapes)
      if lost:
        raise UserError(f"the index names {lost[0]} in {path}, which lacks it; fetch both again")
    return shapes
