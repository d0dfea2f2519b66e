"""--job=rl with a reward head: it learns a rule, ranks held-out pairs, and rewards completions."""

import contextlib
import json
import random

import debug_runs
import harness
import jax
import numpy as np
import numpy_model
import pytest
import safetensors.numpy

from fp8jax import params as params_lib
from fp8jax.data.config import DataConfig
from fp8jax.data.tokenize import Tokenizer
from fp8jax.export import padding, write
from fp8jax.generation.completion import Completion
from fp8jax.jobs import diagnose
from fp8jax.models import heads, lora
from fp8jax.models.hf import config as hf_config
from fp8jax.models.hf import weights as hf_weights
from fp8jax.rl import pairs, ranking, reward_model, rollout
from fp8jax.rl.pairs import Pair
from fp8jax.run import checkpoint
from fp8jax.step import train_step

CHANGES = {
  "model.reward_head": True, "rl.loss": "reward", "seq_len": 16, "global_batch": 16,
  "eval.batch": 16, "steps": 20, "eval.every": 0, "log.every": 1, "log.tensor_stats_every": 0,
}  # fmt: skip


def write_pairs(path, count, seed):
  """The longer run of sevens is preferred."""
  draw = random.Random(seed)
  rows = [(draw.choice("abcdefgh"), *sorted(draw.sample(range(1, 7), 2))) for _ in range(count)]
  text = [
    json.dumps({"prompt": f"{c}=", "chosen": "7" * long, "rejected": "7" * short})
    for c, short, long in rows
  ]
  path.write_text("\n".join(text) + "\n")
  return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("pairs")
  return {
    "rl.pairs": write_pairs(folder / "train.jsonl", 128, 1),
    "rl.eval_pairs": write_pairs(folder / "heldout.jsonl", 40, 2),
  }


def config(files, arm="", **changes):
  return debug_runs.config(arm, **CHANGES | files | changes)


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  code, out, err = debug_runs.run_job("rl", config(files), workdir)
  assert code == 0, err
  return workdir, out


# --- pairs as batches ----------------------------------------------------------------------------


def test_pairs_are_laid_out_as_written_by_hand():
  batch = ranking.laid_out([Pair((5,), (6, 7), ()), Pair((8, 9), (), (3, 4))], 4, 6)
  assert batch["tokens_BL"].tolist() == [
    [5, 6, 7, 0], [5, 0, 0, 0], [8, 9, 0, 0], [8, 9, 3, 4], [0] * 4, [0] * 4,
  ]  # fmt: skip
  assert batch["positions_BL"][3].tolist() == [0, 1, 2, 3]
  assert batch["segments_BL"].sum(1).tolist() == [3, 1, 2, 4, 0, 0]
  ends = np.zeros((6, 4))
  ends[[0, 1, 2, 3], [2, 0, 1, 3]] = 0.5
  np.testing.assert_array_equal(batch["weights_BL"], ends)


