"""The house in numbers, at one commit beside another.

  python tests/house_table.py 2bb238f HEAD

Lines of Python by ring, files over the length of one sitting, functions with many parameters, keys
of the configuration, and words that mean more than one thing.
"""

import ast
import collections
import io
import pathlib
import re
import subprocess
import sys
import tarfile

from guards import RINGS, ROOT

LONG, MANY = 400, 8  # lines of a file; parameters of a function
WORDS = ("found", "plan", "look", "looks", "told", "anew", "rung")


def sources(commit: str) -> dict[str, str]:
  """{"ops/linear.py": text} of fp8jax/ at a commit."""
  command = ["git", "archive", commit, "fp8jax", "configs/base.py"]
  data = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
  with tarfile.open(fileobj=io.BytesIO(data)) as archive:
    members = [m for m in archive if m.isfile() and m.name.endswith(".py")]
    return {m.name.removeprefix("fp8jax/"): archive.extractfile(m).read().decode() for m in members}


def keys(texts: dict[str, str]) -> int:
  """Leaves of the configuration: key(...) declarations, or before them assignments in base.py."""
  declared = sum(len(re.findall(r"= key\(", text)) for text in texts.values())
  base = texts["configs/base.py"]
  return declared or len(re.findall(r"^  c\.[\w.]+ = (?!ConfigDict\(\))", base, re.MULTILINE))


def numbers(commit: str) -> dict[str, int]:
  """{row: number} at a commit."""
  texts, ring_of = sources(commit), {f: ring for ring, folders in RINGS.items() for f in folders}
  library = {name: text for name, text in texts.items() if not name.startswith("configs/")}
  found: collections.Counter[str] = collections.Counter()
  for name, text in library.items():
    folder = pathlib.PurePath(name).parts[0] if "/" in name else ""
    lines = len(text.splitlines())
    found[f"lines, {ring_of.get(folder, 'folders that are gone')}"] += lines
    found["lines, all"] += lines
    found["files"] += 1
    found[f"files over {LONG} lines"] += lines > LONG
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        a = node.args
        found[f"functions of {MANY} and more parameters"] += (
          len(a.args) + len(a.kwonlyargs) + len(a.posonlyargs) >= MANY
        )
    for word in WORDS:
      found[f"the word {word!r}"] += len(re.findall(rf"\b{word}\b", text))
  return dict(found) | {"keys of the configuration": keys(texts)}


def main(commits: list[str]):
  columns = [numbers(commit) for commit in commits]
  names = list(dict.fromkeys(name for column in columns for name in column))
  print("| | " + " | ".join(commits) + " |", "|---" * (len(commits) + 1) + "|", sep="\n")
  for name in sorted(names):
    print(f"| {name} | " + " | ".join(f"{column.get(name, 0):,}" for column in columns) + " |")


if __name__ == "__main__":
  main(sys.argv[1:] or ["HEAD"])
