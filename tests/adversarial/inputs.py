"""Damaged inputs from a seed, and what the launcher makes of them.

  python tests/adversarial/inputs.py [COUNT [SEED]]   -> results.json, results.md beside this file
  python tests/adversarial/inputs.py show NUMBER      one of them: its command and its output
  python tests/adversarial/inputs.py sound            the inputs without their faults: all end well

Every input is one sound run with one fault, drawn from a group of faults. It is "ok" where the
launcher refuses it in an error that names what is wrong (the key or the file), or ends well where
the group says that it may; "misleading" where the error names neither, "silent" where a fault that
must be refused is taken, "traceback", or "hang" after LIMIT seconds.
"""

import atexit
import collections
import dataclasses
import functools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

import case_inputs  # noqa: E402
import numpy as np  # noqa: E402
import safetensors.numpy  # noqa: E402

from fp8jax.config import registry  # noqa: E402
from fp8jax.run import calibration  # noqa: E402

COUNT, SEED, LIMIT = 200, 28, 120
OTHER = (None, -1, 2.5, "", "x", True, [], {}, [None], {"x": 1}, 10**30, [[1]])


@dataclasses.dataclass
class Case:
  """A command and its fault.

  Attributes:
    arguments: of launch.py.
    names: words of which the refusal has one.
    may_pass: whether the input may be taken, too.
    standard_input: of the command.
  """

  arguments: list[str]
  names: tuple[str, ...]
  may_pass: bool = False
  standard_input: str = ""


# --- faults of texts and values ------------------------------------------------------------------


def spots(value, path=()):
  """Paths of all values inside a JSON value."""
  for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
    yield (*path, key)
    if isinstance(inner, (dict, list)) and inner:
      yield from spots(inner, (*path, key))


def changed(rng, value, where=None, to=OTHER):
  """The JSON value with another one at a random place, or at `where`; (the value, the place)."""
  value = json.loads(json.dumps(value))
  path = rng.choice(list(spots(value))) if where is None else where
  node = value
  for key in path[:-1]:
    node = node[key]
  before = node[path[-1]]
  node[path[-1]] = rng.choice([x for x in to if type(x) is not type(before)])
  return value, path


def broken(rng, text: str) -> bytes:
  """A text of JSON cut, with a stray bracket, with bytes that are no UTF-8, or nested deeply."""
  at = rng.randrange(1, len(text) - 2)
  return rng.choice([
    text[:at].encode(), b"[" + text.encode(), text[:at].encode() + b"\xff\xfe" + text[at:].encode(),
    b"[" * 50_000, b"",
  ])  # fmt: skip


def flags(**values) -> list[str]:
  return [f"--config.{key.replace('__', '.')}={value}" for key, value in values.items()]


DEBUG = ["--config=configs/debug.py:bf16", *flags(
  mesh__fsdp=1, steps=2, global_batch=2, seq_len=64, eval__tokens=0, eval__batch=2,
  optim__warmup_steps=0, optim__decay_steps=0, optim__schedule="constant", log__report=False,
  log__tensorboard=False)]  # fmt: skip


# --- groups: (random numbers, empty folder) -> Case ----------------------------------------------

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CHATS = {
  "messages": [{"messages": TURNS * 2, "tools": [{"type": "function", "function": {"name": "f"}}]}],
  "sharegpt": [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}],
  "prompt": [{"prompt": "q", "completion": "a"}],
}


def _chat(folder, text: bytes, form: str, *others) -> list[str]:
  (folder / "a.jsonl").write_bytes(text)
  tokenizer = case_inputs.tokenizer_folder(folder / "t")
  return [*DEBUG, "--job=preview", *flags(
    data__sources__main__kind="jsonl", data__sources__main__path=folder / "a.jsonl",
    data__sources__main__chat=form, data__tokenizer=tokenizer, data__samples_per_step=1,
    data__on_long="truncate", data__heldout_fraction=0.0,
    data__sources__main__field={"messages": "messages", "sharegpt": "conversations",
                                "prompt": "prompt,completion"}[form]), *others]  # fmt: skip