def test_a_text_whose_end_is_no_input_of_seq_len_is_refused_by_line():
  data = DataConfig({}, Tokenizer("bytes"), seq_len=4)
  encode = pairs.Encoder(data, lambda: None, is_scored=True)
  row = {"prompt": "a", "chosen": "77", "rejected": "7"}
  assert encode(row, "there") == Pair((97,), (55, 55, 256), (55, 256))
  with pytest.raises(ValueError, match="line 3: chosen with .* 5 tokens, .* at most seq_len = 4"):
    encode(row | {"chosen": "777"}, "line 3")


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"model.reward_head": None}, "rl.loss='reward' trains a reward head: set model.reward_head"),
    ({"rl.pairs": ""}, "rl.pairs='' names no pairs"),
    ({"global_batch": 6, "grad_accum_steps": 2}, "grad_accum_steps=3 must be even"),
    ({"rl.eval_pairs": ""}, "a reward head has no loss of text; name held-out pairs"),
    ({"precision.rules": ((".*", "block_128"),)}, "give the reward head recipe 'block_128'"),
    ({"rl.loss": "grpo"}, "rl.loss='grpo' with a reward head, which draws no text"),
    ({"model.unit_scaling": "loss"}, "model.reward_head=True with model.unit_scaling='loss'"),
    ({"eval.tokens": 0}, "rl.eval_pairs=.* with eval.tokens=0, which turns evaluations off"),
    ({"rl.beta": 0.7}, "rl.beta=0.7 is not read with rl.loss='reward'; leave it out"),
    ({"rl.temperature": 0.7}, "rl.temperature=0.7 is not read with rl.loss='reward'; leave it"),
    ({"rl.samples": 4}, "rl.samples=4 is not read with rl.loss='reward'; leave it out"),
    ({"rl.kl": 0.3}, "rl.kl=0.3 is not read with rl.loss='reward'; leave it out"),
    ({"rl.reference": "w"}, "rl.reference='w' is not read with rl.loss='reward'; leave it out"),
    ({"rl.tasks": "sums"}, "rl.tasks='sums' is not read with rl.loss='reward'; leave it out"),
    ({"eval.tasks": "q.jsonl"}, "eval.tasks='q.jsonl' with rl.loss='reward': a reward head"),
  ],
)  # fmt: skip
def test_settings_that_cannot_train_a_reward_head_are_refused(
  files, changes, said, tmp_path, monkeypatch
):
  (tmp_path / "q.jsonl").write_text(json.dumps({"question": "a=", "answer": "7"}) + "\n")
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=said):
    debug_runs.spec(config(files, **changes), "rl")


def test_a_pass_that_cannot_be_repeated_names_what_the_run_left(files, tmp_path):
  (tmp_path / "nonfinite").mkdir()
  (tmp_path / "nonfinite" / "batch_0.npz").touch()
  with pytest.raises(ValueError, match=r"nonfinite/report\.json has every site"):
    diagnose.run(debug_runs.spec(config(files), "diagnose"), str(tmp_path))


# --- a run ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reward_head_has_the_losses_of_its_weights_however_a_step_makes_them(files, tmp_path):
  """Quantized once or by each product; layers computed again or saved."""
  changes = {"steps": 3, "grad_accum_steps": 2, "kernels.matmul": "reference"}
  found = []
  for n, (form, remat) in enumerate((("per_step", "full"), ("per_product", "full"),
                                     ("per_product", "none"))):  # fmt: skip
    how = {"memory.weight_operands": form, "memory.remat_policy": remat}
    code, _, err = debug_runs.run_job("rl", config(files, **changes | how), tmp_path / str(n))
    assert code == 0, err
    found.append([row["loss"] for row in debug_runs.rows(tmp_path / str(n)) if "loss" in row])
  assert len(set(found[0])) == 3
  np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-6)


@pytest.mark.slow
def test_a_reward_head_ranks_held_out_pairs_above_chance(trained):
  workdir, out = trained
  rows = debug_runs.rows(workdir)
  losses = [row["loss"] for row in rows if "loss" in row]
  assert len(losses) == 20 and np.mean(losses[-5:]) < 0.3 < 0.6 < losses[0]
  steps = [row for row in rows if "rl/accuracy" in row]
  assert len(steps) == 20
  # The margin that a loss of log(1 + exp(-margin)) has at least.
  assert all(row["loss"] >= np.log1p(np.exp(-row["rl/margin"])) - 1e-6 for row in steps)
  assert steps[-1]["rl/accuracy"] >= 7 / 8 and steps[-1]["rl/margin"] > 1
  evaluations = debug_runs.read_json(workdir / "summary.json")["evaluations"]
  first, last = (evaluations[step]["pairs"]["block_128"] for step in ("0", "20"))
  assert last["tokens"] == 40 and last["loss"] < first["loss"]
  # Wilson 1927, by hand, at 1.96.
  p, n, z = last["accuracy"], 40, 1.959964
  half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
  assert last["low"] == pytest.approx((p + z * z / (2 * n)) / (1 + z * z / n) - half, rel=1e-5)
  assert last["low"] > 0.5 and last["low"] > first["high"]
  by_step = {row["step"]: row for row in rows if "heldout/pairs/block_128/accuracy" in row}
  assert by_step[20]["heldout/pairs/block_128/accuracy"] == p
  assert f"step 20  of 40 held-out pairs: block_128 ranked right {p:.4f} [{last['low']:.4f}" in out


