"""Cross-entropy of a large vocabulary, a chunk of positions at a time, and distillation.

Logits exist for `chunk` positions only: [B, chunk, V] float32, never [B, L, V]. Their gradient is
known as soon as they are, so under differentiation each chunk multiplies its three GEMMs on the
spot and nothing is recomputed; the backward pass merely scales what was stored. Logits of a teacher
exist beside them, for as long.

On a mesh the whole loop runs inside one `shard_map`: the head is gathered once before it and its
gradient reduced once after it.

  h[B_data, C, D] . head[D, V_tensor] -> logits[B_data, C, V_tensor]

Letters: C is a chunk of L.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fp8jax import axes
from fp8jax.ops import collectives, derivative, gemm_spec, observe, products, site_checks
from fp8jax.ops.gemm_spec import Role
from fp8jax.ops.site import ActivationSite, ScalingInputs, Site
from fp8jax.ops.stored_params import Parts
from fp8jax.quantization import tensor_stats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
  """The teacher of a batch, for distillation: loss = (1 - w) CE + w t^2 KL(teacher || student).

  Attributes:
    h_BLD: its last hidden states, normalised, in the dtype of its product.
    head: its output embedding, as the student's.
    site: precision of its head, unquantized.
    weight: w, from 0 to 1.
    temperature: t, which divides the logits of both; t^2 keeps the size of the gradient
      (arXiv:1503.02531 §2).
  """

  h_BLD: jax.Array
  head: jax.Array
  site: Site
  weight: float = dataclasses.field(metadata=dict(static=True))
  temperature: float = dataclasses.field(metadata=dict(static=True))


def cross_entropy(*args, **options):
  """The loss alone of `cross_entropy_by_source`."""
  return cross_entropy_by_source(*args, **options)[0]


def cross_entropy_by_source(
  h_BLD, head, eqn: str, targets_BL, weights_BL, site: Site, chunk: int, *,
  is_frozen: bool = False, logits_site: ActivationSite | None = None, sources_BL=None,
  num_sources: int = 0, gradient_gain: float = 1.0, teacher: Teacher | None = None,
  temperature: float = 1.0, parts: Parts | None = None,
):  # fmt: skip
  """Sum over tokens of weight * -log p(target), and sums beside it.

  Args:
    h_BLD: last hidden states, normalised.
    head: output embedding; [D, V], or [V, D] when tied to the input embedding.
    eqn: "BLD,DV->BLV" or "BLD,VD->BLV".
    targets_BL: int32 next tokens.
    weights_BL: float32 weight of each token, 0 for padding. Not differentiated.
    site: precision of the head.
    chunk: positions (of L) per chunk.
    is_frozen: whether the head has no gradient, so that its product is left out.
    logits_site: observes the logits under differentiation; None for a step that does not.
    sources_BL: int32 number of each token's source, below num_sources; None adds up none apart.
    gradient_gain: factor of the gradient of logits, and so of all behind it.
    teacher: makes the loss `Teacher`'s; it has no gradient.
    temperature: divides the logits; 1 with a teacher, which has its own.
    parts: of the head's gradient, whose terms stay apart; `head` then has a first axis of them.

  Returns:
    (float32 scalar, float32 [num_sources, 2] or None, float32 [2] or None). The scalar over the sum
    of the weights is the mean, exp of that perplexity. The rows are sums of losses and of weights
    by source. The pair is of a teacher: sums of weight * -log p(target), and of weight * KL of the
    distributions at its temperature. Only the scalar is differentiated.
  """
  site.claim()
  static = (eqn, chunk, is_frozen, num_sources, gradient_gain, temperature,
            parts.axes if parts else ())  # fmt: skip
  loss, *sums = _cross_entropy(
    static, h_BLD, head, targets_BL, weights_BL, sources_BL, teacher, site, logits_site
  )
  return loss, *jax.lax.stop_gradient(sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(static, *args):
  return _run(static, *args, is_differentiated=False)[0]


def _fwd(static, *args):
  site = args[-2]
  derivative.refuse_twice(args[:-2], ((site.name, site.recipe.is_quantized),))
  sums, *gradients = _run(static, *args, is_differentiated=True)
  return sums, (*gradients, *args[-2:])


def _run(static, *args, is_differentiated: bool):
  """(sums, gradients of h and head, statistics of the site and of the logits); or (sums,)."""
  eqn, chunk, is_frozen, num_sources, gain, t, later = static
  *arrays, teacher, site, logits_site = args
  letters, layout = eqn.partition(",")[2].partition("->")[0], site.layout

  def local(h, head, targets, weights, sources, teacher, tap, inputs):
    # The site as seen from inside the loop's own `shard_map`.
    inside, dtype = dataclasses.replace(site, tap=tap, layout=layout.manual()), head.dtype
    head = _gathered(head[0] if later else head, site, h.dtype, letters)
    losses = _losses(teacher, eqn, letters, layout, t)

    def one(carry, xs):
      h, targets, weights, sources, h_teacher = xs
      spec = gemm_spec.make_spec(eqn, h, head, inside, out_dtype=jnp.float32)
      logits_BCV, _ = products.forward(spec, h, head, inputs)
      loss_BC, g_BCV, parts = losses(logits_BCV, targets, weights, h_teacher)
      if not is_differentiated:
        return (_added(carry[0], loss_BC, weights, sources, parts),), None
      sums, dhead, observed, logits_stats = carry
      if logits_site is not None:
        here = observe.logits_stats(logits_BCV, logits_site)
        logits_stats = tensor_stats.combine(logits_stats, here)
      g_BCV = (g_BCV if gain == 1 else gain * g_BCV).astype(h.dtype)
      dh, _ = products.data_gradient(spec, g_BCV, head, inputs, h)
      if not is_frozen:
        dhead = dhead + products.weight_gradient(spec, h, g_BCV, dtype, inputs, head)
      tensors = ((Role.X_FWD, h), (Role.W_FWD, head), (Role.G_DGRAD, g_BCV))
      here = [observe.operand_stats(spec, role, t, inputs) for role, t in tensors]
      observed = tensor_stats.combine(observed, jnp.stack(here))
      return (_added(sums, loss_BC, weights, sources, parts), dhead, observed, logits_stats), dh

    by_source = None if sources is None else jnp.zeros((num_sources, 2), jnp.float32)
    carry: tuple = ((jnp.zeros((), jnp.float32), by_source, teacher and jnp.zeros(2)),)
    if is_differentiated:
      dhead = jnp.zeros(() if is_frozen else head.shape, dtype)
      of_logits = logits_site and tensor_stats.nothing(logits_site.tap.shape)
      carry += (dhead, tensor_stats.nothing(tap.shape), of_logits)
    xs = (h, targets, weights, sources, teacher and teacher.h_BLD)
    (sums, *rest), dh = for_chunks(one, carry, chunk, *xs)
    sums = jax.tree.map(lambda x: collectives.sum_over(x, layout, "B"), sums)
    if not is_differentiated:
      return (sums,)
    dhead, *stats = rest
    everywhere = tuple(dict.fromkeys(layout.act_axes_of("BV")))
    return (
      sums,
      collectives.sum_over(dh, layout, "V"),
      dhead if is_frozen else collectives.scatter_gradient(dhead, letters, "BL", layout, later),
      *(None if one is None else tensor_stats.over_mesh(one, everywhere) for one in stats),
    )

  rows, of_h, of_head = *map(layout.act_spec, ("BL", "BLD")), layout.weight_spec(letters)
  of_teacher = teacher and dataclasses.replace(teacher, h_BLD=of_h, head=of_head, site=P())
  of_head = P(later, *of_head) if later else of_head
  inputs = (of_h, of_head, rows, rows, rows, of_teacher, P(), P())
  outputs = (P(), of_h, P() if is_frozen else of_head, P(), P())
  run = collectives.on_mesh(local, layout, inputs, outputs if is_differentiated else outputs[:1])
  return run(*arrays, teacher, site.tap, ScalingInputs.of(site))


def _gathered(head, site: Site, dtype, letters: str):
  # In the compute dtype; FP8 recipes quantize it from the master copy.
  head = head if site.recipe.fwd.is_quantized else head.astype(dtype)
  return collectives.gather_weight(head, letters, site.layout)


def _losses(teacher: Teacher | None, eqn: str, letters: str, layout: axes.Layout, t: float):
  """(logits, targets, weights, h of the teacher) of a chunk -> (loss, its gradient, sums of
  `_distilled` or None), inside the loop's `shard_map`."""
  if teacher is None:
    return lambda logits, targets, weights, _: (
      *_loss_and_gradient(logits, targets, weights, layout, t), None
    )  # fmt: skip
  inside = dataclasses.replace(teacher.site, layout=layout.manual())
  head = collectives.gather_weight(teacher.head.astype(teacher.h_BLD.dtype), letters, layout)

  def distilled(logits_BCV, targets_BC, weights_BC, h_BCD):
    both = _loss_and_gradient(logits_BCV, targets_BC, weights_BC, layout)
    spec = gemm_spec.make_spec(eqn, h_BCD, head, inside, out_dtype=jnp.float32)
    teacher_BCV, _ = products.forward(spec, h_BCD, head, ScalingInputs(None, None))
    return _distilled(logits_BCV, teacher_BCV, *both, weights_BC, teacher, layout)

  return distilled


