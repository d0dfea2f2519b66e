"""Shows conversations as training reads them: ten samples, and how many tokens are trained."""

import os
from typing import Any

import numpy as np
import rich.console
import rich.text

from fp8jax.console import visible
from fp8jax.data import config as data_config
from fp8jax.data import loader, tokenize
from fp8jax.data.chat import encode
from fp8jax.errors import UserError
from fp8jax.generation import api

SHOWN = 10
# Characters of a sample that are shown.
_MOST = 2_000
# Around trained text; on a terminal it is also green.
_MARKS = "⟦", "⟧"


def run(
  data: data_config.DataConfig, steps: int, windows: int, out: rich.console.Console
) -> dict[str, Any]:
  """Prints the first samples in the order of training.

  Args:
    steps: optimizer steps of the run.
    windows: of a step, global_batch.

  Returns:
    Counts over all samples: "samples", "tokens", "trained_tokens", "heldout_samples", "steps",
    "windows_needed" by the fullest step, "padding" (share of the positions of all steps), and
    those of conversations and samples that were passed over or cut.

  Raises:
    UserError: the sources have no conversations, or a malformed one by data.on_malformed.
  """
  if data.chat is None:
    raise UserError(
      "--job=preview shows conversations, and data.sources have documents; give a source its chat"
    )
  index = loader.chat_index(data)
  made = loader.chat_steps(data, windows)
  order = np.concatenate([made.numbers(step) for step in range(SHOWN)])
  for number in order[: min(SHOWN, len(made.samples))]:
    sample = made.samples[int(number)]
    out.rule(f"{len(sample)} tokens, {int(sample.trained.sum())} trained", align="left")
    out.print(_shown(sample, data.tokenizer))
  for line in _lines(data, index):
    out.print(line)
  positions = int(made.samples.lengths.sum())
  used = steps * data.chat.samples_per_step / len(made.samples) * positions
  return {
    "samples": len(made.samples),
    "tokens": positions,
    "trained_tokens": int(made.samples.trained.sum()),
    "heldout_samples": int(index.is_heldout.sum()),
    "steps": steps,
    "windows_needed": made.needed(steps),
    "padding": round(1 - used / (steps * windows * data.seq_len), 4),
    **dict(index.counts),
  }


def _lines(data: data_config.DataConfig, index) -> list[str]:
  """The template chosen among several, and turns whose end the tokenizer's folder does not name."""
  tokenizer, (closing, warning) = data.tokenizer, index.ends(data.tokenizer)
  folder = "" if tokenizer.path == tokenize.BYTES else os.path.dirname(tokenizer.file)
  other = [token for token in closing if token not in api.end_ids(folder, tokenizer)]
  lines = [data.chat.template.origin if data.chat else "", warning]
  if other:
    lines.append(
      f"trained turns end with {tokenizer.decode(other, special=True)!r}, which is no end token in "
      f"{folder}; generation, evaluation and export of the run end at it too"
    )
  return [line for line in lines if line]


def _shown(sample: encode.Sample, tokenizer: tokenize.Tokenizer) -> rich.text.Text:
  """The text of a sample, trained runs of tokens between marks."""
  text = rich.text.Text()
  starts = np.flatnonzero(np.diff(sample.trained, prepend=~sample.trained[:1]))
  for start, end in zip(starts, [*starts[1:], len(sample)]):
    piece = visible(tokenizer.decode(sample.tokens[start:end].tolist(), special=True))
    if sample.trained[start]:
      text.append(_MARKS[0] + piece + _MARKS[1], style="bold green")
    else:
      text.append(piece, style="dim")
  rest = len(text) - _MOST
  if rest > 0:
    text.truncate(_MOST)
    text.append(f" ... {rest:,} characters more")
  return text
