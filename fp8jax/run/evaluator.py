"""Held-out loss: the same documents, in the training recipe and in BF16 (eval.precisions).

Evaluation reads scales and moves none.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fp8jax.data import batch_sharding, loader
from fp8jax.errors import UserError
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.models.config import EVAL_PRECISIONS, ComputeConfig
from fp8jax.ops import scaling as scaling_lib
from fp8jax.ops import site as site_lib
from fp8jax.ops import site_tree
from fp8jax.recipe import by_token
from fp8jax.step import distillation
from fp8jax.step.train_spec import TrainSpec

RECIPE, BF16 = EVAL_PRECISIONS


class Evaluator:
  """Held-out evaluation of parameters under a spec, whose recipes may change later.

  Compiles each precision once.
  """

  def __init__(self, spec: TrainSpec, teacher: Any = None):
    """Args: the spec; a teacher (step/distillation.py), from which the KL is evaluated too."""
    self.spec, self._teacher = spec, teacher
    per_batch = spec.eval.batch * spec.data.seq_len
    self._num_batches = math.ceil(spec.eval.tokens / per_batch)

    options = choose.compiler_options(spec.device)

    @functools.partial(jax.jit, static_argnames="run", compiler_options=options)
    def losses(params, sites, batch, run, teacher):
      batch = distillation.taught(spec, params, batch, teacher)
      loss, aux = transformer.loss_and_aux(params, sites, batch, spec.model, run)
      loss, *kl = aux.sums.get("distill", [loss])
      return loss, batch["weights_BL"].sum(), *kl

    self._losses = losses
    # Of the last evaluation, per source.
    self.passed_over: dict[str, dict[str, int]] = {}

  def run(
    self, params, scaling_states: Mapping[str, Any], phase: int = 0,
    stop: Callable[[], bool] | None = None,
  ):  # fmt: skip
    """Evaluates in the recipes of a phase of the precision schedule and in BF16 (eval.precisions).

    Args:
      scaling_states: of the training state, for delayed and static scales. Without any,
        those scales are chosen from the evaluated tensors themselves.
      stop: asked before every batch of a source whether to leave.

    Returns:
      {source: {precision: {"loss", "perplexity", "tokens"}}}, loss in nats per token; {} if
      stopped. With a teacher "loss" is the text's cross entropy, beside "kl", nats per token at
      distill.temperature.
    """
    sites = {}
    for label, recipe in precisions(self.spec, phase).items():
      own = sites_of(self.spec, recipe, scaling_states, phase)
      sites[label] = own, run_of(self.spec, recipe, own)
    losses = {}
    for name in self.spec.data.sources:
      losses[name] = self._one_source(params, sites, name, stop)
      if not losses[name]:
        return {}
    return losses

  def lines(self, step: int, results) -> list[str]:
    """The losses of a step, as `run` returned them, and the documents passed over."""
    lines = []
    for source, by_precision in results.items():
      for reason, number in self.passed_over[source].items():
        lines.append(f"held-out documents of {source} passed over as {reason}: {number}")
      text = "  ".join(
        f"{p} {v['loss']:.4f}" + (f" (KL {v['kl']:.4f})" if "kl" in v else "")
        for p, v in by_precision.items()
      )
      lines.append(f"step {step}  held-out loss on {source}: {text}")
    return lines

  def _one_source(self, params, sites_of, source: str, stop):
    spec = self.spec
    spread = batch_sharding.BatchSharder(spec.run.layout, spec.eval.batch)
    totals = {precision: [] for precision in sites_of}
    counts = loader.DocumentCounts()
    stream = loader.heldout_batches(
      spec.data, source, spread.local_rows, self._num_batches, spread.shard, counts
    )
    for batch in stream:
      if stop is not None and stop():
        return {}
      batch = spread.place(batch)
      for precision, (sites, run) in sites_of.items():
        totals[precision].append(self._losses(params, sites, batch, run=run, teacher=self._teacher))
    self.passed_over[source] = counts.summary()  # each process reads all
    return {precision: _summary(source, parts) for precision, parts in totals.items()}


def sites_of(
  spec: TrainSpec, recipe: str | None, scaling_states: Mapping[str, Any], phase: int = 0
) -> Any:
  """The tree of sites of a forward pass, delayed and static scales from `scaling_states`.

  Those of a site that has none, or for whose x or w a batch with finite amaxes above 0 is awaited,
  are chosen from the tensors themselves.
  """
  tree = spec.sites(recipe, phase=phase)
  has_states = bool(scaling_lib.states(tree))
  awaited = {*scaling_lib.unknown(tree, scaling_states, "xw")} if has_states else set()

  def one(site):
    if site.scaling_state is None:
      return site
    if site.name in scaling_states and awaited.isdisjoint(site.layer_names):
      return dataclasses.replace(site, scaling_state=scaling_states[site.name])
    return site_lib.with_current_scales(site)

  return site_lib.tree_map(one, tree)


def run_of(spec: TrainSpec, recipe: str | None, sites) -> ComputeConfig:
  """The execution of a forward pass: in BF16 attention is not quantized either, and scales that are
  chosen from the tensors themselves are of a whole batch, in no invariant pass."""
  run = spec.run if recipe is None else dataclasses.replace(spec.run, attention_recipe=None)
  is_of_batch = any(map(by_token.problems, site_tree.recipes_of(sites).values()))
  return dataclasses.replace(run, is_invariant=run.is_invariant and not is_of_batch)


def precisions(spec: TrainSpec, phase: int = 0) -> dict[str, str | None]:
  """{label: recipe for every site, or None for the rules of the phase}, in eval.precisions' order.

  Where nothing is quantized, attention included, the recipe and BF16 are one.
  """
  used = {site.recipe for site in site_lib.flatten(spec.sites(phase=phase)).values()}
  quantized = sorted(r.name for r in used if r.is_quantized)
  quantized += [spec.run.attention_recipe.name] if spec.run.attention_recipe else []
  if not quantized:
    return {BF16: None}
  both = {RECIPE: ("+".join(quantized), None), BF16: (BF16, BF16)}
  return dict(both[name] for name in spec.eval.precisions)


def _summary(source: str, parts) -> dict[str, float]:
  sums = jax.device_get(parts)
  loss, tokens, *kl = (sum(map(float, column)) for column in zip(*sums))
  if tokens == 0:
    raise UserError(
      f"data.sources.{source} has no held-out token: raise data.heldout_fraction or eval.tokens, "
      "or give more documents"
    )
  mean = loss / tokens
  summary = {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "tokens": tokens}
  return {**summary, "kl": kl[0] / tokens} if kl else summary


def objective(results: dict[str, Any]) -> float:
  """The number that a sweep minimizes: held-out loss in nats, the mean over the sources.

  In the BF16 forward pass where that was evaluated, so that recipes compare by their weights; else
  in the first precision.
  """
  values = [by.get("bf16", next(iter(by.values())))["loss"] for by in results.values()]
  return sum(values) / len(values)


def metrics(results: dict[str, Any]) -> dict[str, float]:
  """{"heldout", "heldout/SOURCE": loss in nats} in the first precision, for policies."""
  losses = {name: next(iter(by.values()))["loss"] for name, by in results.items()}
  mean = sum(losses.values()) / len(losses)
  return {"heldout": mean, **{f"heldout/{name}": loss for name, loss in losses.items()}}


def flat(results: dict[str, Any]) -> dict[str, float]:
  """{"heldout/<source>/<precision>/loss": ...} for metrics."""
  return {
    f"heldout/{source}/{precision}/{name}": values[name]
    for source, by_precision in results.items()
    for precision, values in by_precision.items()
    for name in ("loss", "kl", "accuracy", "margin")
    if name in values
  }
