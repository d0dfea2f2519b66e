"""Writes llmcompressor.npz: what llm-compressor makes of weights and inputs that a seed makes.

Not a test: it needs llm-compressor and torch, which fp8jax never imports. In an environment of its
own, Python 3.11, on a CPU; llm-compressor pins compressed-tensors 0.19, folders are those of 0.20:

  pip install torch==2.13.0 llmcompressor==0.14.0.1
  python -P tests/golden/write_llmcompressor.py

Everything goes through llm-compressor's own parts: its observers choose scales, its GPTQ codes,
its modifiers the scales of SmoothQuant and AWQ. Integers have two rules of scales here. "int4_64"
is the package's: amax / 7.5, with a code -8. "int4_64_max" is fp8jax's, amax / 7, by an observer
that tells the package a wider range; so GPTQ and AWQ are compared on the same scales.
"""

import functools
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np

ROWS, COLUMNS, TOKENS, DAMP, BLOCK, GRID, ALPHAS = 20, 256, 640, 0.01, 128, 21, (0.25, 0.5, 0.75)
DEAD = 5
# Name: (preset, columns of a group where they are not the preset's).
FORMATS = {
  "int4_64": ("W4A16", 64), "int4_128": ("W4A16", 0), "int8": ("INT8", 0),
  "int4_64_max": ("W4A16", 64), "int4_128_max": ("W4A16", 0), "int8_max": ("INT8", 0),
  "fp8": ("FP8_DYNAMIC", 0), "mxfp4": ("MXFP4A16", 0), "nvfp4": ("NVFP4A16", 0),
}  # fmt: skip
# Of GPTQ: (format, order of the columns).
GPTQ = tuple((name, "static") for name in ("int4_64_max", "int4_128_max", "mxfp4", "nvfp4"))
GPTQ += (("int4_64_max", "none"), ("int8_max", "none"), ("fp8", "none"), ("fp8", "static"))
AWQ = ("int4_64", "int4_64_max", "fp8", "mxfp4", "nvfp4")


def case():
  """(weights [rows, columns] of two layers, inputs [tokens, columns]), float32.

  Correlated channels, some loud and not centred, one dead.
  """
  rng = np.random.default_rng(11)
  x = rng.standard_normal((TOKENS, COLUMNS))
  x = x @ (np.eye(COLUMNS) + rng.standard_normal((COLUMNS, COLUMNS)) / COLUMNS**0.5)
  x = x * np.exp(0.7 * rng.standard_normal(COLUMNS)) + 0.5 * rng.standard_normal(COLUMNS)
  x[:, 3::100] *= 20
  x[:, DEAD] = 0
  ws = [rng.standard_t(5, (rows, COLUMNS)) * 0.05 for rows in (ROWS, ROWS + 8)]
  return [w.astype(np.float32) for w in ws], x.astype(np.float32)


def alive(x):
  """The inputs without a dead channel."""
  x = x.copy()
  x[:, DEAD] = x[:, DEAD + 1]
  return x


def with_zeros(w):
  """The weight with a row of whole groups of zeros."""
  w = w.copy()
  w[1, :128] = 0
  return w


def main():
  import compressed_tensors
  import llmcompressor
  import torch

  (w, v), x = case()
  arrays = {}
  for name in FORMATS:
    codes, scale, factor = _rounded(with_zeros(w), name)
    arrays |= {f"nearest.{name}.codes": codes, f"nearest.{name}.scale": scale}
    if factor is not None:
      arrays[f"nearest.{name}.factor"] = factor
  for name, order in GPTQ:
    codes, scale = _gptq(w, x, name, order)
    arrays |= {f"gptq.{name}.{order}.codes": codes, f"gptq.{name}.{order}.scale": scale}
  for alpha in ALPHAS:
    arrays[f"smooth.{alpha}"] = _smooth((w, v), x, alpha)
  for name in AWQ:
    arrays[f"awq.{name}.losses"], arrays[f"awq.{name}.scale"] = _awq((w, v), alive(x), name)
  arrays["awq.dead.losses"], arrays["awq.dead.scale"] = _awq((w, v), x, "int4_64")
  arrays |= _llama_by_gptq()
  about = {
    "versions": {"llmcompressor": llmcompressor.__version__, "torch": torch.__version__,
                 "compressed-tensors": compressed_tensors.__version__},
    "command": "python -P tests/golden/write_llmcompressor.py",
  }  # fmt: skip
  arrays["about"] = np.array(json.dumps(about))
  path = pathlib.Path(__file__).with_name("llmcompressor.npz")
  np.savez_compressed(path, **arrays)
  print(path.stat().st_size, "bytes")


# --- llm-compressor's parts ----------------------------------------------------------------------


@functools.cache
def _register():
  """An observer of integers that fp8jax's scale follows from."""
  from llmcompressor.observers import Observer
  from llmcompressor.observers.min_max import MemorylessMinMaxObserver

  @Observer.register("codes_to_max")
  class CodesToMax(MemorylessMinMaxObserver):
    """Widens the range, so that the largest magnitude has the code 2^(bits - 1) - 1."""

    def update_statistics_from_observed(self, observed):
      super().update_statistics_from_observed(observed)
      most = 2.0 ** (self.args.num_bits - 1) - 1
      self.min_vals, self.max_vals = (
        (v.double() * (most + 0.5) / most).float() for v in (self.min_vals, self.max_vals)
      )


