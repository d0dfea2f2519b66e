"""FLIQS: the policy against REINFORCE in float64, published costs, a known best assignment."""

import functools
import itertools
import json
import math

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fp8jax.config import resolve
from fp8jax.errors import UserError
from fp8jax.jobs import search as job
from fp8jax.jobs import table
from fp8jax.models import presets
from fp8jax.recipe import rules as rules_lib
from fp8jax.run import checkpoint
from fp8jax.search import controller as controller_lib
from fp8jax.search import cost
from fp8jax.search import space as space_lib

FORMATS = ("e2m1_dynamic", "fp8_dynamic", "bf16")


# --- the policy ----------------------------------------------------------------------------------


def _weight(schedule, t):
  if schedule == "heaviside":
    return float(t >= 0.5)
  return {"cosine": (1 - math.cos(math.pi * t)) / 2, "linear": t, "constant": 1.0}[schedule]


def _reward(kind, q, c, beta):
  over = max(c - 1, 0)
  return {
    "absolute": q - beta * abs(c - 1), "one_sided": q - beta * over,
    "soft": q * c**beta, "hard": q * (1 + over) ** beta,
  }[kind]  # fmt: skip


def _by_numpy(rules, choices, qualities, costs):
  """(logits, baseline) after steps, in float64: the gradient by its formula, Adam by its paper."""
  z = np.full((choices.shape[1], 3), 0.5)
  m, v, count, baseline = np.zeros_like(z), np.zeros_like(z), 0, None
  for step, (choice, q, c) in enumerate(zip(choices, qualities, costs, strict=True)):
    if not np.isfinite(q):
      continue
    r = _reward(rules.reward, q, c, rules.beta)
    baseline = r if baseline is None else 0.99 * baseline + 0.01 * r
    if step < rules.delay:
      continue
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    entropy = -(p * np.log(p)).sum(1, keepdims=True)
    t = (step - rules.delay) / (rules.steps - rules.delay)
    weight = rules.entropy * _weight(rules.entropy_schedule, t)
    g = -(r - baseline) * (np.eye(3)[choice] - p) - weight * p * (np.log(p) + entropy)
    g, count = g / len(z), count + 1
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    z = z - rules.rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
  return z, baseline


@pytest.mark.parametrize(
  ("reward", "schedule"),
  [*zip(controller_lib.REWARDS, controller_lib.ENTROPY_SCHEDULES, strict=True)],
)
def test_policy_moves_by_reinforce(rng, reward, schedule):
  rules = controller_lib.Rules(12, 3, 0.05, reward, 0.7, 0.3, schedule)
  choices = rng.integers(0, 3, (12, 4)).astype(np.int32)
  qualities, costs = -2 + rng.standard_normal(12) / 2, rng.uniform(0.5, 2, 12)
  qualities[7] = np.nan  # changes nothing
  update = jax.jit(functools.partial(controller_lib.update, rules))
  state = controller_lib.init(4, 3)
  for step, (choice, q, c) in enumerate(zip(choices, qualities, costs, strict=True)):
    state, metrics = update(state, step, choice, np.float32(q), np.float32(c))
    if step == 5:  # on paper, and back
      state = controller_lib.from_json(
        json.loads(json.dumps(controller_lib.to_json(state))), controller_lib.init(4, 3)
      )
  assert update._cache_size() == 1
  logits, baseline = _by_numpy(rules, choices, qualities, costs)
  np.testing.assert_allclose(state.logits, logits, rtol=0, atol=1e-5)
  assert float(state.baseline) == pytest.approx(baseline, rel=1e-5)
  assert np.abs(logits - 0.5).max() > 0.1
  share = metrics["search/entropy_weight"] / rules.entropy
  assert float(share) == pytest.approx(_weight(schedule, 8 / 9), abs=1e-6)
  with pytest.raises(ValueError, match=r"logits of \(4, 3\)"):
    controller_lib.from_json(controller_lib.to_json(state), controller_lib.init(5, 3))


