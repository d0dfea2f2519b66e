"""AIME24, AIME25, GPQA-diamond and LiveCodeBench v5, with InfiR2's protocol.

Source: arXiv:2509.22536 and its evaluation scripts (evalscope): temperature 0.65, top-p 0.95, the
output before the closing think tag removed; 32 samples of at most 31,000 tokens for AIME, 8 of
26,000 for GPQA-diamond, 8 of 27,000 for LiveCodeBench, whose problems are those of contests from
2024-08-01 to 2025-02-01. Their wording of AIME's system turn is not published; ours asks for the
same. The data are not part of this project: a task runs when its file lies in the data folder.
"""

import base64
import csv
import dataclasses
import hashlib
import io
import json
import os
import pickletools
import random
import re
import zlib
from collections.abc import Callable
from typing import Any

from fp8jax.data import text_files
from fp8jax.errors import UserError
from fp8jax.evaluation import code_sandbox, verifiers
from fp8jax.evaluation.tasks import Item, Protocol, Task, Verdict, check_items

_AIME_SYSTEM = "Reason step by step, and put the final answer within \\boxed{}, as in \\boxed{204}."
_GPQA_PROMPT = (
  "Answer the following multiple choice question. The last line of your response should be of the "
  "following format: 'ANSWER: [LETTER]' (without quotes) where [LETTER] is one of A,B,C,D. Think "
  "step by step before answering.\n\n{question}"
)
_CODE_PROMPT = "### Question:\n{question} ### Answer: (use the provided format with backticks)\n\n"
_WITH_STARTER = (
  "You will use the following starter code to write the solution to the problem and enclose your "
  "code within delimiters."
)
_WITHOUT_STARTER = (
  "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
  "test on the sample inputs). Enclose your code within delimiters as follows."
)
FIRST_CONTEST, LAST_CONTEST = "2024-08-01", "2025-02-01"


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A benchmark whose data a user brings.

  Attributes:
    file: its name in the data folder.
    items: how many there must be; 0 where the file decides.
    read: path -> items.
    task: all but the items and their source.
  """

  file: str
  format: str
  items: int
  read: Callable[[str], list[Item]]
  task: Task
  runs_code: bool = False

  def problems(self, name: str, data_dir: str, allow_code: bool) -> list[str]:
    """Why it cannot run, in words: the missing file and its format, or code that may not run."""
    texts = []
    path = os.path.join(os.path.expanduser(data_dir), self.file)
    if not os.path.isfile(path):
      texts.append(f"{name} needs {path}, which does not exist; put it there "
                   f"(eval.data_dir names the folder): {self.format}")  # fmt: skip
    if self.runs_code and not allow_code:
      texts.append(f"{name} executes programs that the model writes, in a sandbox; "
                   "allow it with eval.allow_code_execution=True")  # fmt: skip
    elif self.runs_code:
      try:
        code_sandbox.sandbox()
      except UserError as e:
        texts.append(f"{name}: {e}")
    return texts


def make(name: str, data_dir: str, allow_code: bool = False) -> Task:
  """The task of a benchmark, by its key in BENCHMARKS.

  Raises:
    UserError: its file is missing, broken, or has another number of items.
  """
  made = BENCHMARKS[name]
  if problems := made.problems(name, data_dir, allow_code):
    raise UserError("; ".join(problems))
  path = os.path.join(os.path.expanduser(data_dir), made.file)
  items = check_items(made.read(path), path)
  if made.items and len(items) != made.items:
    raise UserError(
      f"{path} has {len(items)} items and {name} has {made.items}; fetch the whole benchmark, or "
      "give a part of it another name as a JSONL task"
    )
  return dataclasses.replace(made.task, items=items, source=path)


# --- readers --------------------------------------------------------------------------------------


def _read_aime(path: str) -> list[Item]:
  items = []
  for number, (where, row) in enumerate(text_files.json_lines(path), 1):
    question, answer = row.get("problem", row.get("question")), str(row.get("answer", ""))
    if not isinstance(question, str) or not re.fullmatch(r"\d{1,3}", answer):
      raise UserError(f"{where}: expected 'problem' and an 'answer' from 0 to 999; {_AIME_FORMAT}")
    items.append(Item(str(row.get("id", number)), question, str(int(answer))))
  return items


def _read_gpqa(path: str) -> list[Item]:
  # The order of the choices depends on a question's line ends.
  text = text_files.read(path, f"expected {_GPQA_FORMAT}", ends=True)
  try:
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
  except csv.Error as e:
    raise UserError(f"{path} is no CSV: {e}; expected {_GPQA_FORMAT}") from e
  items = []
  wrong = [f"Incorrect Answer {i}" for i in (1, 2, 3)]
  for number, row in enumerate(rows, 1):
    texts = [(row.get(k) or "").strip() for k in ("Question", "Correct Answer", *wrong)]
    if not all(texts):
      raise UserError(f"{path}, row {number} lacks a column; expected {_GPQA_FORMAT}")
    question, right, *_ = texts
    # The same order in every run, and another one for every question.
    seed = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8])
    order = random.Random(seed).sample(texts[1:], 4)
    listed = "\n".join(f"{letter}) {text}" for letter, text in zip("ABCD", order))
    name = row.get("Record ID") or str(number)
    items.append(Item(name, f"{question}\n\n{listed}", "ABCD"[order.index(right)]))
  return items


def _read_livecodebench(path: str) -> list[Item]:
  items = []
  for where, row in text_files.json_lines(path):
    try:
      if not FIRST_CONTEST <= row["contest_date"][:10] <= LAST_CONTEST:
        continue
      tests = json.loads(row["public_test_cases"]) + _private_tests(row["private_test_cases"])
      function = json.loads(row["metadata"] or "{}").get("func_name") or ""
      starter = row["starter_code"]
      form = f"### Format: {_WITH_STARTER if starter else _WITHOUT_STARTER}\n"
      form += f"```python\n{starter or '# YOUR CODE HERE'}\n```\n\n"
      data = {"tests": [(t["input"], t["output"]) for t in tests], "function": function}
      question = f"{row['question_content']}\n\n{form}"
      items.append(Item(str(row["question_id"]), question, "", data))
    except (KeyError, TypeError, ValueError, zlib.error) as e:
      raise UserError(f"{where}: {type(e).__name__}: {e}; expected {_CODE_FORMAT}") from e
  return items


def _private_tests(packed: str) -> list[dict[str, Any]]:
  """Tests as JSON, or as base64 of zlib of a pickled text of JSON, which is not unpickled."""
  if packed.lstrip().startswith("["):
    return json.loads(packed)
  raw = zlib.decompress(base64.b64decode(packed))
  texts = [arg for op, arg, _ in pickletools.genops(io.BytesIO(raw)) if "UNICODE" in op.name]
  if len(texts) != 1 or not isinstance(texts[0], str):
    raise ValueError("private_test_cases hold something else than one text")
  return json.loads(texts[0])


# --- programs -------------------------------------------------------------------------------------


def verify_program(item: Item, output: str) -> Verdict:
  """The last fenced block of the output passes all tests of the item, in the sandbox."""
  program = code_sandbox.last_block(output)
  if not program:
    return Verdict(False, "", "no fenced block of code")
  for number, (given, expected) in enumerate(item.data["tests"], 1):
    outcome = code_sandbox.run(program, given, item.data["function"])
    if outcome.failure:
      return Verdict(False, program, f"test {number}: {outcome.failure}")
    if not code_sandbox.is_same(outcome.output, expected, bool(item.data["function"])):
      return Verdict(False, program, f"test {number}: wrong output")
  return Verdict(True, program)


_AIME_FORMAT = 'one JSON per line with "problem" and "answer", 30 lines (AIME I and II of the year)'
_GPQA_FORMAT = (
  'a CSV with columns "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", '
  '"Incorrect Answer 3", 198 rows (gpqa_diamond.csv of Rein et al. 2023)'
)
_CODE_FORMAT = (
  'one JSON per line with "question_id", "question_content", "starter_code", "contest_date", '
  '"public_test_cases", "private_test_cases" and "metadata" (release v5 of code_generation_lite)'
)


def _task(name: str, verify, samples: int, max_new_tokens: int, **asked: Any) -> Task:
  protocol = Protocol(samples, 0.65, 0.95, max_new_tokens)
  return Task(name, (), verify, name, think_end="</think>", chat=True, protocol=protocol, **asked)


BENCHMARKS = {
  **{
    name: Benchmark(
      f"{name}.jsonl", _AIME_FORMAT, 30, _read_aime,
      _task(name, verifiers.math_verify, 32, 31_000, system=_AIME_SYSTEM, prefix="<think>\n"),
    )
    for name in ("aime24", "aime25")
  },
  "gpqa_diamond": Benchmark(
    "gpqa_diamond.csv", _GPQA_FORMAT, 198, _read_gpqa,
    _task("gpqa_diamond", verifiers.choice, 8, 26_000, prompt=_GPQA_PROMPT),
  ),
  "livecodebench_v5": Benchmark(
    "livecodebench_v5.jsonl", _CODE_FORMAT, 0, _read_livecodebench,
    _task("livecodebench_v5", verify_program, 8, 27_000, prompt=_CODE_PROMPT), runs_code=True,
  ),
}  # fmt: skip
