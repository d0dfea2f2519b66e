"""Completions of prompts, streamed as they grow or written as JSON lines."""

import collections
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from fp8jax import console as console_lib
from fp8jax.data import text_files
from fp8jax.data.chat import conversation
from fp8jax.data.tokenize import Tokenizer
from fp8jax.errors import UserError, writing
from fp8jax.generation.completion import Completion
from fp8jax.generation.settings import Generate
from fp8jax.jobs import generator as generator_lib
from fp8jax.run import start as run_start
from fp8jax.step import train_spec

_BETWEEN = "\n---\n"


def run(spec: train_spec.TrainSpec, workdir: str):
  """Completes every prompt of `generate`; returns counts and tokens per second."""
  config = spec.of(Generate)
  records = read_prompts(config.prompts)
  if config.out and (taken := sorted({field for row in records for field in row} & _WRITTEN)):
    raise UserError(
      f"{config.prompts}: the fields {', '.join(taken)} are those of completions, which "
      "generate.out has beside a prompt's own; rename them"
    )
  generator, where = generator_lib.load(spec, workdir)
  texts, prompts = _encoded(records, generator, spec.data)
  total = len(prompts) * config.num_samples
  log = console_lib.console(stderr=True)
  log.print(f"{run_start.device_line(spec)}: {len(prompts)} prompts, {total} completions")
  reasons, tokens, done, start = collections.Counter(), 0, 0, time.perf_counter()
  with contextlib.ExitStack() as stack:
    if config.out:
      stack.enter_context(writing(config.out))
      out = stack.enter_context(open(os.path.expanduser(config.out), "x", encoding="utf-8"))
      sink = JsonLines(out, records)
    else:
      sink = Stream(sys.stdout, texts, len(prompts), config.num_samples)

    def on_text(index: int, number: int, piece: str, completion: Completion | None):
      nonlocal tokens, done
      sink.add(index, number, piece, completion)
      if completion is None:
        return
      reasons[completion.finish_reason] += 1
      is_drawn = number == 0 or config.sampling.temperature > 0  # equal greedy ones are drawn once
      tokens, done = tokens + len(completion.tokens) * is_drawn, done + 1
      if config.out and done * 10 // total > (done - 1) * 10 // total:
        rate = tokens / (time.perf_counter() - start)
        log.print(f"{done}/{total} completions, {tokens} tokens, {rate:.1f} tokens/s")

    completions = generator.generate(prompts, config.sampling, config.num_samples, on_text)
    wrong = generator.not_finite(prompts, completions)
  seconds = time.perf_counter() - start
  return {
    **where,
    "prompts": len(prompts),
    "prompt_tokens": sum(map(len, prompts)),
    "completions": total,
    "finish_reasons": dict(reasons),
    "tokens": tokens,
    "cache_bytes_per_token": generator.cache_bytes_per_token,
    "seconds": round(seconds, 2),  # programs are compiled in them
    "tokens_per_second": round(tokens / seconds, 2),
    **({"not_finite": wrong} if wrong else {}),
  }


def read_prompts(path: str, stdin: IO[str] | None = None) -> list[dict[str, Any]]:
  """[{"prompt": text} or {"messages": [...]}, with the other fields of its line].

  Args:
    path: JSON lines if it ends in .jsonl; else a prompt per line that is not blank; "" is `stdin`.
    stdin: default: standard input.

  Raises:
    UserError: a line is no such record, or there is no prompt; with its number.
  """
  remedy = "set generate.prompts to a file of prompts"
  if path.endswith(".jsonl"):
    records = [_record(row, where) for where, row in text_files.json_lines(path, remedy)]
  else:
    text = text_files.read(path, remedy) if path else _standard_input(stdin or sys.stdin)
    records = [{"prompt": line} for line in text.split("\n") if line.strip()]
  if not records:
    raise UserError(
      f"{path or 'standard input'} has no prompt; give one per line, or JSON lines with 'prompt' "
      "or 'messages' in a file that ends in .jsonl"
    )
  return records