@pytest.fixture(scope="module")
def folder(files, trained, tmp_path_factory):
  target = tmp_path_factory.mktemp("export") / "folder"
  text = target.parent / "text.txt"
  text.write_text("a=777 " * 40)
  changes = {"export.gate_text": str(text), "export.gate_tokens": 64}
  code, _, err = debug_runs.run_job("export", config(files, **changes), trained[0], out=str(target))
  assert code == 0, err
  return target


def scores_by_hand(folder, texts):
  """float64, of the folder's own weights."""
  cfg = hf_config.read_config(str(folder))
  weights, _ = hf_weights.load_params(str(folder), cfg)
  made = []
  for text in texts:
    batch = {"tokens_BL": np.array([text]), "positions_BL": np.arange(len(text))[None]}
    made.append(numpy_model.logits(cfg, weights, batch)[0, -1, 0])
  return np.array(made)


@pytest.mark.slow
def test_the_exported_folder_scores_texts_of_any_length_in_any_number(files, folder):
  written = debug_runs.read_json(folder / "config.json")
  assert written["architectures"] == ["LlamaForSequenceClassification"]
  assert (written["pad_token_id"], written["dtype"]) == (257, "bfloat16")
  assert "pipeline_tag: text-classification" in (folder / "README.md").read_text()
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  assert tensors["score.weight"].shape == (1, 192) and "lm_head.weight" not in tensors

  c = config(files, **{"precision.compute_dtype": "float32"})
  judge = reward_model.RewardModel(str(folder), debug_runs.spec(c, "rl"))
  texts = [[*b"a=", *b"7" * n, 256] for n in (*range(1, 14), *range(1, 10))]
  assert len(texts) > 16 and max(map(len, texts)) == 16
  want = scores_by_hand(folder, texts)
  assert np.ptp(want) > 1
  np.testing.assert_allclose(judge.scores(texts), want, atol=1e-4)
  assert judge.scores([]) == []

  judge._params = {**judge._params, "head": judge._params["head"] * np.nan}
  question = rollout.Question(
    rollout.Task("sums", (), print, "p"), rollout.Item("q7", "", ""), (1,)
  )
  with pytest.raises(ValueError, match="scores sums, q7 with nan for the output 'seven'"):
    judge([(question, Completion((2, 3), "seven", "eos"))])


@pytest.mark.slow
def test_completions_are_rewarded_with_their_scores(files, folder, tmp_path):
  (tmp_path / "q.jsonl").write_text(
    "\n".join(json.dumps({"question": f"{c}=", "answer": "7"}) for c in "abcd") + "\n"
  )
  c = config(files, **{
    "model.reward_head": None, "rl.loss": "dr_grpo", "rl.tasks": str(tmp_path / "q.jsonl"),
    "rl.reward_model": str(folder), "rl.prompts": 4, "rl.samples": 8, "rl.max_new_tokens": 6,
    "rl.updates_per_rollout": 2, "rl.pairs": "", "rl.eval_pairs": "",
    "generate.max_length": 16, "generate.slots": 8, "eval.tokens": 0, "steps": 1,
    "precision.compute_dtype": "float32", "optim.warmup_steps": 0, "optim.decay_steps": 0,
  })  # fmt: skip
  code, _, err = debug_runs.run_job("rl", c, tmp_path / "run")
  assert code == 0, err
  with np.load(next((tmp_path / "run" / "rollouts").glob("*.npz"))) as stored:
    batch = {k.partition("/")[2]: stored[k] for k in stored.files if k.startswith("0/")}
  ends = [int(np.flatnonzero(row)[-1]) for row in batch["weights_BL"]]
  rows = zip(batch["tokens_BL"], batch["targets_BL"], ends, strict=True)
  rewards = scores_by_hand(folder, [[*t[: end + 1], targets[end]] for t, targets, end in rows])
  rewards = rewards.reshape(2, 8)
  got = np.array([row[end] for row, end in zip(batch["advantages_BL"], ends)]).reshape(2, 8)
  np.testing.assert_allclose(got, rewards - rewards.mean(1, keepdims=True), atol=1e-4)
  assert np.ptp(got) > 1e-2


