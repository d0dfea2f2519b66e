"""The tokenizer of a GGUF file, token by token."""

import json

import pytest
import tokenizers

from fp8jax.models import presets
from fp8jax.models.hf import convert_gguf

TOKENS = ["<|end|>", "<unk>", "a", "b", "1", "2", "12", "ab", "Ġ", "Ġab"]
FIELDS = {
  "tokenizer.ggml.tokens": TOKENS,
  "tokenizer.ggml.token_type": [3, 3] + [1] * 8,  # 3: control
  "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2"],
  "tokenizer.chat_template": "{{ messages }}",
  **{f"tokenizer.ggml.{role}_token_id": i for role, i in
     {"bos": 0, "eos": 0, "unknown": 1, "padding": 2}.items()},
}  # fmt: skip


def test_tokens_merges_digits_and_special_tokens_are_those_of_the_file(tmp_path):
  convert_gguf._write_tokenizer(FIELDS, str(tmp_path))
  made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  assert [made.id_to_token(i) for i in range(len(TOKENS))] == TOKENS
  # Digits stay apart, though a merge would join them; the special token is one, inside text too.
  assert made.encode("ab ab12<|end|>b").ids == [7, 9, 4, 5, 0, 3]
  assert made.decode([7, 9, 4, 5, 0, 3]) == "ab ab12b"  # special ones are left out
  config = json.loads((tmp_path / "tokenizer_config.json").read_text())
  assert config["chat_template"] == "{{ messages }}" and not config["add_prefix_space"]
  assert [config[f"{r}_token"] for r in ("bos", "eos", "unk", "pad")] == [
    "<|end|>", "<|end|>", "<unk>", "a"
  ]  # fmt: skip
  assert config["model_max_length"] == presets.SMOLLM2_135M.max_positions == 8192


def test_another_file_is_refused_by_its_hash(tmp_path):
  path = tmp_path / "a.gguf"
  path.write_bytes(b"GGUF")
  with pytest.raises(ValueError, match=r"a\.gguf has sha256 \w{64}, expected b179.*download it ag"):
    convert_gguf.convert(str(path), str(tmp_path / "made"))
  assert not (tmp_path / "made").exists()
