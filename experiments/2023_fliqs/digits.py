"""A small convolutional network on scikit-learn's digits, its formats sampled, fixed or ranked.

Data: 1,797 images of 8 x 8 pixels; every fourth is held out. Four convolutions and a linear layer
multiply through the Flax hooks at sites with options, so that every arm is the same program.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from fp8jax.errors import UserError
from fp8jax.integrations import flax as hooks
from fp8jax.ops import site as site_lib
from fp8jax.recipe import rules as rules_lib
from fp8jax.search import controller as controller_lib
from fp8jax.search import formats
from fp8jax.search import space as space_lib

BATCH, RATE = 64, 2e-3
# Name, outputs, stride; a 3 x 3 kernel.
CONVOLUTIONS = (("conv0", 16, 1), ("conv1", 32, 2), ("conv2", 32, 1), ("conv3", 64, 2))
CLASSES = "classes"


def load() -> dict[str, np.ndarray]:
  """{"train", "heldout": images [N, 8, 8, 1] from 0 to 1; and labels [N] beside each}."""
  try:
    from sklearn import datasets
  except ModuleNotFoundError as e:
    raise UserError("the digits are in scikit-learn: pip install scikit-learn") from e
  both = datasets.load_digits()
  images, labels = both.images[..., None].astype(np.float32) / 16, both.target.astype(np.int32)
  is_held = np.arange(len(labels)) % 4 == 3
  return {
    "train": images[~is_held], "train_labels": labels[~is_held],
    "heldout": images[is_held], "heldout_labels": labels[is_held],
  }  # fmt: skip


def macs() -> dict[str, int]:
  """{site: multiplications per image}."""
  found, size, inputs = {}, 8, 1
  for name, outputs, stride in CONVOLUTIONS:
    size //= stride
    found[name] = size**2 * outputs * inputs * 9
    inputs = outputs
  return {**found, CLASSES: size**2 * inputs * 10}


class Product(hooks.LinenDotGeneral):
  """The hook with a site that is given, not made."""

  site: Any = None

  def _site(self):
    return self.site


class Convolution(Product, hooks.LinenConv):
  """As Product."""


class Network(nn.Module):
  """Convolutions with ReLU, and a linear layer."""

  sites: Any

  @nn.compact
  def __call__(self, x):
    for name, outputs, stride in CONVOLUTIONS:
      hook = functools.partial(self._hook, Convolution, name)
      of = dict(strides=stride, name=name, conv_general_dilated_cls=hook)
      x = nn.relu(nn.Conv(outputs, (3, 3), **of)(x))
    hook = functools.partial(self._hook, Product, CLASSES)
    return nn.Dense(10, name=CLASSES, dot_general_cls=hook)(x.reshape(len(x), -1))

  def _hook(self, cls, name):
    return cls(self.sites[name].recipe, "auto", self.sites[name])


@dataclasses.dataclass(frozen=True)
class Trained:
  """An arm after its steps: losses in nats per image, held out in its own formats."""

  params: Any
  choice: np.ndarray
  probabilities: np.ndarray | None
  heldout: float
  errors: float
  training: float
  seconds_per_step: float


class Task:
  """The programs of one search space; `steps` of each arm."""

  def __init__(self, options: tuple[str, ...], steps: int, decisions: str = "layer"):
    recipes = [rules_lib.recipe_by_name(name) for name in options]
    self.space, self.steps, self._data = space_lib.make(macs(), recipes, decisions), steps, load()
    self._sites = {n: site_lib.unobserved(recipes[0], name=n) for n in macs()}
    rate = optax.warmup_cosine_decay_schedule(0.0, RATE, max(steps // 20, 1), steps)
    self._adam = optax.adam(rate)
    self._measure = jax.jit(self._losses)

  def _losses(self, params, choice, images, labels):
    """(mean loss, share of errors, log p [N, 10])."""
    network = Network(self.space.with_choice(self._sites, choice))
    log_p = jax.nn.log_softmax(network.apply({"params": params}, images))
    loss = -jnp.take_along_axis(log_p, labels[:, None], 1).mean()
    return loss, (log_p.argmax(1) != labels).mean(), log_p

  def train(self, seed: int, fixed=None, target: float = 1.0, rules=None) -> Trained:
    """Args: a choice that stays, or a target and rules for the controller; of the seed."""
    space, data = self.space, self._data
    costs = jnp.asarray(space.costs / target, jnp.float32)
    controller = controller_lib.init(*space.costs.shape)
    key = jax.random.key(seed)
    choice = jnp.zeros(len(space.decisions), jnp.int32)
    network = Network(space.with_choice(self._sites, choice))
    params = network.init(key, data["train"][:1])["params"]

    @jax.jit
    def step(params, opt, controller, i):
      order, own = jax.random.split(jax.random.fold_in(key, i))
      rows = jax.random.randint(order, (BATCH,), 0, len(data["train"]))
      images, labels = (jnp.asarray(data[k])[rows] for k in ("train", "train_labels"))
      sampled = jnp.asarray(fixed, jnp.int32) if rules is None else controller_lib.sample(
        rules, controller, i, own)  # fmt: skip
      of = lambda p: self._losses(p, sampled, images, labels)[0]  # noqa: E731
      loss, gradient = jax.value_and_grad(of)(params)
      moves, opt = self._adam.update(gradient, opt)
      if rules is not None:
        spent = jnp.take_along_axis(costs, sampled[:, None], 1).sum()
        controller, _ = controller_lib.update(rules, controller, i, sampled, -loss, spent)
      return optax.apply_updates(params, moves), opt, controller, loss

    opt, losses, started = self._adam.init(params), [], time.perf_counter()
    for i in range(self.steps):
      params, opt, controller, loss = step(params, opt, controller, i)
      losses.append(loss)
      if not i:
        jax.block_until_ready(loss)
        started = time.perf_counter()  # without the compilation
    last = np.mean(jax.device_get(losses[-max(self.steps // 8, 1) :]))
    seconds = (time.perf_counter() - started) / max(self.steps - 1, 1)
    p = None if rules is None else np.asarray(jax.nn.softmax(controller.logits), np.float64)
    choice = np.asarray(fixed, np.int32) if p is None else p.argmax(1)
    heldout, errors, _ = self._heldout(params, choice)
    return Trained(params, choice, p, heldout, errors, float(last), seconds)

  def _heldout(self, params, choice):
    of = self._data["heldout"], self._data["heldout_labels"]
    loss, errors, log_p = self._measure(params, jnp.asarray(choice, jnp.int32), *of)
    return float(loss), float(errors), np.asarray(log_p, np.float64)

  def ranked(self, params, budget: float) -> np.ndarray:
    """The choice within a budget by the KL that every site alone costs in every option, on training
    images of a model that was trained in the last option.
    """
    last, of = len(self.space.options) - 1, (self._data["train"], self._data["train_labels"])
    plain = np.full(len(self.space.decisions), last, np.int32)

    def log_p(choice):
      return np.asarray(self._measure(params, jnp.asarray(choice), *of)[2], np.float64)

    base, kl = log_p(plain), np.zeros(self.space.costs.shape)
    for d, o in np.ndindex(*kl.shape):
      choice = plain.copy()
      choice[d] = o
      kl[d, o] = (np.exp(base) * (base - log_p(choice))).sum(1).mean()
    return formats.knapsack(np.maximum(kl, 0), self.space.costs, budget)
