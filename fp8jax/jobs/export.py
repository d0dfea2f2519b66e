"""A checkpoint or a folder, as a folder that Hugging Face, vLLM and others read."""

from fp8jax import hub
from fp8jax.evaluation import divergence
from fp8jax.export import build, checks, folder
from fp8jax.export.settings import Export
from fp8jax.run import restore
from fp8jax.step.train_spec import TrainSpec


def run(spec: TrainSpec, workdir: str, out: str = ""):
  """Writes a checkpoint, or the folder weights.hf, as a Hugging Face folder."""
  target = restore.output_folder(out, workdir, "hf")
  versions, e = build.check_place(spec, target, workdir), spec.of(Export)
  texts = divergence.batches(spec, divergence.Wanted(e.gate_tokens, e.gate_text, "export.gate_"))
  if not spec.weights.hf:
    step, meta = restore.find(spec, workdir)
    if began := meta["config"].get("init.hf", ""):
      folder.check_other(target, {hub.local(began): "the folder that training started from"})
    build.check_codes(restore.as_trained(spec, meta), meta, step)
  has_scales = checks.scheme(e) is not None
  loaded = restore.load_weights(spec, workdir, has_scales=has_scales, has_frozen=False)
  spec, is_folder = loaded.spec, bool(spec.weights.hf)
  source = build.of_folder(loaded) if is_folder else build.of_checkpoint(loaded, workdir)
  plain = restore.without_adapters(spec) if spec.model.lora else spec
  return build.build(spec, plain, source, target, texts, versions)
