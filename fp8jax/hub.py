"""Models of the Hugging Face hub by their ids, "Qwen/Qwen2.5-1.5B", in its own cache.

Wherever a folder of a model is expected an id may stand. A local folder of that name comes first.
`fetch` downloads what a job names, once per host; `local` then finds it without a network.
"""

import os
import re
import socket
import zlib
from collections.abc import Collection

import jax
import numpy as np
from jax.experimental import multihost_utils

from fp8jax.errors import UserError

# Never pickles.
TOKENIZER = ("*.json", "*.txt", "*.model", "*.jinja")
WEIGHTS = (*TOKENIZER, "*.safetensors")
# Of subfolders templates alone (additional_chat_templates/).
_SUBFOLDERS = [f"*/{pattern}" for pattern in WEIGHTS if pattern != "*.jinja"]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Where the shipped configurations expect models that were put there by hand.
_ASSETS = "assets"


def is_id(name: str) -> bool:
  """Whether a name is of the hub: ORG/NAME, and no path that is or could be on this machine."""
  if os.path.exists(os.path.expanduser(name)) or not _ID.fullmatch(name):
    return False
  folder = name.split("/")[0]
  return folder != _ASSETS and not os.path.isdir(folder) and not name.endswith(".json")


def local(name: str) -> str:
  """The path that a name stands for: the path itself, or the id's folder in the hub's cache."""
  if not is_id(name):
    return os.path.expanduser(name)
  try:
    # The files that every `fetch` asks for: without patterns the hub's library expects all.
    return _snapshot(name, TOKENIZER, local_files_only=True)
  except (OSError, ValueError):  # not in the cache; the reader of the path says so
    return name


def fetch(wanted: dict[str, Collection[str]]):
  """Downloads ids into the hub's cache, on every host by the first of its processes.

  Args:
    wanted: {name: patterns of files}; names that are no ids are left alone.

  Raises:
    UserError: an id could not be fetched; with the command that does it elsewhere.
  """
  ids = {name: patterns for name, patterns in wanted.items() if is_id(name)}
  if not ids:
    return
  gather = multihost_utils.process_allgather
  host = zlib.crc32(socket.gethostname().encode()) >> 1
  hosts = np.ravel(gather(np.asarray(host, np.int32))).tolist()
  problem = _download(ids) if hosts.index(host) == jax.process_index() else None
  gather(np.asarray(problem is None, np.int32))  # the others wait here until the files are there
  if problem:
    raise UserError(problem)


def _download(ids: dict[str, Collection[str]]) -> str | None:
  """The reason of a failure, or None."""
  for name, patterns in ids.items():
    try:
      _snapshot(name, patterns)
    except ModuleNotFoundError:
      raise
    except Exception as e:  # of the library, of its HTTP client and of sockets
      reason = " ".join(str(e).split()).rstrip(".")
      return (
        f"{name} is no folder here, and the Hugging Face hub gave none: {type(e).__name__}: "
        f"{reason}; {remedy(name)}"
      )
  return None


def _snapshot(name: str, patterns: Collection[str], local_files_only: bool = False) -> str:
  import huggingface_hub  # extra `hf`

  return huggingface_hub.snapshot_download(
    name, allow_patterns=list(patterns), ignore_patterns=_SUBFOLDERS,
    local_files_only=local_files_only,
  )  # fmt: skip


def remedy(name: str) -> str:
  """How to get the folder that a name stands for, for the end of a message."""
  last = os.path.basename(os.path.normpath(name))
  if last == "smollm2-135m":
    command = f"python -m fp8jax.models.hf.convert_gguf {name}"
    return f"expected a Hugging Face folder; write it with: {command}"
  source, target = (name, f"{_ASSETS}/{last}") if is_id(name) else (f"ORG/{last}", name)
  where = f", and name {target} instead" if is_id(name) else ""
  return (
    "expected a Hugging Face folder; where there is a network: "
    f"hf download {source} --local-dir {target}{where}"
  )
