"""The decoder in float64, written from the papers; it shares no code with fp8jax's."""

import jax
import numpy as np

from fp8jax import params as params_lib


def rms_norm(x, weight, eps):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x, positions, theta):
  """Channels i and i + K/2 are one complex number, turned by position / theta^(2i / K)."""
  half = x.shape[-1] // 2
  angle = positions[:, :, None, None] * theta ** -(np.arange(half) / half)
  turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag], axis=-1)


def attend(q, k, v, visible):
  """Head h reads key head h // (H / G)."""
  k, v = (np.repeat(t, q.shape[2] // t.shape[2], axis=2) for t in (k, v))
  score = np.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(q.shape[-1])
  score = np.where(visible[:, None], score, -np.inf)
  p = np.exp(score - score.max(-1, keepdims=True))
  return np.einsum("bhlm,bmhk->blhk", p / p.sum(-1, keepdims=True), v)


def plain(x, w):
  """[..., in] . [in, ...]"""
  return np.tensordot(x, w, 1)


def logits(cfg, weights, batch, product=plain):
  """`product` makes every linear layer but the head."""
  w = params_lib.flatten(jax.tree.map(np.float64, weights))
  positions = batch["positions_BL"]
  visible = np.tril(np.ones((positions.shape[1],) * 2, bool))[None]
  if "segments_BL" in batch:
    segments = batch["segments_BL"]
    visible = visible & (segments[:, :, None] == segments[:, None])
  x = w["embed"][batch["tokens_BL"]]
  for i in range(cfg.num_layers):
    a = {k.removeprefix("layers/attn/"): t[i] for k, t in w.items() if k.startswith("layers/attn")}
    m = {k.removeprefix("layers/mlp/"): t[i] for k, t in w.items() if k.startswith("layers/mlp")}
    h = rms_norm(x, a["norm"], cfg.norm_eps)
    q, k, v = (product(h, a[c]) + a.get(f"{c}_bias", 0) for c in "qkv")
    if cfg.qk_norm:
      q, k = rms_norm(q, a["q_norm"], cfg.norm_eps), rms_norm(k, a["k_norm"], cfg.norm_eps)
    q, k = (rotate(t, positions, cfg.rope_theta) for t in (q, k))
    mixed = attend(q, k, v, visible)
    x = x + product(mixed.reshape(*x.shape[:2], -1), a["o"].reshape(-1, x.shape[-1]))
    h = rms_norm(x, m["norm"], cfg.norm_eps)
    gate, up = product(h, m["gate"]), product(h, m["up"])
    x = x + product(gate / (1 + np.exp(-gate)) * up, m["down"])
  head = w["embed"].T if cfg.tie_embeddings else w["head"]
  return rms_norm(x, w["norm"], cfg.norm_eps) @ head


def loss(cfg, weights, batch):
  made = logits(cfg, weights, batch)
  top = made.max(-1)
  log_total = top + np.log(np.exp(made - top[..., None]).sum(-1))
  target = np.take_along_axis(made, batch["targets_BL"][..., None], -1)[..., 0]
  return np.average(log_total - target, weights=batch["weights_BL"])
