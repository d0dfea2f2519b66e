"""The noise floor: which weights move and by how much; differences against float64 NumPy."""

import json

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.config import resolve
from fp8jax.errors import ConfigError, UserError
from fp8jax.evaluation import divergence
from fp8jax.jobs import noise, table
from fp8jax.models import transformer
from fp8jax.ops import scaling
from fp8jax.report import files, run_report
from fp8jax.run import restore


def test_norms_move_by_one_ulp_and_nothing_else(rng):
  weights = {
    "embed": jnp.ones((4, 3)),
    "norm": jnp.asarray([1.0, -2.0, 0.5]),
    "layers": {"mlp": {"norm": jnp.full((2, 3), 3.0), "up": jnp.ones((2, 3))}},
  }
  moved = divergence.nudged(weights)
  assert moved["embed"] is weights["embed"]
  assert moved["layers"]["mlp"]["up"] is weights["layers"]["mlp"]["up"]
  for new, old in ((moved["norm"], weights["norm"]),
                   (moved["layers"]["mlp"]["norm"], weights["layers"]["mlp"]["norm"])):  # fmt: skip
    assert np.array_equal(new, np.nextafter(np.asarray(old), np.float32(np.inf)))


def test_differences_are_those_of_float64_over_the_tokens_that_count(rng):
  shape = (2, 5, 7)
  source, made = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
  tokens = rng.integers(0, 7, shape[:2])
  counts = np.float32([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
  made[0, 2] = np.nan  # of a token that does not count

  def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))

  p, q = log_softmax(source), log_softmax(made)
  kl, change, same, nexts = 0.0, 0.0, 0, 0
  for b, i in zip(*np.nonzero(counts)):
    kl += (np.exp(p[b, i]) * (p[b, i] - q[b, i])).sum()
    same += p[b, i].argmax() == q[b, i].argmax()
    if i < 4:
      change += abs(p[b, i, tokens[b, i + 1]] - q[b, i, tokens[b, i + 1]])
      nexts += 1
  row = divergence.row(divergence.difference(*map(jnp.asarray, (source, made, tokens, counts))))
  total = counts.sum()
  expected = {"kl": kl / total, "dlogp": change / nexts, "top1": same / total, "tokens": total}
  assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shift", [0, 300])
def test_divergence_is_that_of_float64_whatever_the_offset(shift, rng):
  logits, others = (8 * rng.normal(size=(3, 4, 9)) for _ in range(2))
  p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits, others))
  made = divergence.kl(np.float32(logits + shift), np.float32(others - shift))
  np.testing.assert_allclose(made, (p * np.log(p / q)).sum(-1), rtol=1e-3)


@pytest.mark.parametrize("by, within", [(1e-6, 0.03), (1e-4, 1e-3), (1e-2, 1e-4), (1.0, 1e-5)])
def test_divergence_of_nearly_the_same_is_the_square_of_the_difference(by, within, rng):
  """Down to an ulp of the logits, where their logarithms are as wrong as they differ."""
  logits = np.float32(4 * rng.normal(size=(64, 1000)))
  others = np.float32(logits + by * rng.normal(size=logits.shape))
  p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in np.float64((logits, others)))
  made = np.float64(divergence.kl(logits, others))
  assert made.min() > 0
  np.testing.assert_allclose(made.mean(), (p * np.log(p / q)).sum(-1).mean(), rtol=within)


