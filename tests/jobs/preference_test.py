"""--job=rl with rl.loss='dpo', from a file and from rollouts, and 'rejection': what a step learns
from, resuming to the bit, and what is refused."""

import json
import re

import harness
import numpy as np
import pytest

from fp8jax.data import sources
from fp8jax.errors import ConfigError, UserError
from fp8jax.jobs import generator, rl
from fp8jax.run import preemption

REWARD = "def third(item, output):\n  return len(output.encode()) % 3\n"
PAIRS = {
  "rl.loss": "dpo", "global_batch": 8, "grad_accum_steps": 2, "seq_len": 32, "optim.peak_lr": 0.003,
  "steps": 4, "eval.tokens": 0, "log.tensor_stats_every": 0, "rl.beta": 0.5,
  "optim.warmup_steps": 1,
}  # fmt: skip
DRAWN = {
  "rl.max_new_tokens": 5, "rl.prompts": 4, "rl.samples": 3, "rl.updates_per_rollout": 2,
  "seq_len": 32, "generate.max_length": 32, "generate.slots": 8, "steps": 2, "eval.tokens": 0,
  "log.tensor_stats_every": 0, "optim.peak_lr": 0.003,
}  # fmt: skip


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def file_of_pairs(path, count=12):
  texts = ((f"say {n}:", f" {n}" * (1 + n % 3), " no" * (1 + n % 4)) for n in range(count))
  return write(path, [dict(zip(("prompt", "chosen", "rejected"), x, strict=True)) for x in texts])


def run(workdir, recipe="bf16", **changes):
  return rl.run(harness.text_spec(recipe, job="rl", **changes), str(workdir))


def rows(workdir):
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return {
    row["step"]: {k: v for k, v in row.items() if k.startswith(("loss", "rl/", "grad_norm"))}
    for row in lines if "loss" in row
  }  # fmt: skip


def parts(workdir):
  with np.load(workdir / "rollouts/000000.npz") as stored:
    return [
      {k[2:-3]: stored[k].astype(np.float64) for k in stored.files if k.startswith(f"{n}/")}
      for n in range(2)
    ]


def rewards_and_lengths(workdir):
  lines = (workdir / "rollouts/000000.jsonl").read_text().splitlines()
  texts = [json.loads(line)["completions"] for line in lines]
  return [[(c["reward"], c["tokens"]) for c in group] for group in texts]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "lora"), [("block_128", 0), ("bf16", 4)])
def test_pairs_of_a_file_are_learned_and_resumed_to_the_bit(tmp_path, recipe, lora, monkeypatch):
  harness.train_on_text(tmp_path / "before", "bf16", steps=3)
  changes = {
    **PAIRS, "rl.pairs": file_of_pairs(tmp_path / "p.jsonl"), "model.lora.rank": lora,
    "init.workdir": str(tmp_path / "before"), "model.lora.base": "float32",
    "init.weights_only": True,
  }  # fmt: skip
  monkeypatch.setattr(generator, "make", None)  # nothing is drawn
  run(tmp_path / "whole", recipe, **changes)
  found = rows(tmp_path / "whole")
  assert found[1]["loss"] == pytest.approx(np.log(2), abs=1e-6) and len(found) == 4
  assert abs(found[1]["rl/margin"]) < 1e-5 < abs(found[3]["rl/margin"])
  # The reference stays where the run began: the policy leaves it.
  assert found[4]["rl/margin"] > 0.01 and found[4]["rl/accuracy"] > 0.6
  assert found[4]["loss"] < found[1]["loss"]
  for row in found.values():
    assert row["rl/margin"] == pytest.approx(row["rl/chosen"] - row["rl/rejected"], abs=1e-6)
  for stop in (1, 2, 3, 4):
    with monkeypatch.context() as m:
      m.setattr(preemption.Interrupts, "requested", lambda _, step, stop=stop: step >= stop)
      run(tmp_path / "parts", recipe, **changes)
    if stop == 2 and not lora:
      moved = {**changes, "rl.pairs": file_of_pairs(tmp_path / "q.jsonl", 13)}
      with pytest.raises((ConfigError, UserError), match="data"):
        run(tmp_path / "parts", recipe, **moved)
  assert rows(tmp_path / "parts") == found
  spec = harness.text_spec(recipe, job="rl", **changes)
  harness.assert_trees_equal(
    *(harness.saved_state(tmp_path / name, spec, 4) for name in ("whole", "parts"))
  )


@pytest.fixture
def questions(tmp_path):
  (tmp_path / "rewards.py").write_text(REWARD)
  asked = [{"question": f"say {n}:", "answer": str(n), "verifier": "regex"} for n in range(9)]
  return {
    "rl.tasks": write(tmp_path / "learned.jsonl", asked),
    "rl.reward": f"{tmp_path}/rewards.py:third",
  }  # fmt: skip


