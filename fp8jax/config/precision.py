"""The precision sections of a configuration: read, completed by what the model needs, checked."""

import dataclasses
import math
import sys
from typing import Any

from fp8jax import axes, patterns
from fp8jax.errors import ConfigErrors
from fp8jax.kernels.device import Device
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.models import config as model_config
from fp8jax.models import invariant, lora, transformer
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.optim import storage
from fp8jax.phases.schedule import Phase, Precision, Rules
from fp8jax.quantization import amax_history, stored_matrix
from fp8jax.recipe import attention, by_token
from fp8jax.recipe import rules as rules_lib
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.papers import PAPERS
from fp8jax.recipe.quant import Quant, Static
from fp8jax.step import quantized_once


def read(c: Any, steps: int | None = None) -> Precision:
  """`precision` of a config as phases.

  Args:
    steps: of the run; None where data.epochs would have to count them, which then sets no end.

  Raises:
    ValueError: a rule, a recipe or a step that makes no sense.
  """
  p = c.precision
  end: int = (sys.maxsize if c.data.epochs else c.steps) if steps is None else steps
  phases = [(0, _rules("precision.rules", p.rules))]
  for i, entry in enumerate(p.schedule):
    key = f"precision.schedule[{i}]"
    if not isinstance(entry, (tuple, list)) or len(entry) != 2 or type(entry[0]) is not int:
      raise ValueError(
        f"{key}={entry!r} is no pair of a first step and rules, such as (900, (('.*', 'bf16'),))"
      )
    if not phases[-1][0] < entry[0] < end:
      raise ValueError(
        f"{key} starts at step {entry[0]}; phases start in order, after step {phases[-1][0]} and "
        f"before the last, steps={end}"
      )
    phases.append((entry[0], _rules(key, entry[1])))
  return Precision(tuple(Phase(start, rules) for start, rules in phases))


def with_first_last_rules(
  precision: Precision, c: Any, model: model_config.ModelConfig
) -> Precision:
  """The same with precision.first_bf16 and last_bf16 layers excepted.

  Raises:
    ValueError: more layers than there are; a rule that decides nothing, or a site without one.
  """
  first, last = c.precision.first_bf16, c.precision.last_bf16
  if first + last > model.num_layers:
    raise ValueError(
      f"precision.first_bf16={first} and last_bf16={last} name more layers than the model's "
      f"{model.num_layers}"
    )
  ends = rules_lib.first_last_rules(first, last, model.num_layers)
  ends = lora.RULES + ends if model.lora else ends
  phases = tuple(dataclasses.replace(p, rules=ends + p.rules) for p in precision.phases)
  paths = list(site_tree.find_sites(transformer.site_params(model)))
  for phase in phases:
    rules_lib.segments(paths, model.num_layers, phase.rules)
  return dataclasses.replace(precision, phases=phases)


def frozen_problems(
  precision: Precision, model: model_config.ModelConfig, layout: axes.Layout
) -> list[str]:
  """Recipes that cannot multiply the codes of a frozen base, sizes that its rotation does not
  divide, and meshes that split its tiles."""
  stored = storage.FROZEN.get(model.lora.base) if model.lora else None
  if model.lora is None or stored is None or not storage.is_in_codes(stored):
    return []
  base, rotation = f"model.lora.base={model.lora.base!r}", stored.rotation
  problems, declared = [], site_tree.find_sites(transformer.site_params(model))
  for phase in precision.phases:
    for _, _, chosen in rules_lib.segments(list(declared), model.num_layers, phase.rules):
      for path, name in chosen.items():
        recipe, is_base = rules_lib.recipe_by_name(name), path.startswith("layers/")
        if not is_base or lora.is_adapter(path):
          continue
        extent = math.prod(model.dims[letter] for letter in declared[path].gemm_letters[0])
        if not _multiplies(recipe, stored):
          problems.append(
            f"{path} has recipe {name!r} and {base} keeps its weight in codes of {stored}: "
            f"{_alternatives(recipe, stored)}"
          )
        elif rotation and extent % rotation.size:
          problems.append(
            f"{path}: {base} rotates blocks of {rotation.size}, and the product contracts {extent},"
            " no multiple of it; set model.lora.base='bf16'"
          )
        # Of a recipe in the compute dtype too: a device dequantizes its own part.
        elif not tiles_are_whole(declared[path], model, layout, stored):
          letters = "".join(declared[path].gemm_letters)
          problems.append(
            f"{path}: {base} on this mesh would split tiles of {stored} over devices; take a "
            f"smaller {layout.smaller(layout.weight_axes_of(letters))}, or set "
            "model.lora.base='bf16'"
          )
  return list(dict.fromkeys(problems))


