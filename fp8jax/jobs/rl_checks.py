"""Refusals of --job=rl that depend on the whole configuration, in words."""

import dataclasses
import math

import jax

from fp8jax.evaluation import catalog
from fp8jax.evaluation.settings import Tasks
from fp8jax.generation.settings import Generate
from fp8jax.jobs import checks, rl_reward
from fp8jax.models import lora
from fp8jax.models.hf import same_model
from fp8jax.ops.policy_gradient import OBJECTIVES
from fp8jax.phases import policy
from fp8jax.recipe import rules
from fp8jax.rl import reward_model
from fp8jax.rl.settings import OF_COMPLETIONS, REWARD, RL
from fp8jax.run import evaluator
from fp8jax.step.train_spec import TrainSpec


def problems_of_spec(spec: TrainSpec) -> list[str]:
  """The problems of a run's rl section with the rest, in words."""
  own, texts = spec.of(RL), _unread(spec)
  if epochs := spec.flat["data.epochs"]:
    texts.append(
      f"data.epochs={epochs} with --job=rl, which does not train on data.sources; set steps, and "
      "data.epochs=0"
    )
  if spec.log.source_loss:
    texts.append(
      "log.source_loss=True with --job=rl, whose losses are of completions or pairs and of no "
      "source; set log.source_loss=False"
    )
  if own.loss == REWARD:
    return texts + rl_reward.problems_of_spec(spec)
  rule = own.objective
  texts += [*checks.accuracy_problems(spec), *_reference_problems(spec)]
  if not 0 <= rule.kl < math.inf:
    texts.append(f"rl.kl={rule.kl} must be 0, no reference, or positive and finite")
  if rule.kl and (rule.beta or rule.keeps_best):
    texts.append(f"rl.kl={rule.kl} with rl.loss={own.loss!r}, which has no such term; leave it out")
  if not 0 < own.beta < math.inf:
    texts.append(f"rl.beta={own.beta} must be positive and finite")
  if not (0 <= rule.clip_low <= 1 and 0 <= rule.clip_high < math.inf):
    texts.append(
      f"rl.clip_low={rule.clip_low} must be from 0 to 1, rl.clip_high={rule.clip_high} 0 or "
      "positive"
    )
  if spec.distill.weight:
    texts.append(
      f"distill.weight={spec.distill.weight} with --job=rl, whose loss has no teacher; set it to 0"
    )
  if spec.model.unit_scaling != "none":
    texts.append(
      f"model.unit_scaling={spec.model.unit_scaling!r} with --job=rl: its factors are of "
      "tokens that weigh 1 each; set model.unit_scaling='none'"
    )
  if spec.model.reward_head:
    texts.append(_draws_no_text(own))
  if own.temperature <= 0:
    texts.append(f"rl.temperature={own.temperature} must be positive: greedy draws are all alike")
  if rule.beta and spec.microbatch % 2:
    texts.append(
      f"rl.loss={own.loss!r} with {spec.microbatch} rows per microbatch, expected an even number: "
      "a pair is two rows; change global_batch or grad_accum_steps"
    )
  if jax.process_count() > 1:
    texts.append("--job=rl runs in one process; start one for all of its devices")
  return texts + (_pairs_problems if own.pairs else _rollout_problems)(spec)


def _read(own: RL) -> set[str]:
  """The keys of rl that a run with this loss reads, from pairs or from completions that it draws.

  Keys whose own refusals say more (_pairs_problems) are among them.
  """
  if own.loss == REWARD:
    return {"loss", "pairs", "eval_pairs"}
  rule, names = own.objective, {"loss", "pairs", "tasks", "kl", "temperature"}
  if not (own.pairs and OBJECTIVES[own.loss].beta):
    names |= {"questions", "reward", "reward_model", "rollout", "overlong", "max_new_tokens"}
    names |= {"prompts", "samples", "updates_per_rollout"}
    names |= {"max_resampling"} if rule.drops_equal else set()
  if OBJECTIVES[own.loss].beta:
    names.add("beta")
  elif not rule.keeps_best:
    names |= {"clip_low", "clip_high", "most_correction"}
  return names | ({"reference"} if rule.has_reference or "beta" in names else set())


def _unread(spec: TrainSpec) -> list[str]:
  """The keys that have been set and that such a run does not read, in words."""
  own = spec.of(RL)
  read, of_drawing, texts = _read(own), _read(dataclasses.replace(own, pairs="")), []
  for of in dataclasses.fields(own):
    value, name = getattr(own, of.name), of.name
    if name not in read and value != of.default:
      because = " and rl.pairs" * (name in of_drawing)
      if name == "reference" and own.loss != REWARD:
        because += f" and rl.kl={own.objective.kl}"
      texts.append(
        f"rl.{name}={value!r} is not read with rl.loss={own.loss!r}{because}; leave it out, or set "
        f"its default, {of.default!r}"
      )
  if own.loss == REWARD and (tasks := spec.of(Tasks).tasks):
    texts.append(
      f"eval.tasks={tasks!r} with rl.loss={REWARD!r}: a reward head answers nothing; name held-out "
      "pairs as rl.eval_pairs, and set eval.tasks=''"
    )
  return texts


