"""From a document to tokens, and what happens to documents that cannot make the journey."""

import contextlib
import dataclasses
import filecmp
import functools
import hashlib
import os
from typing import Any

import numpy as np

from fp8jax import hub
from fp8jax.data import reading
from fp8jax.errors import UserError, read_json

POLICIES, BOS = ("error", "skip"), ("auto", "none")
LONG_POLICIES = ("split", "error", "skip")

# The built-in tokenizer: UTF-8 bytes, then one id for the end of a document.
BYTES = "bytes"
_BYTES_EOS = 256
_PROBES = 512  # tokens that are tried as a text


class MalformedDocument(UserError):
  """A document that the config says must stop the run."""


def refuse(policy: str, remedy: str, origin: str, problem: str):
  """Raises MalformedDocument by the policy "error"; `remedy` is the key and value of another."""
  if policy == "error":
    raise MalformedDocument(f"{origin}: {problem}. Fix it, or set {remedy}, which is counted")


def refuse_malformed(policy: str, record: dict[str, Any]):
  """`refuse` of a record with an error."""
  refuse(policy, "data.on_malformed='skip'", record["origin"], record["error"])


def _keep_spaces(loaded) -> bool:
  """Has offsets count the spaces of a token; whether trim_offsets would have left them out."""
  processor = loaded.post_processor
  if processor is None or b'"trim_offsets":true' not in (state := processor.__getstate__()):
    return False
  processor.__setstate__(state.replace(b'"trim_offsets":true', b'"trim_offsets":false'))
  loaded.post_processor = processor
  return True


def _trimmed(text: str, first: int, end: int) -> tuple[int, int]:
  """Offsets of a token without its outer spaces, as trim_offsets has them; of spaces alone, all."""
  piece = text[first:end]
  if not (inner := piece.strip()):
    return first, end
  first += piece.index(inner)
  return first, first + len(inner)


