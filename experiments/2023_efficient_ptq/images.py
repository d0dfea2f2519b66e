"""Small networks on scikit-learn's digits whose products a Flax hook makes: MLP, CNN, transformer.

They train in float32 without hooks; parameters are the same with them, so that a trained network
is multiplied in any recipe.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "2023_fliqs")]

import digits  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

from fp8jax.formats import E4M3  # noqa: E402
from fp8jax.integrations import flax as hooks  # noqa: E402
from fp8jax.ops import site as site_lib  # noqa: E402
from fp8jax.recipe.gemm import Gemm, Recipe  # noqa: E402
from fp8jax.recipe.quant import Quant, Static  # noqa: E402

STEPS, BATCH, RATE = 600, 64, 2e-3


class Network(nn.Module):
  """Base: layers that multiply in a recipe, or plainly."""

  recipe: Recipe | None = None
  sizes: tuple = ()

  def dense(self, width: int, name: str, plain: bool = False):
    of = {} if plain or self.recipe is None else {
      "dot_general_cls": hooks.linen_dot_general(self.recipe)}  # fmt: skip
    return nn.Dense(width, name=name, **of)

  def conv(self, width: int, name: str, stride: int = 1, groups: int = 1, plain: bool = False):
    """As patches, unquantized too: XLA:CPU multiplies these faster than it convolves in a loop."""
    recipe = Recipe("plain") if plain or self.recipe is None else self.recipe
    of = dict(strides=stride, feature_group_count=groups, name=name)
    return nn.Conv(width, (3, 3), conv_general_dilated_cls=hooks.linen_conv(recipe), **of)


class Mlp(Network):
  """Hidden layers of `sizes`; all are quantized."""

  @nn.compact
  def __call__(self, x):
    x = x.reshape(len(x), -1)
    for number, width in enumerate(self.sizes):
      x = nn.relu(self.dense(width, f"hidden{number}")(x))
    return self.dense(10, "classes")(x)


class Cnn(Network):
  """Convolutions of (width, stride, depthwise) with ReLU; the first and the last layer stay."""

  @nn.compact
  def __call__(self, x):
    for number, (width, stride, is_depthwise) in enumerate(self.sizes):
      if is_depthwise:
        x = self.conv(x.shape[-1], f"depth{number}", groups=x.shape[-1])(x)
      x = nn.relu(self.conv(width, f"conv{number}", stride, plain=number == 0)(x))
    return self.dense(10, "classes", plain=True)(x.reshape(len(x), -1))


class Vit(Network):
  """Patches of 2 x 2; `sizes` are width, blocks and heads. Attention's own products stay."""

  @nn.compact
  def __call__(self, x):
    width, blocks, heads = self.sizes
    x = x.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4)
    place = self.param("place", nn.initializers.normal(0.02), (16, width))
    x = self.dense(width, "patches")(x) + place
    for b in range(blocks):
      h = nn.LayerNorm(name=f"norm{b}a")(x)
      q, k, v = (self.dense(width, f"{name}{b}")(h).reshape(*h.shape[:2], heads, -1)
                 for name in "qkv")  # fmt: skip
      x += self.dense(width, f"o{b}")(nn.dot_product_attention(q, k, v).reshape(h.shape))
      h = nn.gelu(self.dense(4 * width, f"up{b}")(nn.LayerNorm(name=f"norm{b}b")(x)))
      x += self.dense(width, f"down{b}")(h)
    return self.dense(10, "classes")(nn.LayerNorm(name="norm")(x).mean(1))


NETWORKS = {
  "mlp": (Mlp, (64,)), "mlp_deep": (Mlp, (128, 128, 128, 128)),
  "cnn": (Cnn, tuple((width, stride, False) for _, width, stride in digits.CONVOLUTIONS)),
  "cnn_narrow": (Cnn, ((8, 1, False), (8, 2, False), (8, 1, False))),
  "cnn_depthwise": (Cnn, ((16, 1, False), (32, 2, True), (64, 2, True))),
  "vit": (Vit, (32, 2, 2)), "vit_deep": (Vit, (48, 5, 4)),
}  # fmt: skip


def build(name: str, recipe: Recipe | None = None) -> Network:
  kind, sizes = NETWORKS[name]
  return kind(recipe, sizes)


def _losses(network, variables, images, labels):
  log_p = jax.nn.log_softmax(network.apply(variables, images))
  loss = -jnp.take_along_axis(log_p, labels[:, None], 1).mean()
  return loss, (log_p.argmax(1) == labels).mean()


@functools.cache
def _trainer(name: str):
  network, data = build(name), digits.load()
  adam = optax.adam(optax.warmup_cosine_decay_schedule(0.0, RATE, 50, STEPS))
  images, labels = jnp.asarray(data["train"]), jnp.asarray(data["train_labels"])

  @jax.jit
  def train(key):
    params = network.init(key, images[:1])["params"]

    def step(carry, i):
      params, state = carry
      rows = jax.random.randint(jax.random.fold_in(key, i), (BATCH,), 0, len(images))
      of = lambda p: _losses(network, {"params": p}, images[rows], labels[rows])[0]  # noqa: E731
      moves, state = adam.update(jax.grad(of)(params), state)
      return (optax.apply_updates(params, moves), state), None

    (params, _), _ = jax.lax.scan(step, (params, adam.init(params)), jnp.arange(STEPS))
    return params

  return train


def trained(name: str, seed: int) -> Any:
  """Parameters of a network after its training in float32."""
  return _trainer(name)(jax.random.key(seed))


@functools.cache
def _calibrator(name: str):
  """params -> sites whose states are the amaxes of 128 training images; of any static format."""
  recipe = Recipe("any", Gemm(Quant(E4M3, source=Static()), Quant(E4M3)))
  network, data = build(name, recipe), digits.load()
  images, labels = data["train"][:128], data["train_labels"][:128]

  @jax.jit
  def calibrate(params):
    made = network.init(jax.random.key(0), jnp.asarray(images[:1]))["fp8"]
    of = lambda s: _losses(network, {"params": params, "fp8": s}, images, labels)[0]  # noqa: E731
    return site_lib.calibrate(made, of)

  return calibrate


@functools.cache
def _measurer(name: str, recipe: Recipe | None):
  """Variables -> (loss, accuracy) of the held-out images."""
  network, data = build(name, recipe), digits.load()
  run = functools.partial(_losses, network)
  return jax.jit(lambda v: run(v, data["heldout"], data["heldout_labels"]))


def measured(name: str, params, recipe: Recipe | None) -> dict[str, float]:
  """{"loss", "accuracy"} of the held-out images."""
  variables = {"params": params}
  if recipe is not None and recipe.is_stateful:
    sites = _calibrator(name)(params)
    variables["fp8"] = site_lib.tree_map(lambda s: dataclasses.replace(s, recipe=recipe), sites)
  loss, accuracy = _measurer(name, recipe)(variables)
  return {"loss": float(loss), "accuracy": float(accuracy)}


def nudged(params):
  """Every parameter one ulp larger."""
  return jax.tree.map(lambda x: np.nextafter(np.asarray(x), np.float32(np.inf)), params)
