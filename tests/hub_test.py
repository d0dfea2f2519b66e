"""Ids of the Hugging Face hub where a folder is expected: found, fetched, refused. No network."""

import dataclasses
import json
import pathlib
import shutil

import huggingface_hub
import numpy as np
import pytest
import tokenizers
from huggingface_hub import constants

from configs import base
from fp8jax import hub
from fp8jax.config import resolve
from fp8jax.data import tokenize
from fp8jax.errors import UserError
from fp8jax.jobs import dispatch, table
from fp8jax.kernels.choose import Device
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import weights as hf_weights

ROOT = pathlib.Path(__file__).resolve().parent.parent
LLAMA = ROOT / "tests/golden/hf/llama"
ID = "Qwen/Qwen2.5-1.5B"
COMMAND = "hf download Qwen/Qwen2.5-1.5B --local-dir assets/Qwen2.5-1.5B"


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """The hub's cache with one model, as its library lays it out, and the hub out of reach."""
  monkeypatch.chdir(tmp_path)
  folder = tmp_path / "cache"
  commit = "0123456789abcdef0123456789abcdef01234567"
  model = folder / f"models--{ID.replace('/', '--')}"
  snapshot = model / "snapshots" / commit
  shutil.copytree(LLAMA, snapshot)
  vocabulary = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "<eos>": 2}, "<unk>")
  tokenizers.Tokenizer(vocabulary).save(str(snapshot / "tokenizer.json"))
  (snapshot / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
  (model / "refs").mkdir()
  (model / "refs/main").write_text(commit)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  return snapshot


@pytest.mark.parametrize(
  "name, expected",
  [
    (ID, True), ("HuggingFaceTB/SmolLM2-135M", True), ("assets/Qwen2.5-7B", False),
    ("./Qwen/x", False), ("/models/x", False), ("~/models", False), ("a/b/c", False),
    ("vocabulary/tokenizer.json", False), ("models/mine", False), ("bytes", False), ("", False),
  ],
)  # fmt: skip
def test_an_id_is_told_from_a_path(name, expected, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "models").mkdir()  # a folder: what is missing in it is a path
  assert hub.is_id(name) == expected


def test_a_local_folder_comes_first(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / ID).mkdir(parents=True)
  monkeypatch.setattr(
    huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub")
  )
  assert hub.local(ID) == ID
  hub.fetch({ID: hub.WEIGHTS})


def test_what_is_in_the_cache_is_read_like_a_folder(cache):
  assert hub.local(ID) == str(cache)
  cfg = hf_config.read_config(ID)
  assert cfg == hf_config.read_config(str(LLAMA))
  got, want = hf_weights.load_params(ID, cfg)[0], hf_weights.load_params(str(LLAMA), cfg)[0]
  np.testing.assert_array_equal(got["embed"], want["embed"])
  assert list(tokenize.Tokenizer(ID).encode("a")) == [1, 2]
  c = base.get_config("bf16")
  c.init.hf, c.model.preset, c.seq_len = ID, "hf", 16
  spec = resolve.resolve(c, 1, Device("cpu"))
  # The id, not this machine's path, is remembered with the run.
  assert spec.model == cfg and spec.flat["init.hf"] == ID


def test_a_missing_model_ends_with_the_command_that_fetches_it(cache, capsys, tmp_path):
  c = base.get_config("bf16")
  c.init.hf, c.model.preset = "Qwen/Qwen3-0.6B", "hf"
  assert dispatch.run("train", c, base.get_config(), "configs/debug.py", str(tmp_path / "run")) == 1
  err = capsys.readouterr().err
  assert err.startswith("error: Qwen/Qwen3-0.6B is no folder here")
  assert "hf download Qwen/Qwen3-0.6B --local-dir assets/Qwen3-0.6B" in err
  assert not (tmp_path / "run").exists()
  with pytest.raises(resolve.ConfigError, match="hf download Qwen/Qwen3-0.6B --local-dir assets/"):
    resolve.resolve(c, 1, Device("cpu"))


def test_a_missing_tokenizer_ends_with_the_command_too(cache):
  with pytest.raises(FileNotFoundError, match="hf download a/b --local-dir assets/b"):
    tokenize.Tokenizer("a/b").fingerprint  # noqa: B018


@pytest.mark.parametrize(
  "folder, command",
  [
    ("assets/smollm2-135m", "python -m fp8jax.models.hf.convert_gguf assets/smollm2-135m"),
    ("assets/Qwen2.5-7B", "hf download ORG/Qwen2.5-7B --local-dir assets/Qwen2.5-7B"),
  ],
)
def test_a_missing_folder_names_the_command_that_makes_it(folder, command, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(FileNotFoundError) as e:
    hf_config.read_config(folder)
  assert command in str(e.value)


def _asked(monkeypatch, error=None):
  """Notes what the hub is asked for: [(name, how)]."""
  calls = []

  def snapshot(name, **how):
    calls.append((name, how))
    if error:
      raise error
    return "/somewhere"

  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
  return calls


@pytest.mark.parametrize("process, downloads", [(0, 1), (1, 0), (2, 1), (3, 0)])
def test_the_first_process_of_every_host_downloads(process, downloads, monkeypatch):
  """Four processes on two hosts."""
  asked = _asked(monkeypatch)
  monkeypatch.setattr(hub.socket, "gethostname", lambda: f"host{process // 2}")

  def gather(x):
    hosts = [hub.zlib.crc32(f"host{n}".encode()) >> 1 for n in (0, 0, 1, 1)]
    return np.asarray(hosts) if int(x) in hosts else np.ones(4, np.int32)

  monkeypatch.setattr(hub.multihost_utils, "process_allgather", gather)
  monkeypatch.setattr(hub.jax, "process_index", lambda: process)
  hub.fetch({ID: hub.WEIGHTS, "bytes": hub.TOKENIZER})
  assert len(asked) == downloads


def test_what_is_downloaded_holds_no_pickle_and_no_subfolder(monkeypatch):
  asked = _asked(monkeypatch)
  hub.fetch({ID: hub.WEIGHTS})
  ((name, how),) = asked
  assert not how.pop("local_files_only")
  files = [
    "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
    "pytorch_model.bin", "original/consolidated.00.pth", "onnx/config.json", "flax_model.msgpack",
  ]  # fmt: skip
  kept = list(huggingface_hub.utils.filter_repo_objects(files, **how))
  assert name == ID and kept == files[:7]


def test_a_failed_download_is_one_sentence_in_every_process(monkeypatch):
  _asked(monkeypatch, ConnectionError("no route\nto host"))
  with pytest.raises(UserError) as e:
    hub.fetch({ID: hub.WEIGHTS})
  assert "ConnectionError: no route to host" in str(e.value) and COMMAND in str(e.value)


def test_prepare_fetches_the_tokenizer_alone(monkeypatch, tmp_path):
  fetched = {}
  monkeypatch.setattr(hub, "fetch", fetched.update)
  row = dataclasses.replace(table.JOBS["prepare"], run=lambda *_, **__: {})
  monkeypatch.setitem(table.JOBS, "prepare", row)
  c = base.get_config()
  c.init.hf = ID
  assert dispatch.run("prepare", c, base.get_config(), "configs/debug.py", str(tmp_path)) == 0
  assert fetched == {ID: hub.TOKENIZER}


def test_the_remedy_names_a_folder_to_download_to_and_to_name_instead_of_an_id(monkeypatch):
  monkeypatch.chdir(ROOT)
  start = "expected a Hugging Face folder; where there is a network: "
  assert hub.remedy(ID) == f"{start}{COMMAND}, and name assets/Qwen2.5-1.5B instead"
  assert hub.remedy("./mine/x/") == f"{start}hf download ORG/x --local-dir ./mine/x/"