def chat_values(rng, folder):
  form = rng.choice(list(CHATS))
  row, path = changed(rng, CHATS[form][0])
  may_pass = path[0] == "tools" or row in CHATS[form]  # an empty list of tools is none
  return Case(_chat(folder, json.dumps(row).encode(), form), ("a.jsonl", "main"), may_pass)


def chat_files(rng, folder):
  form = rng.choice(list(CHATS))
  text = broken(rng, "".join(json.dumps(row) + "\n" for row in CHATS[form] * 3))
  return Case(_chat(folder, text, form), ("a.jsonl", "main"))


def chat_templates(rng, folder):
  pieces = ["{% if %}", "{{", "{% endfor %}", "{{ 1/0 }}", "{{ messages[99].role.x }}", "{% for %}",
            "{{ range(10**9)|list|length }}", "{% set x = 'y'*10**9 %}{{ x }}"]  # fmt: skip
  text, piece = case_inputs.CHATML, rng.choice(pieces)
  at = rng.choice([0, len(text), text.index("<|im_end|>")])
  path = folder / "bad.jinja"
  path.write_text(text[:at] + piece + text[at:])
  chat = json.dumps(CHATS["messages"][0]).encode()
  arguments = _chat(folder, chat, "messages", *flags(data__chat_template=path))
  return Case(arguments, ("bad.jinja", "template"))


def tokenizers(rng, folder):
  arguments = _chat(folder, json.dumps(CHATS["messages"][0]).encode(), "messages")
  path = folder / "t" / "tokenizer.json"
  state = json.loads(path.read_text())
  if rng.random() < 0.5:
    path.write_bytes(broken(rng, path.read_text()))
  else:
    where = rng.choice([("model",), ("model", "vocab"), ("model", "merges"), ("added_tokens",)])
    path.write_text(json.dumps(changed(rng, state, where)[0]))
  return Case(arguments, ("tokenizer",), may_pass=True)


def documents(rng, folder):
  path = folder / "d.jsonl"
  rows = [{"text": "word " * 40} for _ in range(30)]
  if rng.random() < 0.5:
    rows[3] = changed(rng, rows[3])[0]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  else:
    path.write_bytes(broken(rng, "".join(json.dumps(row) + "\n" for row in rows)))
  source = flags(data__sources__main__kind="jsonl", data__sources__main__path=path)
  arguments = [*DEBUG, *source, "--job=prepare", f"--out={folder / 'out'}"]
  return Case(arguments, ("d.jsonl", "main"))


def numbers(rng, folder):
  bounded = [k for k in registry.KEYS.values() if k.least is not None and k.type in (int, float)]
  one = rng.choice(bounded)
  value = rng.choice([one.least - 1, "nan" if one.type is float else -(10**12), 10**19, "many"])
  # A number without an upper bound may be taken.
  may_pass = value == 10**19 and one.type is float
  arguments = [*DEBUG, "--job=memory", *flags(**{one.name.replace(".", "__"): value})]
  return Case(arguments, (one.name,), may_pass)


def choices(rng, folder):
  one = rng.choice([k for k in registry.KEYS.values() if k.choices])
  value = rng.choice(["", "Bf16", "none ", "auto,auto", one.default[:-1] + "?"])
  arguments = [*DEBUG, "--job=memory", *flags(**{one.name.replace(".", "__"): value})]
  return Case(arguments, (one.name,), may_pass=value in one.choices)


def keys(rng, folder):
  name = rng.choice(list(registry.KEYS))
  head, _, last = name.rpartition(".")
  wrong = rng.choice([last + "s", last[:-1], last[1:], last.replace("_", ""), "x" + last])
  if not wrong or wrong == last:
    wrong = last + "x"
  wrong = f"{head}.{wrong}" if head else wrong
  return Case([*DEBUG, f"--config.{wrong}=1"], (wrong, wrong.split(".")[-1]))


