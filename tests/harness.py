"""What several tests share: small models that train, and steps whose FP8 GEMMs are looked up.

Programs for GPUs that are not there: aot_harness.py. Operands of exact products: lattice.py.
"""

import dataclasses
import functools
import json
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from configs import base
from fp8jax import params as params_lib
from fp8jax.compiled import expected_gemms, fp8_gemms, hlo
from fp8jax.config import resolve
from fp8jax.data import batch_sharding, loader
from fp8jax.export import write
from fp8jax.jobs import table, train
from fp8jax.kernels import choose
from fp8jax.kernels.choose import Device
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.models import lora, presets, transformer
from fp8jax.ops import site as site_lib
from fp8jax.quantization import scaled_matrix
from fp8jax.run import checkpoint
from fp8jax.step import train_spec, train_step

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
CPU, HOPPER = Device("cpu"), Device("gpu", 90)

# --- a tiny model that trains ---------------------------------------------------------------------

# Every local dimension holds whole scale tiles on every mesh of the tests.
_SIZES = dict(
  vocab_size=512, hidden_size=128, intermediate_size=512, num_layers=2, num_heads=4, num_kv_heads=4,
  head_dim=128, max_positions=128,
)  # fmt: skip
TINY = dataclasses.replace(presets.DEBUG, **_SIZES)
STEPS = 20


def tiny_config(recipe="block_128", **changes):
  """A config of the model TINY: STEPS steps of 8 sequences of 128 tokens."""
  c = base.get_config(recipe)
  c.model.update(_SIZES)
  c.steps, c.global_batch, c.seq_len, c.eval.batch = STEPS, 8, 128, 8
  c.optim.warmup_steps, c.optim.decay_steps = 4, 4
  c.optim.peak_lr, c.optim.min_lr = 1e-4, 1e-5  # InfiR2's
  c.update_from_flattened_dict(changes)
  return c


def tiny_spec(c, shape=None, job="train") -> train_spec.TrainSpec:
  """The config resolved for one CPU device, or for a mesh (data, fsdp, tensor)."""
  if shape is None:
    return resolve.resolve(c, 1, CPU, needs=table.JOBS[job].needs)
  c.mesh.data, c.mesh.fsdp, c.mesh.tensor = shape
  return resolve.resolve(c, int(np.prod(shape)), CPU)


def tiny_runner(recipe="block_128", shape=None, **changes):
  """A compiled step of `tiny_config`; on a mesh (data, fsdp, tensor), where one is given."""
  return Runner(tiny_spec(tiny_config(recipe, **changes), shape))


@functools.cache
def host_batches():
  """A noisy chain over the vocabulary: contexts differ, so that tokens' rounding errors average."""
  rng = np.random.default_rng(0)
  found = []
  for _ in range(STEPS):
    stream = np.zeros((8, 129), np.int32)
    stream[:, 0] = rng.integers(0, 512, 8)
    for i in range(128):
      follow = (stream[:, i] * 5 + 17) % 512
      stream[:, i + 1] = np.where(rng.random(8) < 0.7, follow, rng.integers(0, 512, 8))
    found.append(
      {
        "tokens_BL": stream[:, :-1],
        "targets_BL": stream[:, 1:],
        "weights_BL": np.ones((8, 128), np.float32),
        "segments_BL": np.ones((8, 128), np.int32),
        "positions_BL": np.tile(np.arange(128, dtype=np.int32), (8, 1)),
      }
    )
  return found


def uneven_batch(spec):
  """A step's batch of random tokens, of which half weigh nothing, so that devices differ."""
  rng, shape = np.random.default_rng(0), (spec.global_batch, spec.data.seq_len)
  tokens = rng.integers(0, spec.model.vocab_size, (shape[0], shape[1] + 1)).astype(np.int32)
  return {
    "tokens_BL": tokens[:, :-1], "targets_BL": tokens[:, 1:],
    "weights_BL": rng.integers(0, 2, shape).astype(np.float32),
    "positions_BL": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
    "segments_BL": np.ones(shape, np.int32),
  }  # fmt: skip