def _linear(w, name):
  """A layer with the scheme of a format and llm-compressor's observer of its weight."""
  import torch
  from compressed_tensors.quantization import (
    initialize_module_for_quantization,
    preset_name_to_scheme,
  )
  from llmcompressor.modifiers.quantization.calibration import initialize_observer

  _register()
  preset, group = FORMATS[name]
  scheme = preset_name_to_scheme(preset, ["Linear"])
  scheme.input_activations = None
  if group:
    scheme.weights.group_size = group
  if name.endswith("_max"):
    scheme.weights.observer = "codes_to_max"
  layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
  layer.weight.data = torch.from_numpy(w.copy())
  initialize_module_for_quantization(layer, scheme)
  initialize_observer(layer.requires_grad_(False), "weight")
  return layer


def _numpy(x):
  import torch

  if x.dtype in (torch.float8_e4m3fn, torch.bfloat16):
    x = x.float()
  return x.detach().numpy()


def _codes(values, name):
  """Numbers of the format, in the smallest dtype of NumPy that holds them."""
  import torch

  made = values.astype(np.float32)
  if name.startswith("int"):
    return made.astype(np.int8)
  if name == "fp8":
    return torch.from_numpy(made).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
  return (2 * made).astype(np.int8)  # of E2M1, in halves


def _rounded(w, name):
  """(codes, scales, the tensor's global scale or None)."""
  import torch
  from compressed_tensors.quantization.lifecycle.forward import quantize
  from llmcompressor.modifiers.quantization.calibration import observe, update_qparams

  layer = _linear(w, name)
  observe(layer, "weight")
  update_qparams(layer, "weight")
  factor = getattr(layer, "weight_global_scale", None)
  with torch.no_grad():
    codes = quantize(
      layer.weight, layer.weight_scale, None, layer.quantization_scheme.weights,
      global_scale=factor,
    )  # fmt: skip
  return (
    _codes(_numpy(codes), name), _numpy(layer.weight_scale),
    None if factor is None else _numpy(factor),
  )  # fmt: skip


