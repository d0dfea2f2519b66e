"""A generator of a run's checkpoint, or of a Hugging Face folder, in the precision of a run."""

import os

from fp8jax import console as console_lib
from fp8jax import hub
from fp8jax import params as params_lib
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.data.config import DataConfig
from fp8jax.data.tokenize import BYTES, Tokenizer
from fp8jax.errors import ConfigErrors, UserError
from fp8jax.generation import api, checks, weights
from fp8jax.generation.settings import Generate
from fp8jax.models.config import ComputeConfig
from fp8jax.ops import site_tree
from fp8jax.run import evaluator as evaluator_lib
from fp8jax.run.restore import load_weights
from fp8jax.step import train_spec


def load(
  spec: train_spec.TrainSpec, workdir: str, has_digest: bool = False
) -> tuple[api.Generator, dict]:
  """(the generator that `generate` describes, the place of its weights for a report).

  Delayed and static scales are those of the checkpoint or of the calibration; without any, they are
  taken from the tensors of every step.

  Args:
    has_digest: whether the place has "digest", of the bits of all weights and scales.
  """
  problems = ConfigErrors()
  problems.extend(checks.of_model(spec.model, spec.run))
  g = spec.of(Generate)
  recipe = evaluator_lib.BF16 if g.precision == evaluator_lib.BF16 else None
  problems.extend(checks.of_values(g.weights, spec.sites(recipe)))
  problems.refuse()
  kept = weights.multiplied_as_codes(site_tree.recipes_of(spec.sites(recipe)))
  loaded = load_weights(spec, workdir, kept=kept)
  spec, states = loaded.spec, loaded.states
  sites = evaluator_lib.sites_of(spec, recipe, states, loaded.phase)
  digest = {"digest": params_lib.digest((loaded.params, states))} if has_digest else {}
  return make(spec, workdir, loaded.params, sites), loaded.where | digest


def make(
  spec: train_spec.TrainSpec, workdir: str, params, sites, run: ComputeConfig | None = None
) -> api.Generator:
  """The generator of these parameters and sites, with the settings of `generate`.

  Args:
    run: the execution of its forward pass; None: training's.
  """
  g, folder, tokenizer = spec.of(Generate), settings_folder(spec, workdir), spec.data.tokenizer
  # A run that began without Hugging Face files keeps its ends of turns in its own folder.
  ends = api.end_ids(folder or workdir, tokenizer, g.stop_tokens)
  return api.Generator(
    params, sites, spec.model, run or spec.run, tokenizer, ends, slots=g.slots,
    cache_format=g.cache_format, max_length=g.max_length, folder=folder, weight_form=g.weights,
  )  # fmt: skip


def settings_folder(spec: train_spec.TrainSpec, workdir: str) -> str:
  """The folder of a model's settings: weights.hf, the one kept by training, init.hf, or ""."""
  if spec.weights.hf:
    return spec.weights.hf
  kept = os.path.join(workdir, "hf_source")
  if os.path.isdir(kept):
    return kept
  return spec.init.hf if spec.init.hf and os.path.isdir(hub.local(spec.init.hf)) else ""


def template_of(data: DataConfig, tokenizer: Tokenizer | None = None) -> ChatTemplate:
  """`chat_template` of a run's data, or of another tokenizer with its settings."""
  return chat_template(tokenizer or data.tokenizer, data.chat_template, data.template_date)


def chat_template(tokenizer: Tokenizer, template: str = "", date: str = "") -> ChatTemplate:
  """The template of a tokenizer.

  Args:
    template: data.chat_template, a file instead.
    date: data.template_date, which a template may write.

  Raises:
    UserError, FileNotFoundError: there is none.
  """
  if tokenizer.path == BYTES:
    raise UserError(
      "messages need a chat template, and data.tokenizer='bytes' has none; set data.tokenizer to "
      "a Hugging Face folder, or write no chats (texts as 'prompt', eval.chat=False)"
    )
  made = ChatTemplate.load(tokenizer.path, template, date)
  if made.origin:
    console_lib.console(stderr=True).print(made.origin)
  return made
