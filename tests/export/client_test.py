"""Readers of an export in interpreters of their own: what they must agree on, and what is told."""

import dataclasses
import json
import pathlib
import stat
import sys

import harness
import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
import safetensors

from fp8jax.errors import UserError
from fp8jax.export import folder as export_folder
from fp8jax.export import gate as export_gate
from fp8jax.export import served_pass, settings, vllm_client
from fp8jax.models.hf import weights as hf_weights

FP8 = {"export.format": "hf-fp8-block"}


def _script(path, text):
  path.write_text(f"#!{sys.executable}\n{text}")
  path.chmod(path.stat().st_mode | stat.S_IXUSR)
  return str(path)


# Answers as an interpreter with transformers would: the logits come from a file.
CLIENT = """
import json, shutil, sys
_, flag, script, *arguments = sys.argv
if "import_module" in script and "transformers" in arguments:
  print(json.dumps({"transformers": "5"}))
else:
  shutil.copyfile("LOGITS", arguments[2])
  shutil.copyfile("PRODUCTS", arguments[3])
  print('{"quantized": FOUND}')
"""


SPOILT = {
  "weights": "transformers computes another model from the weights than fp8jax reads in the folder",
  "activations": "transformers computes another model from the activations than fp8jax reads",
  "count": "has 13 quantized matrices, and the folder 14: it fell back to unquantized weights",
}
OF = "model.layers.1.mlp.down_proj"