def _pairs_problems(spec: TrainSpec) -> list[str]:
  own, texts = spec.of(RL), []
  if spec.of(Tasks).tasks:  # evaluations ask them
    texts += checks.generator_problems(spec)
  if not own.objective.beta:
    texts.append(f"rl.pairs={own.pairs!r} with rl.loss={own.loss!r}, which draws completions; set "
                 "rl.loss='dpo', or rl.pairs=''")  # fmt: skip
  if own.tasks:
    texts.append(f"rl.pairs={own.pairs!r} with rl.tasks={own.tasks!r}: a run learns from one of "
                 "them; empty the other")  # fmt: skip
  return texts


def _rollout_problems(spec: TrainSpec) -> list[str]:
  own, g, texts = spec.of(RL), spec.of(Generate), checks.generator_problems(spec)
  if g.precision != evaluator.RECIPE:
    texts.append(
      f"generate.precision={g.precision!r} with --job=rl, whose completions are drawn in "
      f"rl.rollout={own.rollout!r} (that of training where it is ''); set that, and "
      f"generate.precision={evaluator.RECIPE!r}"
    )
  named = {name for phase in spec.precision.phases for _, name in phase.rules}
  late = sorted(name for name in named if rules.recipe_by_name(name).is_stateful)
  if spec.run.is_invariant and late and not spec.calibration:
    texts.append(
      f"precision.invariant=True with recipe {late[0]!r}: the first rollout comes before any step, "
      "and scales chosen from its batches are of many tokens; set precision.calibration, which "
      "--job=calibrate writes"
    )
  if own.rollout:
    texts += checks.recipe_problems(spec, "rl.rollout", (own.rollout,))
  if own.reward_model:
    texts += reward_model.problems(own.reward_model, spec)
  if own.reward_model and own.reward:
    texts.append(
      f"rl.reward={own.reward!r} beside rl.reward_model={own.reward_model!r}: a completion has one "
      "reward; leave one out"
    )
  learned = dataclasses.replace(spec.of(Tasks), tasks=own.tasks, train_data="")
  has_verdicts = not (own.reward or own.reward_model)
  texts += catalog.problems(learned, "rl.tasks", OF_COMPLETIONS, has_verdicts)
  if not own.tasks:
    texts.append("rl.tasks='' names no question to learn from; see eval.tasks for what there is, "
                 "or set rl.pairs with rl.loss='dpo'")  # fmt: skip
  if own.prompts % own.updates_per_rollout:
    texts.append(
      f"rl.prompts={own.prompts} must be a multiple of "
      f"rl.updates_per_rollout={own.updates_per_rollout}: a group is of one step"
    )
  each = 2 if own.objective.beta else own.samples
  rows = own.prompts * each // own.updates_per_rollout
  if rows != spec.global_batch:
    texts.append(
      f"global_batch={spec.global_batch} must be rl.prompts * "
      f"{'2' if own.objective.beta else 'rl.samples'} / rl.updates_per_rollout = {rows}: a "
      "completion in every row"
    )
  if own.overlong >= own.max_new_tokens:
    texts.append(f"rl.overlong={own.overlong} must be below rl.max_new_tokens={own.max_new_tokens}")
  if g.top_p != 1 or g.top_k:
    texts.append(
      f"generate.top_p={g.top_p}, generate.top_k={g.top_k}: a token's probability would be another "
      "in the rollout than in training; set top_p=1.0 and top_k=0"
    )
  if any(isinstance(one, policy.RollBack) for one in spec.precision.policy):
    texts.append(
      "precision.policy rolls back with --job=rl: its batches are drawn by the parameters, and the "
      "same ones would come again; leave that policy out"
    )
  return texts + (_cache_problems(spec) if own.tasks else [])


def memory_problems(spec: TrainSpec) -> list[str]:
  """The problems of what a run with this section holds, in words."""
  own = spec.of(RL)
  if spec.model.reward_head:
    return rl_reward.step_problems(spec) if own.loss == REWARD else [_draws_no_text(own)]
  texts = _cache_problems(spec) if own.tasks else []
  if own.tasks and own.reward_model:
    texts += reward_model.problems(own.reward_model, spec, False)
  return texts


def _draws_no_text(own: RL) -> str:
  return f"rl.loss={own.loss!r} with a reward head, which draws no text; set 'reward'"


def _cache_problems(spec: TrainSpec) -> list[str]:
  if spec.of(Generate).max_length:
    return []
  return [
    "generate.max_length=0: the cache of a rollout has one size, so that a completion does not "
    "depend on others; set it to the longest prompt and completion together"
  ]


def _reference_problems(spec: TrainSpec) -> list[str]:
  own, init = spec.of(RL), spec.init
  if not own.objective.has_reference:
    return []
  by = "rl.loss='dpo'" if own.objective.beta else f"rl.kl={own.objective.kl}"
  if own.reference:
    try:
      same_model.check(own.reference, lora.without(spec.model))
    except (ValueError, OSError) as e:
      return [f"rl.reference: {e}"]
  elif not (init.hf or init.workdir):
    return [
      f"{by} (set, or of rl.loss={own.loss!r}) without a reference: weights are drawn at random; "
      "set init.hf or init.workdir to weights to start from, rl.reference to a folder, or rl.kl=0"
    ]
  elif init.adapters:
    return [
      f"{by} with init.adapters={init.adapters!r}: the frozen base is not what "
      "training starts from; merge them (--job=export) and set rl.reference to the folder"
    ]
  return []
