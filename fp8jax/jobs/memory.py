"""Memory of a step on a device, declared and compiled, and its FP8 GEMMs."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax

from fp8jax import console as console_lib
from fp8jax.compiled import aot, collectives, memory
from fp8jax.compiled.memory import MemoryRow
from fp8jax.generation import aot as generation_aot
from fp8jax.generation import batching, capacity
from fp8jax.generation.settings import VALUES, Generate
from fp8jax.rl import reward_model, scoring
from fp8jax.rl.settings import REWARD, RL
from fp8jax.run import provenance
from fp8jax.step import distillation, quantized_once, train_spec

# Other models than the one in training, whose parameters a run holds: keys of a summary's "rl".
HELD = ("reference", "reward model")


def run(
  spec: train_spec.TrainSpec, devices: Sequence[Any], topology: str, workdir: str
) -> dict[str, Any]:
  """Bytes per device by kind and FP8 GEMMs, declared and found in the compiled step.

  Args:
    devices: those to compile for, real or of a topology.
    topology: --topology, for the message; "" where the devices are here.
    workdir: gets memory.json for the run's report, where it exists.
  """
  out = console_lib.console(stderr=True)
  rows = memory.declared(spec)
  out.print(f"compiling the step for {topology or devices[0].device_kind}")
  compiled, summary = memory.compiled(spec, aot.lower(spec, devices))
  rows += compiled
  if (own := spec.sections.get(RL)) and (own.tasks or own.pairs) and own.loss != REWARD:
    beside, summary["rl"] = _of_rl(spec, devices, aot.parse(topology)[0] if topology else "")
    rows += beside
  out.print(memory.table(rows, summary))
  if of_rl := summary.get("rl"):
    of_rl["peaks"] = peaks = _peaks(summary["state_declared"], summary["peak"], of_rl)
    texts = (f"{n / 2**30:.3f} GiB {moment}" for moment, n in peaks.items())
    out.print(f"peaks per device, all parameters of other models included: {', '.join(texts)}")
  proof = summary["fp8_gemms"]
  out.print(
    f"FP8 GEMMs per step and device: {proof['found']} of {proof['planned']} planned"
    + (f", by {', '.join(proof['by'])}" if proof["by"] else "")
    + (f"; {proof['problem']}" if proof["problem"] else "")
  )
  for line in (*collectives.lines(summary.get("collectives", [])), *_once(spec, summary["peak"])):
    out.print(line)
  result = {"rows": [dataclasses.asdict(row) for row in rows], **summary}
  if os.path.isdir(workdir):
    provenance.write_json(workdir, "memory.json", result)
  return result


def _once(spec: train_spec.TrainSpec, peak: int) -> list[str]:
  """The price of quantizing weights once per step, where a step could and does not.

  Args:
    peak: bytes per device of the step as it is.
  """
  if quantized_once.is_on(spec) or spec.run.is_invariant:
    return []
  account = quantized_once.account(spec)
  if not account.names:
    return []
  more, whole = (n / 2**30 for n in (account.nbytes, peak + account.nbytes))
  passes = f" of {spec.grad_accum_steps} microbatches" if spec.grad_accum_steps > 1 else ""
  return [
    f"memory.weight_operands='per_step' would make the operands of {len(account.names)} sites once "
    f"per step, not in each pass{passes}: {more:.3g} GiB more per device, a peak of the step of at "
    f"most {whole:.3g}"
  ]


def _of_rl(spec: train_spec.TrainSpec, devices, gpu: str) -> tuple[list[MemoryRow], dict]:
  """(what --job=rl holds beside the state of training, its bytes by part).

  The parameters of the reference and of the reward model are always there; a rollout's weights and
  cache while it draws, and its weights while the reward model scores what was drawn; then
  training's forward pass does. Each is compiled, for a GPU of aot.CAPABILITY or, where that is "",
  for the devices at hand.
  """
  own, rows = spec.of(RL), []
  summary: dict[str, Any] = {"reference": _of_reference(spec), "reward model": 0}
  if own.tasks and own.reward_model:
    held = jax.tree.leaves(reward_model.abstract_params(own.reward_model, spec))
    summary["reward model"] = sum(map(memory.nbytes, held))
    rewards: Any = reward_model.lower(own.reward_model, spec, devices).compile()
    summary["rewarding"] = {"temporaries": rewards.memory_analysis().temp_size_in_bytes}
    note = f"scores of {spec.microbatch} texts"
    rows.append(
      MemoryRow("rewarding: temporaries", None, summary["rewarding"]["temporaries"], note)
    )
  rows += [
    MemoryRow(name, summary[name], None, "in the compute dtype") for name in HELD if summary[name]
  ]
  if own.tasks:
    drawn, summary["rollout"] = _of_rollout(spec, devices, gpu)
    rows += drawn
  if own.objective.has_reference or (own.tasks and not own.objective.beta):
    program: Any = scoring.lower(spec, devices, own.temperature).compile()
    summary["scoring"] = {"temporaries": program.memory_analysis().temp_size_in_bytes}
    note = f"log-probabilities of {spec.microbatch} sequences"
    rows.append(MemoryRow("scoring: temporaries", None, summary["scoring"]["temporaries"], note))
  return rows, summary


def _peaks(state: int, of_step: int, of_rl: dict[str, Any]) -> dict[str, int]:
  """{"in the step": bytes, ...} of the moments of a run that learns by reinforcement, from the
  state of training, the step's peak, and the summary of `_of_rl`."""
  held = sum(of_rl[name] for name in HELD)
  peaks = {"in the step": of_step + held}
  for moment, part in (
    ("while it draws", "rollout"), ("while it scores", "scoring"), ("while it rewards", "rewarding")
  ):  # fmt: skip
    if own := of_rl.get(part):
      peaks[moment] = state + held + own.get("arguments", 0) + own["temporaries"]
      if part == "rewarding":  # between rounds of drawing
        peaks[moment] += of_rl["rollout"]["weights"]
  return peaks