def test_samples_are_uniform_at_first_and_then_the_policys():
  rules = controller_lib.Rules(10, 5)
  state = controller_lib.Controller(
    jnp.tile(jnp.log(jnp.array([0.7, 0.2, 0.1])), (20000, 1)), (), 0
  )
  draw = jax.jit(functools.partial(controller_lib.sample, rules))
  for step, p in ((4, [1 / 3] * 3), (5, [0.7, 0.2, 0.1])):
    found = np.bincount(draw(state, step, jax.random.key(step)), minlength=3) / 20000
    np.testing.assert_allclose(found, p, atol=0.015)  # 4 standard errors


# Of a synthetic problem: by site the loss of 4 and 8 bits; 16 bits lose nothing.
DAMAGE = [[0.9, 0.1, 0], [0.05, 0.01, 0], [0.1, 0.05, 0], [1.5, 1.2, 0], [0.4, 0.02, 0]]


def test_search_finds_the_best_of_all_assignments():
  """All 243 are tried: the best one mixes three formats, and leads the second by 0.05."""
  macs, damage = [1.0, 2.0, 4.0, 1.0, 2.0], np.array(DAMAGE)
  costs = cost.table(macs, [rules_lib.recipe_by_name(n) for n in FORMATS]) / 0.22
  rules = controller_lib.Rules(4000, 400, 0.02, "absolute", 1.0, 0.2, "cosine")

  def step(state, i):
    choice = controller_lib.sample(rules, state, i, jax.random.fold_in(jax.random.key(0), i))
    at = jnp.arange(5), choice
    quality = -jnp.asarray(damage, jnp.float32)[at].sum()
    spent = jnp.asarray(costs, jnp.float32)[at].sum()
    return controller_lib.update(rules, state, i, choice, quality, spent)

  run = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(rules.steps)))
  state, metrics = run(controller_lib.init(5, 3))

  def reward(choice):
    at = np.arange(5), np.array(choice)
    return -damage[at].sum() - abs(costs[at].sum() - 1)

  ranked = sorted(itertools.product(range(3), repeat=5), key=reward, reverse=True)
  assert len({*ranked[0]}) == 3 and reward(ranked[0]) > reward(ranked[1]) + 0.05
  assert np.argmax(state.logits, 1).tolist() == [*ranked[0]]
  assert metrics["search/entropy"][-1] < 0.1


# --- costs ---------------------------------------------------------------------------------------


def _resnet18():
  """Multiplications of ResNet-18 at 224 x 224, with a projection in the first block of each of the
  four groups, as TensorFlow's has it."""
  macs, size, before = {"stem": 112**2 * 64 * 3 * 49, "classes": 512 * 1000}, 56, 64
  for group, width in enumerate((64, 128, 256, 512)):
    size = 56 >> group
    for block in range(2):
      inputs = before if block == 0 else width
      macs[f"{group}/{block}/first"] = size**2 * width * inputs * 9
      macs[f"{group}/{block}/second"] = size**2 * width * width * 9
    macs[f"{group}/projection"] = size**2 * width * before
    before = width
  return macs


@pytest.mark.parametrize(
  ("recipe", "published"), [("bf16", "467.7"), ("fp8_dynamic", "116.9"), ("e2m1_dynamic", "29.23")]
)
def test_cost_of_resnet18_is_the_published_one(recipe, published):
  macs = _resnet18()
  of = dict.fromkeys(macs, rules_lib.recipe_by_name(recipe))
  digits = len(published.split(".")[1])
  assert f"{cost.bops(macs, of) / 1e9:.{digits}f}" == published


