"""Memory at the peak of a compiled step, as XLA has assigned it.

The compiler says how large the one block is that all temporaries share, not what is in it. It can
write down where in the block every value lies and from when to when it is needed; from that comes
what is there at a time, and what of the block is empty even then.
"""

import dataclasses
import pathlib
import re
import tempfile


@dataclasses.dataclass(frozen=True)
class Buffer:
  """A value in the block.

  Attributes:
    name: of the instruction that gives it.
    shape: "bf16[32768,18944]"; of several results, or of none, "".
    start: first byte in the block.
  """

  name: str
  shape: str
  start: int
  nbytes: int


def compile_and_read(lowered):
  """(the compiled program, its buffers at the peak; nothing if XLA does not say)."""
  with tempfile.TemporaryDirectory() as folder:
    program = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
    texts = []
    for what in ("buffer-assignment", "live-range"):
      paths = sorted(pathlib.Path(folder).glob(f"*.jit_step.*-{what}.txt"))
      texts.append(paths[-1].read_text() if paths else "")
  return program, peak(*texts)


def peak(assignment: str, live_ranges: str) -> list[Buffer]:
  """Values in the block when most of it is in use, largest first; no byte is counted twice.

  Args:
    assignment, live_ranges: as XLA writes them beside a program.
  """
  held = _temporaries(assignment)
  # Value -> (from, to), in the order of the schedule.
  lines = re.findall(r"^    (\S+\}):(\d+)-(\d+)$", live_ranges, re.M)
  spans = {name: (int(begin), int(end)) for name, begin, end in lines}
  by_time: dict[int, list[Buffer]] = {begin: [] for begin, _ in spans.values()}
  for value, (begin, end) in ((v, spans[v.name]) for v in held if v.name in spans):
    for time, there in by_time.items():
      if begin <= time <= end:
        there.append(value)
  apart = (_apart(there) for there in by_time.values())
  return max(apart, key=lambda there: sum(v.nbytes for v in there), default=[])


def _temporaries(assignment: str) -> list[Buffer]:
  buffers, is_block = [], False
  for line in assignment.splitlines():
    if line.startswith("allocation "):
      is_block = "preallocated-temp" in line
    value = re.match(r" value: <\d+ (\S+).*?> \(size=(\d+),offset=(\d+)\): (.*)", line)
    if value and is_block:
      name = value[1] if value[1].endswith("}") else value[1] + "{}"
      shape = re.match(r"\w+\[[\d,]*\]", value[4])
      buffers.append(Buffer(name, shape[0] if shape else "", int(value[3]), int(value[2])))
  return buffers


def _apart(values: list[Buffer]) -> list[Buffer]:
  """Without what shares its bytes with a larger one: a loop's result is its last state."""
  kept, taken = [], []
  for value in sorted(values, key=lambda v: -v.nbytes):
    begin, end = value.start, value.start + value.nbytes
    if not any(begin < b and a < end for a, b in taken):
      taken.append((begin, end))
      kept.append(value)
  return kept