def _gptq(w, x, name, order):
  """(codes, scales): GPTQModifier's steps for one layer."""
  import torch
  from compressed_tensors.quantization import ActivationOrdering
  from llmcompressor.modifiers.gptq import gptq_quantize, helpers
  from llmcompressor.modifiers.quantization.calibration import observe

  layer = _linear(w, name)
  args = layer.quantization_scheme.weights
  if order != "none":
    args.actorder = ActivationOrdering(order)
  observe(layer, "weight")
  qparams = layer.weight_observer.get_qparams()
  gram, count = helpers.accumulate_hessian(
    torch.from_numpy(x), layer, helpers.make_empty_hessian(layer), torch.zeros(())
  )
  weights, grams, scales, zeros, factors = helpers.prepare_batch(
    [layer], [qparams], {layer: gram}, {layer: count}
  )
  with torch.no_grad():
    made, _, has_failed = gptq_quantize.quantize_weight(
      weights, grams, scales, zeros, factors, args, BLOCK, DAMP
    )
  assert not bool(has_failed.any())
  scale = _numpy(scales[0]).astype(np.float32)
  wide = scale if factors is None else scale / _numpy(factors).reshape(())
  values = _numpy(made[0]) / np.repeat(wide, w.shape[1] // wide.shape[1], 1)
  near = np.rint(2 * values) / 2 if name in ("mxfp4", "nvfp4") else values
  return _codes(np.rint(near) if name.startswith("int") else near, name), scale


def _smooth(ws, x, alpha):
  """[columns] that SmoothQuantModifier divides the outputs of a norm by."""
  import torch
  from llmcompressor.modifiers.transform import SmoothQuantModifier
  from llmcompressor.modifiers.transform.smoothquant.base import SmoothQuantMapping

  norm = torch.nn.LayerNorm(x.shape[1], bias=False)
  norm.forward = lambda x: x
  layers = [_linear(w, "int8") for w in ws]
  modifier = SmoothQuantModifier(smoothing_strength=alpha, mappings=[])
  modifier.resolved_mappings_ = [SmoothQuantMapping("norm", norm, layers)]
  modifier.scales_ = {}
  modifier._setup_scale_hooks()
  norm(torch.from_numpy(x))
  modifier._apply_smoothing(torch.nn.ModuleList([norm, *layers]))
  return 1 / _numpy(norm.weight)


def _awq(ws, x, name):
  """(losses of the grid, scales that AWQModifier chooses), activations alone (no duo scaling)."""
  import torch
  from llmcompressor.core import active_session
  from llmcompressor.modifiers.transform import AWQModifier
  from llmcompressor.modifiers.transform.awq.mappings import ResolvedMapping
  from llmcompressor.observers import Observer
  from llmcompressor.pipelines.cache import IntermediatesCache

  losses = []

  class Recording(AWQModifier):
    def _compute_loss(self, *args):
      losses.append(super()._compute_loss(*args))
      return losses[-1]

  class Parent(torch.nn.Module):
    """Layers that read one input; their names are none of those that share a global scale."""

    def __init__(self):
      super().__init__()
      self.first, self.second = (_linear(w, name) for w in ws)

    def forward(self, x):
      made = [torch.nn.functional.linear(x, of.weight) for of in (self.first, self.second)]
      return torch.cat(made, -1)

  parent = Parent()
  layers, norm = [parent.first, parent.second], torch.nn.LayerNorm(x.shape[1], bias=False)
  mapping = ResolvedMapping("norm", norm, layers, ["first", "second"], parent, "")
  modifier = Recording(duo_scaling=False, n_grid=GRID, mappings=[])
  active_session().state.sequential_prefetch = False
  x = torch.from_numpy(x)
  modifier._parent_args_cache[parent] = IntermediatesCache(None, None)
  modifier._parent_args_cache[parent].append({"x": x})
  modifier._smooth_activation_stats["norm"] = [x.abs().sum(0), torch.tensor(len(x))]
  # The search takes the plain observer, whatever the scheme says.
  load = Observer.load_from_registry
  observer = layers[0].quantization_scheme.weights.observer or "memoryless_minmax"
  own = lambda _, **how: load(observer, **how)  # noqa: E731
  with torch.no_grad(), mock.patch.object(Observer, "load_from_registry", own):
    originals = {layer: layer.weight.clone() for layer in layers}
    scale = modifier._compute_best_scale(mapping, modifier._run_samples(parent), originals)
  return np.array(losses), _numpy(scale)


# --- a whole model -------------------------------------------------------------------------------

SIZES = dict(vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
             num_attention_heads=3, num_key_value_heads=1, head_dim=16,
             max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False)  # fmt: skip


def llama():
  """({name in a Hugging Face folder: float32}, tokens [windows, length]) of a tiny Llama."""
  rng, s = np.random.default_rng(12), SIZES
  d, f, kv = s["hidden_size"], s["intermediate_size"], s["head_dim"]
  shapes = {"q_proj": (d, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, d),
            "gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}  # fmt: skip
  made = {}
  for layer in range(s["num_hidden_layers"]):
    name = f"model.layers.{layer}"
    for norm in ("input_layernorm", "post_attention_layernorm"):
      made[f"{name}.{norm}.weight"] = np.exp(0.8 * rng.standard_normal(d))
    for proj, shape in shapes.items():
      part = "mlp" if shape[0] == f or proj == "down_proj" else "self_attn"
      made[f"{name}.{part}.{proj}.weight"] = 0.2 * rng.standard_normal(shape)
  made["model.norm.weight"] = np.ones(d)
  for name in ("model.embed_tokens.weight", "lm_head.weight"):
    made[name] = rng.standard_normal((s["vocab_size"], d))
  return {k: v.astype(np.float32) for k, v in made.items()}, rng.integers(0, 64, (8, 32))


def llama_matrices(weights) -> list[str]:
  return [name for name in weights if "_proj" in name]


def _oneshot(model, tokens):
  import datasets
  import tokenizers
  import transformers
  from llmcompressor import oneshot
  from llmcompressor.modifiers.gptq import GPTQModifier

  text = datasets.Dataset.from_dict(
    {"input_ids": tokens.tolist(), "attention_mask": np.ones_like(tokens).tolist()}
  )
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
  processor = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a")
  recipe = GPTQModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])
  oneshot(model=model, dataset=text, recipe=recipe, num_calibration_samples=len(tokens),
          max_seq_length=tokens.shape[1], shuffle_calibration_samples=False,
          processor=processor)  # fmt: skip


def _llama_by_gptq():
  """Codes, E4M3 scales and global scales of `llama_matrices`, by oneshot, layer after layer."""
  import torch
  import transformers

  weights, tokens = llama()
  config = transformers.LlamaConfig(**SIZES, attn_implementation="eager", dtype="float32")
  model = transformers.LlamaForCausalLM(config)
  model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
  with tempfile.TemporaryDirectory() as folder:  # oneshot reads the model's folder, too
    model.save_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="eager"
    )
    _oneshot(model, tokens)
  modules = dict(model.named_modules())
  made = {"codes": [], "scale": [], "factor": []}
  for name in llama_matrices(weights):
    module = modules[name.removesuffix(".weight")]
    scale, factor = module.weight_scale.float(), module.weight_global_scale
    values = _numpy(module.weight / (scale / factor).repeat_interleave(16, 1))
    made["codes"].append(_codes(np.rint(2 * values) / 2, "nvfp4").ravel())
    made["scale"].append(_codes(_numpy(scale), "fp8").ravel())
    made["factor"].append(_numpy(factor))
  return {f"llama.{part}": np.concatenate(of) for part, of in made.items()}


if __name__ == "__main__":
  main()
