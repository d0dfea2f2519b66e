"""The teacher of distillation: its parameters, and what it says of a batch.

A teacher is None (none), () (under adapters, the frozen base of the student's own parameters) or a
tree like the student's parameters, in the compute dtype. It is an argument of the step beside the
state: no optimizer and no checkpoint has it, and it lies on a mesh as the student does. It computes
outside of differentiation, one microbatch at a time, unquantized.

Source: quantization-aware distillation (arXiv:2601.20088 §3), there with weight and temperature 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import params as params_lib
from fp8jax.models import lora, transformer
from fp8jax.ops import site as site_lib
from fp8jax.ops import stored_params
from fp8jax.recipe import library

BASE = ()
# The loss of texts without a teacher, in words.
CROSS_ENTROPY = "cross entropy"


def declaration(spec):
  """The declaration tree of a teacher: the student's without adapters."""
  return transformer.params(lora.without(spec.model))


def is_base(spec, folder: str) -> bool:
  """Whether the student's own frozen base is the teacher, where no other is named."""
  return spec.model.lora is not None and not folder


def abstract(spec) -> Any:
  """The teacher's shapes, dtypes and shardings."""
  if not spec.distill.weight:
    return None
  return BASE if is_base(spec, spec.distill.teacher) else abstract_params(spec)


def abstract_params(spec) -> Any:
  """Of a teacher's own parameters, as `abstract`."""
  declared = declaration(spec)
  params = params_lib.abstract(declared, spec.model.dims, spec.run.layout)

  def one(p, x):
    return jax.ShapeDtypeStruct(x.shape, _dtype(spec, p), sharding=x.sharding)

  return jax.tree.map(one, declared, params)


def _dtype(spec, param):
  # Norms and biases are computed with in float32.
  return spec.run.dtype if param.decay else jnp.dtype(jnp.float32)


def take(spec, params) -> Any:
  """The teacher of parameters in any storage format, which it uses up one by one."""

  def one(p, x):
    made = stored_params.dequantize_tree(x)
    if made.dtype != _dtype(spec, p):
      made = jax.jit(lambda x: x.astype(_dtype(spec, p)), out_shardings=made.sharding)(made)
      for old in jax.tree.leaves(x):
        old.delete()
    return made

  return jax.tree.map(one, declaration(spec), params)


def identity(teacher, key: str = "distill.teacher") -> dict[str, str]:
  """{key: digest of its parameters to the bit, whatever the mesh}, which a resumed run must have
  again; {} of none and of a frozen base."""
  if not teacher:
    return {}
  return {key: "sum " + params_lib.digest(teacher)}


def loss_of(spec, teacher: dict[str, str]) -> str:
  """The loss of texts, in words: what amaxes of its gradients depend on.

  Args:
    teacher: its `identity`.
  """
  if not spec.distill.weight:
    return CROSS_ENTROPY
  own, where = spec.distill, teacher.get("distill.teacher", "the frozen base")
  return f"{CROSS_ENTROPY}, distill.weight={own.weight}, temperature={own.temperature}, {where}"


def taught(spec, params, batch, teacher):
  """A batch [B, L] with its teacher (transformer.taught), as it is without one.

  Args:
    params: the student's, as the state has them.
  """
  if teacher is None:
    return batch
  cfg, own = lora.without(spec.model), spec.distill
  teacher = of_student(teacher, params)
  with jax.named_scope("teacher"):
    run = dataclasses.replace(spec.run, attention_recipe=None)
    return transformer.taught(teacher, _sites(spec), batch, cfg, run, own.weight, own.temperature)


def of_student(teacher, params):
  """The parameters of a teacher beside a student's, whose base it may be."""
  if not isinstance(teacher, tuple):
    return teacher
  flat = params_lib.flatten(params)
  return params_lib.unflatten({k: p for k, p in flat.items() if not lora.is_adapter(k)})


def _sites(spec):
  """Sites in BF16 whose products are not taken for the student's."""

  def renamed(site):
    name = site.name.replace("layers/", "layers/teacher/")
    return dataclasses.replace(site, name="teacher_head" if name == "head" else name)

  return site_lib.tree_map(renamed, spec.sites(library.BF16.name))
