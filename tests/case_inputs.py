"""Inputs of tests/cases: tiny tokenizers, folders of weights, runs of jobs, without torch.

A case is an input of which somebody reported, in public, that a trainer got it wrong. Its test says
what must come out; a refusal counts where it is ours and names the input.
"""

import contextlib
import json
import pathlib

import debug_runs
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from configs import base
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
  """Runs a job in this process, on one device: (exit code, stdout and stderr).

  Args:
    folder: of the run, without --workdir.
    lines: assignments to `c`, configs/base.py's in BF16.
    arguments: --job, --workdir and options of the job, as for launch.py.
  """
  body = [
    "c.mesh.fsdp, c.log.report, c.log.tensorboard, c.eval.tokens = 1, False, False, 0",
    "c.optim.schedule, c.optim.warmup_steps, c.optim.decay_steps = 'constant', 0, 0",
    *lines,
  ]
  c = base.get_config("bf16")
  exec("\n".join(body), {"c": c, "base": base})
  options = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
  job, workdir = options.pop("job", "train"), options.pop("workdir", str(folder / "run"))
  with contextlib.chdir(ROOT):
    code, *output = debug_runs.run_job(job, c, workdir, **options)
  return code, "".join(output)