def _multiplies(recipe: Recipe, stored: Quant) -> bool:
  """Whether both products of a weight take what is stored."""
  rows = recipe.fwd.rotate_rows[1], recipe.dgrad.rotate_rows[1]
  return stored_matrix.is_compatible(recipe.fwd.rhs, stored, rows[0]) and (
    stored_matrix.is_compatible(recipe.dgrad.rhs, stored, rows[1], is_turned=True)
  )


def _alternatives(recipe: Recipe, stored: Quant) -> str:
  """The recipes of codes, and the bases of a recipe, in words."""
  known = [r.name for r in (RECIPES | PAPERS).values() if r.fwd.rhs and _multiplies(r, stored)]
  bases = [
    n for n, q in storage.FROZEN.items() if storage.is_in_codes(q) and _multiplies(recipe, q)
  ]
  (*most, last), keys = ([*map(repr, own), "'bf16'"] for own in (known, bases))
  recipes = " or ".join([", ".join(most), last] if most else [last])
  return f"give it recipe {recipes}, or set model.lora.base={' or '.join(keys)}"


def tiles_are_whole(
  param, model: model_config.ModelConfig, layout: axes.Layout, stored: Quant
) -> bool:
  """Whether every device's part of a weight begins and ends with a tile, and a rotated block."""
  size = stored.rotation.size if stored.rotation else 1
  wanted = (math.lcm(size, stored.tile[1] or 1), stored.tile[0] or 1)
  for group, multiple in zip(param.gemm_letters, wanted, strict=True):
    parts = [layout.size(layout.weight_axes(letter)) for letter in group]
    extent = math.prod(model.dims[letter] for letter in group)
    if max(parts[1:], default=1) > 1 or (parts[0] > 1 and extent // parts[0] % multiple):
      return False
  return True


def read_attention(c: Any, device: Device, problems: ConfigErrors) -> attention.Attention | None:
  """The value of precision.attention; None for "wide", and where it is refused."""
  recipe = attention.ATTENTIONS.get(c.precision.attention)
  if recipe is None:
    return None
  problems.check(
    device.platform == "cpu" or c.kernels.matmul == "reference",
    f"precision.attention={recipe.name!r}: no kernel here multiplies attention's products in 8 "
    "bits, and a GPU emulates by name alone; set kernels.matmul='reference' to have them emulated, "
    "slowly, or precision.attention='wide'",
  )
  problems.check(
    c.kernels.attention in ("auto", "xla"),
    f"kernels.attention={c.kernels.attention!r} with precision.attention={recipe.name!r}, which is "
    "emulated in plain JAX; set kernels.attention='xla' or 'auto', or precision.attention='wide'",
  )
  return recipe


def check_smooth(c: Any, model: model_config.ModelConfig | None, problems: ConfigErrors):
  """precision.smooth_swiglu is of the model's mixers."""
  form = c.precision.smooth_swiglu
  if form != "none" and model is not None:
    problems.check(
      any(mixer.fold_channel_scales is not None for mixer in transformer.mixers(model)),
      f"precision.smooth_swiglu={form!r} with model.mixers={model.mixers!r}: none of them has it; "
      "set precision.smooth_swiglu='none'",
    )


def weight_operand_problems(spec: Any) -> list[str]:
  """The reasons why no step of a TrainSpec can quantize weights once, in words."""
  if not quantized_once.is_on(spec):
    return []
  found = [quantized_once.account(spec, n) for n in range(len(spec.precision.phases))]
  if any(account.names for account in found):
    return []
  name, why = next(iter(found[0].by_product.items()))
  return [
    f"memory.weight_operands='per_step' with no weight that a step can quantize once ({name}: "
    f"{why}; and so on); set memory.weight_operands='per_product', or another recipe"
  ]


def own_teacher_problems(spec: Any) -> list[str]:
  """The sites of a student that learns from its own beginning alone, whose gradients grow from
  nearly 0, with a scale of gradients that stays where it began, in words."""
  if spec.distill.weight < 1 or spec.distill.teacher:
    return []
  g = amax_history.TENSORS.index("g")
  static = {
    recipe.name: name
    for name, recipe in site_tree.recipes_of(spec.sites()).items()
    if isinstance(amax_history.sources(recipe)[g], Static)
  }
  return [
    f"distill.weight={spec.distill.weight} and distill.teacher='' with recipe {recipe!r} (site "
    f"{name}): the teacher is what training starts from, gradients grow from nearly 0, and a "
    "static scale of them saturates; take a recipe with current or delayed scales of gradients, "
    "set distill.weight below 1, or name a teacher"
    for recipe, name in static.items()
  ]


def invariant_problems(spec: Any) -> list[str]:
  """The reasons why a TrainSpec cannot keep precision.invariant, in words; empty without any."""
  if not spec.run.is_invariant:
    return []
  wanted = (
    ("optim.in_backward", False, "a layer is differentiated apart there"),
    ("memory.remat_policy", "full", "a layer saves its input alone"),
    ("memory.save_layer_inputs", "none", "the backward pass begins at the very input of a layer"),
    ("distill.weight", 0.0, "a teacher's logits come from the plain forward pass"),
    ("precision.attention", "wide", "its scales are of many tokens"),
    ("model.unit_scaling", "none", "its factors are of whole batches"),
    ("memory.weight_operands", "per_product", "its products read the weights in another form"),
  )
  texts = [
    f"{key}={spec.flat[key]!r}: {why}; set {key}={needed!r}"
    for key, needed, why in wanted
    if spec.flat[key] not in (needed, None)
  ]
  if spec.run.smooth_swiglu == "channel":
    texts.append(
      "precision.smooth_swiglu='channel': its scales are of all tokens of a batch; take 'token'"
    )
  if spec.device.platform != "cpu":
    texts.append(
      f"a {spec.device.platform.upper()}, where these choose how to sum by the size of what they "
      f"are given: {'; '.join(_of_libraries(spec))}. Run on a CPU, or set precision.invariant=False"
    )
  texts += invariant.problems_of_layout(spec.run.layout)
  if spec.model.rope_scaling.kind == "dynamic":
    texts.append("dynamic rope: its frequencies depend on the length of what a token stands in")
  named = [name for phase in spec.precision.phases for _, name in phase.rules]
  named += [policy.to for policy in spec.precision.policy if hasattr(policy, "to")]
  for name in dict.fromkeys(named):
    texts += (
      f"recipe {name!r}: {why}" for why in by_token.problems(rules_lib.recipe_by_name(name))
    )
  return [f"precision.invariant=True with {text}" for text in dict.fromkeys(texts)]


def _of_libraries(spec: Any) -> list[str]:
  """The forward passes of a program for a GPU that no kernel of ours computes, by library."""
  by = {"cuBLASLt": [], "XLA": []}
  for name, site in site_lib.flatten(spec.sites()).items():
    if (backend := site.backends[0]) not in ("mosaic_sm90", *gemm_api.EMULATED):
      by["XLA" if backend == "reference" else "cuBLASLt"].append(name)
  kind = spec.run.attention
  attention = "cuDNN" if kind == "cudnn" else "XLA" if kind == "xla" else f"kernels of {kind}"
  by.setdefault(attention, []).append("attention")
  by["reductions of XLA's Triton"] = ["norms", "log-softmax"]
  return [f"{library} ({', '.join(names)})" for library, names in by.items() if names]


def _rules(key: str, stated) -> Rules:
  """(regular expression, recipe name) pairs."""
  rules = tuple(stated) if isinstance(stated, (tuple, list)) else ()
  are_pairs = all(isinstance(r, (tuple, list)) and len(r) == 2 for r in rules)
  if not rules or not are_pairs or not all(isinstance(x, str) for r in rules for x in r):
    raise ValueError(
      f"{key}: {stated!r} is no sequence of (regular expression, recipe) pairs such as "
      "(('head', 'bf16'), ('.*', 'block_128'))"
    )
  for pattern, recipe in rules:
    if problem := patterns.problem(pattern):
      raise ValueError(f"{key}: {problem}")
    try:
      rules_lib.recipe_by_name(recipe)
    except ValueError as e:
      raise ValueError(f"{key}: {e}") from e
  return tuple((p, r) for p, r in rules)