def _added(sums, loss_BC, weights_BC, sources_BC, parts):
  """`sums`, of all losses, by source and of a teacher, with those of a chunk."""
  loss, by_source, of_teacher = sums
  if by_source is not None:
    is_of = sources_BC[..., None] == jnp.arange(len(by_source))
    both = jnp.stack([loss_BC, weights_BC], axis=-1)[:, :, None]
    by_source = by_source + jnp.sum(jnp.where(is_of[..., None], both, 0.0), axis=(0, 1))
  return loss + jnp.sum(loss_BC), by_source, None if parts is None else of_teacher + parts


def _bwd(static, residuals, g):
  is_frozen, g = static[2], g[0]
  dh_BLD, dhead, observed, logits_stats, site, logits_site = residuals
  roots = site_checks.roots(site.roots, observed)
  made = (g * dh_BLD).astype(dh_BLD.dtype), None if is_frozen else g * dhead
  return (
    *derivative.once(made, ((site.name, site.recipe.is_quantized),)),
    None,
    None,
    None,
    None,
    # The site observed the gradient of the sum over tokens, before the caller's factor.
    dataclasses.replace(site, tap=observed, scaling_state=None, key=None, roots=roots),
    None if logits_site is None else dataclasses.replace(logits_site, tap=logits_stats),
  )


