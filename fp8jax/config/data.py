"""The data section of a configuration, checked and typed."""

import os
from typing import Any

from fp8jax import hub
from fp8jax.config import chat as chat_checks
from fp8jax.config.needs import TRAINING, Needs
from fp8jax.data import config as data_config
from fp8jax.data import sources, tokenize
from fp8jax.data.chat import conversation
from fp8jax.errors import ConfigErrors, UserError, check_number, nearest

_AS_THEY_ARE = (
  "cross_document", "on_malformed", "on_long", "workers", "prefetch", "shuffle_windows",
  "chat_template", "template_date",
)  # fmt: skip


def spec(
  c: Any, vocab_size: int | None, problems: ConfigErrors, needs: Needs = TRAINING
) -> data_config.DataConfig:
  """The data of a run.

  Args:
    vocab_size: the model's, or None if there is no model to fit.
    problems: what is wrong is added here.
    needs: of the job, which may take the tokenizer of its weights.
  """
  is_chat = chat_checks.has_chats(c)
  if not is_chat:
    problems.one_of("data.on_long", c.data.on_long, tokenize.LONG_POLICIES)
  problems.check(
    0 <= c.data.heldout_fraction < 1,
    f"data.heldout_fraction={c.data.heldout_fraction} must be in [0, 1)",
  )
  (named, eos), (folder, _) = needs.tokenizer(c), needs.folder(c)
  tokenizer = tokenize.Tokenizer(named or folder or tokenize.BYTES, eos, c.data.bos)
  # A folder that is not there is init.hf's problem.
  if named or not folder or os.path.isdir(hub.local(folder)):
    _check_tokenizer(tokenizer, vocab_size, problems)
  problems.check(len(c.data.sources) > 0, "data.sources is empty; give at least one")
  for name, source in c.data.sources.items():
    key = f"data.sources.{name}"
    problems.check(
      isinstance(name, str) and bool(name.strip()) and "/" not in name,
      f"data.sources has a source named {name!r}: metrics and folders are named after it; give it "
      "letters, and no '/'",
    )
    if not problems.attempt(lambda k=key, s=source: _check_types(k, s)):
      continue
    _check_source(key, dict(source), tokenizer, c.data, problems)
  typed = {name: s for name, s in c.data.sources.items() if hasattr(s, "keys")}
  return data_config.DataConfig(
    sources={name: dict(source) for name, source in typed.items()},
    tokenizer=tokenizer,
    seq_len=c.seq_len,
    heldout=c.data.heldout_fraction,
    seed=c.seed,
    tells_sources=c.log.source_loss,
    chat=chat_checks.read(c, tokenizer.path, problems) if is_chat else None,
    **{name: c.data[name] for name in _AS_THEY_ARE},
  )


def _check_types(key: str, source: Any) -> bool:
  """Whether a source is a mapping of strings and one weight."""
  if not hasattr(source, "keys"):
    raise UserError(f"{key} is {source!r}, expected an entry as configs.base.source() makes it")
  for name in sources.KEYS:
    if name == "weight" and name in source:
      check_number(f"{key}.weight", source[name], 1e-9, 1e9, "weights are shares of tokens")
    elif not isinstance(source.get(name, ""), str):
      raise UserError(f"{key}.{name} is {source[name]!r}, expected a string")
  return True


def _check_tokenizer(tokenizer, vocab_size: int | None, problems: ConfigErrors):
  if problems.attempt(lambda: tokenizer.fingerprint) is not None and vocab_size is not None:
    problems.extend(tokenizer.beyond(vocab_size))


def _check_source(key: str, source: dict[str, Any], tokenizer, d: Any, problems: ConfigErrors):
  for name in source.keys() - set(sources.KEYS):
    near = nearest(name, sources.KEYS)
    hint = f"did you mean {key}.{near}?" if near else f"a source has {', '.join(sources.KEYS)}"
    problems.found.append(f"{key}.{name} is unknown; {hint}")
  missing = [name for name in sources.KEYS if name not in source]
  if missing:
    problems.found.append(f"{key} lacks {', '.join(missing)}; build it with configs.base.source()")
    return
  problems.one_of(f"{key}.kind", source["kind"], sources.KINDS)
  problems.one_of(f"{key}.chat", source["chat"], sources.CHAT_FORMATS)
  if source["kind"] not in sources.KINDS or source["chat"] not in sources.CHAT_FORMATS:
    return
  if format := source["chat"]:
    fields = (source["field"], conversation.FIELDS[format])
    given, wanted = map(conversation.columns, fields)
    if len(given) != len(wanted):
      problems.found.append(
        f"{key}.field={source['field']!r} names {len(given)} columns and chat={format!r} reads "
        f"{len(wanted)}; give e.g. {fields[1]!r}"
      )
      return
  problems.attempt(lambda: _check_files(source, tokenizer, d), key)


def _check_files(source: dict[str, Any], tokenizer: tokenize.Tokenizer, d: Any):
  """Whether every file is there and, where that costs little, is what it should be."""
  opened = sources.open_source(source)
  opened.files()
  if source["kind"] == "prepared":
    _check_prepared(source, tokenizer, d)
  if source["kind"] in ("parquet", "tfds", "datasets"):
    len(opened)  # reads footers, finds the split
  if isinstance(opened, (sources.JsonLines, sources.JsonLinesStream)):
    opened.check()


def _check_prepared(source: dict[str, Any], tokenizer: tokenize.Tokenizer, d: Any):
  """Refuses documents of another tokenizer or split, and damaged ones."""
  train, heldout = (sources.Prepared(source["path"], split) for split in ("train", "heldout"))
  index = train.index
  if index["tokenizer"] != tokenizer.fingerprint:
    raise UserError(
      f"{source['path']} was prepared with another tokenizer or data.bos (fingerprint "
      f"{index['tokenizer']}, data.tokenizer with data.bos={tokenizer.bos!r} has "
      f"{tokenizer.fingerprint}); prepare it again with --job=prepare"
    )
  if index["heldout"] != d.heldout_fraction:
    raise UserError(
      f"{source['path']} was prepared with data.heldout_fraction={index['heldout']}, now it is "
      f"{d.heldout_fraction}; prepare it again or use that value"
    )
  train.check()
  heldout.check()
  if d.shuffle_windows:
    _ = train.lengths