CALLS = {
  "precision.policy": "switch_recipe(to='bf16', k=3, looks=5)",
  "log.alarms": "('saturation', '>', 0.01)",
  "precision.schedule": "(1, (('.*', 'bf16'),))",
  "precision.rules": "('.*', 'tensor_delayed(steps=16, margin=1)')",
  "optim.clip_groups": "('layers/.*', 1.0)",
  "optim.lr_multipliers": "('embed', 2.0)",
  "sharding.weights": "('fsdp',)",
}


def tables(rng, folder):
  key = rng.choice(list(CALLS)[:-1])
  text = CALLS[key]
  at = rng.randrange(1, len(text) - 1)
  damage = rng.choice([text[:at] + text[at + 1 :], text[:at] + "*" + text[at:], "5", "(5,)",
                       text.replace(",", ",,"), text.replace("(", "(zz=1, ", 1)])  # fmt: skip
  value = f"({json.dumps(damage)},)" if key == "precision.policy" else f"({damage},)"
  # A change inside of a name or a number may be another good value.
  return Case([*DEBUG, "--job=memory", f"--config.{key}={value}"], (key,), may_pass=True)


SWEEP = {
  "config": "configs/debug.py", "search": {"Grid": {}}, "arms": ["bf16"], "seeds": 1,
  "stop_above": 50.0, "axes": {"optim.peak_lr": [1e-3, 2e-3]},
}  # fmt: skip


def sweeps(rng, folder):
  fields = {
    "config": "'configs/debug.py'", "arms": "('bf16',)", "axes": "{'optim.peak_lr': (1e-3, 2e-3)}",
    "fixed": "{'steps': 2}", "seeds": "(0,)",
  }  # fmt: skip
  name = rng.choice(list(fields))
  bad = ["5", "None", "'x'", "()", "[5]", "{'x': 1}", "{'optim.peak_lrr': (1,)}", "-1", "object()"]
  fields[name] = rng.choice(bad)
  path = folder / "sweep_file.py"
  body = ", ".join(f"{k}={v}" for k, v in fields.items())
  text = f"from fp8jax.sweeps.spec import *\n\n\ndef get_sweep():\n  return Sweep({body})\n"
  path.write_text(text)
  arguments = [f"--sweep={path}", f"--workdir={folder / 'w'}", "--print"]
  return Case(arguments, ("sweep_file.py", name), may_pass=fields[name] in ("()", "None"))


def prompts(rng, folder):
  model = case_inputs.model_folder(folder / "m")
  path = folder / "p.jsonl"
  rows = [{"prompt": "hello"}, {"messages": TURNS[:1]}]
  if rng.random() < 0.5:
    path.write_bytes(broken(rng, "".join(json.dumps(row) + "\n" for row in rows)))
  else:
    bad = changed(rng, rng.choice(rows))[0]
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(bad) + "\n")
  arguments = [*DEBUG, "--job=generate", *flags(
    weights__hf=model, generate__prompts=path, generate__max_new_tokens=2)]  # fmt: skip
  return Case(arguments, ("p.jsonl",))


TASK = {"name": "t", "questions": "q.jsonl", "verifier": "exact", "samples": 1, "temperature": 0.0,
        "max_new_tokens": 2}  # fmt: skip


def tasks(rng, folder):
  model = case_inputs.model_folder(folder / "m")
  rows, kind = [{"question": "1+1", "answer": "2"}, {"question": "2", "answer": "2"}], rng.random()
  path, described = folder / "q.jsonl", TASK
  text = "".join(json.dumps(row) + "\n" for row in rows)
  path.write_text(text)
  if kind < 0.4:
    path.write_bytes(broken(rng, text))
  elif kind < 0.7:
    rows[1] = changed(rng, rows[1])[0]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  else:
    described = changed(rng, TASK)[0]
  (folder / "t.json").write_text(json.dumps(described))
  arguments = [*DEBUG, "--job=evaluate", f"--workdir={folder / 'w'}", *flags(
    weights__hf=model, eval__tasks=folder / "t.json", data__tokenizer=model)]  # fmt: skip
  return Case(arguments, ("q.jsonl", "t.json"), may_pass=kind >= 0.4)


