"""A checkpoint or a folder, as a folder that Hugging Face, vLLM and others read."""

from fp8jax import hub
from fp8jax.export import build, checks, folder, gate
from fp8jax.export.settings import Export
from fp8jax.run import restore
from fp8jax.step.run_spec import RunSpec


def run(plan: RunSpec, workdir: str, out: str = ""):
  """Writes a checkpoint, or the folder weights.hf, as a Hugging Face folder."""
  target = restore.folder_of(out, workdir, "hf")
  never = {workdir: "the run's own folder", plan.init.hf: "the folder of init.hf",
           plan.weights.hf: "the folder of weights.hf"}  # fmt: skip
  versions = build.check_place(plan, target, never)
  texts = gate.batches(plan)
  if not plan.weights.hf:
    step, meta = restore.find(plan, workdir)
    if began := meta["config"].get("init.hf", ""):
      folder.check_other(target, {hub.local(began): "the folder that training started from"})
    build.check_codes(restore.as_trained(plan, meta), meta, step)
  has_scales = checks.fp8_format(plan.of(Export)) is not None
  loaded = restore.load_weights(plan, workdir, has_scales=has_scales)
  plan, is_folder = loaded.spec, bool(plan.weights.hf)
  source = build.of_folder(loaded) if is_folder else build.of_checkpoint(loaded, workdir)
  plain = restore.without_adapters(plan) if plan.model.lora else plan
  return build.build(plan, plain, source, target, texts, versions)
