"""A checkpoint or a folder, as a folder that Hugging Face, vLLM and others read."""

from fp8jax import hub
from fp8jax.export import build, checks, folder, gate
from fp8jax.jobs import restore
from fp8jax.step.run_spec import RunSpec


def run(plan: RunSpec, workdir: str):
  """Writes a checkpoint, or the folder eval.hf, as a Hugging Face folder."""
  target = restore.folder_of(plan.export.path, workdir, "hf")
  never = {workdir: "the run's own folder", plan.init.hf: "the folder of init.hf",
           plan.eval.hf: "the folder of eval.hf"}  # fmt: skip
  versions = build.check_place(plan, target, never)
  texts = gate.batches(plan)
  if plan.eval.hf:
    plain = restore.without_adapters(plan) if plan.model.lora else plan
    return build.build(plan, plain, build.of_folder(plan), target, texts, versions)
  step, meta = restore.find(plan, workdir)
  if began := meta["config"].get("init.hf", ""):
    folder.check_other(target, {hub.local(began): "the folder that training started from"})
  plan = restore.as_trained(plan, meta)
  build.check_codes(plan, meta, step)
  plain = restore.without_adapters(plan) if plan.model.lora else plan
  return build.build(
    plan, plain, _checkpoint(plan, workdir, step, meta), target, texts, versions
  )  # fmt: skip


def _checkpoint(plan: RunSpec, workdir: str, step: int, meta) -> build.Source:
  params, _, _ = restore.restore_params(plan, workdir, step)
  states = {}
  if checks.fp8_format(plan.export) is not None:
    phase = plan.phase(max(step - 1, 0))
    states = restore.restore_scaling_states(plan, workdir, step, meta, phase)
  return build.of_checkpoint(plan, workdir, params, step, meta, states)