_cross_entropy.defvjp(_fwd, _bwd)


@jax.named_scope("loss")
def _loss_and_gradient(logits_BCV, targets_BC, weights_BC, layout: axes.Layout, t: float = 1.0):
  """weight * (logsumexp - logit of the target), and its gradient weight * (softmax - one-hot), of
  logits / t.

  V may be split over devices: maxima, sums and the target's logit are then combined across them.
  """
  split = layout.act_axes("V")
  logits_BCV = logits_BCV if t == 1 else logits_BCV / t
  size = logits_BCV.shape[-1]
  index = jax.lax.broadcasted_iota(jnp.int32, (1, 1, size), 2)
  if split:
    index = index + jax.lax.axis_index(split) * size

  def across(reduce, x):
    return reduce(x, split) if split else x

  top = across(jax.lax.pmax, jnp.max(logits_BCV, axis=-1, keepdims=True))
  exp = jnp.exp(logits_BCV - top)
  total = across(jax.lax.psum, jnp.sum(exp, axis=-1, keepdims=True))
  is_target = index == targets_BC[..., None]
  target = across(jax.lax.psum, jnp.sum(jnp.where(is_target, logits_BCV - top, 0.0), axis=-1))
  loss_BC = weights_BC * (jnp.log(total[..., 0]) - target)
  g_BCV = weights_BC[..., None] * (exp / total - is_target)
  return loss_BC, g_BCV if t == 1 else g_BCV / t