def placed_uneven_batch(spec):
  """`uneven_batch` in microbatches, on the devices of the spec's mesh."""
  sizes = (spec.microbatch, spec.grad_accum_steps)
  return batch_sharding.BatchSharder(spec.run.layout, *sizes).place(uneven_batch(spec))


@dataclasses.dataclass
class Runner:
  """A compiled step and the means to feed it."""

  spec: train_spec.TrainSpec

  def __post_init__(self):
    self.spread = batch_sharding.BatchSharder(
      self.spec.run.layout, self.spec.microbatch, self.spec.grad_accum_steps
    )
    self.step_fn, self.sites = train_step.make_step(self.spec), self.spec.sites()

  def step(self, state, host):
    state, values = self.step_fn(state, self.spread.place(host), self.sites)
    return state, {k: float(v) for k, v in values.items()}

  def run(self, hosts, state=None):
    """(losses, state)."""
    state = make_state(self.spec) if state is None else state
    losses = []
    for host in hosts:
      state, values = self.step(state, host)
      losses.append(values["loss"])
    return np.array(losses), state


# --- a small model that trains on real text -------------------------------------------------------

THREE_LAYERS = dict(num_layers=3, hidden_size=64, intermediate_size=96, num_heads=1, num_kv_heads=1)


def text_config(recipe="tensor_delayed", **changes):
  """A config of six steps of 2 sequences of 64 tokens of the default text."""
  c = base.get_config(recipe)
  c.model.update(THREE_LAYERS)
  c.update_from_flattened_dict({
    "steps": 6, "global_batch": 2, "seq_len": 64, "eval.tokens": 64, "eval.batch": 2,
    "optim.warmup_steps": 1, "optim.decay_steps": 1, "checkpoint.every": 0,
    "log.tensorboard": False, "log.report": False, "memory.loss_chunk": 64,
    "precision.verify_fp8_gemms": False,  # compiled/fp8_gemms_test.py
    **changes,
  })  # fmt: skip
  return c


def text_spec(*args, job="train", **changes):
  """`text_config`, resolved for one device of the kind that JAX computes on."""
  c, needs = text_config(*args, **changes), table.JOBS[job].needs
  return resolve.resolve(c, 1, choose.current_device(), needs=needs)


def train_on_text(workdir, *args, **changes):
  """Runs the train job on `text_config` in this workdir."""
  train.run(text_spec(*args, **changes), str(workdir))


def saved_state(workdir, spec, step):
  """The checkpoint of a step, on the host."""
  saved = checkpoint.Checkpoints(str(workdir))
  state = jax.device_get(saved.restore(step, train_step.abstract_state(spec, step)))
  saved.close()
  return state


def assert_trees_equal(a, b):
  """The leaves of two trees are the same, bit for bit."""
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def batches(spec, count):
  """So many first batches of training, placed."""
  spread = batch_sharding.BatchSharder(spec.run.layout, spec.microbatch)
  stream = loader.train_batches(spec.data, 2)
  placed = [spread.place(next(stream)) for _ in range(count)]
  stream.close()
  return placed


def calibrated_batches(spec, count):
  """(a state calibrated on the first, so many batches of training)."""
  hosts = batches(spec, count)
  return train_step.calibrate(spec, make_state(spec), hosts[0], 0), hosts


# --- steps whose FP8 GEMMs are looked up ----------------------------------------------------------


def debug_plan(arm="", devices=1, device=CPU, **changes) -> train_spec.TrainSpec:
  """configs/base.py's two random layers, resolved; `__` in a key stands for its dot."""
  c = base.get_config(arm)
  c.global_batch, c.seq_len = 4, 64
  c.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
  return resolve.resolve(c, devices, device)


def step_arguments(spec):
  """Shapes of what the second step of a run is called with."""
  lead = (spec.grad_accum_steps,) if spec.grad_accum_steps > 1 else ()
  shape = (*lead, spec.microbatch, spec.data.seq_len)
  names = ("tokens_BL", "targets_BL", "positions_BL", "segments_BL")
  batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}
  batch["weights_BL"] = jax.ShapeDtypeStruct(shape, jnp.float32)
  return train_step.abstract_state(spec, 1), batch, spec.sites()