@pytest.mark.slow
def test_pairs_of_rollouts_are_the_best_and_the_worst_of_a_group(tmp_path, questions):
  harness.train_on_text(tmp_path / "before", "bf16", steps=3)
  run(tmp_path / "w", **{**DRAWN, **questions, "rl.loss": "dpo", "global_batch": 4, "steps": 4,
      "init.workdir": str(tmp_path / "before"), "init.weights_only": True})  # fmt: skip
  found, groups = rows(tmp_path / "w"), rewards_and_lengths(tmp_path / "w")
  assert found[1]["loss"] == pytest.approx(np.log(2), abs=1e-6)
  assert 0 <= found[1]["rl/reward"] <= 2 and "old" not in parts(tmp_path / "w")[0]
  for n, part in enumerate(parts(tmp_path / "w")):
    drawn = (part["weights"] > 0).sum(1)
    for i, group in enumerate(groups[n::2]):
      best, worst = (f(group, key=lambda c: c[0])[1] for f in (max, min))
      assert drawn[2 * i : 2 * i + 2].tolist() == [best, worst]
      start = int((part["weights"][2 * i] > 0).argmax())
      np.testing.assert_array_equal(*part["tokens"][2 * i : 2 * i + 2, : start + 1])
    np.testing.assert_allclose(part["weights"].sum(1), 1 / 4, rtol=1e-6)
  assert found[4]["rl/margin"] != 0 == found[1]["rl/margin"]  # the reference is of the start


@pytest.mark.slow
def test_rejection_learns_the_best_and_keeps_them_as_conversations(tmp_path, questions):
  run(tmp_path / "w", **{**DRAWN, **questions, "rl.loss": "rejection", "global_batch": 6})
  found, groups = rows(tmp_path / "w"), rewards_and_lengths(tmp_path / "w")
  for n, part in enumerate(parts(tmp_path / "w")):
    right = [r == max(c[0] for c in g) > 0 for g in groups[n::2] for r, _ in g]
    assert ((part["weights"] > 0).any(1) == right).all() and any(right) and not all(right)
    np.testing.assert_allclose(part["weights"].sum(), 1, rtol=1e-6)
    loss = -(part["weights"] * part["old"])[part["weights"] > 0].sum()
    if not n:
      assert found[1]["loss"] == pytest.approx(loss, rel=1e-5)
  kept = {"kind": "jsonl", "path": str(tmp_path / "w/kept/*.jsonl"), "chat": "messages"}
  chats = sources.open_source({**kept, "field": "messages"})
  assert [m["role"] for m in chats[0]["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"grad_accum_steps": 4, "global_batch": 12}, "with 3 rows per microbatch, expected an even"),
    ({"rl.loss": "grpo"}, "rl.pairs='p.jsonl' with rl.loss='grpo', which draws"),
    ({"rl.tasks": "x.jsonl"}, "rl.pairs='p.jsonl' with rl.tasks='x.jsonl': a run learns from one"),
    ({"rl.beta": 0.0}, "rl.beta=0.0 must be positive"),
    ({"rl.kl": 0.1}, "rl.kl=0.1 with rl.loss='dpo', which has no such term"),
    *(({f"rl.{name}": value}, f"rl.{name}=.* is not read with rl.loss='dpo' and rl.pairs; leave")
      for name, value in (("rollout", "block_128"), ("reward", "r.py:f"), ("reward_model", "no"),
                          ("prompts", 3), ("updates_per_rollout", 2), ("overlong", 9))),
    ({"rl.clip_high": 0.3}, "rl.clip_high=0.3 is not read with rl.loss='dpo'; leave it out"),
    ({"rl.pairs": ""}, "names no question to learn from; .* or set rl.pairs"),
    ({}, "rl.loss='dpo' .*without a reference: weights are drawn at random"),
    ({**DRAWN, "rl.pairs": "", "rl.tasks": "x.jsonl", "global_batch": 6},
     r"global_batch=6 must be rl.prompts \* 2 / rl.updates_per_rollout = 4"),
  ],
)  # fmt: skip
def test_what_cannot_learn_is_refused_by_name(changes, message):
  with pytest.raises(ConfigError) as e:
    harness.text_spec("bf16", job="rl", **{**PAIRS, "rl.pairs": "p.jsonl", **changes})
  assert re.search(message, "\n".join(e.value.problems))


def test_gradients_are_of_the_loss_of_pairs(tmp_path):
  """Scales of a table of --job=calibrate are of text's."""
  losses = set()
  for changes in ({}, {"rl.beta": 0.25}):
    own = {**PAIRS, "rl.pairs": file_of_pairs(tmp_path / "p.jsonl"), **changes}
    own |= {"init.workdir": str(tmp_path), "init.weights_only": True}
    feed, _ = rl._of_pairs(harness.text_spec("bf16", job="rl", **own))
    losses.add(feed.loss)
  assert len(losses) == 2 and all(loss.startswith("rl.loss=dpo, ") for loss in losses)


def test_train_refuses_pairs():
  with pytest.raises(ConfigError, match="rl.pairs='p.jsonl' is read by --job=rl"):
    harness.text_spec("bf16", **{"rl.pairs": "p.jsonl"})
