"""The section `export`: its checks, and the choice of the matrices that are FP8."""

import os
import re
import shutil
from collections.abc import Collection

from fp8jax.config.files import Config
from fp8jax.errors import ConfigErrors, UserError
from fp8jax.export import fp8 as fp8_export
from fp8jax.export import refusals
from fp8jax.export.settings import Export
from fp8jax.models import transformer
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import names, schemes
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.phases.policy import SwitchRecipe
from fp8jax.recipe import library
from fp8jax.recipe.gemm import PASSES
from fp8jax.recipe.quant import CURRENT
from fp8jax.recipe.served import SERVED
from fp8jax.step.train_spec import TrainSpec

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Forms of Smooth-SwiGLU that cannot be merged into weights.
_NOT_FOLDED = {
  "none": "there is nothing to merge",
  "token": "every token has a scale of its own, which no weight can hold",
}


def problems(c: Config) -> list[str]:
  """Of the section `export` against itself and the files it names, in words."""
  problems, e = ConfigErrors(), c.export
  problems.check(
    e.format != "peft" or bool(c.model.lora.rank or c.init.adapters),
    "export.format='peft' writes adapters, and model.lora.rank=0 has none; set the rank of the run",
  )
  problems.file("export.input_scales", e.input_scales, "write it with --job=calibrate")
  problems.file("export.gate_text", e.gate_text, "name a text file, or '' for held-out text")
  problems.check(e.max_kl > 0, f"export.max_kl={e.max_kl} must be positive, in nats per token")
  client = os.path.expanduser(e.client_python)
  problems.check(
    not client or shutil.which(client) is not None,
    f"export.client_python={e.client_python!r} is no program; name the python of an environment "
    "with torch and transformers, or with vllm, or '' for none",
  )
  problems.check(
    e.client == "transformers" or bool(client),
    f"export.client={e.client!r} reads the folder in an environment of its own: name its python as "
    "export.client_python, or set export.client='transformers'",
  )
  problems.check(
    e.client == "transformers" or e.format != "peft",
    f"export.client={e.client!r} reads whole models, and export.format='peft' writes adapters; "
    "take another export.format, which merges them, or set export.client='transformers'",
  )
  problems.check(
    e.client == "transformers" or not e.kv_cache,
    f"export.kv_cache={e.kv_cache!r} with export.client={e.client!r}: it would round keys and "
    "values, and the pass that it is compared with does not; check the folder with "
    "export.kv_cache='' and write it without export.client_python, or set "
    "export.client='transformers'",
  )
  problems.check(
    not e.push_to or _REPOSITORY.fullmatch(e.push_to) is not None,
    f"export.push_to={e.push_to!r} must be a repository of the Hugging Face hub, ORG/NAME",
  )
  _check_fp8(e, problems)
  form = c.precision.smooth_swiglu
  if e.fold_smooth_batches and form in _NOT_FOLDED:
    problems.found.append(
      f"export.fold_smooth_batches={e.fold_smooth_batches} with precision.smooth_swiglu={form!r}: "
      f"{_NOT_FOLDED[form]}; set export.fold_smooth_batches=0, or train with 'channel'"
    )
  return problems.found


def problems_of_spec(spec: TrainSpec) -> list[str]:
  """Of the choice of the FP8 matrices, before anything is read.

  Recipes that a policy may have switched are known with the checkpoint, see build.check_codes.
  """
  problems = ConfigErrors()
  with_gains = sorted(
    name
    for name, site in site_lib.flatten(spec.sites()).items()
    if any(getattr(site.recipe, p).gain for p in PASSES)
  )
  problems.check(
    not with_gains,
    f"recipes multiply the products of {', '.join(with_gains[:3])} by gains, and no architecture "
    "of transformers does; keep the checkpoint, which this project reads",
  )
  problems.check(
    spec.of(Export).format != "peft" or not spec.model.reward_head,
    "export.format='peft' writes adapters alone, and the reward head belongs to them; another "
    "export.format merges both",
  )
  problems.check(
    spec.of(Export).client == "transformers" or not spec.model.reward_head,
    f"export.client={spec.of(Export).client!r} compares logits of the next token, and a reward "
    "model has none; set export.client='transformers'",
  )
  switches = any(isinstance(p, SwitchRecipe) for p in spec.precision.policy)
  last = spec.weights.step if spec.weights.step >= 0 else spec.steps
  if spec.weights.hf or not switches:
    plan = problems.attempt(lambda: choose(spec, spec.phase(max(last - 1, 0))))
    if spec.weights.hf and not hf_weights.codes_of(spec.weights.hf, spec.model):
      problems.attempt(lambda: check_inputs(spec, plan))
  return problems.found


