"""A checkpoint as a folder that Hugging Face, vLLM and others read."""

import os

import jax
import jax.numpy as jnp

from fp8jax import console as console_lib
from fp8jax import hub
from fp8jax.data import batch_sharding, loader
from fp8jax.errors import UserError
from fp8jax.jobs.restore import folder_of, restore_params
from fp8jax.models import transformer
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import export_folder
from fp8jax.models.hf import names as hf_names
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import stored_params
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.step import run_spec


def run(plan: run_spec.RunSpec, workdir: str):
  """Writes a checkpoint as a Hugging Face folder."""
  hf_names.entries(plan.model)  # before anything is read: raises where there is no mapping
  target = folder_of(plan.export.path, workdir, "hf")
  never = {workdir: "the run's own folder", plan.init.hf: "the folder of init.hf"}
  export_folder.check_other(target, _local(never))
  export_folder.check(target)  # before work that takes long; `claim` checks again
  params, step, meta = restore_params(plan, workdir)
  began_with = {meta["config"].get("init.hf", ""): "the folder that training started from"}
  export_folder.check_other(target, _local(began_with))
  params = stored_params.dequantize_tree(params)
  if plan.export.fold_smooth_batches:
    params = _fold_smooth(plan, params)
  dtype = plan.export.dtype
  dtype = meta["weights_dtype"] if dtype == "auto" else dtype
  source = os.path.join(workdir, "hf_source")
  source = source if os.path.isdir(source) else ""
  base = hf_config.read_json(source, "config.json") if source else None
  hf_weights.save_params(target, params, plan.model, dtype, base, source=source)
  return {"folder": target, "step": step, "dtype": dtype}


def _local(folders: dict[str, str]) -> dict[str, str]:
  return {hub.local(folder): what for folder, what in folders.items() if folder}


def _fold_smooth(plan: run_spec.RunSpec, params):
  """The parameters with Smooth-SwiGLU's scales per channel, those of held-out text, folded in."""
  scales = None
  sites = plan.sites(evaluator_lib.BF16)
  look = jax.jit(lambda p, b: transformer.channel_scales(p, sites, b, plan.model, plan.run))
  spread = batch_sharding.BatchSharder(plan.run.layout, plan.eval.batch)
  for source in plan.data.sources:
    counts = loader.DocumentCounts()
    for batch in loader.heldout_batches(
      plan.data, source, spread.local_rows, plan.export.fold_smooth_batches, spread.shard, counts
    ):
      found = look(params, spread.place(batch))
      scales = found if scales is None else jax.tree.map(jnp.maximum, scales, found)
    for what, number in counts.summary_everywhere().items():
      text = f"held-out documents of {source} passed over as {what}: {number}"
      console_lib.console(stderr=True).print(text)
  if scales is None:
    raise UserError(
      "export.fold_smooth_batches needs held-out text to choose scales from, and there is none: "
      "raise data.heldout_fraction or give more documents"
    )
  return transformer.fold_channel_scales(params, scales, plan.model)
