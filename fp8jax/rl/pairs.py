"""Preference pairs: a completion of a prompt that is preferred, and one that is not.

Lines of JSON as trl reads them (its documentation, dataset formats, "preference"): "prompt",
"chosen" and "rejected" are texts, or lists of messages {"role", "content"}. Without a prompt, or
where the lists repeat it, the prompt is what chosen and rejected begin with.

A pair lies in two rows of a batch, 2i the chosen one and 2i + 1 the rejected one, so that a
microbatch of an even number of rows has whole pairs.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8jax.data import batch_sharding, loader, reading, sources
from fp8jax.data.chat import conversation, encode
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.data.config import DataConfig
from fp8jax.errors import UserError
from fp8jax.rl import rollout
from fp8jax.step.train_spec import TrainSpec

CHOSEN, REJECTED = "chosen", "rejected"
FORM = (
  'write {"prompt": ..., "chosen": ..., "rejected": ...}, texts or lists of messages '
  '{"role", "content"}, or chosen and rejected alone, which begin with their prompt'
)


class Pair(NamedTuple):
  """Token ids; both completions end with the end token."""

  prompt: tuple[int, ...]
  chosen: tuple[int, ...]
  rejected: tuple[int, ...]


class Encoder:
  """Rows -> pairs.

  Raises:
    UserError: a row is no pair, or longer than seq_len; names its file and line.
  """

  def __init__(
    self, data: DataConfig, template: Callable[[], ChatTemplate], is_scored: bool = False
  ):  # fmt: skip
    """
    Args:
      data: of it the tokenizer and seq_len.
      template: makes the chat template, once a row has messages.
      is_scored: whether a text's last token is an input too, so that it has seq_len at most.
    """
    self._tokenizer, self._longest = data.tokenizer, data.seq_len + (not is_scored)
    self._limit = "seq_len" if is_scored else "seq_len + 1"
    self._template = functools.lru_cache(maxsize=1)(template)

  def __call__(self, row: Any, where: str) -> Pair:
    have = row if isinstance(row, Mapping) else {}
    if missing := [key for key in (CHOSEN, REJECTED) if have.get(key) is None]:
      shown = ", ".join(map(repr, have)) or type(row).__name__
      raise UserError(f"{where}: missing {missing[0]!r} (has {shown}); {FORM}")
    both = have[CHOSEN], have[REJECTED]
    is_text = all(isinstance(x, str) for x in (*both, have.get("prompt") or ""))
    (n, chosen), (m, rejected) = (self._of_texts if is_text else self._of_chats)(have, where)
    size = min(n, m, _common(chosen, rejected))
    pair = Pair(tuple(chosen[:size]), tuple(chosen[size:]), tuple(rejected[size:]))
    if pair.chosen == pair.rejected:
      raise UserError(f"{where}: chosen equals rejected, expected two answers; remove the line")
    if not pair.prompt:
      raise UserError(
        f"{where}: chosen and rejected have no token of a prompt in common, expected one at least, "
        f"which the first of the answer is predicted from; {FORM}"
      )
    for name, tokens in ((CHOSEN, chosen), (REJECTED, rejected)):
      if len(tokens) > self._longest:
        raise UserError(
          f"{where}: {name} with its prompt has {len(tokens)} tokens, expected at most "
          f"{self._limit} = {self._longest}; raise seq_len, or remove the line"
        )
    return pair

  def _of_texts(self, row: Mapping[str, Any], where: str):
    """[(tokens of the prompt at most, all tokens) of chosen, of rejected]."""
    del where
    prompt, both = row.get("prompt"), (row[CHOSEN], row[REJECTED])
    if not prompt:
      prompt = both[0][: _common(*both)]
      both = tuple(text[len(prompt) :] for text in both)
    alone, made = self._tokenizer.encode_prompt(prompt), []
    for text in both:
      # Tokenized whole: a token that the end of the prompt lies in belongs to the answer.
      whole = [*self._tokenizer.encode_prompt(prompt + text), self._tokenizer.eos_id]
      made.append((_common(alone, whole), whole))
    return made

  def _of_chats(self, row: Mapping[str, Any], where: str):
    """As `_of_texts`, by the chat template."""
    first = conversation.cell(row[CHOSEN])
    is_whole = isinstance(first, list) and first and _role(first[0]) != "assistant"
    if not is_whole and row.get("prompt") is None:
      raise UserError(f"{where}: missing 'prompt', and chosen begins with no prompt; {FORM}")
    records = []
    for key in (CHOSEN, REJECTED):
      how = ("messages", key) if is_whole else ("prompt", f"prompt,{key}")
      records.append(conversation.read(row, *how, where))
      if "error" in records[-1]:
        raise UserError(f"{where}: {key}: {records[-1]['error']}")
    chats = [record["messages"] for record in records]
    if chats[0] == chats[1]:
      raise UserError(f"{where}: chosen equals rejected, expected two answers; remove the line")
    shared, made = _common(*chats), []
    for key, record in zip((CHOSEN, REJECTED), records, strict=True):
      chat = record["messages"]
      if len(chat) != shared + 1 or chat[-1]["role"] != "assistant":
        raise UserError(
          f"{where}: {key} has {[m['role'] for m in chat[shared:]]} behind the {shared} messages "
          "that chosen and rejected share, expected one message of the assistant; cut the "
          "conversation there"
        )
      record["messages"] = [*({**m, "weight": 0} for m in chat[:-1]), {**chat[-1], "weight": 1}]
      made.append(self._answered(record, where))
    return made

  def _answered(self, record: Mapping[str, Any], where: str):
    try:
      (sample,) = encode.Encoder(self._tokenizer, self._template()).samples(record)
    except UserError as e:
      raise UserError(f"{where}: {e}") from e
    trained = np.flatnonzero(sample.trained)
    if not len(trained):
      raise UserError(f"{where}: the chat template writes no token of the answer; change the line")
    tokens = sample.tokens[: trained[-1] + 1].tolist()
    # A template may write white space behind the end of a turn, which no model is asked for.
    last = len(tokens) - tokens[::-1].index(sample.closing[-1])
    is_special = not self._tokenizer.decode([tokens[last - 1]])
    end = tokens[:last] if is_special else [*tokens, self._tokenizer.eos_id]
    return int(trained[0]), end


def _role(message: Any) -> Any:
  return message.get("role", message.get("from")) if isinstance(message, Mapping) else None


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
  """The length of what two sequences begin with."""
  return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


class Pairs(reading.Reopened):
  """The pairs of JSON lines, by number; a random-access source for grain, 8 bytes per line."""

  def __init__(self, path: str, encoder: Encoder):
    """Of a file, or a glob.

    Raises:
      UserError, FileNotFoundError: there is no such file.
    """
    self._path, self._encoder = path, encoder

  @functools.cached_property
  def _lines(self) -> sources.JsonLines:
    lines = sources.JsonLines(sources.find_files(self._path), _AsItIs("", ""))
    lines.check()
    return lines

  def __len__(self):
    return len(self._lines)

  def __getitem__(self, index: int) -> Pair:
    record = self._lines[index]
    path, _, line = record["origin"].rpartition(":")
    where = f"{path}, line {line}" if path else record["origin"]
    if "error" in record:
      raise UserError(f"{where}: {record['error']}; {FORM}")
    return self._encoder(record["row"], where)

  def fingerprint(self) -> str:
    """Changes with the content of the files."""
    entry = {"kind": "jsonl", "path": self._path, "field": "", "dataset": "", "split": ""}
    return loader.source_fingerprint(entry)


class _AsItIs(sources.Rows):
  def __call__(self, row: Any, origin: str) -> dict[str, Any]:
    return {"row": row, "origin": origin}


def laid_out(pairs: Sequence[Pair], length: int, rows: int = 0) -> dict[str, np.ndarray]:
  """{"tokens_BL", "targets_BL", "positions_BL", "segments_BL", "weights_BL"}: a completion with its
  prompt in each row; tokens of a completion weigh 1 / (its tokens * completions).

  Args:
    length: L, at least the tokens of a prompt and a completion but one.
    rows: B; 0 for those of the pairs, else rows beyond are padding.
  """
  batch = rollout.empty(rows or 2 * len(pairs), length)
  for i, pair in enumerate(pairs):
    for row, answer in ((2 * i, pair.chosen), (2 * i + 1, pair.rejected)):
      own = rollout.put(batch, row, pair.prompt, answer)
      batch["weights_BL"][row, own] = 1 / (2 * len(pairs) * len(answer))
  return batch


class Batches(batch_sharding.Batches):
  """Pairs in the place of a run's data."""

  def __init__(self, spec: TrainSpec, stored: Pairs, lay: Callable = laid_out):
    """Args: lay: see `batches`."""
    super().__init__(spec.run.layout, spec.microbatch, spec.grad_accum_steps)
    self._closing: collections.Counter[int] = collections.Counter()
    self.shares = 1  # processes take turns
    of = self.spread.local_batch, spec.data, self.spread.shard
    self.iterator = batches(stored, *of, lay, self._closing)

  def ends(self) -> list[int]:
    return [token for token, _ in self._closing.most_common()]


