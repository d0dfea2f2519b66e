"""A training step in sampled formats, and the policy's after it, as one program."""

import zlib

import jax
import jax.numpy as jnp

from fp8jax.kernels import choose
from fp8jax.models.config import ModelConfig
from fp8jax.ops import site as site_lib
from fp8jax.optim import schedule as schedule_lib
from fp8jax.recipe import rules as rules_lib
from fp8jax.search import controller as controller_lib
from fp8jax.search import cost
from fp8jax.search import space as space_lib
from fp8jax.search.settings import Search
from fp8jax.step import train_spec, train_step
from fp8jax.step.state import StepFn

# Keys of sites are made of their names in the same way, and no site has this one.
_SAMPLING = zlib.crc32(b"search")


def space_of(spec: train_spec.TrainSpec, s: Search) -> space_lib.Space:
  """The space of a run."""
  sites = site_lib.flatten(spec.sites()).values()
  searched = {n for site in sites if space_lib.is_searched(site) for n in site.layer_names}
  macs = {n: k for n, k in cost.macs_per_token(spec.model).items() if n in searched}
  return space_lib.make(macs, [rules_lib.recipe_by_name(n) for n in s.options], s.decisions)


def rules_of(spec: train_spec.TrainSpec, s: Search) -> controller_lib.Rules:
  return controller_lib.Rules(
    spec.steps, s.delay, s.rate, s.reward, s.beta, s.entropy, s.entropy_schedule
  )


def outside(model: ModelConfig, space: space_lib.Space) -> float:
  """Multiplications per token of linear layers that no decision is about."""
  return sum(k for n, k in cost.macs_per_token(model).items() if n not in space.decision_of)


def make_step(spec: train_spec.TrainSpec, space: space_lib.Space, s: Search) -> StepFn:
  """(state, controller, batch, sites) -> (state, controller, metrics), jitted, both donated.

  Metrics are the training step's and search/*: reward, advantage, cost of the sample and the mean
  of the policy's (BOPs over the target), entropy in nats, its weight, and the mean probability of
  the most likely options.
  """
  rules = rules_of(spec, s)
  costs = jnp.asarray(space.costs / s.target, jnp.float32)

  def step(state, controller, batch, sites, *, rate, key):
    key, at = jax.random.wrap_key_data(key), state.step
    own = jax.random.fold_in(jax.random.fold_in(key, at), _SAMPLING)
    choice = controller_lib.sample(rules, controller, at, own)
    sites = space.with_choice(sites, choice)
    state, values = train_step.take_step(spec, state, batch, sites, rate, key)
    spent = jnp.take_along_axis(costs, choice[:, None], axis=1).sum()
    controller, more = controller_lib.update(rules, controller, at, choice, -values["loss"], spent)
    probs = jax.nn.softmax(controller.logits)
    more |= {
      "search/expected_cost": (probs * costs).sum(), "search/likeliest": probs.max(-1).mean(),
    }  # fmt: skip
    return state, controller, values | more

  options = choose.compiler_options(spec.device)
  key = jax.random.key_data(jax.random.key(spec.seed))  # on the one device
  jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
  return StepFn(jitted, schedule_lib.rate_of(spec.optim), key)  # pyright: ignore
