"""Tasks with verifiable answers: the second half of --job=evaluate."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any

from fp8jax import console as console_lib
from fp8jax.config import identity, registry
from fp8jax.data.chat import conversation
from fp8jax.data.tokenize import Tokenizer
from fp8jax.evaluation import benchmarks, catalog, code_sandbox, report, store
from fp8jax.evaluation import run as run_lib
from fp8jax.evaluation.settings import Tasks
from fp8jax.evaluation.tasks import Item, Task
from fp8jax.generation import api
from fp8jax.generation.completion import ERROR
from fp8jax.generation.settings import Generate
from fp8jax.jobs import generator as generator_lib
from fp8jax.models.config import EVAL_PRECISIONS
from fp8jax.run import provenance
from fp8jax.step import train_spec

_RECIPE = EVAL_PRECISIONS[0]


def run(spec: train_spec.TrainSpec, workdir: str) -> dict[str, Any]:
  """Evaluates eval.tasks; prints their table and writes WORKDIR/evaluation.

  Returns:
    {"evaluation": folder, "tasks": {task: summary}}, and "comparison" with eval.compare_with;
    "not_finite", a sentence, where logits were not, which ended those outputs.
  """
  console = console_lib.console()
  tasks = catalog.load(spec.of(Tasks))
  catalog.check_packages(tasks)
  generator, where = generator_lib.load(spec, workdir, has_digest=True)
  ask = asker(spec, generator.tokenizer, any(task.chat for task in tasks))
  settings = _settings(spec, where)
  folder, other = _folder(spec, workdir, settings), spec.of(Tasks).compare_with
  if other:  # before hours of questions
    store.newest(other, folder)
  done = []
  for task in tasks:
    asked = {**settings, "chat": spec.of(Tasks).chat or task.chat}
    done.append(
      run_lib.evaluate(task, generator, ask, folder, asked, spec.of(Tasks).seed, console.print)
    )
  summary = _summary(spec, settings, folder, done)
  title = f"{folder}: intervals over items"
  console.print(console_lib.table(title, report.COLUMNS, report.rows(done)))
  if other:
    summary["comparison"] = _compare(other, folder, tasks, console)
  provenance.write_json(folder, store.SUMMARY, summary)
  kept = ("tasks", "comparison")
  bad = {one.task.name: one.summary["finish_reasons"].get(ERROR, 0) for one in done}
  listed = ", ".join(f"{n} of {task}" for task, n in bad.items() if n)
  said = f"outputs ended at logits that are not finite and count as wrong ({listed})"
  return {
    "evaluation": folder,
    **{k: summary[k] for k in kept if k in summary},
    **({"not_finite": f"{sum(bad.values())} {said}; {api.NOT_FINITE}"} if listed else {}),
  }


def asker(spec: train_spec.TrainSpec, tokenizer: Tokenizer, needs_chat: bool) -> run_lib.Ask:
  """Writes prompts by the chat template (eval.chat, or the task's protocol), or as plain text."""
  is_chat = spec.of(Tasks).chat or needs_chat
  template = generator_lib.template_of(spec.data, tokenizer) if is_chat else None

  def ask(task: Task, item: Item) -> tuple[str, Sequence[int]]:
    user = task.user_text(item)
    if template is None or not (spec.of(Tasks).chat or task.chat):
      text = "\n\n".join(filter(None, (task.system, user))) + task.prefix
      return text, tokenizer.encode_prompt(text)
    turns = [{"role": "system", "content": task.system}] if task.system else []
    turns.append({"role": "user", "content": user.strip()})
    chat = conversation.prompt({"messages": turns}, f"{task.name}, {item.name}")
    text = template.render(chat["messages"], add_generation_prompt=True) + task.prefix
    return text, tokenizer.encode_prompt(text, add_special_tokens=False)

  return ask


def _settings(spec: train_spec.TrainSpec, where: dict[str, Any]) -> dict[str, Any]:
  """All that decides the outputs besides the task; a change is another evaluation."""
  hf = spec.weights.hf
  of = {"hf": os.path.basename(os.path.normpath(hf))} if hf else {"step": where["step"]}
  weights = {**of, "digest": where["digest"]}
  return {**weights, **how_asked(spec, spec.of(Generate).precision, spec.flat["precision.rules"])}


def how_asked(spec: train_spec.TrainSpec, precision: str, rules: Any) -> dict[str, Any]:
  """All that decides the outputs besides the task and the weights."""
  g, data, template = spec.of(Generate), spec.data, {}
  if data.chat_template or data.template_date:  # else it is the tokenizer's own
    with open(os.path.expanduser(data.chat_template) or os.devnull, "rb") as f:
      template["template"] = hashlib.sha256(f.read() + data.template_date.encode()).hexdigest()[:16]
  if (matmul := spec.flat["kernels.matmul"]) != "auto":  # another order of sums
    template["matmul"] = matmul
  if g.stop:
    template["stop"] = list(g.stop)
  # Other keys that make the forward pass; scales are in the digest of the weights.
  known = [f"precision.{key}" for key in ("rules", "policy", "calibration", "compute_dtype")]
  changed = {
    key: value
    for key, (_, value) in identity.diff(dict(spec.flat), identity.flatten(registry.base())).items()
    if key.startswith("precision.") and key not in known
    if registry.affects(key) is registry.Affects.RESULT
  }
  return {
    **template,
    **(changed if precision == _RECIPE else {}),
    "precision": precision,
    "rules": rules if precision == _RECIPE else [],
    "compute_dtype": spec.run.dtype.name,
    "cache_format": g.cache_format,
    "max_length": g.max_length,
    "stop_tokens": list(g.stop_tokens),
    "chat": spec.of(Tasks).chat,
    "tokenizer": spec.data.tokenizer.fingerprint,
  }


def _folder(spec: train_spec.TrainSpec, workdir: str, of: dict[str, Any]) -> str:
  """WORKDIR/evaluation/step_100, or .../hf_NAME; "_bf16" where that is the forward pass."""
  label = f"step_{of['step']}" if "step" in of else f"hf_{store.slug(of['hf'])}"
  suffix = "" if spec.of(Generate).precision == _RECIPE else f"_{spec.of(Generate).precision}"
  return os.path.join(workdir, store.FOLDER, label + suffix)


def _summary(spec, settings, folder: str, done: list[run_lib.Evaluated]) -> dict[str, Any]:
  prints = " ".join(one.task.fingerprint for one in done)
  data = hashlib.sha256(prints.encode()).hexdigest()
  runs_code = any(one.task.verify is benchmarks.verify_program for one in done)
  tool = code_sandbox.sandbox().tool if runs_code else None
  earlier = store.earlier_seconds(folder)
  for one in done:
    one.summary["seconds"] = round(one.summary["seconds"] + earlier.get(one.task.name, 0.0), 1)
  return {
    "tasks": {one.task.name: one.summary for one in done},
    "settings": {**settings, "seed": spec.of(Tasks).seed, "code_sandbox": tool},
    "provenance": provenance.provenance(spec.flat, data, spec.seed, spec.num_devices),
  }


def _compare(other: str, folder: str, tasks: Sequence[Task], console) -> dict[str, dict[str, Any]]:
  """Prints and returns this evaluation minus the other workdir's newest, by task."""
  there = store.newest(other, folder)
  names = {task.name for task in tasks}
  mine = {k: v for k, v in store.read_scores(folder).items() if k in names}
  comparisons = run_lib.compare([mine], [store.read_scores(there)])
  title = f"{folder} - {there}: two runs, bootstrap over items"
  console.print(console_lib.table(title, report.COMPARED, report.compared_rows(comparisons)))
  return {
    name: {**dataclasses.asdict(c), "verdict": c.verdict, "with": there}
    for name, c in comparisons.items()
  }