def batches(
  pairs: Pairs, rows: int, data: DataConfig, shard: loader.Shard, lay=laid_out,
  closing: collections.Counter[int] | None = None,
):  # fmt: skip
  """Endless batches of this process's share, see `laid_out`: a grain iterator, whose state resumes.

  Every line is read once before: what must stop a run does so before its first step.

  Args:
    rows: of a batch of this process.
    lay: makes a batch of pairs, as `laid_out`.
    closing: counts the last tokens of preferred completions, if given.

  Raises:
    UserError: of a line; there are fewer than `rows` / 2 for each process.
  """
  import grain  # extra `data`

  source = grain.MapDataset.source(pairs)
  for pair in reading.read(source, data.workers):
    if closing is not None:
      closing[pair.chosen[-1]] += 1
  if len(pairs) * 2 < rows * shard.count:
    raise UserError(
      f"rl.pairs has {len(pairs)} pairs, expected at least the {rows * shard.count // 2} of a "
      "step; give more, or lower global_batch"
    )
  order = source.shuffle(seed=reading.seed(f"{data.seed}/pairs")).repeat()
  stream = reading.read(order[shard.index :: shard.count], data.workers)
  return iter(stream.batch(rows // 2, batch_fn=functools.partial(lay, length=data.seq_len)))


def of_groups(groups: Sequence[rollout.Group]) -> list[Pair]:
  """The first completion of the highest reward in each group, and the first of the lowest; groups
  of equal rewards have none."""
  made = []
  for group in groups:
    best, worst = (f(group.rewards) for f in (np.argmax, np.argmin))
    answers = (group.completions[int(i)].tokens for i in (best, worst))
    if not group.is_equal:
      made.append(Pair(group.question.prompt, *map(tuple, answers)))
  return made