def check_inputs(spec: TrainSpec, plan: fp8_export.Plan | None):
  """Refuses static scales of activations that no table gives; a quantized folder may have them.

  Raises:
    UserError: names the key.
  """
  e, inputs = spec.of(Export), [m.scheme.inputs for m in plan.matrices.values()] if plan else []
  if not e.input_scales and any(x is not None and x.source != CURRENT for x in inputs):
    raise UserError(
      f"export.format={e.format!r} has static scales of activations: set {refusals.TABLE}"
    )


def _check_fp8(e: Config, problems: ConfigErrors):
  problems.check(
    e.scale_fmt == "auto" or e.format == "hf-fp8-block",
    f"export.scale_fmt={e.scale_fmt!r} is of export.format='hf-fp8-block'; set it to 'auto'",
  )
  problems.check(
    e.strategy == "auto" or e.format == "compressed-tensors",
    f"export.strategy={e.strategy!r} is of export.format='compressed-tensors'; set it to 'auto'",
  )
  problems.check(
    e.format != "peft" or e.dtype in ("auto", "float32"),
    f"export.dtype={e.dtype!r} with export.format='peft', which writes adapters as they were "
    "trained, float32; set it to 'auto'",
  )
  problems.check(
    not e.input_scales
    or (e.format in ("compressed-tensors", "modelopt") and e.strategy != "block"),
    f"export.input_scales={e.input_scales!r}: static scales of inputs are of "
    "export.format='compressed-tensors' and 'modelopt'; blocks scale every token. Set "
    "export.input_scales=''",
  )
  problems.check(
    not e.kv_cache or e.format in ("compressed-tensors", "modelopt"),
    f"export.kv_cache={e.kv_cache!r}: scales of keys and values are of "
    "export.format='compressed-tensors' and 'modelopt'; set it to ''",
  )
  problems.check(
    not (e.format == "hf-fp8-block" and e.dtype == "float32"),
    "export.dtype='float32' with export.format='hf-fp8-block': transformers multiplies such a "
    "model in 16 bits; set export.dtype='auto' or 'bfloat16'",
  )


def scheme(e: Export) -> schemes.Scheme | None:
  """Of matrices whose recipe does not say one, in the section's format; None for no codes."""
  method = fp8_export.METHODS.get(e.format)
  if method == schemes.MODELOPT:
    return schemes.Scheme(method, schemes.NVFP4, schemes.NVFP4_INPUTS)
  strategy = "channel" if e.strategy == "auto" else e.strategy
  strategy = "block" if method == schemes.FINE_GRAINED else strategy
  return schemes.fp8(method, strategy, static_inputs=bool(e.input_scales)) if method else None


def choose(
  spec: TrainSpec,
  phase: int,
  merged: Collection[str] = (),
  stored: fp8_export.StoredByName | None = None,
) -> fp8_export.Plan | None:
  """The quantized matrices of an export of a checkpoint in this phase of the precision schedule.

  A folder (weights.hf) in 16 bits was trained nobody knows how: all of it is quantized, as the
  recipes say where they are served ones.

  Args:
    merged: paths of the weights that adapters were merged into, which are requantized.
    stored: see fp8_export.choose.

  Raises:
    UserError: see fp8_export.choose, and names.entries.
  """
  e = spec.of(Export)
  default = scheme(e)
  if default is None:
    return None
  recipes = site_tree.recipes_of(spec.sites(phase=phase))
  if spec.weights.hf:
    recipes = {n: r if r.name in SERVED else library.BF16 for n, r in recipes.items()}
  hf_config.check_exportable(spec.model)
  follows = default.method != schemes.FINE_GRAINED and e.strategy == "auto"
  return fp8_export.choose(
    names.entries(spec.model), spec.model.dims, recipes, default,
    follows=follows, scale_fmt=e.scale_fmt, requantize=e.requantize, changed=_changed(spec),
    merged=merged, stored=stored,
  )  # fmt: skip


def _changed(spec: TrainSpec) -> set[str]:
  """Paths of the weights that Smooth-SwiGLU's scales per channel multiply, in training or here."""
  if spec.run.smooth_swiglu != "channel":
    return set()
  is_folded = bool(spec.of(Export).fold_smooth_batches)
  return {
    f"layers/{mixer.key}/{one.name}"
    for mixer in transformer.mixers(spec.model)
    for one in mixer.sites
    if (one.has_channel_scales and not spec.weights.hf)
    or (is_folded and mixer.fold_channel_scales is not None)
  }