def _of_reference(spec: train_spec.TrainSpec) -> int:
  """Bytes per device of the reference's own parameters; 0 where it has none."""
  own = spec.of(RL)
  if not own.objective.has_reference or distillation.is_base(spec, own.reference):
    return 0
  return sum(map(memory.nbytes, jax.tree.leaves(distillation.abstract_params(spec))))


def _of_rollout(spec: train_spec.TrainSpec, devices, gpu: str) -> tuple[list[MemoryRow], dict]:
  """(rows, bytes) of what draws: weights as products read them, keys and values, temporaries."""
  own, g, served = spec.of(RL), spec.of(Generate), spec.run.layout.served()
  drawn = spec.with_recipe(own.rollout) if own.rollout else spec
  serving = capacity.Serving(
    spec.model, capacity.Gpu.named(gpu or "h200"), g.max_length, 0.0, g.cache_format,
    spec.run.dtype.itemsize,
  )  # fmt: skip
  num, shards = (served.size(served.act_axes(letter)) for letter in "FB")
  row = serving.row("", drawn.precision.phases[0].rules, num)
  slots = -(-g.slots // shards)
  weights, cache = row.weights, slots * row.cache_per_sequence
  if not served.act_axes("G"):  # a device has the keys of all heads
    cache = cache * spec.model.num_kv_heads * num // capacity.shared(spec.model, num).num_kv_heads
  prompt = batching.bucket(g.max_length - own.max_new_tokens, g.max_length)
  sizes = slots * shards, g.max_length, g.cache_format, prompt
  programs = generation_aot.lower(drawn, devices, *sizes)
  if g.weights == VALUES:  # a server's bytes are those of codes
    weights = programs.weights // num
  analyses: list[Any] = [
    program.compile().memory_analysis() for program in (programs.decode, programs.prefill)
  ]
  decode, prefill = (analysis.temp_size_in_bytes for analysis in analyses)
  arguments = analyses[0].argument_size_in_bytes
  rows = [
    MemoryRow("rollout: weights, keys and values", weights + cache, arguments),
    MemoryRow("  rollout: weights", weights, None, f"shared by {num}"),
    MemoryRow("  rollout: keys and values", cache, None, f"{slots} x {g.max_length} tokens"),
    MemoryRow("rollout: temporaries", None, max(decode, prefill), f"prompts of {prompt} tokens"),
  ]
  return rows, {
    "weights": weights, "keys and values": cache, "arguments": arguments,
    "temporaries": max(decode, prefill),
  }  # fmt: skip
