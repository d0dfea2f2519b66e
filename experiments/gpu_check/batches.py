"""A small .npz of token windows for the stage `cpt`, written without a data loader.

command: python experiments/gpu_check/batches.py FILE.npz --tokenizer assets/smollm2-135m
         [--length 512] [--text 'folder/**/*.txt']
needs:   tokenizers; by default the text is the Python language reference that ships with Python,
         as in `make run`

The file holds `tokens` uint16 or int32 [sequences, length + 1] and `text`, which names its origin.
"""

import argparse
import pathlib
import sys

import numpy as np


def cut(documents, length: int) -> np.ndarray:
  """int32 [sequences, length + 1]: documents end to end, cut into windows; the rest is dropped."""
  tokens = np.concatenate(list(documents))
  num = len(tokens) // (length + 1)
  if not num:
    raise ValueError(f"{len(tokens)} tokens are no sequence of {length} + 1")
  return tokens[: num * (length + 1)].reshape(num, length + 1).astype(np.int32)


def write(path: str, windows: np.ndarray, text: str):
  """Args: text: where the tokens come from."""
  small = windows.astype(np.uint16) if windows.max() < 2**16 else windows
  np.savez_compressed(path, tokens=small, text=np.str_(text))


def read(path: str) -> tuple[np.ndarray, str]:
  """(int32 [sequences, length + 1], origin).

  Raises:
    FileNotFoundError, ValueError: with the command that writes such a file.
  """
  how = "write it with: python experiments/gpu_check/batches.py FILE.npz --tokenizer FOLDER"
  if not path or not pathlib.Path(path).exists():
    raise FileNotFoundError(f"--batches={path!r} does not exist; {how}")
  with np.load(path, allow_pickle=False) as file:
    if "tokens" not in file or file["tokens"].ndim != 2 or file["tokens"].dtype.kind not in "iu":
      raise ValueError(f"{path} holds no integers `tokens` [sequences, length + 1]; {how}")
    return file["tokens"].astype(np.int32), str(file["text"]) if "text" in file else "unknown"


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("file")
  parser.add_argument("--tokenizer", required=True, help="a folder with tokenizer.json")
  parser.add_argument("--eos", default="<|endoftext|>", help="the token that ends a document")
  parser.add_argument("--length", type=int, default=512)
  parser.add_argument("--text", default="", help="a glob of text files, a document each")
  flags = parser.parse_args()
  sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
  from fp8jax.data import sources, tokenize

  tokenizer = tokenize.Tokenizer(flags.tokenizer, flags.eos)
  source = (
    sources.TextFiles(sources.find_files(flags.text)) if flags.text else sources.PydocTopics()
  )
  texts = [source[i]["text"] for i in range(len(source)) if "text" in source[i]]
  windows = cut((tokenizer.encode(text) for text in texts), flags.length)
  write(flags.file, windows, flags.text or "the Python language reference (pydoc topics)")
  print(f"{flags.file}: {len(windows)} sequences of {flags.length} tokens")


if __name__ == "__main__":
  main()