@pytest.mark.slow
def test_adapters_and_eight_devices_train_the_same_head(files, tmp_path):
  """Under adapters the head trains and the base does not; D, H and F are split by the mesh."""
  made, changes = {}, {}
  for name, devices, mesh in (("one", 1, (1, 1, 1)), ("eight", 8, (2, 2, 2))):
    changes = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True))
    changes |= {"model.lora.rank": 4, "model.lora.base": "bf16", "steps": 3}
    c = config(files, "bf16", **changes, **{"precision.compute_dtype": "float32"})
    code, _, err = debug_runs.run_job("rl", c, tmp_path / name, devices)
    assert code == 0, err
    made[name] = [r for r in debug_runs.rows(tmp_path / name) if "loss" in r]
  for a, b in zip(made["one"], made["eight"], strict=True):
    for key in ("loss", "grad_norm", "rl/margin"):
      assert b[key] == pytest.approx(a[key], rel=1e-4), key
    assert a["rl/accuracy"] == b["rl/accuracy"]
  one = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 1}
  spec = debug_runs.spec(config(files, "bf16", **changes | one), "rl")
  begun = params_lib.flatten(train_step.make_state(spec).params)
  with contextlib.closing(checkpoint.Checkpoints(str(tmp_path / "one"))) as saved:
    ended = params_lib.flatten(saved.restore_params(3, train_step.abstract_params(spec)))
  sums = [{path: params_lib.digest(x) for path, x in of.items()} for of in (begun, ended)]
  moved = {path for path in begun if sums[0][path] != sums[1][path]}
  assert moved == {"head", *(path for path in begun if lora.is_adapter(path))}


@pytest.mark.slow
def test_a_reward_head_starts_on_the_weights_of_a_language_model(files, tmp_path):
  """Of another run, whose head of logits is the embedding, and of its folder."""
  short = {"steps": 1, "eval.tokens": 0, "optim.warmup_steps": 0, "optim.decay_steps": 0}
  plain = debug_runs.config(**short)
  assert debug_runs.run_job("train", plain, tmp_path / "lm")[0] == 0
  (tmp_path / "text.txt").write_text("a=777 " * 400)
  plain.export.gate_text, plain.export.dtype = str(tmp_path / "text.txt"), "float32"
  code, _, err = debug_runs.run_job("export", plain, tmp_path / "lm", out=str(tmp_path / "hf"))
  assert code == 0, err
  begun = hf_weights.load_params(str(tmp_path / "hf"), hf_config.read_config(tmp_path / "hf"))[0]
  for name, start in (
    ("workdir", {"init.workdir": str(tmp_path / "lm"), "init.weights_only": True}),
    ("folder", {"init.hf": str(tmp_path / "hf"), "model.preset": "hf", "data.tokenizer": "bytes"}),
  ):
    c = config(files, **start, **short, **{"optim.peak_lr": 0.0, "optim.min_lr": 0.0})
    code, _, err = debug_runs.run_job("rl", c, tmp_path / name)
    assert code == 0, err
    spec = debug_runs.spec(c, "rl")
    ended = debug_runs.saved_params(tmp_path / name, 1, spec)
    for path, value in params_lib.flatten(begun).items():
      np.testing.assert_array_equal(ended[path], value, path)
    assert ended.keys() - params_lib.flatten(begun).keys() == {"head"}
    fresh = params_lib.init(jax.random.key(spec.seed), {"head": heads.declared(spec.model)}, {
      "D": 192, "C": 1,
    })  # fmt: skip
    np.testing.assert_array_equal(ended["head"], fresh["head"])


