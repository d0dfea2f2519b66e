"""The adapter for lm_eval against lm_eval's own Hugging Face backend (lm_eval_scores.json)."""

import importlib
import json
import os
import pathlib
import runpy
import sys
import types

import pytest

from fp8jax.errors import UserError
from fp8jax.generation.settings import Sampling

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


@pytest.fixture
def adapter(monkeypatch):
  """The adapter with a stand-in for lm_eval: its names alone, windows of two tokens."""
  names = ("", ".api", ".api.model", ".api.registry", ".utils")
  package = {name: types.ModuleType(f"lm_eval{name}") for name in names}
  package[".api.model"].TemplateLM = object
  package[".api.registry"].register_model = lambda name: lambda cls: cls
  package[".utils"].get_rolling_token_windows = lambda tokens, prefix, most, of: [
    ([prefix], tokens[:2]),
    (tokens[:2], tokens[2:4]),
  ]
  package[".utils"].make_disjoint_window = lambda pair: (pair[0][-1:], pair[1])
  for name, module in package.items():
    monkeypatch.setitem(sys.modules, f"lm_eval{name}", module)
  monkeypatch.delitem(sys.modules, "fp8jax.evaluation.lm_eval", raising=False)
  module = importlib.import_module("fp8jax.evaluation.lm_eval")
  yield module
  sys.modules.pop("fp8jax.evaluation.lm_eval", None)


class _Letters:
  """A generator of letters: it scores by lengths and completes by what it was asked for."""

  max_length, folder, seen = 6, "", ()

  def __init__(self, path):
    self.tokenizer = types.SimpleNamespace(
      path=str(path), eos_id=2, token_id={"<s>": 1}.get,
      encode_prompt=lambda text, prefix: ((1,) if prefix else ()) + tuple(map(ord, text)),
    )  # fmt: skip

  def score(self, sequences):
    return [(-100.0 * sum(context) - sum(rest), not context) for context, rest in sequences]

  def generate(self, prompts, sampling):
    self.seen = (*self.seen, (prompts, sampling))
    return [
      [types.SimpleNamespace(text=f"{''.join(map(chr, p))}{sampling.top_k}")] for p in prompts
    ]

  def not_finite(self, prompts, made):
    return "not a number" if any(0 in p for p in prompts) else ""


def _asked(text, **how):
  return types.SimpleNamespace(args=(text, how))


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>"}, None], ids=str)
def test_requests_are_cut_batched_and_put_back_in_their_order(adapter, tmp_path, bos):
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
  letters = _Letters(tmp_path)
  model = adapter.FP8JaxLM(generator=letters)
  assert (model.eot_token_id, model.prefix_token_id, model.max_length) == (2, 1 if bos else 2, 6)
  assert model.tok_encode("<s>") == ([] if bos else [1]) + list(b"<s>")
  assert model.tok_encode("ab") == [1, 97, 98] and model.tok_encode("ab", False) == [97, 98]
  long = [*range(1, 10)]
  requests = [((), long, [3, 4]), ((), [7], long[:8]), ((), long, [8] * 6)]
  # Six tokens are read: of the continuation all but the last. What comes last is kept.
  scores = [score for score, _ in model._loglikelihood_tokens(requests)]
  assert scores == [-100 * (5 + 6 + 7 + 8 + 9) - 7, -700 - (3 + 4 + 5 + 6 + 7 + 8), -900 - 48]
  first = -100 * model.prefix_token_id - (1 + 97)
  rolling = model.loglikelihood_rolling([_asked("a"), _asked("abc")])
  assert rolling == [first - 9700, first - 9700 - (98 + 99)]
  asked = [_asked("abcdefgh", top_k=3, max_gen_toks=2), _asked("xy", max_gen_toks=5),
           _asked("ij", top_k=3, max_gen_toks=2)]  # fmt: skip
  assert model.generate_until(asked) == ["efgh3", "y0", "\x01ij3"]
  assert [len(prompts) for prompts, _ in letters.seen] == [2, 1]
  with pytest.raises(UserError, match="max_gen_toks=6 leaves no room in a context of 6; lower it"):
    model.generate_until([_asked("a", max_gen_toks=6)])
  with pytest.raises(UserError, match="not a number"):
    model.generate_until([_asked("\0", max_gen_toks=1)])
  for wrong in ({}, {"generator": letters, "pretrained": "x"}):
    with pytest.raises(UserError, match="name either `pretrained`"):
      adapter.FP8JaxLM(**wrong)


@pytest.mark.parametrize(
  "asked, changed",
  [
    ({}, {}),
    ({"until": "\n", "max_gen_toks": 7}, {"stop": ("\n",), "max_new_tokens": 7}),
    ({"until": ["a", "b"], "temperature": 0.5}, {"stop": ("a", "b"), "temperature": 0.5}),
    ({"do_sample": True}, {"temperature": 1.0}),
    ({"do_sample": False, "temperature": 0.5}, {}),
    ({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 4, "seed": 5},
     {"temperature": 0.7, "top_p": 0.9, "top_k": 4, "seed": 5}),
  ],
  ids=str,
)  # fmt: skip
def test_settings_of_a_task_are_lm_evals(adapter, asked, changed):
  """Greedy unless sampling is asked for; 256 tokens."""
  whole = dict(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=256, stop=(), seed=0)
  assert adapter._sampling(asked) == Sampling(**whole | changed)
  with pytest.raises(UserError, match="generation_kwargs num_beams, x of a task are not supported"):
    adapter._sampling({**asked, "x": 1, "num_beams": 2})


def test_its_command_is_lm_evals_and_an_import_runs_nothing(adapter, monkeypatch):
  run, calls = runpy.run_module, []
  monkeypatch.setattr(runpy, "run_module", lambda *of, **how: calls.append((of, how)))
  importlib.reload(adapter)
  assert not calls
  sys.modules.pop(adapter.__name__)
  run(adapter.__name__, run_name="__main__")
  assert calls == [(("lm_eval",), {"run_name": "__main__"})]
