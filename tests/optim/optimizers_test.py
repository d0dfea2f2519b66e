"""Clip, AdamW and schedules against float64 NumPy and their closed forms."""

import dataclasses
import math

import jax
import numpy as np
import optax
import pytest
import tolerances

from fp8jax.optim import optimizers
from fp8jax.optim import schedule as schedule_lib
from fp8jax.optim import update as update_lib
from fp8jax.params import Param

OPTIM = optimizers.OptimizerConfig(
  optimizer="adam", moment_format="float32", master_format="float32", grad_format="float32",
  schedule="wsd", peak_lr=3e-2, min_lr=1e-3, warmup_steps=4, decay_steps=6, steps=20,
  b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0,
)  # fmt: skip
DECLARATION = {"w": Param("DF", inputs=1), "norm": Param("D", init="ones", decay=False)}
SHAPES = {"w": (8, 6), "norm": (8,)}
# Sizes of five gradients: the second and fourth are below the clip, the fifth is zero.
SIZES = (3.0, 0.02, 50.0, 1e-4, 0.0)


def _adamw(optim, params, gradients, rates):
  """Yields the parameters after each step (Kingma & Ba 2015, alg. 1; Loshchilov & Hutter 2019)."""
  p = {k: v.astype(np.float64) for k, v in params.items()}
  m, v = ({k: np.zeros(x.shape) for k, x in p.items()} for _ in range(2))
  for t, (g, rate) in enumerate(zip(gradients, rates), 1):
    norm = math.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in g.values()))
    shrink = optim.grad_clip_norm / norm if 0 < optim.grad_clip_norm < norm else 1.0
    for k, x in g.items():
      x = x.astype(np.float64) * shrink
      m[k] = optim.b1 * m[k] + (1 - optim.b1) * x
      v[k] = optim.b2 * v[k] + (1 - optim.b2) * x**2
      update = m[k] / (1 - optim.b1**t) / (np.sqrt(v[k] / (1 - optim.b2**t)) + optim.eps)
      decay = optim.weight_decay if DECLARATION[k].decay else 0.0
      share = rate if optim.decay_by == "rate" else rate / optim.peak_lr
      p[k] = p[k] - rate * update - share * decay * p[k]
    yield dict(p)


