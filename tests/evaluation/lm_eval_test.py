"""The adapter for lm_eval against lm_eval's own Hugging Face backend (lm_eval_scores.json)."""

import json
import os
import pathlib

import pytest

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SMOLLM2 = pathlib.Path(__file__).parents[2] / "assets" / "smollm2-135m"
TASKS = ["golden_choice", "golden_text", "golden_continue"]


@pytest.fixture
def manager(tmp_path, monkeypatch):
  """lm_eval's tasks of golden/lm_eval, with their data where they lie."""
  pytest.importorskip("lm_eval")
  import datasets
  from lm_eval.tasks import TaskManager

  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
  for path in (GOLDEN / "lm_eval").glob("*.yaml"):
    text = path.read_text().replace("DATA", str(GOLDEN / "lm_eval"))
    (tmp_path / path.name).write_text(text)
  return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scores_and_texts_are_those_of_lm_evals_hugging_face_backend(manager, monkeypatch):
  import lm_eval
  from lm_eval.api import registry

  from fp8jax.evaluation import lm_eval as adapter

  if not os.path.exists(SMOLLM2 / "model.safetensors"):
    pytest.skip("assets/smollm2-135m is not there")
  golden = json.loads((GOLDEN / "lm_eval_scores.json").read_text())
  assert registry.get_model("fp8jax") is adapter.FP8JaxLM
  found = lm_eval.simple_evaluate(
    model="fp8jax", model_args={"pretrained": str(SMOLLM2), "compute_dtype": "float32"},
    tasks=TASKS, task_manager=manager, log_samples=True, bootstrap_iters=0,
  )  # fmt: skip
  for task in TASKS:
    samples = sorted(found["samples"][task], key=lambda s: s["doc_id"])
    for sample, expected in zip(samples, golden["responses"][task], strict=True):
      for [mine], [theirs] in zip(sample["resps"], expected, strict=True):
        if task == "golden_choice":
          (logp, greedy), (their_logp, their_greedy) = mine, theirs
          assert logp == pytest.approx(their_logp, abs=2e-3) and greedy == their_greedy
        elif task == "golden_text":
          assert mine == pytest.approx(theirs, abs=1e-2)  # of 60 tokens
        else:
          assert mine == theirs
    for metric, value in golden["results"][task].items():
      assert found["results"][task][metric] == pytest.approx(value, rel=1e-4), (task, metric)