def _products(folder, rng, spoil: str) -> dict[str, np.ndarray]:
  """Inputs and products of a folder's matrices, in float64; scales of tokens and of channels."""
  dtypes = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": np.float32, "BF16": ml_dtypes.bfloat16}
  tensors = {name: np.frombuffer(t["data"], dtypes[t["dtype"]]).reshape(t["shape"])
             for name, t in safetensors.deserialize((folder / "model.safetensors").read_bytes())
            }  # fmt: skip
  kept = {}
  for name in [n.removesuffix(".weight_scale") for n in tensors if n.endswith("weight_scale")]:
    w, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    x = rng.normal(size=(16, w.shape[1])).astype(np.float32)
    x[0] *= 1000  # as a first token's are
    of = np.abs(x).max(-1, keepdims=True) / np.float32(448)
    of = of * np.float32(1.01 if (spoil, name) == ("product", OF) else 1)
    codes = np.clip(x / of, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    kept[f"{name}.x"] = x
    rounded = codes.astype(np.float64) * of
    if (spoil, name) == ("tokens", OF):  # that come after the first
      rounded[1:] = x[1:]
    kept[f"{name}.y"] = rounded @ (w.astype(np.float64) * scale).T
  assert len(kept) == 28
  return {k: v for k, v in kept.items() if (spoil, k) != ("silent", f"{OF}.x")}


@pytest.mark.parametrize("spoil", ["", "product", "tokens", "silent"])
def test_products_of_quantized_activations_are_the_clients(
  export, rng, tmp_path, monkeypatch, spoil
):
  """A scale that is 1 % larger is refused, and activations that the client left as they are."""
  files = {word: tmp_path / word.lower() for word in ("LOGITS", "PRODUCTS")}
  client = export_gate.Gate.client

  def watched(gate, folder, versions, read, plan):
    ours = np.concatenate(
      [*gate._logits(served_pass.load_as_client(gate._spec, folder, plan.matrices))]
    )
    for word, save in (
      ("LOGITS", lambda f: np.save(f, np.stack([ours, ours]))),
      ("PRODUCTS", lambda f: np.savez(f, **_products(pathlib.Path(folder), rng, spoil))),
    ):  # fmt: skip
      with files[word].open("wb") as f:
        save(f)
    return client(gate, folder, versions, read, plan)

  monkeypatch.setattr(export_gate.Gate, "client", watched)
  script = CLIENT.replace("FOUND", "14")
  for word, path in files.items():
    script = script.replace(word, str(path))
  python = {"export.client_python": _script(tmp_path / "python", script)}
  done = export(**{"export.format": "compressed-tensors"}, **python)
  if spoil:
    otherwise = f"transformers multiplies {OF}.weight otherwise than fp8jax"
    said = {"product": otherwise, "tokens": otherwise,
            "silent": f"transformers left the activations of {OF}.weight unquantized"}  # fmt: skip
    assert done.code == 1 and not done.target.exists() and said[spoil] in done.stderr
    return
  assert done.code == 0, done.stderr
  fidelity = json.loads(done.stdout)["gate"]["fidelity"]
  assert fidelity["product"] < 0.01 and fidelity["product_of"].endswith("_proj.weight")


@pytest.mark.parametrize("spoil", ["", *SPOILT])
def test_export_writes_fp8_that_both_readers_pass_and_nothing_otherwise(
  export, source, tmp_path, monkeypatch, spoil
):
  logits = tmp_path / "logits.npy"
  client = export_gate.Gate.client

  def watched(gate, folder, versions, read, plan):
    params = served_pass.load_as_client(gate._spec, folder, plan.matrices)
    ours = np.concatenate([*gate._logits(params)])
    sign = np.where([spoil == "activations", spoil == "weights"], -1, 1)
    np.save(logits, np.stack([ours * s for s in sign]))
    return client(gate, folder, versions, read, plan)

  monkeypatch.setattr(export_gate.Gate, "client", watched)
  script = CLIENT.replace("FOUND", "13" if spoil == "count" else "14")
  np.savez(products := tmp_path / "products.npz")
  script = script.replace("LOGITS", str(logits)).replace("PRODUCTS", str(products))
  form = {"export.format": "compressed-tensors"} if spoil == "count" else FP8
  done = export(**form, **{"export.client_python": _script(tmp_path / "python", script)})
  assert not (tmp_path / "target.part").exists()
  if spoil:
    assert done.code == 1 and not done.target.exists()
    assert f"refused, nothing was written: {SPOILT[spoil]}" in done.stderr or spoil == "count"
    assert SPOILT[spoil] in done.stderr, done.stderr
    return
  assert done.code == 0, done.stderr
  result = json.loads(done.stdout)
  gate = result.pop("gate")
  assert gate["fidelity"]["kl"] == 0 < gate["fidelity"]["bound"] < 1e-9
  assert gate["transformers"]["transformers"] == "5"
  for reader in ("fp8jax", "served", "transformers"):
    row = gate[reader]
    assert 0 < row["low"] <= row["kl"] <= row["high"] < 0.05 < 0.6 < row["top1"]
  # Activations of 4 significant bits cost something, and no more than their bound.
  assert 0 < gate["fidelity"]["served_kl"] < gate["fidelity"]["served_bound"] < 0.1
  assert gate["noise_floor"]["kl"] < 1e-6 < gate["fp8jax"]["kl"] < gate["fp8jax"]["dlogp"]
  rows = json.loads((done.target / "fp8_matrices.json").read_text())["rows"]
  _check_rows(rows, source, done.target)
  matrices = 2 * (4 * 128 * 128 + 3 * 128 * 256)
  share = matrices / (matrices + 5 * 128 + 512 * 128)
  assert result == {
    "folder": str(done.target), "hf": result["hf"], "dtype": "bfloat16", "format": "hf-fp8-block",
    "strategy": "block", "scale_fmt": "float32", "fp8_share": share, "fp8_matrices": 14,
    "codes_of_training": 0, "unquantized_matrices": 0, "matrices": "fp8_matrices.json",
    "lowest_snr_db": min(r["snr_db"] for r in rows.values()),
    "tensor_parallel": [1],  # of two heads, whose halves hold no whole tiles
  }  # fmt: skip
  assert f"{share:.1%} of the parameters in codes of e4m3 128x128 f32 (14 matrices)" in done.stderr
  assert set(export_folder.files(str(done.target))) == {
    "README.md", "config.json", "fp8_matrices.json", "model.safetensors", "tokenizer_config.json"
  }  # fmt: skip
  card = huggingface_hub.ModelCard.load(str(done.target / "README.md"))
  assert card.data.library_name == "transformers" and "fp8" in card.data.tags
  assert f"| FP8 | {share:.1%} of the parameters" in card.content
  assert json.dumps(gate["fp8jax"]) in card.content
  worst = min(rows, key=lambda name: rows[name]["snr_db"])
  assert f"| {worst} | {rows[worst]['snr_db']:.1f} |" in card.content
  assert f"{rows[worst]['snr_db']:.1f}" in done.stderr and "signal-to-noise" in done.stderr


def _check_rows(rows, source, folder):
  """SNR of every matrix in float64, of the files before and after."""
  dtypes = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": np.float32, "BF16": ml_dtypes.bfloat16}
  before, after = (
    {
      name: np.frombuffer(t["data"], dtypes[t["dtype"]]).reshape(t["shape"]).astype(np.float64)
      for name, t in safetensors.deserialize((f / "model.safetensors").read_bytes())
    }
    for f in (source, folder)
  )
  names = [name for name in after if f"{name}_scale_inv" in after]
  assert sorted(rows) == sorted(names) and len(names) == 14
  for name in names:
    back = after[name] * np.kron(after[f"{name}_scale_inv"], np.ones((128, 128)))
    snr = 10 * np.log10((before[name] ** 2).sum() / ((before[name] - back) ** 2).sum())
    assert rows[name]["snr_db"] == pytest.approx(snr, abs=1e-3) and 25 < snr < 40
    assert not rows[name]["kept"] and rows[name]["scale_ratio"] is None


MISSING = "raise ModuleNotFoundError('No module named x')"
RAISES = (
  "import sys; sys.stderr.write('Traceback\\n  x\\nKeyError: \\'a\\'\\nand more'); sys.exit(1)"
)
NO_PYTHON = "is no working Python: "
UNREADABLE = "export refused, nothing was written: the client "
PROBED = "import json, sys\nif 'import_module' in sys.argv[2]: print('{\"torch\": \"2\"}')\nelse: "


@pytest.mark.parametrize(
  "script, said, is_install",
  [
    (MISSING, "ModuleNotFoundError: No module named x; export.format='hf-bf16'", True),
    (RAISES, NO_PYTHON + "KeyError: 'a' and more; ", False),
    ("", NO_PYTHON + "it printed '' in place of versions", False),  # as /bin/true
    ("print([1])", NO_PYTHON + "it printed '[1]", False),
    ("import os; os.kill(os.getpid(), 9)", NO_PYTHON + "ended by signal 9", False),
    (PROBED + RAISES, "cannot read the folder: KeyError: 'a' and more", False),
    (PROBED + RAISES.replace("KeyError", "[rank0]: KeyError"), "folder: KeyError: 'a' and", False),
    (PROBED + "raise ImportError('Using `fp8` requires accelerate')",
     "cannot read the folder: ImportError: Using `fp8` requires accelerate; ", True),
    (PROBED + "print('done')", "cannot read the folder: it wrote no logits of shape (2, 2, 32, 51",
     False),
    (PROBED + "__import__('numpy').save(sys.argv[5], [1.0])", "it wrote no logits of shape", False),
  ],
)  # fmt: skip
def test_a_client_that_fails_is_told_by_cause(
  export, tmp_path, monkeypatch, script, said, is_install
):
  if not script.startswith(PROBED):
    monkeypatch.setattr(hf_weights, "load_params", lambda *_: pytest.fail("the weights were read"))
  done = export(**{"export.client_python": _script(tmp_path / "python", script)})
  assert (done.code, done.stdout) == (1, "") and said in done.stderr, done.stderr
  assert ("install them" in done.stderr) == is_install and "client_python=''" not in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1
  assert not done.target.exists() and not done.target.with_name("target.part").exists()


# As much of vLLM 0.32 as the script asks for: logits come from a file.
VLLM = """
import types
import numpy

class Tensor:  # torch's
  def __init__(self, value):
    self.value = value
  float = cpu = lambda self: self
  numpy = lambda self: self.value

def kind(name, **attributes):
  made = type(name, (), {})()
  vars(made).update(attributes)
  return made

class Model:
  packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"],
                            "gate_up_proj": ["gate_proj", "up_proj"]}
  def named_modules(self):
    for i in range(2):
      for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        last = (i, name) == (1, "mlp.down_proj")
        if not (last and SPOIL == "gone"):
          yield f"model.layers.{i}.{name}", self.layer(last)
  def layer(self, last):
    if last and SPOIL == "marlin":  # of a method without a scheme
      method = kind("Fp8LinearMethod", fp8_linear=kind("MarlinFP8ScaledMMLinearKernel"))
      return kind("Linear", quant_method=method)
    if last and SPOIL == "unquantized":
      return kind("Linear", quant_method=kind("UnquantizedLinearMethod"))
    scheme = kind("W8A16" if last and SPOIL == "a16" else "W8A8", kernel=kind("CPUKernel"))
    return kind("Linear", quant_method=kind("CompressedTensorsLinearMethod"), scheme=scheme)
  def parameters(self):
    yield types.SimpleNamespace(device="cpu")
  def compute_logits(self, logits):
    return Tensor(logits)

class SamplingParams:
  def __init__(self, **how):
    assert how == {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}

class LLM:
  def __init__(self, folder, **how):
    assert open(folder + "/config.json").read() and how["dtype"] == "bfloat16"
    self.model, self.rows = Model(), iter(numpy.load("LOGITS"))
  def apply_model(self, function):
    return [function(self.model)]
  def generate(self, prompts, how, use_tqdm):
    logits, tokens = next(self.rows), prompts[0]["prompt_token_ids"]
    self.model.compute_logits(logits[-1:])
    rows = logits[: {"second runner": None, "few rows": -2}.get(SPOIL, -1)]
    for start in range(0, len(rows), 3):
      self.model.compute_logits(rows[start : start + 3])
    wide = logits.astype(float)
    stated = wide - numpy.log(numpy.exp(wide).sum(-1, keepdims=True))
    stated += 0.1 * (SPOIL == "other logits")
    return [types.SimpleNamespace(prompt_logprobs=[None, *(
      {t: types.SimpleNamespace(logprob=stated[i, t])} for i, t in enumerate(tokens[1:])
    )])]
"""
LAST = "vLLM multiplies model.layers.1.mlp.down_proj.weight by "
UNREAD = {
  "unquantized": f"{LAST}UnquantizedLinearMethod on cpu: it fell back to unquantized weights",
  "gone": f"{LAST}no layer on cpu: it fell back to unquantized weights",
  "a16": f"{LAST}CompressedTensorsLinearMethod, W8A16, CPUKernel on cpu: activations stay in 16",
  "marlin": f"{LAST}Fp8LinearMethod, MarlinFP8ScaledMMLinearKernel on cpu: activations stay in 16",
  "few rows": "cannot read the folder: RuntimeError: vLLM computed 3 rows of logits of 5 tokens",
  "other logits": "cannot read the folder: RuntimeError: vLLM's log-probabilities are not those",
}  # fmt: skip


def _environment(path, spoil: str) -> str:
  """An interpreter that finds a torch and this vLLM."""
  path.mkdir()
  for name in ("torch", "vllm"):
    (path / f"{name}.py").write_text("")
    (path / f"{name}-1.dist-info").mkdir()
    (path / f"{name}-1.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.5\n")
    (path / f"{name}-1.dist-info" / "top_level.txt").write_text(name)
  (path / "vllm.py").write_text(VLLM.replace("LOGITS", str(path / "logits.npy"))
                                + f"\nSPOIL = {spoil!r}\n")  # fmt: skip
  python = path / "python"
  python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
  python.chmod(python.stat().st_mode | stat.S_IXUSR)
  return str(python)


def _kl(gate, source, made) -> float:
  """Mean over the tokens that count, in float64."""
  p, q = (np.concatenate([*map(np.asarray, x)]).astype(np.float64) for x in (source, made))
  p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
  counts = np.concatenate([b.counts_BL for b in gate._batches]) > 0
  return float((np.exp(p) * (p - q)).sum(-1)[counts].mean())


@pytest.mark.parametrize("spoil", ["", "second runner", *UNREAD])
@pytest.mark.parametrize("quantizes", [False, True])
def test_matrices_that_vllm_multiplies_otherwise_are_refused_by_name(
  rng, tmp_path, quantizes, spoil
):
  python = _environment(tmp_path / "vllm", spoil)
  tokens, logits = rng.integers(0, 7, (2, 5)), rng.normal(size=(2, 5, 7)).astype(np.float32)
  np.save(tmp_path / "vllm" / "logits.npy", logits)
  (tmp_path / "config.json").write_text("{}")
  names = [f"model.layers.{i}.{name}.weight" for i in range(2)
           for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
          ]  # fmt: skip
  asked = (settings.Export(client="vllm", client_python=python), str(tmp_path), tokens, 7)

  def ask():
    return vllm_client.logits(*asked, dict.fromkeys(names, quantizes))

  in_16_bits = spoil in ("a16", "marlin")
  if spoil in UNREAD and (quantizes or not in_16_bits):
    with pytest.raises(UserError) as e:
      ask()
    assert UNREAD[spoil] in str(e.value)
    return
  made, layers = ask()
  np.testing.assert_array_equal(made, logits)
  by = "CompressedTensorsLinearMethod, {}, CPUKernel"
  others = {"a16": by.format("W8A16"), "marlin": "Fp8LinearMethod, MarlinFP8ScaledMMLinearKernel"}
  counts = {by.format("W8A8"): 8 - in_16_bits} | ({others[spoil]: 1} if in_16_bits else {})
  assert layers == {"device": "cpu", "layers": counts}


@pytest.mark.parametrize(
  "recipe, spoil",
  [
    pytest.param("int8", "", marks=pytest.mark.slow),
    pytest.param("mxfp4_ste", "", marks=pytest.mark.slow),
    ("mxfp4_ste", "unrounded"),
    ("w4a16", ""),
    ("w4a16", "logits"),
  ],
)
def test_vllm_serves_what_fp8jax_computes_within_what_16_bits_and_rounding_cost(
  export, tmp_path, monkeypatch, recipe, spoil
):
  python, bounds = _environment(tmp_path / "vllm", ""), []
  server = export_gate.Gate.server

  def watched(gate, folder, versions, read, plan):
    spec, sites = gate._spec, None
    wide, narrow = (dataclasses.replace(spec, run=dataclasses.replace(spec.run, dtype=np.dtype(d)))
                    for d in ("float32", "bfloat16"))  # fmt: skip
    params = plain = read(folder)
    if recipe != "w4a16":
      params, sites = served_pass.load(spec, plan, folder)
    ours, in_16 = ([*gate._forward(s, sites)(params)] for s in (wide, narrow))
    in_16 = [np.asarray(x.astype("bfloat16"), np.float32) for x in in_16]
    of = [[*gate._forward(s)(plain)] for s in (wide, narrow)]
    of[1] = [np.asarray(x.astype("bfloat16"), np.float32) for x in of[1]]
    costs = [_kl(gate, ours, in_16), _kl(gate, of[0], ours), _kl(gate, *of)]
    is_asked = costs[1] > 4 * costs[2]
    assert is_asked == (recipe == "mxfp4_ste")
    bounds.append({"kl": costs[0], "bound": 3 * max(costs[:2]),
                   "unrounded_kl": _kl(gate, of[0], in_16),
                   "unrounded_least": (costs[1] * costs[2]) ** 0.5 * is_asked})  # fmt: skip
    if spoil == "unrounded":
      in_16 = of[1]
    made = np.concatenate(in_16) * (-1 if spoil == "logits" else 1)
    np.save(tmp_path / "vllm" / "logits.npy", made)
    return server(gate, folder, versions, read, plan)

  monkeypatch.setattr(export_gate.Gate, "server", watched)
  rules = {"precision.rules": (("layers/.*", recipe), ("head", "bf16"))}
  done = export(
    **rules, **{"export.format": "compressed-tensors", "export.client": "vllm",
                "export.client_python": python, "export.max_kl": 1.0},
  )  # fmt: skip
  if spoil:
    said = {"logits": "vllm computes another model from the weights",
            "unrounded": "vllm leaves activations unquantized: "}[spoil]  # fmt: skip
    assert done.code == 1 and not done.target.exists() and said in done.stderr, done.stderr
    return
  assert done.code == 0, done.stderr
  gate = json.loads(done.stdout)["gate"]
  of, fidelity = "served_" * (recipe != "w4a16"), gate["fidelity"]
  for name, value in bounds[0].items():
    if of or not name.startswith("unrounded"):
      found = fidelity.pop(name if name.startswith("unrounded") else of + name)
      assert found == pytest.approx(value, rel=1e-3), name
  assert not fidelity and 0 < bounds[0]["kl"] < bounds[0]["bound"]
  row = gate["vllm"]
  assert (row["torch"], row["vllm"], row["device"]) == ("1.5", "1.5", "cpu")
  assert row["layers"] == {"CompressedTensorsLinearMethod, W8A8, CPUKernel": 14}
  assert row["low"] <= row["kl"] <= row["high"]


@pytest.mark.parametrize(
  "changes, said",
  [
    ({}, "name its python as export.client_python"),
    ({"export.format": "peft", "model.lora.rank": 4, "export.client_python": sys.executable},
     "export.format='peft' writes adapters; take another export.format"),
    ({"export.format": "compressed-tensors", "export.kv_cache": "e4m3",
      "export.client_python": sys.executable}, "check the folder with export.kv_cache=''"),
  ],
)  # fmt: skip
def test_what_vllm_cannot_be_asked_is_refused(export, changes, said):
  done = export(**{"export.client": "vllm"} | changes)
  assert done.code and said in done.stderr and not done.target.exists(), done.stderr


def test_vllm_is_not_asked_about_a_reward_model():
  asked = {"export.client": "vllm", "export.client_python": sys.executable}
  with pytest.raises(UserError, match="a reward model has none; set export.client='transformers'"):
    harness.text_spec(job="export", **{"model.reward_head": True}, **asked)