def strict(spec, change=lambda sites: sites):
  """The rows of the strict check of a spec's step; `change` changes its sites."""
  state, batch, sites = step_arguments(spec)
  return fp8_gemms.strict(spec, train_step.make_step(spec), state, batch, change(sites))


def _dequantised(
  a: scaled_matrix.ScaledMatrix, b: scaled_matrix.ScaledMatrix, accumulate, out_dtype
):
  del accumulate
  return jnp.einsum("mk,nk->mn", a.dequantize(), b.dequantize()).astype(out_dtype)


def with_dequantized_product(sites, name: str, product: str, monkeypatch):
  """The sites, one product of one of them dequantized before it multiplies."""
  broken = types.SimpleNamespace(
    scaled_matmul=_dequantised, supports=lambda problem: "it is broken"
  )
  monkeypatch.setitem(gemm_api.BACKENDS, "dequantised", broken)
  which = ("fwd", "dgrad", "wgrad").index(product)

  def one(site):
    if site.name != name:
      return site
    chosen = tuple("dequantised" if i == which else b for i, b in enumerate(site.backends))
    return dataclasses.replace(site, backends=chosen)

  return site_lib.tree_map(one, sites)


_CUBLAS = (
  '  %d = (f32[{m},{n}]{{1,0}}, s8[4096]{{0}}) custom-call(%a, %b, %s, %s), '
  'custom_call_target="{target}", metadata={{op_name="{scope}/dot_general"}}, backend_config='
  '{{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],'
  '"rhs_contracting_dimensions":["1"]}},"precision_config":{{"operand_precision":'
  '["{precision}","{precision}"],"algorithm":"ALG_UNSET"}}}}}}\n'
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
  """A product as XLA prints it: in a loop, by cuBLASLt."""

  key: hlo.GemmKey
  m: int
  n: int
  k: int
  times: int
  dtype: str = "f8e4m3fn"
  target: str = "__cublas$lt$matmul$f8"
  precision: str = "DEFAULT"

  def text(self, i: int) -> tuple[str, str]:
    """(computations, the loop)."""
    again = "checkpoint/rematted_computation/" if self.key.is_recompute else ""
    scope = f"jit(step)/jvp()/while/body/{again}{self.key.site}:{self.key.product}"
    body = (
      f"%body.{i} (p: s32[]) -> s32[] {{\n"
      f"  %a = {self.dtype}[{self.m},{self.k}]{{1,0}} parameter(0)\n"
      f"  %b = {self.dtype}[{self.n},{self.k}]{{1,0}} parameter(1)\n"
      f"  %s = f32[] constant(1)\n"
      + _CUBLAS.format(
        m=self.m, n=self.n, target=self.target, scope=scope, precision=self.precision
      )
      + "}\n\n"
    )
    trips = f'backend_config={{"known_trip_count":{{"n":"{self.times}"}}}}'
    return body, f"  %w.{i} = s32[] while(%x), condition=%cond, body=%body.{i}, {trips}\n"


def program_text(calls) -> str:
  """A compiled program of these calls, line by line as XLA prints it."""
  bodies, loops = zip(*(call.text(i) for i, call in enumerate(calls)))
  return "".join(bodies) + "ENTRY %main (x: s32[]) -> s32[] {\n" + "".join(loops) + "}\n"


def planned_calls(spec) -> dict[hlo.GemmKey, Call]:
  """A call for every FP8 GEMM that the spec expects."""
  precision = {"fast": "DEFAULT", "precise": "HIGHEST"}
  return {
    row.key: Call(row.key, *row.size, row.expected, precision=precision[row.accumulate])
    for row in expected_gemms.expected(spec)
    if row.expected
  }


# --- one layer, quick to compile ----------------------------------------------------------------

ONE_LAYER_LENGTH, ONE_LAYER_BATCH = 32, 4


def one_layer_spec(recipe="bf16", devices=1, **changes):
  """A resolved run of one small layer."""
  c = base.get_config(recipe)
  c.model.update(
    num_layers=1, hidden_size=32, intermediate_size=64, num_heads=1, num_kv_heads=1, head_dim=32,
    vocab_size=320,
  )  # fmt: skip
  c.update_from_flattened_dict({
    "steps": 6, "global_batch": ONE_LAYER_BATCH, "seq_len": ONE_LAYER_LENGTH,
    "eval.tokens": 4 * ONE_LAYER_LENGTH, "eval.batch": ONE_LAYER_BATCH,
    "optim.warmup_steps": 1, "optim.decay_steps": 1, "checkpoint.every": 0, "memory.loss_chunk": 16,
    "log.tensorboard": False, "precision.verify_fp8_gemms": False, "data.shuffle_windows": 0,
    **changes,
  })  # fmt: skip
  return resolve.resolve(c, devices, Device("cpu"))


def init_params(cfg, seed=0):
  """Random float32 parameters of a model. NumPy draws them: nothing is compiled."""
  rng = np.random.default_rng(seed)
  draw = {
    "ones": lambda p, shape: np.ones(shape),
    "zeros": lambda p, shape: np.zeros(shape),
    "normal": lambda p, shape: p.std * rng.standard_normal(shape),
  }
  return params_lib.tree_map(
    lambda p: jnp.asarray(np.float32(draw[p.init](p, params_lib.shape(p, cfg.dims)))),
    transformer.params(cfg),
  )


def make_state(spec):
  """A fresh state of random parameters. `train_step.make_state` draws them by a program, most of
  whose cost is its compilation."""
  params = init_params(spec.model, spec.seed)
  if spec.run.layout.mesh is not None:
    params = jax.device_put(params, params_lib.shardings(spec.declaration, spec.run.layout))
  return train_step.make_state(spec, params)


def only_down(recipe):
  """One site is enough, and one compiles quickly."""
  return (("layers/.*/mlp/down", recipe), (".*", "bf16"))


def random_adapters(params, scale=0.05):
  """The parameters with adapters from a normal distribution, in place of those that begin as 0."""
  flat = params_lib.flatten(params)
  draws = iter(jax.random.split(jax.random.key(5), len(flat)))
  return params_lib.unflatten({
    path: scale * jax.random.normal(next(draws), x.shape) if lora.is_adapter(path) else x
    for path, x in flat.items()
  })  # fmt: skip


def weighted_batch(rng, lead=()):
  """Tokens whose loss weights differ, zeros among them, more so in later microbatches."""
  shape = (*lead, ONE_LAYER_BATCH // (lead[0] if lead else 1), ONE_LAYER_LENGTH)
  weights = rng.random(shape) < np.linspace(0.9, 0.2, shape[-2])[:, None]
  if lead:
    weights &= rng.random(shape) < np.linspace(1.0, 0.3, lead[0])[:, None, None]
  return {
    "tokens_BL": rng.integers(0, 256, shape).astype(np.int32),
    "targets_BL": rng.integers(0, 256, shape).astype(np.int32),
    "weights_BL": weights.astype(np.float32),
    "segments_BL": np.ones(shape, np.int32),
    "positions_BL": np.broadcast_to(np.arange(ONE_LAYER_LENGTH, dtype=np.int32), shape),
  }


# --- a Hugging Face folder -----------------------------------------------------------------------

# Multiples of 128.
BLOCKS = dict(
  hidden_size=128, intermediate_size=256, num_heads=2, num_kv_heads=2, head_dim=64, num_layers=2
)


def folder_of_blocks(folder):
  """The folder, with random weights in BF16 whose sizes are BLOCKS."""
  cfg = dataclasses.replace(presets.DEBUG, **BLOCKS, init_std=0.05)
  weights = init_params(cfg)
  write.save(str(folder), write.model(weights, cfg, "bfloat16"))
  (folder / "tokenizer_config.json").write_text("{}")
  return folder


def folder_of_scores(name, target, head) -> dict:
  """A folder of golden/hf with the head [1, D] of a reward model, as transformers saves it; its
  config."""
  shutil.copytree(GOLDEN / "hf" / name, target)
  config = json.loads((target / "config.json").read_text())
  config["architectures"] = [
    config["architectures"][0].replace("CausalLM", "SequenceClassification")
  ]
  (target / "config.json").write_text(json.dumps(config))
  tensors = safetensors.numpy.load_file(target / "model.safetensors")
  tensors.pop("lm_head.weight", None)
  safetensors.numpy.save_file(tensors | {"score.weight": head}, target / "model.safetensors")
  return config
