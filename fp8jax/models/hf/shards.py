"""Files of the safetensors format, a tensor at a time.

8 bytes little-endian header size, a JSON header padded with spaces, the tensors' bytes
(https://github.com/huggingface/safetensors#format). safetensors' own writer wants all tensors at
once, and its NumPy reader knows no FP8.
"""

import dataclasses
import json
import struct
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from fp8jax import records
from fp8jax.models.hf import fp8_formats

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Piece:
  """Tensors that are made together and lie side by side in a file.

  Attributes:
    tensors: (name, dtype code, shape) of each.
    make: gives their values in this order, dtypes included.
  """

  tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
  make: Callable[[], Sequence[np.ndarray]]

  @property
  def nbytes(self) -> int:
    return sum(fp8_formats.nbytes(code, shape) for _, code, shape in self.tensors)


def split(pieces: Iterable[Piece], shard_bytes: int) -> dict[str, list[Piece]]:
  """{file name: its pieces}, in order, no file larger than shard_bytes unless one piece is."""
  groups: list[list[Piece]] = [[]]
  total = 0
  for piece in pieces:
    if groups[-1] and total + piece.nbytes > shard_bytes:
      groups.append([])
      total = 0
    groups[-1].append(piece)
    total += piece.nbytes
  if len(groups) == 1:
    return {SINGLE: groups[0]}
  count = len(groups)
  return {f"model-{i + 1:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups)}


def index(files: dict[str, list[Piece]]):
  """The content of INDEX."""
  names = {name: file for file, ps in files.items() for p in ps for name, _, _ in p.tensors}
  size = sum(p.nbytes for pieces in files.values() for p in pieces)
  return {"metadata": {"total_size": size}, "weight_map": names}


def write(path: str, pieces: list[Piece]):
  """One file. Every process must call this, the first writes."""
  header: dict = {"__metadata__": {"format": "pt"}}
  offset = 0
  for name, code, shape in (t for piece in pieces for t in piece.tensors):
    end = offset + fp8_formats.nbytes(code, shape)
    header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
    offset = end
  made = (tensor for piece in pieces for tensor in piece.make())
  if jax.process_index() != 0:
    for _ in made:  # the writer needs the shards that are here
      pass
    return
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with records.replacing(path) as part, open(part, "wb") as f:
    f.write(struct.pack("<Q", len(text)))
    f.write(text)
    for tensor in made:
      f.write(tensor.tobytes())


def read_bytes(path: str, name: str, dtype: np.dtype) -> np.ndarray:
  """A tensor of a dtype that safetensors' NumPy reader does not know.

  The file's header has been read by safetensors, which checks its offsets.
  """
  with open(path, "rb") as f:
    (size,) = struct.unpack("<Q", f.read(8))
    entry = json.loads(f.read(size))[name]
    start, end = entry["data_offsets"]
    f.seek(8 + size + start)
    return np.frombuffer(f.read(end - start), dtype).reshape(entry["shape"])
