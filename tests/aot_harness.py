"""What tests of compiled programs share: steps compiled for GPUs that are not there.

jax is imported inside the functions: `configure_jax` comes first in a process that compiles.
"""

import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent


def configure_jax():
  """In a process that compiles for GPUs and has none."""
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.pop("XLA_FLAGS", None)
  sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def elsewhere(expression: str, file: str):
  """An expression of a test file (its `__file__`), evaluated in a process of its own."""
  path = pathlib.Path(file)
  code = f"import sys, json; sys.path[:0] = [{str(path.parent)!r}, {str(HERE)!r}]; "
  code += f"import {path.stem}, aot_harness; aot_harness.configure_jax(); "
  code += f"print(json.dumps({path.stem}.{expression}))"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
  assert done.returncode == 0, done.stderr[-4000:]
  return json.loads(done.stdout.splitlines()[-1])


def load(config_path: str, overrides: dict):
  """A config without the text and weights that it names: they do not matter to the program."""
  import run_files

  from fp8jax.config import files as config_files

  path, _, arm = config_path.partition(":")
  c = config_files.without_files(run_files.script(ROOT / path).get_config(arm))
  c.update_from_flattened_dict(overrides)
  return c


def lower(c, gpu: str, num: int, change=lambda sites: sites):
  """(spec, train step lowered for so many GPUs); `change` changes the sites it is called with."""
  from fp8jax.compiled import aot

  spec, devices = aot.resolve(c, f"{gpu}:{num}")
  assert len(devices) == num
  return spec, aot.lower(spec, devices, change)


def prove(spec, text: str) -> dict:
  """The strict table, and what strict would say."""
  import io

  import rich.console

  from fp8jax.compiled import fp8_gemms, hlo

  rows = fp8_gemms.compare(spec, hlo.gemms(text, "gpu"))
  out = io.StringIO()
  rich.console.Console(file=out, width=140).print(fp8_gemms.table(rows))
  found = {"table": out.getvalue(), "refused": ""}
  found |= {"fp8": sum(r.fp8 for r in rows), "planned": sum(r.expected for r in rows)}
  found["by"] = sorted({kernel for r in rows if r.expected for kernel in r.kernels})
  try:
    fp8_gemms.check(spec, text)
  except fp8_gemms.NotFp8 as e:
    found["refused"] = str(e)
  return found


# Large enough for XLA to hand products to cuBLASLt, and for loops over K: nothing is computed.
# Shards of an eighth of 3072 hold whole tiles of 128.
SMALL = {
  "global_batch": 9, "seq_len": 256, "memory.loss_chunk": 128, "model.num_layers": 2,
  "model.hidden_size": 3072, "model.intermediate_size": 4608, "model.num_heads": 4,
  "model.num_kv_heads": 2, "model.head_dim": 128, "model.vocab_size": 1024,
}  # fmt: skip
REMAT = {"full": 8, "none": 1}  # on so many GPUs


SITES = ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up")
# No Hopper kernel multiplies these: emulation, asked for by name.
EMULATED = ("mxfp8", "nvfp4", "nvfp4_sr_rht")


def mixtures(remat: str) -> list[dict[str, str]]:
  """{site: recipe} of a few models in which every recipe occurs; compiling each alone takes ages.

  The last site of a layer, never recomputed, has one that another site has too.
  """
  from fp8jax.recipe import library

  def mixed(names):
    starts, around = range(0, len(names), len(SITES)), names * len(SITES)
    sites = (*SITES, "mlp/down")
    return [dict(zip(sites, (*around[i : i + len(SITES)], around[i]))) for i in starts]

  names = [n for n, recipe in library.RECIPES.items() if recipe.is_quantized and n not in EMULATED]
  # Other sites on one device than on eight.
  return mixed(names if remat == "full" else names[3:] + names[:3]) + mixed(list(EMULATED))