@jax.named_scope("distillation")
def _distilled(logits_BCV, teacher_BCV, ce_BC, g_BCV, weights_BC, teacher: Teacher, layout):
  """(loss, its gradient with respect to the logits, sums of cross entropy and KL) of a chunk.

  Args:
    ce_BC, g_BCV: of the cross entropy, weights included.
  """
  split, w, t = layout.act_axes("V"), teacher.weight, teacher.temperature

  def across(reduce, x):
    return reduce(x, split) if split else x

  def log_softmax(x):
    x = x - across(jax.lax.pmax, jnp.max(x, axis=-1, keepdims=True))
    return x - jnp.log(across(jax.lax.psum, jnp.sum(jnp.exp(x), axis=-1, keepdims=True)))

  log_q, log_p = log_softmax(logits_BCV / t), log_softmax(teacher_BCV / t)
  p = jnp.exp(log_p)
  kl_BC = weights_BC * across(jax.lax.psum, jnp.sum(p * (log_p - log_q), axis=-1))
  loss_BC = (1 - w) * ce_BC + w * t**2 * kl_BC
  g_BCV = (1 - w) * g_BCV + w * t * weights_BC[..., None] * (jnp.exp(log_q) - p)
  return loss_BC, g_BCV, jnp.stack([jnp.sum(ce_BC), jnp.sum(kl_BC)])


def log_probs(t, logits_BLV, targets_BL):
  """float32 [B, L]: log-probability of every target under logits / t."""
  logits_BLV = logits_BLV / t
  logits_BLV = logits_BLV - jnp.max(logits_BLV, axis=-1, keepdims=True)
  of_target = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
  return of_target - jnp.log(jnp.sum(jnp.exp(logits_BLV), axis=-1))


def sums_of(loss_BL, batch, num_sources: int):
  """(sum of the batch's weights times these losses, {"by_source": the same by source, or absent}),
  as `cross_entropy_by_source` gives them."""
  sources_BL = batch.get("sources_BL")
  start = jnp.zeros(()), None if sources_BL is None else jnp.zeros((num_sources, 2)), None
  weights_BL = batch["weights_BL"]
  loss, by_source, _ = _added(start, weights_BL * loss_BL, weights_BL, sources_BL, None)
  return loss, {} if by_source is None else {"by_source": by_source}


def for_chunks(step, carry, chunk: int, *arrays_BL):
  """`jax.lax.scan` over chunks of the second axis; the last chunk may be shorter, an array None.

  Returns:
    (carry, outputs joined along that axis again, or None if `step` returns none).
  """
  batch, length = arrays_BL[0].shape[:2]
  num = length // chunk
  pieces = []
  if num:

    def chunked(x):
      return jnp.moveaxis(x[:, : num * chunk].reshape(batch, num, chunk, *x.shape[2:]), 1, 0)

    carry, y = jax.lax.scan(step, carry, jax.tree.map(chunked, arrays_BL))
    if y is not None:
      pieces.append(jnp.moveaxis(y, 0, 1).reshape(batch, num * chunk, *y.shape[3:]))
  if length % chunk:
    carry, y = step(carry, jax.tree.map(lambda x: x[:, num * chunk :], arrays_BL))
    if y is not None:
      pieces.append(y)
  return carry, jnp.concatenate(pieces, axis=1) if pieces else None