def _standard_input(stdin: IO[str]) -> str:
  if stdin.isatty():
    print("a prompt per line; Ctrl-D ends them", file=sys.stderr)
  stored = getattr(stdin, "buffer", None)
  data = stored.read() if stored else stdin.read().encode()
  return text_files.decoded(data, "standard input")


def _record(row: dict[str, Any], where: str) -> dict[str, Any]:
  """The row, its messages and tools as training reads them."""
  kinds = [k for k in ("prompt", "messages") if k in row]
  if len(kinds) != 1:
    raise UserError(f"{where} must be an object with either 'prompt' or 'messages'")
  if kinds == ["messages"]:
    chat = conversation.prompt(row, where)
    return row | {k: chat[k] for k in ("messages", "tools") if k in row}
  if not isinstance(row["prompt"], str) or not row["prompt"]:
    raise UserError(f"{where}: prompt is {row['prompt']!r}, expected a text")
  if row.get("tools"):
    raise UserError(f"{where}: tools stand beside 'messages', which a chat template writes")
  return row


def _encoded(records, generator, data) -> tuple[list[str], list[list[int]]]:
  """(what stands before each completion when it is shown, token ids)."""
  tokenizer: Tokenizer = generator.tokenizer
  is_chat = any("messages" in record for record in records)
  template = generator_lib.template_of(data, tokenizer) if is_chat else None
  texts, prompts = [], []
  for record in records:
    if template is not None and "messages" in record:
      text = template.render(record["messages"], True, record.get("tools"))
      texts.append("")
      prompts.append(tokenizer.encode_prompt(text, add_special_tokens=False))
    else:
      texts.append(record["prompt"])
      prompts.append(tokenizer.encode_prompt(record["prompt"]))
  return texts, prompts


_WRITTEN = {"index", "sample", "text", "tokens", "logp", "finish_reason"}


class JsonLines:
  """Writes a completion as a line when it ends, in that order."""

  def __init__(self, out: IO[str], records: Sequence[Mapping[str, Any]]):
    self._out, self._records = out, records

  def add(self, index: int, number: int, piece: str, completion: Completion | None):
    """Takes what Generator.generate tells."""
    del piece
    if completion is None:
      return
    line = {
      "index": index, "sample": number, **self._records[index], "text": completion.text,
      "tokens": completion.tokens, "logp": completion.logp,
      "finish_reason": completion.finish_reason,
    }  # fmt: skip
    self._out.write(json.dumps(line, ensure_ascii=False) + "\n")
    self._out.flush()


class Stream:
  """Writes prompts and completions in order: the first unfinished one as it grows."""

  def __init__(self, out: IO[str], texts: list[str], num_prompts: int, num_samples: int):
    self._out, self._texts = out, texts
    # A terminal would obey the control characters of a text; a file has it as it is.
    self._shown = console_lib.visible if out.isatty() else str
    self._order = [(i, n) for i in range(num_prompts) for n in range(num_samples)]
    self._waiting: dict[tuple[int, int], str] = collections.defaultdict(str)
    self._finished: set[tuple[int, int]] = set()
    self._current = 0
    self._begin()

  def add(self, index: int, number: int, piece: str, completion: Completion | None):
    """Takes what Generator.generate tells."""
    self._waiting[index, number] += piece
    if completion is not None:
      self._finished.add((index, number))
    self._advance()

  def _advance(self):
    while self._current < len(self._order):
      key = self._order[self._current]
      self._out.write(self._shown(self._waiting.pop(key, "")))
      if key not in self._finished:
        break
      self._current += 1
      self._out.write("\n" if self._current == len(self._order) else _BETWEEN)
      self._begin()
    self._out.flush()

  def _begin(self):
    if self._current < len(self._order):
      self._out.write(self._shown(self._texts[self._order[self._current][0]]))