@pytest.mark.parametrize(
  "changes",
  [
    dict(),
    dict(grad_clip_norm=0.0),
    dict(weight_decay=0.0),
    dict(b1=0.0, b2=0.5, eps=1e-2),
    dict(decay_by="schedule"),
  ],
  ids=str,
)
def test_five_steps_equal_adamw_in_float64(rng, changes):
  """In the order of the train step: clipped as they are read, times minus the schedule's rate."""
  optim = dataclasses.replace(OPTIM, warmup_steps=2, **changes)
  params = {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
  gradients = [
    {k: (size * rng.standard_normal(s)).astype(np.float32) for k, s in SHAPES.items()}
    for size in SIZES
  ]
  leaves, rate_of = optimizers.leaves(optim, DECLARATION), schedule_lib.schedule(optim)
  rates = [_rate(optim, step) for step in range(len(SIZES))]

  @jax.jit
  def step(params, state, g, number):
    factor = update_lib.clip_factor(optax.tree.norm(g), optim.grad_clip_norm)
    now = update_lib.UpdateArgs(number, rate_of(number), factor)
    moved = {k: update_lib.update_param(leaves[k], g[k], state[k], params[k], now) for k in g}
    return [{k: v[i] for k, v in moved.items()} for i in (1, 0)]

  got, state = params, {k: update_lib.init(leaves[k], p)[0] for k, p in params.items()}
  for i, want in enumerate(_adamw(optim, params, gradients, rates)):
    got, state = step(got, state, gradients[i], i)
    for k in SHAPES:
      scale = np.abs(want[k]).max()
      np.testing.assert_allclose(got[k], want[k], rtol=0, atol=tolerances.FLOAT32_SUM * scale)
    assert np.any(got["w"] != params["w"]) == (i > 0)  # the first rate of a warm-up is zero


def _mean(old, new, decay):
  return decay * old + (1 - decay) * new


def _moments(s, g, t, o):
  """First and second moment of the gradient, both without the bias of their start."""
  s["m"], s["v"] = _mean(s["m"], g, o.b1), _mean(s["v"], g * g, o.b2)
  return s["m"] / (1 - o.b1**t), s["v"] / (1 - o.b2**t)


def _lion(s, g, t, o):
  """Chen et al. 2023 (arXiv:2302.06675), alg. 2."""
  update = np.sign(_mean(s["m"], g, o.b1))
  s["m"] = _mean(s["m"], g, o.b2)
  return update


def _adabelief(s, g, t, o):
  """Zhuang et al. 2020 (arXiv:2010.07468), alg. 2; its second epsilon is 1e-16 here."""
  s["m"] = _mean(s["m"], g, o.b1)
  s["v"] = _mean(s["v"], (g - s["m"]) ** 2, o.b2) + 1e-16
  return s["m"] / (1 - o.b1**t) / (np.sqrt(s["v"] / (1 - o.b2**t)) + o.eps)


def _adamax(s, g, t, o):
  """Kingma & Ba 2015 (arXiv:1412.6980), alg. 2, epsilon beside the gradient."""
  s["m"], s["v"] = _mean(s["m"], g, o.b1), np.maximum(o.b2 * s["v"], np.abs(g) + o.eps)
  return s["m"] / (1 - o.b1**t) / s["v"]


def _nadam(s, g, t, o):
  """Dozat 2016 with a constant momentum: the step that the next first moment begins with."""
  _, v = _moments(s, g, t, o)
  ahead = o.b1 * s["m"] / (1 - o.b1 ** (t + 1)) + (1 - o.b1) * g / (1 - o.b1**t)
  return ahead / (np.sqrt(v) + o.eps)


def _radam(s, g, t, o):
  """Liu et al. 2020 (arXiv:1908.03265), alg. 2; rectified from a length of 5 on, as in Optax."""
  m, v = _moments(s, g, t, o)
  limit = 2 / (1 - o.b2) - 1
  length = limit - 2 * t * o.b2**t / (1 - o.b2**t)
  if length < 5:
    return m
  r = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
  return math.sqrt(r) * m / (np.sqrt(v) + o.eps)


def _rmsprop(s, g, t, o):
  return g / (np.sqrt(_moments(s, g, t, o)[1]) + o.eps)


def _sgd(s, g, t, o):
  _moments(s, g, t, o)
  return s["m"]


RULES = {
  "lion": _lion, "adabelief": _adabelief, "adamax": _adamax, "nadam": _nadam, "radam": _radam,
  "rmsprop": _rmsprop, "sgd": _sgd,
}  # fmt: skip


def test_every_rule_is_its_papers_in_float64(rng):
  """Eight steps, past the first that RAdam rectifies. AdamW: above; Madam: madam_test.py."""
  assert {*RULES, "adam", "madam"} == {*optimizers.OPTIMIZERS}
  optim = dataclasses.replace(OPTIM, schedule="constant", warmup_steps=0, grad_clip_norm=0.0)
  start = rng.standard_normal(SHAPES["w"]).astype(np.float32)
  sizes = np.array([0.1, 1.0] * 4)[:, None, None]
  gradients = (sizes * rng.standard_normal((8, *SHAPES["w"]))).astype(np.float32)
  rules = {name: dataclasses.replace(optim, optimizer=name, eps=1e-3) for name in RULES}
  leaves = {name: optimizers.leaves(o, DECLARATION)["w"] for name, o in rules.items()}

  @jax.jit
  def step(values, states, g, number):
    now = update_lib.UpdateArgs(number, optim.peak_lr, 1.0)
    moved = {k: update_lib.update_param(leaf, g, states[k], values[k], now)
             for k, leaf in leaves.items()}  # fmt: skip
    return [{k: v[i] for k, v in moved.items()} for i in (1, 0)]

  got = dict.fromkeys(RULES, start)
  states = {name: update_lib.init(leaf, start)[0] for name, leaf in leaves.items()}
  want = {name: start.astype(np.float64) for name in RULES}
  kept = {name: {"m": np.zeros(start.shape), "v": np.zeros(start.shape)} for name in RULES}
  for t, g in enumerate(gradients, 1):
    got, states = step(got, states, g, t - 1)
    for name, rule in RULES.items():
      update = rule(kept[name], g.astype(np.float64), t, rules[name])
      want[name] -= optim.peak_lr * (update + optim.weight_decay * want[name])
      atol = 4 * tolerances.FLOAT32_SUM * np.abs(want[name]).max()
      np.testing.assert_allclose(got[name], want[name], rtol=0, atol=atol, err_msg=f"{name}, {t}")


def _rate(optim, step: int) -> float:
  """Learning rate of update `step`, the first being 0."""
  o = optim
  if step < o.warmup_steps:
    return o.peak_lr * step / o.warmup_steps
  length = {"wsd": o.decay_steps, "cosine": o.steps - o.warmup_steps, "constant": 0}[o.schedule]
  passed = max(step - (o.steps - length), 0) / max(length, 1)
  return o.min_lr + (o.peak_lr - o.min_lr) * (1 + math.cos(math.pi * passed)) / 2


@pytest.mark.parametrize("name", optimizers.SCHEDULES)
@pytest.mark.parametrize(
  "changes",
  [
    dict(),
    dict(warmup_steps=0),
    dict(decay_steps=0),
    dict(warmup_steps=14),  # wsd: nothing held
    dict(min_lr=0.0),
    dict(peak_lr=0.0, min_lr=0.0),
    dict(peak_lr=1e-4),  # less than min_lr, which "constant" does not read
    dict(warmup_steps=1, decay_steps=0, steps=1),
  ],
  ids=str,
)
def test_schedule_equals_its_closed_form(name, changes):
  optim = dataclasses.replace(OPTIM, schedule=name, **changes)
  if name != "constant" and optim.min_lr > optim.peak_lr:
    assert optim.problems() == ["need 0 <= optim.min_lr=0.001 <= optim.peak_lr=0.0001"]
    return
  assert not optim.problems()
  got = jax.vmap(schedule_lib.schedule(optim))(np.arange(optim.steps))
  want = [_rate(optim, step) for step in range(optim.steps)]
  atol = tolerances.FLOAT32_SUM * optim.peak_lr
  np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_another_optimizer_is_checked_and_counted_by_the_moments_of_its_row(monkeypatch):
  row = optimizers.Optimizer(lambda o, **how: None, {"nu": "b1"})
  monkeypatch.setitem(optimizers.OPTIMIZERS, "third", row)
  # E4M3 moments of 1 byte, v in F16: 2.
  counts = {
    name: dataclasses.replace(
      OPTIM, optimizer=name, moment_format="fp8lm", b1=0.5
    ).bytes_per_parameter()["moments"]
    for name in ("adam", "lion", "third")
  }
  assert {k: round(v) for k, v in counts.items()} == {"adam": 3, "lion": 1, "third": 2}
  # A decay of 0.999 stalls in BF16, that of the moment alone: b1 is m's, b2 v's and Lion's m's.
  stalls = {}
  for name in counts:
    keys = ("b1",) if name == "third" else ("b1", "b2")  # of Adam and Lion
    for key in keys:
      changes = {of: 0.5 for of in keys} | {key: 0.999}
      changes |= {"moment_format": "bf16", "optimizer": name}
      if problems := dataclasses.replace(OPTIM, **changes).problems():
        stalls[name, key] = problems[0].split(": ")[1].split("=")[0]
  assert stalls == {
    ("adam", "b1"): "mu", ("adam", "b2"): "nu", ("lion", "b2"): "mu", ("third", "b1"): "nu"
  }  # fmt: skip