def folders(rng, folder):
  """Hugging Face folders: their JSON, their weights."""
  model = case_inputs.model_folder(folder / "m")
  kind = rng.choice(["config", "json", "weights", "tensor"])
  names, may_pass = ("config.json",), False
  if kind == "config":
    config = json.loads((model / "config.json").read_text())
    where = rng.choice([(k,) for k in ("hidden_size", "num_hidden_layers", "vocab_size",
      "num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps",
      "model_type", "hidden_act", "rope_theta")if k in config])  # fmt: skip
    new, path = changed(rng, config, where)
    (model / "config.json").write_text(json.dumps(new))
    names, may_pass = ("config.json", where[0], str(model)), new[where[0]] in (None, 2.5)
  elif kind == "json":
    text = (model / "config.json").read_text()
    (model / "config.json").write_bytes(broken(rng, text))
  else:
    path = model / "model.safetensors"
    names = ("safetensors",)
    if kind == "weights":
      data = path.read_bytes()
      path.write_bytes(rng.choice([data[: rng.randrange(len(data))], b"", b"\xff" * 64, data[8:]]))
    else:
      tensors = safetensors.numpy.load_file(path)
      name = rng.choice(sorted(tensors))
      names = (name, "safetensors")
      value = tensors.pop(name)
      if rng.random() < 0.6:
        tensors[name] = rng.choice([value[:-1], value.astype(np.int32), value[None]])
      safetensors.numpy.save_file(tensors, path)
  arguments = [*DEBUG, "--job=export", f"--out={folder / 'out'}", *flags(
    weights__hf=model, data__tokenizer="bytes", export__gate_tokens=64)]  # fmt: skip
  return Case(arguments, names, may_pass)


def exports(rng, folder):
  model = case_inputs.model_folder(folder / "m")
  bad = rng.choice([
    ("export.gate_text", folder / "none.txt"), ("export.max_kl", rng.choice([0, -1, "nan"])),
    ("export.input_scales", folder / "none.json"), ("export.client_python", folder / "no-python"),
    ("export.push_to", rng.choice(["x", "a/b/c", "a/ b", "../x"])), ("export.gate_tokens", 10**8),
    ("export.strategy", "blocks"), ("export.scale_fmt", "ue8m0"), ("export.format", "peft"),
    ("weights.hf", folder / "none"), ("init.adapters", folder / "none"),
  ])  # fmt: skip
  arguments = [*DEBUG, "--job=export", f"--out={folder / 'out'}", *flags(
    weights__hf=model, data__tokenizer="bytes"), f"--config.{bad[0]}={bad[1]}"]  # fmt: skip
  return Case(arguments, (bad[0], str(bad[1]), bad[0].split(".")[1]))


_SITES = [f"layers/{i}/{name}" for i in range(2) for name in (
  "attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down")]  # fmt: skip
_ROWS = [{"site": site, "tensor": tensor, "amax": 1.0} for site in _SITES for tensor in "xwg"]
TABLE = {"format": calibration.FORMAT, "rows": _ROWS}


def calibrations(rng, folder):
  path = folder / "table.json"
  if rng.random() < 0.5:
    path.write_text(json.dumps(changed(rng, TABLE)[0]))
  else:
    path.write_bytes(broken(rng, json.dumps(TABLE)))
  arguments = ["--config=configs/debug.py:tensor_delayed", *DEBUG[1:],
               f"--workdir={folder / 'w'}", *flags(precision__calibration=path)]  # fmt: skip
  return Case(arguments, ("table.json", "precision.calibration"))


PATTERNS = ("((.+)+)+X", "(.*)*(.*)*Y!", "(", "a{99999999999}", "*", "[z-a]", "(?P<x>.)(?P<x>.)",
            "(?<=.+)x", "layers/9/none", "layers/0/(.|.+)+!")  # fmt: skip