@dataclasses.dataclass(frozen=True)
class Tokenizer(reading.Reopened):
  """Text -> token ids, ending with one end-of-document id.

  A tokenizer.json carries state beside its vocabulary. All that says which ids a text has is
  obeyed: the model's options, the normalizer, the pre-tokenizer, the added tokens with their flags
  (normalized, lstrip, rstrip, single_word), and the tokens that the post-processor writes before a
  text. Special tokens in a text are recognised (encode_special_tokens, which no file stores).
  `truncation` and `padding` are ignored, as in transformers: the last caller of the library left
  them, and they cut and fill documents. Dropout of BPE is refused: it draws the ids.

  Attributes:
    path: "bytes", a tokenizer.json, or a folder that holds one. Each worker loads its own.
    eos: the token that ends a document; "" takes the folder's own eos_token.
    bos: "auto" begins documents and prompts as the tokenizer begins a text (Llama 3:
      <|begin_of_text|>), once; "none" leaves that out.
  """

  path: str
  eos: str = ""
  bos: str = "auto"

  @functools.cached_property
  def _loaded(self) -> tuple[Any, bool, bool]:
    """(the library's tokenizer, whether its file would have cut or padded texts, and whether it
    leaves outer spaces out of offsets)."""
    import tokenizers  # extra `hf`

    try:
      loaded = tokenizers.Tokenizer.from_file(self.file)
    except Exception as e:  # the library raises nothing narrower
      raise UserError(f"{self.file} is not a tokenizer.json: {e}") from e
    if dropout := getattr(loaded.model, "dropout", None):
      raise UserError(
        f"{self.file} has model.dropout={dropout}: the same text would have other ids every time; "
        "set it to null"
      )
    sizes = bool(loaded.truncation or loaded.padding)
    loaded.no_truncation()
    loaded.no_padding()
    return loaded, sizes, _keep_spaces(loaded)

  @property
  def _tokenizer(self):
    return self._loaded[0]

  @property
  def trims_offsets(self) -> bool:
    """Whether its file leaves the outer spaces of tokens out of offsets."""
    return self.path != BYTES and self._loaded[2]

  @functools.cached_property
  def _begin(self) -> list[int]:
    """Ids that the tokenizer writes before a text."""
    if self.path == BYTES or self.bos == "none":
      return []
    if not self._tokenizer.num_special_tokens_to_add(False):
      return []
    for text in ("a", *map(self._tokenizer.id_to_token, range(_PROBES))):
      with contextlib.suppress(UserError):  # a vocabulary without this text
        encoding = self._encoding(text or "a", True)
        if 0 in (mask := encoding.special_tokens_mask):
          return encoding.ids[: mask.index(0)]
    raise UserError(
      f"{self.file}: none of its first {_PROBES} tokens is a text, so that the ids before a text "
      "are not known; set data.bos='none'"
    )

  def _begun(self, ids: list[int]) -> list[int]:
    return ids if ids[: len(self._begin)] == self._begin else [*self._begin, *ids]

  @property
  def file(self) -> str:
    path = hub.local(self.path)
    path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    if not os.path.exists(path):
      sentencepiece = os.path.join(os.path.dirname(path), "tokenizer.model")
      if os.path.exists(sentencepiece):
        raise FileNotFoundError(
          f"{sentencepiece} is a SentencePiece model without the tokenizer.json that is read; add "
          "it: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
      raise FileNotFoundError(
        f"tokenizer {path!r} does not exist; set data.tokenizer to 'bytes', a tokenizer.json or a "
        "Hugging Face folder" + (f": {hub.remedy(self.path)}" if hub.is_id(self.path) else "")
      )
    return path

  @functools.cached_property
  def vocab_size(self) -> int:
    """One more than the largest id it can produce."""
    if self.path == BYTES:
      return _BYTES_EOS + 1
    return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

  def beyond(self, vocab_size: int) -> list[str]:
    """A sentence about ids that a model of so many rows does not have, if there are any."""
    what = (
      f"data.tokenizer produces ids up to {self.vocab_size - 1}, the model has "
      f"model.vocab_size={vocab_size}; they do not belong together ({self.path!r})"
    )
    return [what] if self.vocab_size > vocab_size else []

  @functools.cached_property
  def eos_id(self) -> int:
    if self.path == BYTES:
      if self.eos:
        raise UserError(
          f"data.eos={self.eos!r} is no token of data.tokenizer='bytes'; leave it empty"
        )
      return _BYTES_EOS
    tokenizer = self._tokenizer  # first: a broken file is no matter of its eos_token
    name = self.eos or self._configured_eos()
    index = tokenizer.token_to_id(name)
    if index is None:
      raise UserError(f"{self.file} has no token {name!r}; set data.eos to one that it has")
    return index

  def _configured_eos(self) -> str:
    config = os.path.join(os.path.dirname(self.file), "tokenizer_config.json")
    remedy = "set data.eos to the token that ends a document"
    if not os.path.exists(config):
      raise UserError(f"{config} does not exist, which would name the eos_token; {remedy}")
    eos = read_json(config, f"fetch it again, or {remedy}").get("eos_token")
    name = eos.get("content") if isinstance(eos, dict) else eos
    if name is None or name == "":
      raise UserError(f"{config} names no eos_token; {remedy}")
    if not isinstance(name, str):
      raise UserError(f"{config}: eos_token is {eos!r}, expected a string; {remedy}")
    return name

  @functools.cached_property
  def fingerprint(self) -> str:
    """Changes whenever the same text would give other tokens."""
    content = self.path.encode()
    if self.path != BYTES:
      with open(self.file, "rb") as f:
        content = f.read()
      content += b"|whole" * self._loaded[1] + f"|{self._begin}".encode() * bool(self._begin)
    return hashlib.sha256(content + f"|{self.eos_id}".encode()).hexdigest()[:16]

  def is_of(self, folder: str) -> bool:
    """Whether a folder's tokenizer gives texts the same ids, whatever ends documents; a folder
    without one is of bytes."""
    theirs = os.path.join(hub.local(folder), "tokenizer.json")
    if self.path == BYTES or not os.path.exists(theirs):
      return self.path == BYTES and not os.path.exists(theirs)
    return filecmp.cmp(self.file, theirs, shallow=False)

  def encode(self, text: str) -> np.ndarray:
    """int32 ids of `encode_prompt`, then the end-of-document id."""
    return np.asarray([*self.encode_prompt(text), self.eos_id], np.int32)

  def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
    """`encode` of every text, by the tokenizer's own loop."""
    if self.path == BYTES:
      return [self.encode(text) for text in texts]
    try:
      encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception:  # the library raises nothing narrower; one by one, it says which
      return [self.encode(text) for text in texts]
    return [np.asarray([*self._begun(e.ids), self.eos_id], np.int32) for e in encodings]

  def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """(int32 ids [n], int64 [n, 2]: first and end character of each), nothing added.

    Outer spaces of a token count as its tokenizer.json has it; those of a token of spaces always.
    """
    if self.path == BYTES:
      first = np.repeat(np.arange(len(text)), [len(letter.encode()) for letter in text])
      ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
      return ids, np.stack([first, first + 1], 1)
    encoding = self._encoding(text)
    offsets = encoding.offsets
    if self.trims_offsets:
      offsets = [_trimmed(text, *pair) for pair in offsets]
    return np.asarray(encoding.ids, np.int32), np.asarray(offsets, np.int64).reshape(-1, 2)

  def encode_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Ids of a text that is to be continued: without the end-of-document id.

    Args:
      add_special_tokens: whether `bos` adds any; not where a chat template has written them.
    """
    if self.path == BYTES:
      return list(text.encode("utf-8"))
    ids = self._encoding(text).ids
    return self._begun(ids) if add_special_tokens else ids

  def token_id(self, name: str) -> int | None:
    """Id of the token of that name, or None."""
    return None if self.path == BYTES else self._tokenizer.token_to_id(name)

  @functools.cached_property
  def special_ids(self) -> list[int]:
    """The ids of all special tokens, which `decode` leaves out."""
    if self.path == BYTES:
      return []
    added = self._tokenizer.get_added_tokens_decoder()
    return sorted(i for i, token in added.items() if token.special)

  def special_id(self, name: str) -> int | None:
    """Id of a special token, which `decode` leaves out; None if there is none of that name."""
    token = self.token_id(name)
    return token if token is not None and not self.decode([token]) else None

  def _encoding(self, text: str, add_special_tokens: bool = False):
    try:
      return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except Exception as e:  # the library raises nothing narrower
      raise UserError(
        f"{self.file} cannot encode a document: {e}; add the token that it asks for, or set "
        "data.tokenizer to another"
      ) from e

  def decode(self, ids, special: bool = False) -> str:
    """Text; `special` keeps the text of special tokens."""
    if self.path == BYTES:
      return bytes(i for i in ids if i < _BYTES_EOS).decode("utf-8", "replace")
    return self._tokenizer.decode(list(ids), skip_special_tokens=not special)


def is_held_out(record: dict[str, Any], fraction: float) -> bool:
  """Whether a document belongs to the held-out split: a hash of its text decides.

  Equal documents fall on the same side, whatever their file, order or source.
  """
  digest = hashlib.blake2b(record["text"].encode("utf-8"), digest_size=8).digest()
  return int.from_bytes(digest, "big") < fraction * 2**64


@dataclasses.dataclass(frozen=True)
class Tokenize:
  """record -> {"tokens": int32 [length], "status": str}. Empty tokens mean: not in this stream.

  Attributes:
    heldout: fraction of documents in the held-out split.
    split: which side of it to keep, "train" or "heldout".
    window: tokens per sequence, for `on_long`.
    on_malformed: "error" or "skip".
    on_long: "split" continues a long document in the next window; "error" and "skip" as above.
  """

  tokenizer: Tokenizer
  heldout: float
  split: str
  window: int
  on_malformed: str = "error"
  on_long: str = "split"

  def __call__(self, record):
    nothing = np.zeros((0,), np.int32)
    if "error" in record:
      refuse_malformed(self.on_malformed, record)
      return {"tokens": nothing, "status": "malformed"}
    if "tokens" in record:
      tokens = record["tokens"]  # prepared: encoded and split already
    elif is_held_out(record, self.heldout) != (self.split == "heldout"):
      return {"tokens": nothing, "status": "other split"}
    else:
      tokens = self.tokenizer.encode(record["text"])
    if len(tokens) > self.window and self.on_long != "split":
      what = f"{len(tokens)} tokens do not fit a window of {self.window}"
      refuse(self.on_long, "data.on_long='skip'", record["origin"], what)
      return {"tokens": nothing, "status": "too long"}
    return {"tokens": tokens, "status": "used"}
