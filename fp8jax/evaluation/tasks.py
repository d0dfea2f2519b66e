"""A task: questions, the way a model is asked, and the verification of its outputs.

A Task is a value. Its fingerprint covers everything that decides a score, the margin of a
comparison among it, and is stored before the first output is drawn.
"""

import dataclasses
import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fp8jax import statistics
from fp8jax.data import text_files
from fp8jax.data.chat import conversation
from fp8jax.errors import UserError, one_line

MOST_SAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Item:
  """A question with its answer.

  Attributes:
    name: unique within the task.
    question: as the prompt's {question}.
    answer: the expected answer; "" where `data` decides (tests of a program).
    data: what decides a verdict besides; JSON values.
    derived: what the verifier reads and follows from the task's source: no part of the fingerprint.
  """

  name: str
  question: str
  answer: str
  data: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  derived: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True)
class Protocol:
  """How outputs are drawn: so many samples of an item (n), each as generation.settings.Sampling."""

  samples: int = 1
  temperature: float = 0.0
  top_p: float = 1.0
  max_new_tokens: int = 256
  stop: tuple[str, ...] = ()

  def problems(self, where: str) -> list[str]:
    """Values that mean nothing, in words."""
    texts = []
    if not 1 <= self.samples <= MOST_SAMPLES or self.max_new_tokens < 1:
      texts.append(f"{where}: samples={self.samples} must be from 1 to {MOST_SAMPLES:,}, "
                   f"max_new_tokens={self.max_new_tokens} at least 1")  # fmt: skip
    if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1:
      texts.append(f"{where}: temperature={self.temperature} must be 0 or more, top_p={self.top_p} "
                   "above 0 and at most 1")  # fmt: skip
    if self.samples > 1 and self.temperature == 0:
      texts.append(f"{where}: {self.samples} greedy samples of an item are all the same; set a "
                   "temperature above 0, or samples to 1")  # fmt: skip
    return texts


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The judgement of one output.

  Attributes:
    extracted: the answer that was found in the output, "" for none.
    note: why it does not count, where a verifier knows ("timeout").
  """

  correct: bool
  extracted: str
  note: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
  """Questions, prompts, sampling and verification.

  Attributes:
    name: of its files and of its row in tables.
    items: in the order in which they are asked.
    verify: (item, output after the thoughts) -> Verdict.
    verifier: name of `verify`, for the fingerprint.
    prompt: the user's turn; {question} stands for the item's question. A chat template gets it
      without white space at its ends.
    system: the system's turn; "" for none.
    prefix: beginning of the model's own turn, e.g. an opened think tag.
    think_end: tag that closes the thoughts: the output up to its last occurrence is not verified;
      "" for none. Without the tag the whole output is verified, as in evalscope.
    chat: whether the chat template writes the prompts, whatever eval.chat says.
    margin: points that an arm may lose against its baseline, fixed with the task.
    source: the file or generator that the items come from.
  """

  name: str
  items: tuple[Item, ...]
  verify: Callable[[Item, str], Verdict] = dataclasses.field(compare=False)
  verifier: str
  prompt: str = "{question}\n"
  system: str = ""
  prefix: str = ""
  think_end: str = ""
  chat: bool = False
  protocol: Protocol = Protocol()
  margin: float = statistics.MARGIN
  source: str = ""

  def user_text(self, item: Item) -> str:
    """The user's turn for an item."""
    return self.prompt.replace("{question}", item.question)

  def judge(self, item: Item, output: str) -> Verdict:
    """Verifies what follows the thoughts; what a verifier raises because of an output is a verdict.

    Raises:
      UserError, OSError, ImportError: of this machine, whatever the output.
    """
    try:
      return self.verify(item, without_thoughts(output, self.think_end))
    except (UserError, OSError, ImportError):
      raise
    except Exception as e:
      return Verdict(False, "", f"{type(e).__name__}: {one_line(e)[:200]}")

  @property
  def fingerprint(self) -> str:
    """SHA-256 of everything that decides a score."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    del fields["verify"], fields["source"]
    if not self.chat:  # the fingerprint of before there was this field
      del fields["chat"]
    fields["items"] = [
      [i.name, i.question, i.answer, *([dict(i.data)] if i.data else [])] for i in self.items
    ]
    fields["protocol"] = dataclasses.asdict(self.protocol)
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def without_thoughts(output: str, think_end: str) -> str:
  """The output after the last closing think tag."""
  return output.rpartition(think_end)[2] if think_end else output


def normalized(question: str) -> str:
  """Questions that differ in case, white space or Unicode form alone are one question; 2³ and 23
  are too: a question too few is asked, rather than one that was trained."""
  return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def plain(answer: str) -> str:
  """A text without case, spelling of white space and width of letters; 2³ is not 23."""
  forms = ("<wide>", "<narrow>")
  one_width = (
    unicodedata.normalize("NFKC", c) if unicodedata.decomposition(c).startswith(forms) else c
    for c in unicodedata.normalize("NFC", answer)
  )
  # Composed again: a narrow kana and its sound mark are two.
  return " ".join(unicodedata.normalize("NFC", "".join(one_width)).casefold().split())


def check_items(items: Sequence[Item], source: str) -> tuple[Item, ...]:
  """Items with unique names.

  Raises:
    UserError: there is none, or two have one name.
  """
  names: set[str] = set()
  for item in items:
    if item.name in names:
      raise UserError(f"{source}: two items are called {item.name!r}; give each a name of its own")
    names.add(item.name)
  if not items:
    raise UserError(f"{source} has no item, expected at least one; name another file")
  return tuple(items)


def apart(items: Sequence[Item], trained: Collection[str]) -> tuple[tuple[Item, ...], int]:
  """(items whose normalized question is not in `trained`, how many were left out)."""
  kept = tuple(item for item in items if normalized(item.question) not in trained)
  return kept, len(items) - len(kept)


_QUESTION_KEYS = ("question", "prompt", "problem")


def _text(content: Any) -> Any:
  """A turn's content; one in parts, {"type": "text", "text": ...}, as training joins it."""
  if not isinstance(content, list):
    return content
  return "".join(str(p.get("text") or "") if isinstance(p, Mapping) else str(p) for p in content)