def patterns(rng, folder):
  """Regular expressions that are none, that match nothing, or that try for ever."""
  text = json.dumps(rng.choice(PATTERNS))
  stated = {
    "precision.rules": f"(({text}, 'bf16'), ('.*', 'bf16'))",
    "precision.schedule": f"((1, (({text}, 'bf16'), ('.*', 'bf16'))),)",
    "precision.policy": f"({{'kind': 'refresh', 'every': 1, 'sites': {text}}},)",
    "log.alarms": f"(('saturation', '>', 0.1, {text}),)",
    "optim.clip_groups": f"(({text}, 1.0),)", "optim.lr_multipliers": f"(({text}, 2.0),)",
    "model.lora.targets": f"({text},)",
  }  # fmt: skip
  key = rng.choice(list(stated))
  arm = DEBUG[0].replace("bf16", "tensor_delayed" if key == "precision.policy" else "bf16")
  arguments = [arm, *DEBUG[1:], "--job=memory", *flags(
    optim__grad_clip_norm=0.0, model__lora__rank=2 * (key == "model.lora.targets")),
    f"--config.{key}={stated[key]}"]  # fmt: skip
  # An alarm may be of sites that the model does not have.
  return Case(arguments, (key,), may_pass=key == "log.alarms" and "none" in text)


# Files that reports read; a metric is any number, and the definition of a GEMM's input may be any.
RECORDS = {
  "metrics.jsonl": {"step": 1, "loss": 2.0, "tokens": 128, "seconds": 1.0},
  "config.json": {"resolved": {"steps": 2}, "changed": {}},
  "summary.json": {"step": 2, "fp8_flops_share": 0.5},
  "sites.json": [{
    "from_step": 0, "site": "head", "layers": 0, "m_n_k": [1, 2, 3], "recipe": "bf16",
    "backends": dict.fromkeys(("fwd", "dgrad", "wgrad"), "xla"),
    "notes": [], "definition": dict.fromkeys(("fwd", "dgrad", "wgrad"), {"lhs": None}),
  }],
  "provenance.json": {"config": {"steps": 2}, "devices": "1 x cpu"},
}  # fmt: skip
_NUMBERS = ("loss", "tokens", "seconds", "fp8_flops_share")


def _records(rng, folder) -> tuple[str, bool]:
  """Writes RECORDS, one of them damaged: (its name, whether it may be read)."""
  folder.mkdir()
  damaged, may_pass = rng.choice(list(RECORDS)), False
  for name, value in RECORDS.items():
    text = json.dumps(value).encode()
    is_lines = name == "metrics.jsonl"
    if name == damaged and rng.random() < 0.4:
      text = broken(rng, text.decode())
      # The last line of a process that was killed.
      may_pass = is_lines and json.dumps(value).startswith(text.decode(errors="replace"))
    elif name == damaged:
      value, path = changed(rng, value)
      node = value
      for key in path:
        node = node[key]
      is_number = isinstance(node, int | float) and not isinstance(node, bool)
      may_pass = path[-1] in _NUMBERS and is_number or path[-1] == "lhs" and isinstance(node, dict)
      text = json.dumps(value).encode()
    (folder / name).write_bytes(text + b"\n" * is_lines)
  return damaged, may_pass


def recorded(rng, folder):
  """Records of a run that --job=report reads."""
  name, may_pass = _records(rng, folder / "w")
  return Case(["--job=report", f"--workdir={folder / 'w'}"], (name,), may_pass)


def compared(rng, folder):
  """Two runs, one of them with a damaged record, or no run at all."""
  name, may_pass = _records(rng, folder / "w")
  _records(random.Random("sound"), folder / "v")
  for file, value in RECORDS.items():
    (folder / "v" / file).write_text(json.dumps(value) + "\n")
  odd = rng.choice(["", "", "", folder / "none", folder, folder / "w" / "metrics.jsonl"])
  arguments = ["--job=compare", folder / "v", odd or folder / "w", f"--workdir={folder / 'out'}"]
  # --baseline names an arm that neither of them has, and tables are without it.
  return Case(arguments, (str(odd) if odd else name,), may_pass and not odd)


