"""cuDNN's FP8 attention beside its BF16 attention, compiled for GPUs that are not there.

  JAX_PLATFORMS=cpu python experiments/2026_cudnn_fp8_attention/compiled.py

writes:  results/jax-VERSION.json
needs:   pip install "jax[cuda13]", no GPU; ten seconds

Calls a private function of jax. No number here is a time, and no kernel ran: the controls at the
end are calls that cannot run, and they compile, too.
"""

import importlib.metadata
import os
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX looks for others
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from fp8jax import records  # noqa: E402
from fp8jax.compiled import aot  # noqa: E402
from fp8jax.run import provenance  # noqa: E402

# The 7B's heads; [batch, tokens, heads, size of a head].
SHAPE = {"batch": 1, "tokens": 4096, "heads": 28, "kv_heads": 4, "size": 128}
ARMS = {
  f"{gpu}, {dtype}, {kv_heads} KV heads": (gpu, dtype, {"kv_heads": kv_heads})
  for gpu in ("h200", "b200")
  for dtype in ("float8_e4m3fn", "bfloat16")
  for kv_heads in (4, 28)
}
# The function refuses these, before XLA sees them.
REFUSED = {
  "4,000 tokens": {"tokens": 4000},
  "heads of 64": {"size": 64},
  "a bias": {"bias": True},
  "a mask of padding": {"mask_type": cudnn.MaskType.PADDING_CAUSAL},
  "lengths of sequences": {"lengths": True},
  "gradients in E5M2 of values in E4M3": {"gradient": "float8_e5m2"},
}
# Nothing can run these: the GPU has no FP8 units, or 5 does not divide the 28 heads.
CONTROLS = {
  "an A100": ("a100", "float8_e4m3fn", {}),
  "28 heads over 5": ("h200", "float8_e4m3fn", {"kv_heads": 5}),
  "28 heads over 5, BF16": ("h200", "bfloat16", {"kv_heads": 5}),
}
_TARGET = re.compile(r'= \((.*?)\) custom-call\(.*custom_call_target="(__cudnn\$[^"]*)"')


def programs(dtype: str, *, gradient="", bias=False, lengths=False, mask_type=None, **shape):
  """(forward pass, forward and backward pass, abstract arguments of the second).

  The first takes the arguments without the last, dO, and gives (O, what it returns besides, saved
  arrays); the second gives (O, what it returns besides, dQ, dK, dV, what it returns besides).
  """
  n = SHAPE | shape
  array = jax.ShapeDtypeStruct
  q = array((n["batch"], n["tokens"], n["heads"], n["size"]), dtype)
  kv = array((n["batch"], n["tokens"], n["kv_heads"], n["size"]), dtype)
  is_fp8 = dtype.startswith("float8")
  scales = {k: array((1, 1, 1, 1), jnp.float32) for k in cudnn.fp8_params_keys} if is_fp8 else None

  def attend(q, k, v, scales):
    more = {"use_fp8": True, "fp8_params": scales} if is_fp8 else {}
    if bias:
      more["bias"] = jnp.zeros((1, 1, n["tokens"], n["tokens"]), dtype)
    if lengths:
      more |= dict.fromkeys(("q_seqlen", "kv_seqlen"), jnp.ones(n["batch"], jnp.int32))
    return cudnn.dot_product_attention(
      q, k, v, scale=n["size"] ** -0.5, mask_type=mask_type or cudnn.MaskType.CAUSAL, **more
    )

  def forward(q, k, v, scales):
    out, pull = jax.vjp(attend, q, k, v, scales)
    o, *amaxes = out if is_fp8 else (out,)
    return o, dict(zip(("amax_s", "amax_o"), amaxes)), jax.tree.leaves(pull), pull

  def both(q, k, v, scales, do):
    o, amaxes, _, pull = forward(q, k, v, scales)
    zeros = [jnp.zeros_like(x) for x in amaxes.values()]
    dq, dk, dv, more = pull((do, *zeros) if is_fp8 else do)
    # The gradients of these placeholders are maxima of gradients; those of scales are zeros.
    more = {k: x for k, x in (more or {}).items() if k.startswith("amax")}
    return o, amaxes, dq, dk, dv, more

  return forward, both, (q, kv, kv, scales, array(q.shape, gradient or dtype))


def _bytes(array) -> int:
  return array.size * array.dtype.itemsize


def measure(gpu: str, dtype: str, changes: dict) -> dict:
  """Calls, arrays and bytes of the forward pass, and of forward and backward pass, compiled."""
  forward, both, arguments = programs(dtype, **changes)
  given = aot.put(arguments, SingleDeviceSharding(aot.devices_of(gpu, 1)[0]))
  _, amaxes, saved, _ = jax.eval_shape(forward, *arguments[:-1])
  _, _, *gradients, more = jax.eval_shape(both, *arguments)
  found: dict = {"saved": [f"{x.dtype.name}{list(x.shape)}" for x in saved if x.size > 1]}
  found["saved_bytes"] = sum(map(_bytes, saved))
  found["gradients"] = [f"{x.dtype.name}{list(x.shape)}" for x in gradients]
  found["returned_amaxes"] = [*amaxes, *more]
  for name, function, takes in (
    ("forward", lambda q, k, v, scales: forward(q, k, v, scales)[:2], given[:-1]),
    ("forward and backward", both, given),
  ):
    program = jax.jit(function).lower(*takes).compile()
    calls = [(m[2], m[1].rpartition(" ")[2]) for m in _TARGET.finditer(program.as_text())]
    memory = program.memory_analysis()
    found[name] = {
      "calls": [name for name, _ in calls],
      "workspaces": [workspace for _, workspace in calls],
      "scales": sorted(set(re.findall(r"%scales__(\w+?)__", program.as_text()))),
      "argument_bytes": memory.argument_size_in_bytes,
      "output_bytes": memory.output_size_in_bytes,
      "temporary_bytes": memory.temp_size_in_bytes,
    }
  return found


def refusal(changes: dict) -> str:
  """The error that tracing forward and backward pass ends with; "" if there is none."""
  _, both, arguments = programs("float8_e4m3fn", **changes)
  try:
    jax.eval_shape(both, *arguments)
  except (ValueError, NotImplementedError, TypeError) as e:
    return f"{type(e).__name__}: {str(e).splitlines()[0][:300]}"
  return ""


def main():
  path = HERE / "results" / f"jax-{jax.__version__}.json"
  origin = provenance.provenance({}, "none", 0, 1)
  origin["versions"]["nvidia-cudnn-cu13"] = importlib.metadata.version("nvidia-cudnn-cu13")
  found = {"origin": origin, "shape": SHAPE}
  found["arms"] = {name: measure(*arm) for name, arm in ARMS.items()}
  found["controls"] = {name: measure(*arm) for name, arm in CONTROLS.items()}
  found["refused"] = {name: refusal(changes) for name, changes in REFUSED.items()}
  path.parent.mkdir(exist_ok=True)
  records.write_atomic(str(path), records.to_json(found, indent=1) + "\n")
  for name, row in (found["arms"] | found["controls"]).items():
    print(name, row["saved_bytes"], row["forward and backward"], flush=True)
  for name, error in found["refused"].items():
    print(name, "->", error or "accepted", flush=True)


if __name__ == "__main__":
  main()
