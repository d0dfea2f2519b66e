"""Folders with scales of keys and values for vLLM: calibrated ones, and an eighth of them.

Not a test. An eighth saturates, so that a client which ignores the scales is far from our logits,
"back" in ours.npz: of decoding, token by token, over the cache "e4m3_folder".

  PYTHONPATH=. .venv/bin/python tests/golden/write_kv_folders.py FOLDER
  python3.11 tests/golden/check_vllm.py FOLDER OUT.json      (see there)
"""

import dataclasses
import json
import pathlib
import sys

import check_fp8_clients as clients
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from fp8jax.generation import cache as cache_lib
from fp8jax.generation import decode
from fp8jax.models import transformer
from fp8jax.models.attention_gqa import KEY
from fp8jax.models.config import ComputeConfig
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import kv_scales
from fp8jax.models.hf import weights as hf_weights
from fp8jax.ops import site_tree

_RUN = ComputeConfig()
_KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def main(folder):
  clients.SMALL = {"w4a16": clients.SMALL["w4a16"]}
  clients.write(folder)
  source = pathlib.Path(folder) / "w4a16"
  cfg, data = hf_config.read_config(str(source)), dict(np.load(source / "ours.npz"))
  params, _ = hf_weights.load_params(str(source), cfg)
  sites = site_tree.build_sites(transformer.site_params(cfg), cfg.dims, ((".*", "bf16"),))
  amaxes = _amaxes(params, sites, data["tokens"], cfg)
  for name, share in (("w4a16_kv", 1), ("w4a16_kv_eighth", 1 / 8)):
    target, scales = source.with_name(name), (amaxes / 448 * share).astype(np.float32)
    target.mkdir(exist_ok=True)
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    for (layer, which), scale in np.ndenumerate(scales):
      tensors[kv_scales.name(layer, "kv"[which], "compressed-tensors")] = np.full(1, scale)
    safetensors.numpy.save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = _KV
    (target / "config.json").write_text(json.dumps(config))
    cached = _decoded(params, sites, data["tokens"], cfg, scales)
    np.savez(target / "ours.npz", tokens=data["tokens"], back=cached, source=data["back"])


def _amaxes(params, sites, tokens, cfg):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  batch = {"tokens_BL": jnp.asarray(tokens, jnp.int32), "positions_BL": positions}
  past = {KEY: cache_lib.NoPast("compute")}
  run = jax.jit(lambda p, b: transformer.hidden_and_aux(p, sites, b, cfg, _RUN, past)[1].states)
  made = run(params, batch)[KEY]
  return np.stack([np.abs(np.asarray(x.data)).max((1, 2, 3, 4)) for x in (made.k, made.v)], 1)


def _decoded(params, sites, tokens, cfg, scales):
  step = jax.jit(lambda p, s: decode.next_logits(p, sites, s, cfg, _RUN))
  slots = decode.Slots.empty(cfg, 1, tokens.shape[1], "e4m3_folder", jnp.float32, scales=scales)
  found = []
  for i, token in enumerate(tokens[0]):
    at = dict(tokens_B=jnp.full(1, token, jnp.int32), positions_B=jnp.full(1, i, jnp.int32))
    logits, cache = step(params, dataclasses.replace(slots, **at))
    slots = dataclasses.replace(slots, cache=cache)
    found.append(np.asarray(logits)[0])
  return np.stack(found)


if __name__ == "__main__":
  main(sys.argv[1])