@functools.cache
def _made(prepare, *arguments: str) -> pathlib.Path:
  """The folder of a sound command, WORK in its arguments, which runs once after `prepare`."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix="adversarial_"))
  atexit.register(shutil.rmtree, folder)
  prepare(folder)
  code, output = run(Case([a.replace("WORK", str(folder)) for a in arguments], ()), folder)
  if code:
    raise RuntimeError(output)
  return folder


def resumed(rng, folder):
  """A checkpoint and the records beside it, one file damaged; the run then goes on."""
  own = flags(checkpoint__every=1, log__every=1)
  shutil.copytree(_made(lambda _: None, *DEBUG, *own, "--workdir=WORK/w") / "w", folder / "w")
  work, last = folder / "w", folder / "w" / "checkpoints" / "2"
  tensors = sorted(last.glob("params/**/d/*"), key=lambda path: path.stat().st_size)
  path = rng.choice([
    *(work / f"{name}.json" for name in ("summary", "provenance", "config")),
    work / "metrics.jsonl", last / "meta" / "metadata", last / "params" / "_METADATA", tensors[-1],
  ])  # fmt: skip
  may_pass = path.name == "metrics.jsonl"  # its last line may be cut
  if path == tensors[-1]:
    data = path.read_bytes()
    path.write_bytes(rng.choice([data[: rng.randrange(len(data))], b"", bytes(len(data))]))
  elif may_pass or rng.random() < 0.6:
    path.write_bytes(broken(rng, path.read_text()))
  else:
    value, where = changed(rng, json.loads(path.read_text()))
    path.write_text(json.dumps(value))
    may_pass = True  # most fields are for people
  arguments = [
    *DEBUG,
    *own,
    f"--workdir={work}",
    *flags(steps=3, checkpoint__accept_changes=("steps",)),
  ]
  return Case(arguments, (path.name, str(last)), may_pass)


def adapters(rng, folder):
  """Folders in PEFT's format: their description, their tensors."""
  model = case_inputs.model_folder(folder / "m")
  where = folder / "a"
  where.mkdir()
  described = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none",
               "fan_in_fan_out": False, "target_modules": ["q_proj"]}  # fmt: skip
  weights = safetensors.numpy.load_file(model / "model.safetensors")
  tensors = {}
  for name, weight in weights.items():
    if name.endswith("q_proj.weight"):
      stem = f"base_model.model.{name.removesuffix('.weight')}."
      tensors[f"{stem}lora_A.weight"] = np.zeros((2, weight.shape[1]), np.float32)
      tensors[f"{stem}lora_B.weight"] = np.zeros((weight.shape[0], 2), np.float32)
  config, may_pass, names = json.dumps(described).encode(), False, ("adapter_config.json",)
  kind = rng.choice(["config", "json", "weights", "tensor"])
  if kind == "config":
    key = rng.choice(["peft_type", "r", "lora_alpha", "bias", "fan_in_fan_out"])
    value, _ = changed(rng, described, (key,))
    # Another scale than 2, and another word for no.
    may_pass = (
      key == "lora_alpha" and value[key] == 2.5 or key == "fan_in_fan_out" and not value[key]
    )
    config = json.dumps(value).encode()
  elif kind == "json":
    config = broken(rng, config.decode())
  if kind == "tensor":
    name, names = rng.choice(sorted(tensors)), (str(where),)
    value = tensors.pop(name)
    if rng.random() < 0.7:
      tensors[name] = rng.choice([value[:-1], value.astype(np.int32), value + np.nan, value[None]])
  (where / "adapter_config.json").write_bytes(config)
  path = where / "adapter_model.safetensors"
  safetensors.numpy.save_file(tensors, path)
  if kind == "weights":
    data, names = path.read_bytes(), (path.name,)
    path.write_bytes(rng.choice([data[: rng.randrange(len(data))], b"", b"\xff" * 64, data[8:]]))
  arguments = [*DEBUG, "--job=export", f"--out={folder / 'out'}", *flags(
    weights__hf=model, data__tokenizer="bytes", export__gate_tokens=64,
    init__adapters=where)]  # fmt: skip
  return Case(arguments, names, may_pass)


