"""Deviations of every tensor at initialization, and what float16 and FP8 without scales lose.

command: python experiments/2025_munit/error_table.py    (two minutes of a CPU core)

Two layers of width 128, a vocabulary of 4,096, 2,048 random tokens. The root mean square of inputs
(x) and weights (w) of products, of gradients of their outputs (g) and of parameters (dw), in
float32; the shares of g that float16 and E5M2 round to 0; the error of a parameter's gradient in
float16 or FP8, each without a loss scale, to its float32 gradient, over the norm of that.
"""

import dataclasses
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "experiments" / "lab"))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import tensors  # noqa: E402

from configs import base  # noqa: E402
from fp8jax import params as params_lib  # noqa: E402
from fp8jax.config import resolve  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models import transformer, unit_scaling  # noqa: E402

SIZES = dict(
  num_layers=2, hidden_size=128, intermediate_size=256, num_heads=2, num_kv_heads=1, head_dim=64,
  vocab_size=4096, max_positions=256, tie_embeddings=False,
)  # fmt: skip
SEQUENCES, LENGTH = 8, 256
_UNIT = {"model.residual_tau": 0.4, "model.init_std": 1.0, "optim.grad_clip_norm": 0.0}
# (changes, the head's recipe, the layers' in the compute dtype and in FP8)
ARMS = {
  "plain": ({}, "bf16", "bf16", "fp8_unscaled"),
  "unit scaling": (
    {**_UNIT, "model.unit_scaling": "all"}, "unit_head", "unit_scaling_wide", "unit_scaling",
  ),
  "µS, mean loss": (_UNIT, "munit_head", "munit_scaling_wide", "munit_scaling"),
  "µS": (
    {**_UNIT, "model.unit_scaling": "loss"}, "munit_head", "munit_scaling_wide", "munit_scaling",
  ),
}  # fmt: skip
KINDS = {"x": "inputs x", "w": "weights w", "g": "gradients g", "dw": "gradients dw"}


def batch() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  shape = (SEQUENCES, LENGTH)
  tokens, targets = rng.integers(0, SIZES["vocab_size"], (2, *shape), dtype=np.int32)
  positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape)
  return {"tokens_BL": tokens, "targets_BL": targets, "positions_BL": positions,
          "weights_BL": np.ones(shape, np.float32)}  # fmt: skip


def mean_loss(arm: str, dtype="float32", is_fp8=False):
  """(params -> the mean loss that a step differentiates, its spec)."""
  changes, head, wide, narrow = ARMS[arm]
  c = base.get_config("bf16")
  c.model.update(SIZES)
  rules = (("head", head), ("layers/.*", narrow if is_fp8 else wide))
  c.update_from_flattened_dict({**changes, "precision.rules": rules})
  spec, rows = resolve.resolve(c, 1, choose.current_device()), batch()
  # A configuration of float16 without factors and loss scale is refused.
  run = dataclasses.replace(spec.run, dtype=jnp.dtype(dtype))

  def loss(params):
    total = rows["weights_BL"].sum()
    found = transformer.loss(params, spec.sites(), rows, spec.model, run)
    return unit_scaling.mean(found, total, spec.model)

  return loss, spec


def rms(t) -> float:
  return float(np.sqrt(np.mean(np.square(np.asarray(t, np.float64)))))


def flushed(t, dtype) -> float:
  """Share of the numbers, not 0, that are 0 in a format."""
  t = np.asarray(t, np.float32)
  return float(np.mean((t.astype(dtype).astype(np.float32) == 0)[t != 0]))


def deviations(arm: str):
  """({kind: {tensor: its root mean square}}, {"float16", "e5m2": share of g}, gradients)."""
  loss, spec = mean_loss(arm)
  params = params_lib.init(jax.random.key(0), transformer.params(spec.model), spec.model.dims)
  seen, gradient = tensors.watched(loss, params, SEQUENCES * LENGTH, sites="")
  # The head's is of the sum: cross_entropy multiplies its products, not their operands, by 1/total.
  factor = 1.0 if spec.model.unit_scaling != "none" else 1 / (SEQUENCES * LENGTH)
  found = {kind: {} for kind in KINDS}
  every = []
  for site, layers in seen.items():
    for i, (x, w, g) in enumerate(reversed(layers)):
      name, g = f"{site} {i}", g * (factor if site == "head" else 1)
      found["x"][name], found["w"][name], found["g"][name] = map(rms, (x, w, g))
      if site != "head":
        every.append(np.asarray(g).ravel())
  for path, dw in params_lib.flatten(gradient).items():
    found["dw"][path] = rms(dw)
  every = np.concatenate(every)
  shares = {"float16": flushed(every, np.float16), "e5m2": flushed(every, ml_dtypes.float8_e5m2)}
  return found, shares, (params, gradient)


def errors(arm: str, params, exact, **how) -> list[float]:
  """Of the gradients of the layers' matrices: ||g - exact|| / ||exact||."""
  loss, _ = mean_loss(arm, **how)
  got = params_lib.flatten(jax.jit(jax.grad(loss))(params)["layers"])
  exact = params_lib.flatten(exact["layers"])
  pairs = [(np.float64(got[k]), np.float64(g)) for k, g in exact.items() if "norm" not in k]
  return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]


def measure(arm: str) -> tuple[dict, dict]:
  """(numbers of the table, {kind: {tensor: root mean square}})."""
  found, shares, (params, exact) = deviations(arm)
  row = {}
  for kind, values in found.items():
    row |= {f"{kind}_min": min(values.values()), f"{kind}_max": max(values.values())}
  row |= {f"flushed_{name}": share for name, share in shares.items()}
  for name, how in {"float16": dict(dtype="float16"), "fp8": dict(is_fp8=True)}.items():
    row[f"error_{name}"] = max(errors(arm, params, exact, **how))
  return row, found


def main():
  rows, points, results = [], [], {}
  for arm in ARMS:
    row, found = measure(arm)
    results[arm] = row
    points += [{"arm": arm, "kind": KINDS[kind], "deviation": v, "tensor": name}
               for kind, values in found.items() for name, v in values.items()]  # fmt: skip
    spans = [f"{row[f'{k}_min']:.2g} to {row[f'{k}_max']:.2g}" for k in KINDS]
    shares = [f"{100 * row[f'flushed_{n}']:.1f}, {100 * row[f'error_{m}']:.1f}"
              for n, m in (("float16", "float16"), ("e5m2", "fp8"))]  # fmt: skip
    rows.append([arm, *spans, *shares])
  chart = (
    alt.Chart(alt.Data(values=points)).mark_tick(thickness=2)
    .encode(x=alt.X("deviation:Q", title="root mean square at initialization",
                    scale=alt.Scale(type="log")),
            y=alt.Y("kind:N", sort=list(KINDS.values()), title=None),
            row=alt.Row("arm:N", sort=list(ARMS), title=None),
            color=alt.Color("kind:N", legend=None))
    .properties(width=420, height=80)
  )  # fmt: skip
  head = ["model", *KINDS.values(), "float16: g that is 0, error of dw, %", "FP8: the same, %"]
  tensors.write(HERE, results, tensors.markdown(head, rows), chart)


if __name__ == "__main__":
  main()