def read_trained(path: str) -> frozenset[str]:
  """Normalized questions of a training set in JSONL.

  Every line is an object with "messages" (OpenAI) or "conversations" (ShareGPT), of which the
  user's turns count, or with "question", "prompt" or "problem".

  Raises:
    UserError, FileNotFoundError: there is no such file, or a line has no question.
  """
  trained = set()
  for where, row in text_files.json_lines(path):
    texts = [row[k] for k in _QUESTION_KEYS if isinstance(row.get(k), str)]
    turns = conversation.cell(row.get("messages") or row.get("conversations") or ())
    if not isinstance(turns, Sequence) or not all(isinstance(turn, Mapping) for turn in turns):
      raise UserError(f"{where}: its turns are {str(turns)[:60]!r}, expected a list of objects")
    for turn in turns:
      if turn.get("role", turn.get("from")) in ("user", "human"):
        texts.append(_text(turn.get("content", turn.get("value"))))
    texts = [t for t in texts if isinstance(t, str) and t.strip()]
    if not texts:
      raise UserError(
        f"{where} has no question; expected 'messages', 'conversations' or one of {_QUESTION_KEYS}"
      )
    trained.update(map(normalized, texts))
  return frozenset(trained)


# --- answers in outputs ---------------------------------------------------------------------------

_DECORATION = " \t\n*`$"
_BRACES = re.compile(r"\\boxed\s*\{|[{}]")
_PHRASE = re.compile(r"answer\s+is|answer:|####", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_ABBREVIATION = re.compile(r"(?:[A-Za-z]{1,2}\.){2,}")  # U.S., a.m., Ph.D.


def final_answer(output: str) -> str:
  r"""The answer that an output ends with, "" for an empty one; in time linear in its length.

  The last \boxed{...}; else the last <answer>...</answer>; else the rest of the line after the last
  "answer is", "answer:" or "####"; else the last line that is not blank.
  """
  marked = boxed_answer(output)
  if marked is None:
    marked = tagged_answer(output)
  if marked is None:
    marked = _after_phrase(output)
  if marked is None:
    marked = "".join(output.rstrip().splitlines()[-1:])
  return bare(marked)


def bare(answer: str) -> str:
  r"""An answer without decoration: **6**, $12$, \text{E}, and the stop of a sentence."""
  answer = answer.strip(_DECORATION)
  if answer.endswith(".") and not answer.endswith(".."):
    if not _ABBREVIATION.fullmatch(answer.split()[-1]):
      answer = answer[:-1].strip(_DECORATION)
  text = _TEXT.fullmatch(answer)
  return bare(text[1]) if text else answer


def boxed_answer(output: str) -> str | None:
  r"""The inside of the last \boxed{...} whose braces close; None without one."""
  open_braces, last = [], (-1, -1)
  for match in _BRACES.finditer(output):
    if match[0] != "}":
      open_braces.append(match.end() if len(match[0]) > 1 else -1)
    elif open_braces:
      last = max(last, (open_braces.pop(), match.start()))
  return output[slice(*last)] if last[0] >= 0 else None


def tagged_answer(output: str) -> str | None:
  """The inside of the last <answer> tags; None without any."""
  start = output.rfind("<answer>", 0, max(output.rfind("</answer>"), 0))
  if start < 0:
    return None
  return output[start + len("<answer>") : output.index("</answer>", start)]


def _after_phrase(output: str) -> str | None:
  """The rest of the line after the last phrase that something follows."""
  ends = [match.end() for match in _PHRASE.finditer(output)]
  for end in reversed(ends[-2:]):  # one alone can have nothing but white space behind it
    rest = output[end:].lstrip().removeprefix(":").lstrip()
    if rest:
      return rest.partition("\n")[0]
  return None
