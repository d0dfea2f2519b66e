"""The account of memory: declared bytes are those that exist, compiled ones are all explained."""

import json

import harness
import jax
import numpy as np
import pytest
import safetensors.numpy

from fp8jax.compiled import aot, memory, saved_tensors, workspace, xla_buffers
from fp8jax.config import files as config_files
from fp8jax.config import resolve
from fp8jax.errors import ConfigError, UserError
from fp8jax.jobs import memory as memory_job
from fp8jax.jobs import table
from fp8jax.step import train_step


@pytest.mark.parametrize("shape, moments", [
  (None, "float32"), ((1, 2, 4), "coat"), pytest.param(None, "coat", marks=pytest.mark.slow),
  pytest.param((1, 2, 4), "float32", marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_declared_bytes_are_those_on_a_device(moments, shape):
  spec = harness.tiny_spec(harness.tiny_config("bf16", **{"optim.moment_format": moments}), shape)
  rows = {row.kind: row.declared for row in memory.declared(spec)}
  state = harness.make_state(spec)
  device = jax.devices()[0]
  there = [
    piece.data.nbytes for x in jax.tree.leaves(state) for piece in x.addressable_shards
    if piece.device == device
  ]  # fmt: skip
  assert sum(rows.values()) == sum(there)
  large = rows["masters: float32"]
  if moments == "coat":
    # Two codes per number, norms excepted; 5 bytes per group of 128 and moment.
    assert rows["moments: codes"] == pytest.approx(large / 2, rel=0.01)
    # Halves of the embedding's groups lie on two devices, the scales on both.
    scales = rows["moments: codes"] * 5 / 128
    assert scales * 0.99 < rows["moments: scales"] < scales * (1.01 if shape is None else 2)
    assert rows["moments: float32"] < 0.02 * large
  else:
    assert rows["moments: float32"] == pytest.approx(2 * large, abs=64)


def test_compiled_bytes_are_explained():
  spec = harness.tiny_spec(harness.tiny_config("bf16"))
  rows, summary = memory.compiled(spec, aot.lower(spec, jax.devices()[:1]))
  parts = [row for row in rows if not row.kind.startswith(" ")]
  of = {row.kind: row.compiled for row in parts}
  batch = 5 * 8 * 128 * 4  # tokens, targets, positions, segments, weights
  assert of["batch, sites, alignment"] == pytest.approx(batch, rel=0.05)
  assert sum(of.values()) + summary["state_declared"] == summary["peak"] and min(of.values()) >= 0
  said = sum(row.declared or 0 for row in parts) + summary["state_declared"]
  assert said == summary["declared"]
  assert summary["saved_compiled"] == pytest.approx(summary["saved_declared"], rel=0.01)


def test_the_peak_phase_is_that_with_the_most_bytes(monkeypatch):
  """Its name sorts neither first nor last, and no kind of it is the largest."""
  spec = harness.tiny_spec(harness.tiny_config("bf16"))
  for name, row in {"_loss": {"a": 5}, "_layer": {"a": 9, "b": 1}, "_embedding": {"a": 10}}.items():
    monkeypatch.setattr(workspace, name, lambda spec, row=row: row)
  for saved, phase in ((0, "last layer"), (1, "last layer")):
    assert workspace.peak(spec, saved)[0] == phase
  monkeypatch.setattr(workspace, "_embedding", lambda spec: {"a": 11, "z": 1})
  assert workspace.peak(spec, 1) == ("embedding", {"a": 11, "z": 1})


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_bytes_of_the_loss_are_counted_by_hand(dtype, size, microbatches):
  """512 tokens in chunks of 2 x 64, 128 channels, a vocabulary of 512, two layers, one device."""
  c = harness.tiny_config("bf16", **{
    "precision.compute_dtype": dtype, "memory.loss_chunk": 64, "seq_len": 256,
    "global_batch": 2 * microbatches, "grad_accum_steps": microbatches, "model.max_positions": 256,
  })  # fmt: skip
  stream, head, chunk = 2 * 256 * 128, 128 * 512, 2 * 64 * 512
  layer = 4 * 128 * 512 + 3 * 128 * 512 + 2 * 128  # q, k, v, o; gate, up, down; two norms
  sums = 4 * (microbatches > 1)  # float32
  spec = harness.tiny_spec(c)
  assert workspace.logits(spec) == 4 * chunk
  assert workspace._loss(spec) == {
    workspace.GRADIENTS: sums * 2 * layer,
    # The head and its gradient; the logits in float32, theirs in float32 and in the dtype.
    workspace.VOCABULARY: sums * head + (size + 4) * head + (4 + 4 + size) * chunk,
    workspace.ACTIVATIONS: 3 * size * stream,
  }


# 128 channels of the stream, 4 heads of 128, 1024 channels of the MLP, a vocabulary of 768.
_MLP, _VOCABULARY = 3 * 128 * 1024, 128 * 768
_GRADIENTS = 4 * 2 * (4 * 128 * 512 + _MLP)  # of the weights of two layers, in float32
_NORMS = 4 * 2 * 2 * 128
KINDS = [k for k in workspace.KINDS if k not in (workspace.SAVED, workspace.ONCE)]
# recipe, mesh, changes, and by hand: KINDS of the last layer, KINDS of the embedding
BY_HAND = {
  # 512 tokens at a time; gate, up (read for both of their gradients), those, and their product's.
  "two microbatches under a loss scale": ("bf16", None, {
    "grad_accum_steps": 2, "precision.compute_dtype": "float16", "loss_scale.kind": "dynamic",
  }, (
    2 * (_GRADIENTS + _NORMS), 8 * _VOCABULARY, 0, 0, 512 * (2048 + 2 * 1024 + 5 * 128) * 2
  ), (2 * (_GRADIENTS + _NORMS), 16 * _VOCABULARY)),
  # One stack: layers add to the sums.
  "two microbatches": ("bf16", None, {"grad_accum_steps": 2}, (
    _GRADIENTS + _NORMS, 8 * _VOCABULARY, 0, 0, 512 * (2048 + 2 * 1024 + 5 * 128) * 4
  ), (_GRADIENTS + _NORMS, 16 * _VOCABULARY)),
  "the same, layers recomputed": (
    "bf16", None, {"grad_accum_steps": 2, "memory.remat_policy": "full"}, (
    _GRADIENTS + _NORMS, 8 * _VOCABULARY, 0, 0, 512 * (2 * 3072 + 5 * 128) * 4
  ), (_GRADIENTS + _NORMS, 16 * _VOCABULARY)),
  "in FP8": ("block_128", None, {}, (
    _GRADIENTS + _NORMS, 4 * _VOCABULARY, 0, 1024 * (2 * 2048 + 128), 1024 * (1024 + 5 * 128) * 4
  ), (_GRADIENTS + _NORMS, 12 * _VOCABULARY)),
  # The stream and weights over 2 devices, heads, the MLP and the vocabulary over 4.
  "on a mesh": ("block_128", (1, 2, 4), {"precision.compute_dtype": "bfloat16"}, (
    _GRADIENTS // 8 + _NORMS // 2, _VOCABULARY, 4 * _MLP // 4 + _MLP * 2 // 3 // 4,
    512 * (2 * 512 + 128), 512 * (256 + 5 * 128) * 2
  ), (_GRADIENTS // 8 + _NORMS // 2, _VOCABULARY + 2 * _VOCABULARY // 2)),
  "layer by layer": ("bf16", None, {
    "optim.in_backward": True, "optim.grad_clip_norm": 0.0, "memory.remat_policy": "full",
  }, (
    0, 4 * _VOCABULARY, (_GRADIENTS + _NORMS) // 2, 0, 1024 * (2 * 3072 + 5 * 128) * 4
  ), (0, 12 * _VOCABULARY)),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_of_a_layer_and_of_the_embedding_are_counted_by_hand(name):
  recipe, mesh, changes, of_layer, of_embedding = BY_HAND[name]
  sizes = {"model.intermediate_size": 1024, "model.vocab_size": 768}
  spec = harness.tiny_spec(harness.tiny_config(recipe, **sizes, **changes), mesh)
  layer, embedding = workspace._layer(spec), workspace._embedding(spec)
  assert tuple(layer[k] for k in KINDS) == of_layer
  assert (embedding.get(workspace.GRADIENTS, 0), embedding[workspace.VOCABULARY]) == of_embedding


def test_a_reward_head_has_one_column_and_no_logits():
  sizes = {"model.vocab_size": 768, "model.tie_embeddings": False}
  plain, scores = (
    harness.tiny_spec(harness.tiny_config("bf16", **sizes, **more), job="memory")
    for more in ({}, {"model.reward_head": True, "rl.loss": "reward"})
  )
  for moment in (workspace._layer, workspace._embedding):
    less = moment(plain)[workspace.VOCABULARY] - moment(scores)[workspace.VOCABULARY]
    assert less == 4 * 128 * (768 - 1)
  assert workspace.logits(plain) == 4 * 1024 * 768 and workspace.logits(scores) == 0


ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, page 0, parameter 0, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <1 state.1 @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 1000, page 0, preallocated-temp:
 value: <2 early @0> (size=600,offset=0): f32[150]{0}
 value: <3 while.1{} (phi) @0> (size=8,offset=992): (s32[], f32[100]{0})
 value: <4 while.1{1} (phi) @0> (size=400,offset=300): bf16[200]{0}
 value: <5 last.7{0} @0> (size=400,offset=300): bf16[2,100]{1,0}
 value: <6 beside @0> (size=200,offset=0): u8[200]{0}
"""
LIVE_RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:early
  BufferLiveRange:
    state.1{}:0-9
    early{}:0-2
    while.1{}:3-6
    while.1{1}:3-6
    last.7{0}:6-8
    beside{}:5-7
  Live ranges at 1 (peak):
    early{}: 600 bytes (cumulative: 600 bytes)
"""


def test_what_lies_in_memory_at_the_fullest_moment():
  """At 5 and 6 most of the block is in use; what follows in the same bytes counts once."""
  found = [(v.name, v.shape, v.nbytes) for v in xla_buffers.peak(ASSIGNMENT, LIVE_RANGES)]
  assert found == [
    ("while.1{1}", "bf16[200]", 400), ("beside{}", "u8[200]", 200), ("while.1{}", "", 8)
  ]  # fmt: skip
  longer = LIVE_RANGES.replace("beside{}:5-7", "beside{}:7-8").replace("early{}:0-2", "early{}:0-3")
  assert (
    sum(v.nbytes for v in xla_buffers.peak(ASSIGNMENT, longer)) == 608
  )  # not 1008: they overlap
  assert xla_buffers.peak("", "") == []


def test_the_job_says_on_stderr_what_it_returns_and_writes(tmp_path, capsys, monkeypatch):
  spec = harness.tiny_spec(harness.tiny_config("bf16"), job="memory")
  kept = memory_job.run(spec, jax.devices()[:1], "h200:1", str(tmp_path))
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("compiling the step for h200:1\n")
  assert err.endswith("FP8 GEMMs per step and device: 0 of 0 planned\n")
  for row in kept["rows"]:
    assert row["kind"].strip() in err
  assert json.loads((tmp_path / "memory.json").read_text()) == json.loads(json.dumps(kept))
  assert sum(row["declared"] or 0 for row in kept["rows"]) >= kept["state_declared"] > 0
  assert "rl" not in kept
  summary = {k: v for k, v in kept.items() if k != "rows"}
  summary["fp8_gemms"] = {**kept["fp8_gemms"], "found": 5, "planned": 6, "by": ["a", "b"]}
  summary["fp8_gemms"]["problem"] = "one is missing"
  monkeypatch.setattr(memory_job.memory, "compiled", lambda *_: ([], summary))
  monkeypatch.setattr(memory_job.aot, "lower", lambda *_: None)
  memory_job.run(spec, jax.devices()[:1], "", str(tmp_path / "none"))
  err = capsys.readouterr().err
  assert err.startswith("compiling the step for cpu\n")
  assert err.endswith("per step and device: 5 of 6 planned, by a, b; one is missing\n")
  assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("changes, is_said", [
  ({"grad_accum_steps": 2}, True), ({"memory.weight_operands": "per_step"}, False),
  ({"precision.invariant": True, "memory.remat_policy": "full"}, False), ({}, True),
  ({"grad_accum_steps": 2, "model.lora.rank": 4}, True),
  ({"grad_accum_steps": 2, "model.lora.rank": 4, "model.lora.base": "bf16"}, True),
])  # fmt: skip
def test_the_price_of_quantizing_weights_once_is_said_where_it_is_not_done(
  capsys, monkeypatch, changes, is_said
):
  spec = harness.tiny_spec(harness.tiny_config("block_128", **changes), job="memory")
  summary = {"peak": 2**20, "fp8_gemms": dict(found=1, planned=1, by=[], problem="")}
  monkeypatch.setattr(memory_job.memory, "compiled", lambda *_: ([], summary))
  monkeypatch.setattr(memory_job.memory, "table", lambda *_: "")
  monkeypatch.setattr(memory_job.aot, "lower", lambda *_: None)
  memory_job.run(spec, jax.devices()[:1], "", "")
  err, m, elements = capsys.readouterr().err, spec.model, 0
  heads = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
  for n, k in ((heads[0], m.hidden_size), (heads[1], m.hidden_size), (heads[1], m.hidden_size),
               (m.hidden_size, heads[0]), *[(m.intermediate_size, m.hidden_size)] * 3):  # fmt: skip
    elements += m.num_layers * (n * k + 4 * -(-n // 128) * -(-k // 128))
  more = 2 * elements / 2**30
  passes = " of 2 microbatches" * ("grad_accum_steps" in changes)
  text = f"of 7 sites once per step, not in each pass{passes}: "
  assert ("per_step" in err) == is_said == (text in err)
  assert (
    f"{more:.3g} GiB more per device, a peak of the step of at most {2**-10 + more:.3g}\n" in err
  ) == is_said


def test_what_a_run_holds_that_learns_from_its_own_completions(capsys, tmp_path):
  """A reference, a reward model, a rollout of 6 sequences of 40 tokens, and the passes that score
  it: by hand."""
  folder = tmp_path / "scores"
  harness.folder_of_scores("qwen2_tied", folder, np.ones((1, 32), np.float32))
  settings = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 128}
  (folder / "config.json").write_text(json.dumps(settings))
  judge = safetensors.numpy.load_file(folder / "model.safetensors")
  c = harness.tiny_config("bf16", **{
    "rl.tasks": "learned.jsonl", "rl.kl": 0.5, "rl.samples": 2, "rl.max_new_tokens": 16,
    "init.workdir": "before", "init.weights_only": True, "generate.slots": 6,
    "generate.max_length": 40, "rl.reward_model": str(folder),
  })  # fmt: skip
  spec = resolve.resolve(c, 1, harness.CPU, needs=table.JOBS["memory"].needs)
  made = memory_job.run(spec, jax.devices()[:1], "", "")
  model, of_rl, state = spec.model, made["rl"], made["state_declared"]
  weights = 4 * sum(x.size for x in jax.tree.leaves(train_step.abstract_state(spec, 0).params))
  cache = 2 * 4 * model.num_layers * 6 * 40 * model.num_kv_heads * model.head_dim
  rollout, scoring = of_rl["rollout"], of_rl["scoring"]["temporaries"]
  assert of_rl["reference"] == weights == rollout["weights"]
  of_judge, rewarding = of_rl["reward model"], of_rl["rewarding"]["temporaries"]
  assert of_judge == 4 * sum(x.size for x in judge.values()) and rewarding > 0
  held = weights + of_judge
  assert rollout["keys and values"] == cache
  assert weights + cache + 16 * 6 <= rollout["arguments"] < weights + cache + 16 * 6 + 4096
  # A forward pass saves nothing for a backward one, nor has it gradients.
  assert 0 < scoring < made["temporaries_compiled"] - weights
  assert of_rl["peaks"] == {
    "in the step": made["peak"] + held,
    "while it draws": state + held + rollout["arguments"] + rollout["temporaries"],
    "while it scores": state + held + scoring,
    "while it rewards": state + held + rollout["weights"] + rewarding,
  }
  assert f"{of_rl['peaks']['while it draws'] / 2**30:.3f} GiB while it" in capsys.readouterr().err


def test_what_rl_cannot_hold_is_refused():
  spec = {"rl.tasks": "learned.jsonl", "generate.max_length": 40, "rl.reward_model": "no_such"}
  with pytest.raises(ConfigError, match="no_such/config.json"):
    c = harness.tiny_config("bf16", **spec)
    resolve.resolve(c, 1, harness.CPU, needs=table.JOBS["memory"].needs)
  head = {"model.reward_head": True, "rl.loss": "reward", "model.tie_embeddings": False}
  c = harness.tiny_config("bf16", **head)  # a run that may have one
  assert resolve.resolve(c, 1, harness.CPU, needs=table.JOBS["memory"].needs).model.reward_head
  for changes, said in (
    ({"rl.loss": "grpo"}, "rl.loss='grpo' with a reward head"), ({"global_batch": 1}, "be even"),
    ({"precision.rules": ((".*", "block_128"),)}, "give the reward head recipe 'block_128'"),
  ):  # fmt: skip
    with pytest.raises(ConfigError, match=said):
      c = harness.tiny_config("bf16", **head | changes)
      resolve.resolve(c, 1, harness.CPU, needs=table.JOBS["memory"].needs)
  c = harness.tiny_config("bf16", **{"rl.tasks": "learned.jsonl"})
  with pytest.raises(ConfigError, match="generate.max_length=0: the cache of a rollout"):
    resolve.resolve(c, 1, harness.CPU, needs=table.JOBS["memory"].needs)


def test_unknown_targets_are_refused():
  for wrong in ("h300:8", "h200:x", "h200:0"):
    with pytest.raises(UserError, match="expected one of a100:N, l4:N, rtx4090:N, h100:N, h200:N"):
      aot.resolve(harness.tiny_config("bf16"), wrong)


def test_a_target_without_a_number_is_one_device(monkeypatch):
  asked = []
  monkeypatch.setattr(aot, "devices_of", lambda *of: asked.append(of) or jax.devices()[: of[1]])
  for target in ("h100", "h200:2", "b200:1"):
    _, devices = aot.resolve(harness.tiny_config("bf16", **{"mesh.fsdp": -1}), target)
    assert len(devices) == asked[-1][1]
  assert asked == [("h100", 1), ("h200", 2), ("b200", 1)]


def small_on_h200() -> dict:
  import aot_harness

  changes = {"eval.batch": 1, "optim.moment_format": "coat", "memory.save_norm_inputs": "e4m3_16"}
  c = aot_harness.load(
    "configs/base.py", aot_harness.SMALL | changes | {"memory.save_gate_up": "e4m3_16"}
  )
  spec, devices = aot.resolve(c, "h200:1")
  rows, summary = memory.compiled(spec, aot.lower(spec, devices))
  return {"rows": {r.kind: (r.declared, r.compiled) for r in rows}, **summary}


@pytest.mark.aot
@pytest.mark.slow
def test_bytes_on_h200_are_those_declared(capsys):
  """Within the batch, and 5 % in all; and what waits for the backward pass, in groups."""
  import aot_harness

  found = aot_harness.elsewhere("small_on_h200()", __file__)
  with capsys.disabled():
    print(found)
  assert found["arguments_compiled"] == pytest.approx(found["state_declared"], rel=0.05)
  assert found["outputs_not_aliased"] < 2**20
  assert found["saved_compiled"] == pytest.approx(found["saved_declared"], rel=0.05)
  assert found["rows"]["free at the peak"][1] < 0.1 * found["temporaries_compiled"]
  assert found["declared"] == pytest.approx(found["peak"], rel=0.05)


def test_a_run_is_planned_without_its_files():
  """Weights and text that a config names may be elsewhere; the config itself stays as it is."""
  c = harness.tiny_config("bf16", **{"init.hf": "no/such/folder", "data.tokenizer": "no/such"})
  c.data.sources.main.kind, c.data.sources.main.path = "jsonl", "no/such/*.jsonl"
  c.mesh.fsdp = 8
  c.init.untie = True  # of weights that nobody reads here
  spec, devices = aot.resolve(config_files.without_files(c), "", table.JOBS["memory"].needs)
  assert len(devices) == spec.run.layout.size(("fsdp",)) == 8
  assert c.init.hf == "no/such/folder"
  with pytest.raises(UserError, match="no/such"):
    aot.resolve(c, "")


def test_differences_of_saved_arrays_are_named_by_dtype():
  """Compiled less declared: two dtypes apart, one as declared, one that nothing declared."""
  wanted = [
    saved_tensors.SavedTensor("mlp", "bf16", (2, 4), 3, 3 * 2**20),
    saved_tensors.SavedTensor("mlp", "f8e4m3fn", (2, 4), 3, 2**20),
    saved_tensors.SavedTensor("attn", "f8e4m3fn", (4, 4), 1, 2**20),
  ]
  arrays = {"bf16[3,2,4] x 1": 3 * 2**20, "f32[3,4] x 2": 2**19, "f8e4m3fn[3,2,4] x 1": 2**20}
  text = (
    "compiled - declared: f32 +0.5 MiB of f32[3,4] x 2; f8e4m3fn -1.0 MiB of f8e4m3fn[3,2,4] x 1"
  )
  assert memory._differences(arrays, wanted) == text
  assert memory._differences({}, wanted[:1]) == "compiled - declared: bf16 -3.0 MiB of none"
  assert memory._differences({"bf16[3,2,4] x 1": 3 * 2**20}, wanted[:1]) == ""
