"""One completion as it grows: its tokens, its text, and where it ends."""

import dataclasses
from collections.abc import Callable, Sequence

from fp8jax.generation.sampling import NO_TOKEN

EOS, STOP, LENGTH, ERROR = "eos", "stop", "length", "error"
# Stands for bytes that are no whole character yet.
_INCOMPLETE = "\ufffd"


@dataclasses.dataclass(frozen=True)
class Completion:
  """A finished completion.

  Attributes:
    tokens: all that were generated, the end token and those of a stop text among them.
    text: of the tokens, without the end token, cut before a stop text.
    finish_reason: "eos", "stop", "length", or "error" where logits were not finite.
    logp: of every token its log-probability in nats, see decode.Slots.logp_B; no part of equality,
      since its last bits depend on the size of the cache.
  """

  tokens: tuple[int, ...]
  text: str
  finish_reason: str
  logp: tuple[float, ...] = dataclasses.field(default=(), compare=False)


class TextStream:
  """Text of a growing list of tokens, piece by piece, up to a stop text.

  A piece is given out once no later token can change it: bytes of an unfinished character wait, and
  so does a tail with which a stop text may begin, also where it crosses the borders of tokens.
  """

  def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]):
    """
    Args:
      decode: tokens -> text.
      stop: texts at the first of which the text ends.
    """
    self.text, self.is_stopped = "", False
    self._decode, self._stop = decode, stop
    self._tokens: list[int] = []
    # Tokens before _first never matter again; those before _read are in `text`.
    self._first = self._read = self._given = 0

  def push(self, token: int) -> str:
    """The piece of text that is certain after one more token."""
    self._tokens.append(token)
    # A tokenizer may decode a token differently at the beginning: the window has one before it.
    before = self._decode(self._tokens[self._first : self._read])
    now = self._decode(self._tokens[self._first :])
    if len(now) > len(before) and not now.endswith(_INCOMPLETE):
      self._append(now[len(before) :])
      self._first, self._read = self._read, len(self._tokens)
    return self._give(len(self.text) - self._held())

  def finish(self) -> str:
    """The rest of the text, bytes of an unfinished character included."""
    if not self.is_stopped:
      before = self._decode(self._tokens[self._first : self._read])
      self._append(self._decode(self._tokens[self._first :])[len(before) :])
      self._first = self._read = len(self._tokens)
    return self._give(len(self.text))

  def _append(self, piece: str):
    start = len(self.text)
    self.text += piece
    places = (self.text.find(s, max(0, start - len(s) + 1)) for s in self._stop)
    starts = [place for place in places if place >= 0]
    if starts:
      self.text, self.is_stopped = self.text[: min(starts)], True

  def _held(self) -> int:
    """Length of the longest end of the text that is the beginning of a stop text."""
    if self.is_stopped:
      return 0
    longest = max(map(len, self._stop), default=1) - 1
    for length in range(min(longest, len(self.text)), 0, -1):
      if any(s.startswith(self.text[-length:]) for s in self._stop):
        return length
    return 0

  def _give(self, end: int) -> str:
    start, self._given = self._given, max(self._given, end)
    return self.text[start:end]


class Growing:
  """A completion that is being generated."""

  def __init__(self, decode, stop, end_ids: frozenset[int], stop_ids: frozenset[int], limit: int):
    """
    Args:
      decode, stop: see TextStream.
      end_ids: tokens that end it for reason "eos".
      stop_ids: tokens that stand for a whole stop text.
      limit: tokens after which it ends.
    """
    self.tokens: list[int] = []
    self.logp: list[float] = []
    self.result: Completion | None = None
    self._stream = TextStream(decode, stop)
    self._end_ids, self._stop_ids, self._limit = end_ids, stop_ids, limit

  def push(self, token: int, logp: float) -> str:
    """The piece of text that one more token makes certain; `result` is set by the last token."""
    if token != NO_TOKEN:
      self.tokens.append(token)
      self.logp.append(logp)
    reason, piece = "", ""
    if token == NO_TOKEN:
      reason = ERROR
    elif token in self._stop_ids:
      reason = STOP
    elif token in self._end_ids:
      reason = EOS
    else:
      piece = self._stream.push(token)
      if self._stream.is_stopped:
        reason = STOP
      elif len(self.tokens) == self._limit:
        reason = LENGTH
    if reason:
      piece += self._stream.finish()
      self.result = Completion(tuple(self.tokens), self._stream.text, reason, tuple(self.logp))
    return piece
