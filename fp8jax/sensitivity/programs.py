"""The programs of a study of sites (study.py): a BF16 forward pass, gradients, switched sites.

Letters: B, L as in models; T is a token, V the vocabulary; N counts layers.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from fp8jax.evaluation import divergence
from fp8jax.kernels import choose
from fp8jax.models import transformer
from fp8jax.ops import residuals, switch
from fp8jax.ops import site as site_lib
from fp8jax.step.train_spec import TrainSpec

# Positions of a chunk of the head.
_CHUNK = 256


class Programs:
  """The three programs of a study; each is compiled once.

  Attributes:
    compiled: programs that have been traced so far, and so compiled.
    reference, gradient, measure: jitted; see the functions they are made of.
  """

  def __init__(self, spec: TrainSpec):
    self.compiled = 0

    def jit(fn):
      def traced(*args):
        self.compiled += 1
        return fn(spec, *args)

      return jax.jit(traced, compiler_options=choose.compiler_options(spec.device))

    self.reference, self.gradient, self.measure = map(jit, (_reference, _gradient, _measure))


def _reference(spec: TrainSpec, params, sites, batch, key):
  """The BF16 forward pass: (hidden [B, L, D], inputs of layers [N, B, L, D], sums of losses [B],
  targets drawn from the model [B, L])."""

  def step(x_BLD, of_layer, context):
    return transformer.layer(x_BLD, of_layer, context, spec.model, spec.run)[0], x_BLD

  x_BLD, inputs_NBLD = transformer.scan_layers(step, params, sites, batch, spec.model, spec.run)
  hidden_BLD = transformer.normalised(x_BLD, params, sites, spec.model, spec.run)

  def one(h_TD, targets_T, keys):
    logits_TV = _logits(spec, params, sites, h_TD)
    drawn_T = jax.vmap(jax.random.categorical)(keys, logits_TV)
    return _nll(logits_TV, targets_T), drawn_T.astype(jnp.int32)

  targets_T = batch["targets_BL"].reshape(-1)
  keys = jax.random.split(key, targets_T.shape[0])
  loss_T, drawn_T = _by_chunks(one, _rows(hidden_BLD), targets_T, keys)
  return hidden_BLD, inputs_NBLD, _sums(loss_T, batch), drawn_T.reshape(batch["targets_BL"].shape)


def _measure(spec: TrainSpec, params, plain, sites, batch, x_BLD, start, hidden_BLD):
  """(sums of losses [B], sums of KL from BF16 [B]) with switched sites.

  Args:
    plain: sites of BF16.
    sites: with switches; those of layers before `start` are off.
    x_BLD: the input of layer `start` in BF16.
    hidden_BLD: of BF16.
  """
  context = transformer.layer_context(batch, spec.model, spec.run)
  for layers, of_sites, p in transformer.runs(sites, params["layers"]):

    def step(i, x_BLD, of_run=(p, of_sites), first=layers.start):
      of_layer = jax.tree.map(lambda x: x[i - first], of_run)
      return transformer.layer(x_BLD, of_layer, context, spec.model, spec.run)[0]

    x_BLD = jax.lax.fori_loop(jnp.maximum(start, layers.start), layers.stop, step, x_BLD)
  changed_BLD = transformer.normalised(x_BLD, params, sites, spec.model, spec.run)

  def one(h_TD, base_TD, targets_T):
    logits_TV = _logits(spec, params, sites, h_TD)
    base_TV = _logits(spec, params, plain, base_TD)
    return _nll(logits_TV, targets_T), divergence.kl(base_TV, logits_TV)

  targets_T = batch["targets_BL"].reshape(-1)
  loss_T, kl_T = _by_chunks(one, _rows(changed_BLD), _rows(hidden_BLD), targets_T)
  return _sums(loss_T, batch), _sums(kl_T, batch)


def _gradient(spec: TrainSpec, params, sites, batch):
  """Trees like the sites of ([N?, 3, B] sums of g over tokens, [N?, 3, B] half sums of g^2).

  g is the gradient of the sum of losses with respect to switches per token at 0; of PARTS.
  """
  shape = batch["targets_BL"].shape
  # Rounding errors per token of all layers are many times larger than the layers' inputs.
  run = dataclasses.replace(spec.run, remat="full", residuals=residuals.ResidualFormats())
  targets_T, weights_T = (batch[name].reshape(-1) for name in ("targets_BL", "weights_BL"))

  def off(site):
    lead = (site.layers[1] - site.layers[0],) if site.layers else ()
    is_on = site.recipe.fwd.is_quantized
    return jnp.zeros((*lead, 2, math.prod(shape))) if is_on else None

  def loss(tree):
    switched = switch.with_switches(sites, tree)
    hidden_BLD = transformer.hidden(params, switched, batch, spec.model, run)
    head, numbers = {"head": sites["head"]}, tree["head"]

    @jax.checkpoint
    def one(h_TD, targets_T, switch_T):
      of_head = switch.with_switches(head, {"head": None if numbers is None else switch_T.T})
      return (_nll(_logits(spec, params, of_head, h_TD), targets_T),)

    switch_T = jnp.zeros((*weights_T.shape, 2)) if numbers is None else numbers.T
    (loss_T,) = _by_chunks(one, _rows(hidden_BLD), targets_T, switch_T)
    return jnp.sum(loss_T * weights_T)

  def sums(g, which: int):
    g = g.reshape(*g.shape[:-1], *shape)
    g = jnp.concatenate([g, jnp.sum(g, axis=-3, keepdims=True)], axis=-3)
    return jnp.sum(0.5 * jnp.square(g) if which else g, axis=-1)

  gradient = jax.grad(loss)(site_lib.tree_map(off, sites))
  return tuple(jax.tree.map(functools.partial(sums, which=i), gradient) for i in range(2))


def _logits(spec: TrainSpec, params, sites, h_TD):
  return transformer.head_logits(h_TD[None], params, sites, spec.model, spec.run)[0]


def _nll(logits_TV, targets_T):
  picked = jnp.take_along_axis(logits_TV, targets_T[:, None], axis=-1)[:, 0]
  return jax.nn.logsumexp(logits_TV, axis=-1) - picked


def _rows(x_BLD):
  return x_BLD.reshape(-1, x_BLD.shape[-1])


def _sums(values_T, batch):
  """[B] of values per token, of tokens that count."""
  weights_BL = batch["weights_BL"]
  return jnp.sum(values_T.reshape(weights_BL.shape) * weights_BL, axis=-1)


def _by_chunks(fn, *arrays):
  """fn of arrays [T, ...], so many rows at a time: of the vocabulary only a chunk exists."""
  count = arrays[0].shape[0]
  chunk = min(_CHUNK, count)
  padding = -count % chunk

  def split(x):
    if padding:  # of rows that are there: a key has no zero
      x = jnp.concatenate([x, x[:padding]])
    return x.reshape(-1, chunk, *x.shape[1:])

  chunks = jax.lax.map(lambda xs: fn(*xs), tuple(map(split, arrays)))
  return tuple(x.reshape(-1, *x.shape[2:])[:count] for x in chunks)