def test_cost_of_a_model_by_hand():
  model = presets.DEBUG
  macs = cost.macs_per_token(model)
  d, f, h, k = model.hidden_size, model.intermediate_size, model.num_heads, model.num_kv_heads
  e, v = model.head_dim, model.vocab_size
  per_layer = d * h * e * 2 + d * k * e * 2 + 3 * d * f
  assert macs["layers/1/attn/k"] == d * k * e and macs["head"] == d * v
  assert sum(macs.values()) == model.num_layers * per_layer + d * v
  recipes = [rules_lib.recipe_by_name(n) for n in ("w4afp8", "w8a16", "int8", "bf16")]
  assert [cost.per_mac(r) for r in recipes] == [32, 128, 64, 256]
  two = {name: n for name, n in macs.items() if name.startswith(("layers/0", "layers/1"))}
  options = [rules_lib.recipe_by_name(n) for n in FORMATS]
  for decisions, count in (("layer", 14), ("block", 2), ("single", 1)):
    space = space_lib.make(two, options, decisions)
    assert len(space.decisions) == count
    for option, share in enumerate((1 / 16, 1 / 4, 1)):
      assert space.cost([option] * count) == pytest.approx(share, rel=1e-12)
  mixed = space_lib.make(two, options, "block").cost([0, 2])
  assert mixed == pytest.approx((1 / 16 + 1) / 2, rel=1e-12)


# --- the job -------------------------------------------------------------------------------------


def _spec(**changes):
  of_search = {"target": 0.2, "delay": 3, "rate": 0.5, "options": FORMATS}
  return harness.text_spec("fp8_dynamic", job="search", **{
    "steps": 8, "checkpoint.every": 4, "eval.every": 0,
    **{f"search.{k}": v for k, v in of_search.items()}, **changes,
  })  # fmt: skip


def _policy(workdir, step):
  saved = checkpoint.Checkpoints(str(workdir))
  values = saved.meta(step)["search"]["controller"]
  saved.close()
  return values


@pytest.mark.slow  # trains a model twice, in one program of three options per site
def test_search_resumes_to_the_bit_and_its_rules_are_a_config(tmp_path, monkeypatch):
  whole, halves = tmp_path / "whole", tmp_path / "halves"
  found = job.run(_spec(), str(whole))
  stopped = _Stop()
  monkeypatch.setattr(job.train.preemption, "Interrupts", lambda: stopped)
  assert job.run(_spec(), str(halves))["exit_code"]
  monkeypatch.undo()
  with pytest.raises(UserError, match=r"search.beta was 1.0 and is 2.0"):
    job.run(_spec(**{"search.beta": 2.0}), str(halves))
  resumed = job.run(_spec(), str(halves))
  assert _policy(whole, 8) == _policy(halves, 8)
  assert resumed["rules"] == found["rules"] and resumed["evaluation"] == found["evaluation"]
  with open(whole / "metrics.jsonl") as f:
    rows = [row for row in map(json.loads, f) if "search/cost" in row]
  assert len(rows) == 8 and len({row["search/cost"] for row in rows}) > 4

  path = whole / "search" / "search.json"
  result = json.loads(path.read_text())
  result["budgets"][0]["verdict"] = "met"  # eight steps are no search
  path.write_text(json.dumps(result))
  config = harness.text_config("fp8_dynamic", **{"precision.sensitivity": str(path)})
  spec = resolve.resolve(config, 1, harness.CPU, needs=table.JOBS["train"].needs)
  from fp8jax.ops import site_tree

  recipes = {k: r.name for k, r in site_tree.recipes_of(spec.sites()).items()}
  assert recipes == {**result["chosen"], "head": "bf16"}


class _Stop:
  """Interrupts after the fourth step."""

  exit_code = 1

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass

  def requested(self, step=0):
    return step >= 4


def test_search_that_makes_no_sense_is_refused():
  for changes, why in (
    ({"search.options": ("block_128", "bf16")}, "backward pass of its own"),
    ({"search.options": ("bf16", "bf16")}, "at least two different"),
    ({"search.target": 0.01}, r"must be from 0.0625 to 1"),
    ({"search.delay": 8}, "below steps=8"),
    ({"precision.rules": ((".*", "bf16"),)}, "nothing is searched"),
    ({"log.tensor_stats_every": 2}, "has no statistics of one; set log.tensor_stats_every=0"),
  ):
    with pytest.raises(resolve.ConfigError, match=why):
      _spec(**changes)
  assert base.get_config("bf16").search.beta == 1.0
