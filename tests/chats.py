"""Conversations for tests: files of them, a template, the bytes that must be trained; a model."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from configs import base
from fp8jax import params as params_lib
from fp8jax.data import config as data_config
from fp8jax.data import tokenize
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.export import write as write_lib
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.models.hf import weights as hf_weights

TEMPLATE = (
  "{% if messages[0].role == 'system' %}{{ raise_exception('no system text here') }}{% endif %}"
  "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
  "{{ 'a:' if add_generation_prompt }}"
)
LENGTH = 48
GOLDEN_TEMPLATES = pathlib.Path(__file__).resolve().parent / "golden/chat_templates"
GOLDEN = json.loads((GOLDEN_TEMPLATES / "rendered.json").read_text())  # by transformers


def user(text) -> dict:
  return {"role": "user", "content": text}


def assistant(text, **more) -> dict:
  return {"role": "assistant", "content": text, **more}


def write(path, count: int, seed: int = 0, longest: int = 20) -> list[dict]:
  """So many conversations of one or two turns, as JSON lines; returns them."""
  path.parent.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(seed)

  def text(most):
    return "".join(map(chr, rng.integers(97, 123, rng.integers(1, most))))

  chats = []
  for i in range(count):
    turns = [{"role": "user", "content": f"{i}{text(4)}"}]
    turns += [{"role": "assistant", "content": text(longest)}]
    if i % 3 == 0:
      turns += [{"role": "user", "content": "?"}, {"role": "assistant", "content": text(8)}]
    chats.append({"messages": turns})
  path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
  return chats


def trained_bytes(chat) -> str:
  """The text that is trained, turn by turn."""
  return "".join(m["content"] + ";" for m in chat["messages"] if m["role"] == "assistant")


def whole(chat) -> str:
  return "".join(f"{m['role'][0]}:{m['content']};" for m in chat["messages"])


def spec(path, **changes) -> data_config.DataConfig:
  """Data of conversations in bytes, windows of LENGTH positions, 8 samples a step."""
  source = dict(base.source("jsonl", str(path), chat="messages"))
  per_step = changes.pop("samples_per_step", 8)
  chat = data_config.ChatConfig(
    ChatTemplate(TEMPLATE), per_step, changes.pop("on_untrained", "error")
  )
  values = {
    "sources": {"main": source}, "tokenizer": tokenize.Tokenizer("bytes"), "seq_len": LENGTH,
    "heldout": 0.0, "on_long": "error", "chat": chat,
  }  # fmt: skip
  return data_config.DataConfig(**(values | changes))


# --- a model that answers ------------------------------------------------------------------------

MODEL_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"


def write_model(folder: pathlib.Path, num_layers: int, max_positions: int) -> pathlib.Path:
  """A random Llama with a byte-level tokenizer and MODEL_TEMPLATE, as a Hugging Face folder."""
  cfg = ModelConfig(
    "llama", vocab_size=260, hidden_size=32, intermediate_size=64, num_layers=num_layers,
    num_heads=2, num_kv_heads=1, head_dim=16, max_positions=max_positions, init_std=0.3,
  )  # fmt: skip
  rng = np.random.default_rng(0)
  tree = params_lib.tree_map(
    lambda p: rng.normal(p.init == "ones", 0.3, params_lib.shape(p, cfg.dims)).astype(np.float32),
    transformer.params(cfg),
  )
  write_lib.save(str(folder), write_lib.model(jax.tree.map(jnp.asarray, tree), cfg, "float32"))
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=260, special_tokens=["</s>"], show_progress=False,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )  # fmt: skip
  tokenizer.train_from_iterator(["the quick brown fox"], trainer)
  tokenizer.save(str(folder / "tokenizer.json"))
  settings = {"eos_token": "</s>", "chat_template": MODEL_TEMPLATE}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  return folder


def damage(monkeypatch, folder: pathlib.Path, text: str):
  """The embedding of a text's first token is NaN when the weights are read."""
  token = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[0]
  load = hf_weights.load_params

  def damaged(*args):
    params, dtype = load(*args)
    return {**params, "embed": params["embed"].at[token].set(jnp.nan)}, dtype

  monkeypatch.setattr(hf_weights, "load_params", damaged)