def test_job_measures_each_recipe_for_itself_and_the_report_shows_it(tmp_path, monkeypatch):
  """Weights larger by a tenth in place of an ulp: float64 of the logits of each recipe's config."""
  monkeypatch.setattr(divergence, "nudged", lambda params: jax.tree.map(lambda x: 1.1 * x, params))
  own = {"precision.rules": (("layers/.*/mlp/.*", "tensor_delayed"), (".*", "bf16"))}
  harness.train_on_text(tmp_path, **own, **{"eval.tokens": 0})
  spec = harness.text_spec(job="noise", **own, **{
    "noise.tokens": 100, "noise.recipes": ("bf16",), "eval.tokens": 0,
  })  # fmt: skip
  assert noise.run(spec, str(tmp_path))["weights"]["step"] == 6
  written = json.loads((tmp_path / "noise_floor.json").read_text())
  by_recipe = {row["recipe"]: row for row in written["rows"]}
  assert list(by_recipe) == ["tensor_delayed", "bf16"]
  assert [row["is_own"] for row in written["rows"]] == [True, False]
  loaded = restore.load_weights(spec, str(tmp_path))
  texts = divergence.batches(spec, divergence.Wanted(100, "", "noise."))
  for name, row in by_recipe.items():
    of = harness.text_spec(**own) if row["is_own"] else harness.text_spec(name)
    sites = of.sites()
    sites = scaling.with_states(sites, loaded.states) if scaling.states(sites) else sites
    run = jax.jit(lambda p, s, inputs, of=of: transformer.logits(p, s, inputs, of.model, of.run))
    kl, tokens = 0.0, 0.0
    for b in texts:
      sets = (loaded.params, divergence.nudged(loaded.params))
      p, q = (np.asarray(run(x, sites, b.inputs), np.float64) for x in sets)
      p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
      kl += ((np.exp(p) * (p - q)).sum(-1) * b.counts_BL).sum()
      tokens += b.counts_BL.sum()
    assert row["kl"] == pytest.approx(kl / tokens, rel=1e-3) and row["tokens"] == tokens >= 100
  assert len({f"{row['kl']:.2e}" for row in by_recipe.values()}) == 2
  sections = run_report.sections(files.read(str(tmp_path)))
  (section,) = [s for s in sections if s.title == "Noise floor"]
  ((columns, cells),) = section.tables
  assert "step 6" in section.note and columns[1] == "KL, nats per token"
  assert [row[:2] for row in cells] == [[r, f"{v['kl']:.1e}"] for r, v in by_recipe.items()]


def test_tiles_of_a_weight_gradient_split_no_noise():
  """64 tokens per device straddle its tile of 128; only forward passes are measured."""
  c = harness.text_config("bf16", **{"noise.recipes": ("block_128",), "mesh.data": 2})
  assert resolve.resolve(c, 2, harness.CPU, needs=table.JOBS["noise"].needs).num_devices == 2
  c.precision.rules = (("head", "bf16"), ("layers/.*", "block_128"))
  with pytest.raises(ConfigError, match="tokens of its weight gradient: 128 over 2"):
    resolve.resolve(c, 2, harness.CPU, needs=table.JOBS["train"].needs)


@pytest.mark.parametrize("changes, message", [
  ({"noise.tokens": 10**6}, "fewer than noise.tokens=1000000: name a text in noise.text, or set "),
  ({"noise.recipes": ("e4m3_static",)}, "'e4m3_static' has delayed or static scales, which belong"),
  ({"noise.recipes": ("block128",)}, "noise.recipes: unknown recipe 'block128'"),
  ({"noise.recipes": ("tensor_current",), "model.lora.rank": 4,
    "model.lora.base": "block_fp8"}, "noise.recipes: layers/attn/k has recipe 'tensor_current'"),
  ({"noise.text": "/none.txt"}, "noise.text='/none.txt'"),
  ({"noise.text": "bad.txt"}, "bad.txt, line 2: bad UTF-8 at byte 1; save the file as UTF-8"),
])  # fmt: skip
def test_recipes_without_scales_and_texts_that_are_too_short_are_refused(
  changes, message, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "bad.txt").write_bytes(b"text\nx\xff")
  with pytest.raises(UserError) as e:
    spec = harness.text_spec("block_128", job="noise", **changes)
    loaded = restore.Loaded(spec, {}, 0, {}, {}, {}, "")
    monkeypatch.setattr(noise, "load_trained", lambda *_: loaded)
    noise.run(spec, str(tmp_path))
  assert message in str(e.value)
