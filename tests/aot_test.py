"""The 7B step compiled for eight H200s, without a GPU. Needs the CUDA wheels: make test-aot.

`python tests/aot_test.py CONFIG[:arm] [--config.a.b=value...]` prints the account of one config.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

TARGETS = pathlib.Path(__file__).resolve().parent / "targets"
ROOT = TARGETS.parent.parent


def account(config_path: str, overrides: dict, gpu: str = "h200", num: int = 8) -> dict:
  """Compiles a config's train step; runs in a process of its own, since it configures jax."""
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
  os.environ["JAX_PLATFORMS"] = "cpu"
  # Triton would swallow the GEMMs and their names.
  os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=false"
  sys.path.insert(0, str(ROOT))
  import importlib.util

  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies
  from jax.sharding import NamedSharding

  from fp8jax import config, mesh
  from fp8jax import step as step_lib
  from fp8jax.kernels.backend import Device

  path, _, arm = config_path.partition(":")
  spec = importlib.util.spec_from_file_location("wanted", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  c = module.get_config(arm)
  # Text and weights do not matter to the program.
  c.init.hf, c.data.tokenizer = "", "bytes"
  c.data.sources = {"main": dict(kind="pydoc", path="", field="", dataset="", split="", weight=1.0)}
  c.update_from_flattened_dict(overrides)

  topology = topologies.get_topology_desc(
    platform="cuda", topology=f"1x1x{num}",
    target_config=(TARGETS / f"{gpu}.txtpb").read_text(),
  )  # fmt: skip
  devices = topology.devices

  def make_mesh(shape):
    return mesh.make(shape, devices)

  assert len(devices) == num
  plan = config.resolve(c, num, Device("gpu", 90), make_mesh)
  layout = plan.run.layout
  state = step_lib.abstract_state(plan)
  letters = "BL" if c.accumulation == 1 else "ABL"
  shape = (plan.microbatch, c.length)
  shape = shape if c.accumulation == 1 else (c.accumulation, *shape)
  sharding = NamedSharding(layout.mesh, layout.act_spec(letters))
  names = {"tokens_BL": jnp.int32, "targets_BL": jnp.int32, "weights_BL": jnp.float32,
           "positions_BL": jnp.int32}  # fmt: skip
  if not c.data.cross_document:
    names["segments_BL"] = jnp.int32
  batch = {k: jax.ShapeDtypeStruct(shape, t, sharding=sharding) for k, t in names.items()}
  scalar = NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
  sites = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=scalar), plan.sites()
  )
  start = time.time()
  lowered = step_lib.make_step(plan).lower(state, batch, sites)
  lowered_at = time.time()
  compiled = lowered.compile()
  text = compiled.as_text()
  memory = compiled.memory_analysis()
  # Started: (operands, results); elements of the largest matrix that each one gives.
  gathered = {}
  for result in re.findall(r"= \(\(?.*?\), \(?(.*?)\)?\) all-gather-start\(", text):
    for dtype, shape in re.findall(r"(\w+)\[([\d,]+)\]", result):
      size = 1
      for n in shape.split(","):
        size *= int(n)
      gathered[dtype] = gathered.get(dtype, 0) + size
  return {
    "seconds": {"lower": lowered_at - start, "compile": time.time() - lowered_at},
    "gib_per_gpu": {
      "arguments": memory.argument_size_in_bytes / 2**30,
      "outputs_not_aliased": (memory.output_size_in_bytes - memory.alias_size_in_bytes) / 2**30,
      "temporaries": memory.temp_size_in_bytes / 2**30,
    },
    "custom_calls": {
      name: len(re.findall(re.escape(name) + r'(?![$\w])', text))
      for name in ("__cublas$lt$matmul$f8", "__cublas$lt$matmul", "__cublas$gemm",
                   "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    },
    "elements_gathered": gathered,
    "text": text,
  }  # fmt: skip


def _account(*args) -> dict:
  code = f"import sys, json; sys.path.insert(0, {str(TARGETS.parent)!r}); import aot_test; "
  code += f"r = aot_test.account(*{args!r}); r.pop('text'); print(json.dumps(r))"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
    env={k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-4000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.aot
def test_cpt_7b_fits_eight_h200(capsys):
  found = _account("configs/cpt_7b.py", {})
  with capsys.disabled():
    print(json.dumps(found, indent=2))
  assert found["custom_calls"]["__cublas$lt$matmul$f8"] > 0
  assert found["custom_calls"]["__cudnn$fmhaSoftmax"] > 0
  assert sum(found["gib_per_gpu"].values()) < 141e9 / 2**30


if __name__ == "__main__":
  changes = dict(a.removeprefix("--config.").split("=", 1) for a in sys.argv[2:])
  result = account(sys.argv[1], {k: __import__("ast").literal_eval(v) for k, v in changes.items()})
  pathlib.Path("step.hlo").write_text(result.pop("text"))
  print(json.dumps(result, indent=2))
