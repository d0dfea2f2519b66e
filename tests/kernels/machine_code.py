"""Hopper's machine code of a kernel, as nvdisasm prints it for Mosaic: what it costs a warp.

A line is "1:-:2:Y:05  /*0f30*/  @P1 FFMA R1, R2, R3, R4": before the address the scoreboards that
the instruction waits for, those that it sets, whether the warp yields, and clocks until the next.
"""

import re
from typing import NamedTuple

_LABEL = re.compile(r"^\.(L_\w+):")
_LINE = re.compile(r"^\s*(\S*?):\S*\s+/\*[0-9a-f]+\*/\s+(.*?)\s*$")
# Without a condition it goes back from code that is rarely run and lies elsewhere.
_BRANCH = re.compile(r"^@.*\bBRA\b.*`\(\.(L_\w+)\)")
_PRODUCT, _COPY, _WAIT = "QGMMA", "UTMALDG", "TRYWAIT"
_FIRST = re.compile(r"QGMMA.* RZ, !UPT")  # of a chain: it adds to nothing


class Instruction(NamedTuple):
  """One line. `waits`: for what a load or another instruction without a fixed length brings."""

  waits: bool
  text: str


def loops_of(sass: str) -> dict[str, float]:
  """What 128 of K cost a warp.

  Args:
    sass: of one kernel of tiles with 128 rows, with control codes.

  Returns:
    consumer: instructions of the loop that multiplies.
    waits: those of them from the first product of a chain to its last that wait, for a load or for
      the product before: the tensor core may run dry there. Reads of constants, which are short,
      count too.
    producer: instructions of the loop that copies, if it is another.

  Raises:
    ValueError: no loop multiplies.
  """
  instructions, loops = _parse(sass)
  multiplies, copies = (_innermost(word, instructions, loops) for word in (_PRODUCT, _COPY))
  if not multiplies:
    raise ValueError("no loop multiplies")
  chains = _chains([instructions[n] for n in multiplies])
  waits = sum(i.waits or "DEPBAR" in i.text for chain in chains for i in chain[1:])
  counts = {"consumer": len(multiplies) / len(chains), "waits": waits / len(chains)}
  if copies and copies != multiplies:
    # Each step waits once for its slot.
    steps = sum(_WAIT in instructions[n].text for n in copies)
    counts["producer"] = len(copies) / steps
  return counts


def program_of(sass: str) -> dict[str, int]:
  """{"program": instructions of a whole kernel, without those that fill it up}."""
  return {"program": sum(not i.text.startswith("NOP") for i in _parse(sass)[0])}


def _parse(sass: str) -> tuple[list[Instruction], list[range]]:
  """(all instructions, loops as ranges of them)."""
  instructions, labels, loops = [], {}, []
  for line in sass.splitlines():
    if label := _LABEL.match(line):
      labels[label[1]] = len(instructions)
    elif code := _LINE.match(line):
      instructions.append(Instruction(code[1] not in ("", "-"), code[2]))
      if (branch := _BRANCH.search(code[2])) and branch[1] in labels:
        loops.append(range(labels[branch[1]], len(instructions)))
  return instructions, loops


def _innermost(word: str, instructions, loops) -> range:
  """The shortest loop with such an instruction, empty if there is none."""
  having = [loop for loop in loops if any(word in instructions[n].text for n in loop)]
  return min(having, key=len, default=range(0))


def _chains(loop: list[Instruction]) -> list[list[Instruction]]:
  """From each chain's first product to its last; the loop may begin within a chain."""
  starts = [n for n, i in enumerate(loop) if _FIRST.search(i.text)]
  ends = [*starts[1:], *(len(loop) + n for n in starts[:1])]
  chains = [(loop * 2)[start:end] for start, end in zip(starts, ends)]
  last = lambda chain: max(n for n, i in enumerate(chain) if _PRODUCT in i.text)  # noqa: E731
  return [chain[: last(chain) + 1] for chain in chains]
