"""The trained end of turn ends completions (LlamaFactory#7454, Qwen3#927, mlx-vlm#2112)."""

import json

import case_inputs


def test_a_fine_tuned_run_ends_at_the_token_that_it_trained(tmp_path):
  """The folder's own generation_config.json names another end; the tokenizer's is <|im_end|>."""
  folder, rows = case_inputs.model_folder(tmp_path / "m"), tmp_path / "rows.jsonl"
  chats = [[("user", "a"), ("assistant", "b")], [("user", "c"), ("assistant", "d")]]
  rows.write_text("".join(
    json.dumps({"messages": [{"role": r, "content": c} for r, c in chat]}) + "\n" for chat in chats
  ))  # fmt: skip
  lines = [
    f"c.init.hf, c.model.preset = {str(folder)!r}, 'hf'",
    f"c.data.sources = {{'main': base.source('jsonl', {str(rows)!r}, chat='messages')}}",
    "c.data.samples_per_step, c.data.on_long, c.data.heldout_fraction = 2, 'error', 0.0",
    "c.global_batch, c.seq_len, c.steps = 2, 64, 1",
  ]
  code, output = case_inputs.launch(tmp_path, lines, f"--workdir={tmp_path / 'run'}")
  assert code == 0, output
  settings = json.loads((tmp_path / "run/hf_source/generation_config.json").read_text())
  assert settings["eos_token_id"] == [2, 0]
