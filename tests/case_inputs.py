"""Inputs of tests/cases: tiny tokenizers, folders of weights, runs of launch.py, without torch.

A case is an input of which somebody reported, in public, that a trainer got it wrong. Its test says
what must come out; a refusal counts where it is ours and names the input.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fp8jax.data.chat import conversation, encode
from fp8jax.data.chat.template import ChatTemplate

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
CHATML = (
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")  # ids 0 to 3


def tokenizer_folder(path, template=CHATML, patch=None, **config) -> str:
  """A byte-level tokenizer without merges: SPECIAL, then 256 bytes.

  Args:
    path: of the folder, which is made.
    template: chat template, or None.
    patch: keys of tokenizer.json to replace.
    config: keys of tokenizer_config.json to replace.
  """
  path = pathlib.Path(path)
  path.mkdir(parents=True, exist_ok=True)
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {word: i for i, word in enumerate((*SPECIAL, *alphabet))}
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(list(SPECIAL))
  state = json.loads(tokenizer.to_str()) | (patch or {})
  (path / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False))
  names = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "pad_token": "<pad>"}
  (path / "tokenizer_config.json").write_text(json.dumps(names | config))
  if template is not None:
    (path / "chat_template.jinja").write_text(template)
  return str(path)


def template(name: str) -> ChatTemplate:
  """A template of tests/golden/chat_templates."""
  text = (GOLDEN / "chat_templates" / f"{name}.jinja").read_text()
  return ChatTemplate(text, {"bos_token": "", "eos_token": "<|im_end|>"}, "2026-01-01")


def rendered(row: dict, name="qwen2_5", form="messages") -> tuple[str, list[str]]:
  """(text, trained texts) of a row under a template, or ("refused: ...", [])."""
  record = conversation.read(row, form, conversation.FIELDS[form], "f:1")
  if "error" in record:
    return "refused: " + record["error"], []
  one = encode.render(template(name), record["messages"], record.get("tools"))[0]
  return one.text, [one.text[begin:end] for begin, end in one.spans]


def model_folder(path, template=CHATML, patch=None, **config) -> pathlib.Path:
  """A tiny Llama with the tokenizer above: the golden one with another vocabulary."""
  path = pathlib.Path(path)
  tokenizer_folder(path, template, patch)
  described = json.loads((GOLDEN / "hf" / "llama" / "config.json").read_text())
  sizes = {"vocab_size": 264, "max_position_embeddings": 128}
  ends = {"eos_token_id": 0, "bos_token_id": 0}
  (path / "config.json").write_text(json.dumps(described | sizes | ends | config))
  (path / "generation_config.json").write_text(json.dumps(ends))
  tensors = safetensors.numpy.load_file(GOLDEN / "hf" / "llama" / "model.safetensors")
  rng = np.random.default_rng(0)
  for key in ("model.embed_tokens.weight", "lm_head.weight"):
    tensors[key] = rng.normal(0, 0.2, (264, tensors[key].shape[1])).astype(np.float32)
  safetensors.numpy.save_file(tensors, path / "model.safetensors", {"format": "pt"})
  return path


def launch(folder: pathlib.Path, lines, *arguments) -> tuple[int, str]:
  """Runs launch.py on the debug configuration with these assignments; (exit code, its output)."""
  body = [
    "c.mesh.fsdp, c.log.report, c.log.tensorboard, c.eval.tokens = 1, False, False, 0",
    "c.optim.schedule, c.optim.warmup_steps, c.optim.decay_steps = 'constant', 0, 0",
    *lines,
  ]
  config = folder / "case_config.py"
  config.write_text(
    "from configs import base\n\n\ndef get_config(arm=''):\n  c = base.get_config('bf16')\n"
    + "".join(f"  {line}\n" for line in body)
    + "  return c\n"
  )
  command = [sys.executable, "launch.py", f"--config={config}", *arguments]
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
  return run.returncode, run.stdout + run.stderr