# --- folders -------------------------------------------------------------------------------------


def test_a_folder_that_gives_no_rewards_is_refused_by_name(files, tmp_path):
  golden = harness.GOLDEN / "hf" / "qwen2_tied"
  head = np.ones((1, 32), np.float32)
  harness.folder_of_scores("qwen2_tied", tmp_path / "scores", head)
  spec = debug_runs.spec(config(files, **{"generate.max_length": 17}), "rl")
  (text,) = reward_model.problems(str(golden), spec)
  assert f"rl.reward_model={str(golden)!r} has no reward head" in text
  beyond, length = reward_model.problems(str(tmp_path / "scores"), spec)
  assert "ids up to 256, the model has model.vocab_size=96" in beyond
  assert "generate.max_length=17 must be at most seq_len=16, and that at most" in length
  (tmp_path / "scores" / "tokenizer.json").write_text("{}")
  assert "has another tokenizer than data.tokenizer='bytes'" in "".join(
    reward_model.problems(str(tmp_path / "scores"), spec)
  )
  with pytest.raises(ValueError, match="no_such/config.json"):
    changes = {"rl.loss": "dapo", "rl.pairs": "", "model.reward_head": None,
               "rl.reward_model": "no_such"}  # fmt: skip
    debug_runs.spec(config(files, **changes), "rl")


@pytest.mark.parametrize(
  ("job", "changes", "said"),
  [
    ("evaluate", {}, "gives scores and no logits: --job=rl with rl.loss='reward'"),
    ("train", {}, "gives scores and no logits"),
    ("export", {"export.format": "peft", "model.lora.rank": 4}, "the reward head belongs to them"),
    ("export", {"weights.hf": str(harness.GOLDEN / "hf" / "llama")}, "which has none"),
  ],
)  # fmt: skip
def test_jobs_without_use_for_scores_refuse_a_reward_head(files, job, changes, said):
  with pytest.raises(ValueError, match=said):
    debug_runs.spec(config(files, **changes), job)


@pytest.mark.parametrize(
  ("base", "vocab_size", "pad"),
  [
    (None, 512, 257),  # bytes end texts with 256
    ({"pad_token_id": 3, "eos_token_id": [5, 6]}, 512, 3),
    ({"pad_token_id": 5, "bos_token_id": 4, "eos_token_id": [5, 6]}, 512, 4),
    ({"pad_token_id": 256, "bos_token_id": 5, "eos_token_id": 5}, 512, 257),
    ({"pad_token_id": 256, "bos_token_id": 5, "eos_token_id": 5}, 257, None),
  ],
)
def test_padding_ends_no_text(base, vocab_size, pad):
  """transformers scores the last token before it."""
  made = lambda: padding.with_token(base, "", Tokenizer("bytes"), vocab_size)  # noqa: E731
  if pad is None:
    with pytest.raises(ValueError, match="no token to fill texts up with but their ends"):
      made()
  else:
    assert made() == (base or {"bos_token_id": None, "eos_token_id": None}) | {"pad_token_id": pad}


def test_a_tokenizer_fills_up_with_the_token_of_the_config(repository):
  """SmolLM2's documents end with token 0, its turns with 2: 1 is the first special one beside."""
  folder = str(repository / "assets" / "smollm2-135m")
  tokenizer = Tokenizer(folder, "<|endoftext|>")
  base = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
  assert padding.with_token(base, folder, tokenizer, 49152)["pad_token_id"] == 1
  (stated,) = padding.file(write.companions(folder), folder, tokenizer, 1).values()
  assert stated["pad_token"] == "<|im_start|>" and stated["eos_token"] == "<|im_end|>"