def _evaluation(folder):
  (folder / "q.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 3)
  (folder / "t.json").write_text(json.dumps(TASK))
  case_inputs.model_folder(folder / "m")


def stored(rng, folder):
  """A stored evaluation, one file of it damaged, to which the same command returns."""
  arguments = [*DEBUG, "--job=evaluate", *flags(
    eval__tasks="WORK/t.json", weights__hf="WORK/m", data__tokenizer="WORK/m")]  # fmt: skip
  base = _made(_evaluation, *arguments, "--workdir=WORK/w")
  shutil.copytree(base / "w", folder / "w")
  path = rng.choice(sorted((folder / "w" / "evaluation").glob("*/*.json*")))
  text, may_pass = path.read_text(), False
  if rng.random() < 0.5:
    path.write_bytes(broken(rng, text))
    # The last line of a process that was killed.
    may_pass = path.suffix == ".jsonl" and text.startswith(path.read_text(errors="replace"))
  elif path.suffix == ".jsonl":
    lines = text.splitlines()
    value, where = changed(rng, json.loads(lines[1]))
    lines[1] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")
    may_pass = where[-1] in ("extracted", "answer")  # for people
  else:
    path.write_text(json.dumps(changed(rng, json.loads(text))[0]))
    may_pass = path.name == "summary.json"  # written again
  arguments = [argument.replace("WORK", str(base)) for argument in arguments]
  return Case([*arguments, f"--workdir={folder / 'w'}"], (path.name,), may_pass)


def config_files(rng, folder):
  path = folder / "mine.py"
  base = "from configs import base\n\n\ndef get_config(arm=''):\n  c = base.get_config()\n"
  body = rng.choice([
    "  return 5\n", "  return None\n", "  del c.memory\n  return c\n", "  c.x = 1\n  return c\n",
    "  1/0\n  return c\n", "  return c.optim\n", "  import sys; sys.exit(0)\n", "  return c +\n",
    "  c.optim = 5\n  return c\n", "  c.steps = 'x'\n  return c\n", "\x00",
    "  c.data.sources = {}\n  return c", "  c.eval.hf = 'x'\n  return c\n",
    "  open('/nonexistent/x')\n  return c\n", "  raise KeyboardInterrupt\n",
    "  c.data.sources.main.kind = 'x'\n  return c\n",
  ])  # fmt: skip
  path.write_text(base + body)
  arguments = [f"--config={path}", f"--workdir={folder / 'w'}"]
  return Case(arguments, ("mine.py", "data.sources", "get_config"))


def sources(rng, folder):
  kind = rng.choice(["text", "jsonl", "parquet", "tfds", "datasets", "prepared", "x", ""])
  path = rng.choice([folder / "none", folder, "", "*", "\\", "~nobody/x", "gs://none/x"])
  arguments = [*DEBUG, "--job=prepare", f"--out={folder / 'out'}", *flags(
    data__sources__main__kind=kind, data__sources__main__path=path)]  # fmt: skip
  return Case(arguments, ("data.sources.main",), may_pass=kind == "text" and path == "*")


def names(rng, folder):
  """Names that terminals and markup read as more than names: nothing may break."""
  name = rng.choice(["a[/b]", "x[red]", "<script>", "a b", "é", "'", '"', "a\x1b[31m", "-x", "%s"])
  return Case([*DEBUG, "--job=preview", f"--workdir={folder / name}"], ("conversations",))


GROUPS = (
  chat_values, chat_files, chat_templates, tokenizers, documents, numbers, choices, keys, tables,
  sweeps, prompts, tasks, folders, exports, calibrations, recorded, config_files, sources, names,
  patterns, compared, resumed, adapters, stored,
)  # fmt: skip


# --- runs ----------------------------------------------------------------------------------------


def make(number: int, seed: int, folder: pathlib.Path) -> tuple[str, Case]:
  """(group, input) of a number: groups take turns."""
  group = GROUPS[number % len(GROUPS)]
  return group.__name__, group(random.Random(f"{seed} {number}"), folder)


def run(case: Case, folder: pathlib.Path) -> tuple[int | None, str]:
  """(exit code, output) of launch.py in a child of this process; None after LIMIT seconds."""
  log = folder / "output"
  pid = os.fork()
  if not pid:
    os.setsid()
    with open(log, "wb") as out, open(os.devnull, "rb") as nothing:
      os.dup2(nothing.fileno(), 0)
      os.dup2(out.fileno(), 1)
      os.dup2(out.fileno(), 2)
    os.chdir(ROOT)
    os.execve(sys.executable, [sys.executable, "launch.py", *map(str, case.arguments)],
              os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "COLUMNS": "200"})  # fmt: skip
  until = time.time() + LIMIT
  while time.time() < until:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
      return os.waitstatus_to_exitcode(status), log.read_bytes().decode(errors="replace")
    time.sleep(0.05)
  os.killpg(pid, signal.SIGKILL)
  os.waitpid(pid, 0)
  return None, log.read_bytes().decode(errors="replace")


