"""Low-rank adapters of a model's linear layers: declared, attached, merged.

An adapter of "layers/attn/q" is two parameters beside it, "q_lora_a" [contracted letters, R] and
"q_lora_b" [R, produced letters], each with a GEMM site of its own name in recipe bf16. R is the
rank of the adapter. Every other parameter is frozen (params.Param.trainable).

Source: LoRA (Hu et al. 2021, arXiv:2106.09685 §4.1): a is random, b zero.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax import params as params_lib
from fp8jax import patterns
from fp8jax.models.config import Lora, ModelConfig
from fp8jax.models.mixer import GemmSite
from fp8jax.ops import dots, site, stored_params
from fp8jax.ops.dots import dot
from fp8jax.params import Param
from fp8jax.recipe import library

SUFFIXES = _A, _B = "_lora_a", "_lora_b"
# Of adapters, before the rules of a configuration.
RULES = ((f".*({_A}|{_B})", "bf16"),)


def is_adapter(name: str) -> bool:
  """Whether a path is of an adapter's parameter or site."""
  return name.endswith((_A, _B))


def problems(
  lora: Lora, hidden_size: int, names: Iterable[str], formats: Iterable[str]
) -> list[str]:
  """The problems of these adapters, in words.

  Args:
    hidden_size: of the model, which no matrix exceeds in rank.
    names: "attn/q" of every linear layer of a layer.
    formats: known storage formats of the base.
  """
  texts, names = [], list(names)
  if lora.rank > hidden_size:
    texts.append(f"model.lora.rank={lora.rank} must be at most model.hidden_size={hidden_size}")
  if lora.rank < 1:
    texts.append(f"model.lora.rank={lora.rank} must be at least 1, or 0 for no adapters")
  if not 0 < lora.alpha < math.inf:
    texts.append(f"model.lora.alpha={lora.alpha} must be positive and finite")
  if lora.base not in formats:
    texts.append(f"model.lora.base={lora.base!r} is not one of {', '.join(formats)}")
  if not lora.targets:
    texts.append("model.lora.targets is empty; name linear layers, e.g. ('attn/.*', 'mlp/.*')")
  for pattern in lora.targets:
    if problem := patterns.problem(pattern, names):
      texts.append(f"model.lora.targets: {problem}")
    elif not patterns.matches(pattern, names):
      texts.append(
        f"model.lora.targets: {pattern!r} matches no linear layer; there are {', '.join(names)}"
      )
  return texts


def matching(lora: Lora, names: Iterable[str]) -> list[str]:
  """Those of the names "attn/q" that the adapters are of."""
  rules = [(target,) for target in lora.targets]
  return [name for name in names if patterns.first(rules, name) >= 0]


def declared(of_layer: Mapping[str, Mapping[str, Param]], cfg: ModelConfig):
  """The declaration tree of one layer with its adapters, all else frozen."""
  if cfg.lora is None:
    return of_layer
  tree = {}
  for key, params in of_layer.items():
    tree[key] = {name: dataclasses.replace(p, trainable=False) for name, p in params.items()}
    for name in targets(params, key, cfg.lora):
      contracted, produced = params[name].gemm_letters
      std = (3 * math.prod(cfg.dims[c] for c in contracted)) ** -0.5
      p, of_a = params[name], contracted + "R"
      tree[key][name + _A] = dataclasses.replace(p, letters=of_a, init="normal", std=std)
      tree[key][name + _B] = dataclasses.replace(p, letters="R" + produced, init="zeros", inputs=1)
  return tree


def targets(params: Mapping[str, Param], key: str, lora: Lora) -> list[str]:
  """Names of the linear layers of a mixer that have adapters."""
  linear = [name for name, p in params.items() if p.inputs is not None]
  return [n for n in linear if matching(lora, [f"{key}/{n}"])]


def with_sites(sites: Iterable[GemmSite], names: Iterable[str]) -> list[GemmSite]:
  """The sites of a mixer, each followed by those of its adapter if it is among `names`."""
  with_lora = []
  for one in sites:
    with_lora.append(one)
    if one.name in names:
      of_a, of_b = dots.adapter_equations(one.eqn)
      with_lora.append(GemmSite(one.name + _A, of_a, one.input))
      with_lora.append(GemmSite(one.name + _B, of_b, one.name + _A))
  return with_lora


def attached(p: Mapping[str, Any], s: Mapping[str, Any], cfg: ModelConfig):
  """The parameters of a mixer, a weight with an adapter as the linear layer takes both."""
  if cfg.lora is None:
    return p
  tree = {name: value for name, value in p.items() if not is_adapter(name)}
  for name in tree:
    if name + _A in p:
      sites = (s[name + _A], s[name + _B])
      scale = cfg.lora.alpha / cfg.lora.rank
      tree[name] = dots.Adapted(tree[name], p[name + _A], p[name + _B], sites, scale)
  return tree


def adapted_paths(params) -> set[str]:
  """Paths of the weights that have an adapter in this tree."""
  paths = params_lib.flatten(params)
  return {path for path in paths if path + _A in paths}


def without(cfg: ModelConfig) -> ModelConfig:
  """The model without adapters."""
  return dataclasses.replace(cfg, lora=None)


def merged(params, declaration, cfg: ModelConfig):
  """float32 parameters of `without(cfg)`: weights w + (alpha / r) a b, multiplied in float32.

  Args:
    params: as a run has them, stored in any format.
    declaration: of the same tree.
  """
  flat = params_lib.flatten(stored_params.dequantize_tree(params))
  letters = {path: p.letters for path, p in params_lib.flatten(declaration).items()}
  weights = {}
  for path, w in flat.items():
    if is_adapter(path):
      continue
    w = jnp.asarray(w, jnp.float32)
    if cfg.lora is not None and path + _A in flat:
      eqn = f"{letters[path + _A]},{letters[path + _B]}->{letters[path]}"
      multiply = site.unobserved(library.BF16)  # no quantization: the operands' own float32
      with jax.default_matmul_precision("highest"):
        delta = dot(eqn, flat[path + _A], flat[path + _B], multiply)
      w = w + cfg.lora.alpha / cfg.lora.rank * delta
    weights[path] = w
  return params_lib.unflatten(weights)