def verdict(case: Case, code: int | None, output: str) -> str:
  if code is None:
    return "hang"
  if code == 130 and output.endswith("interrupted\n"):
    return "ok"  # a file that raises KeyboardInterrupt
  if "Traceback (most recent call last)" in output or code not in (0, 1, 3):
    return "traceback"
  if code == 0:
    return "ok" if case.may_pass else "silent"
  last = output[output.rfind("error:") :]
  is_ours = "error:" in output or re.search(r"^FATAL|flag --", output, re.MULTILINE)
  return "ok" if is_ours and any(name in last for name in case.names) else "misleading"


def judged(number: int, seed: int) -> tuple[str, str, Case, str]:
  """(group, verdict, input, output)."""
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    group, case = make(number, seed, folder)
    code, output = run(case, folder)
    return group, verdict(case, code, output), case, output.replace(name, "FOLDER")


def main(count: int = COUNT, seed: int = SEED):
  kinds = ("ok", "traceback", "silent", "misleading", "hang")
  counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
  bad = []
  for number in range(count):
    group, kind, case, output = judged(number, seed)
    counts[group][kind] += 1
    if kind != "ok":
      bad.append({"number": number, "group": group, "verdict": kind, "output": output[-400:]})
      print(number, group, kind, *case.arguments[-3:], flush=True)
      print("   ", output.strip()[-300:].replace("\n", "\n    "), flush=True)
  total = sum(counts.values(), collections.Counter())
  (HERE / "results.json").write_text(
    json.dumps({"seed": seed, "count": count, "verdicts": total, "bad": bad}, indent=1) + "\n"
  )
  lines = [f"# {count} damaged inputs, seed {seed}", "", "Written by `inputs.py`.", "",
           "| group | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]  # fmt: skip
  rows = [*sorted(counts.items()), ("**all**", total)]
  lines += [f"| {g} | " + " | ".join(str(c[k]) for k in kinds) + " |" for g, c in rows]
  (HERE / "results.md").write_text("\n".join(lines) + "\n")
  print("\n".join(lines))


def sound():
  """Prints the groups whose input is refused without its fault, which then proves nothing."""
  globals()["changed"] = lambda rng, value, where=None, to=(): (value, where or next(spots(value)))
  globals()["broken"] = lambda rng, text: text.encode()
  changing = (chat_values, chat_files, tokenizers, documents, prompts, tasks, folders, recorded)
  for group in (*changing, calibrations, compared, resumed, adapters, stored):
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      code, output = run(group(random.Random(group.__name__), folder), folder)
      print(group.__name__, code, output[-600:] if code else "", flush=True)


if __name__ == "__main__":
  if sys.argv[1:2] == ["sound"]:
    sound()
  elif sys.argv[1:2] == ["show"]:
    _, kind_, case_, output_ = judged(int(sys.argv[2]), SEED)
    print(kind_, *case_.arguments, output_, sep="\n")
  else:
    main(*map(int, sys.argv[1:]))
