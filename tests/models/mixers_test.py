"""A mixer with aux, defined here and named in one row of a table: every job works on it.

Two experts, every token through both: y = x + p_0 * swiglu_0(norm(x)) + p_1 * swiglu_1(norm(x)),
p = softmax of a router in float32. The load-balancing loss is one sequence's at a time, as in
DeepSeek-V3 (arXiv:2412.19437 §2.1.2), so that it adds up over microbatches:
COEFFICIENT * 2 * sum over experts of mean(is chosen) * mean(p), per token of the sequence.
"""

import functools
import json

import debug_runs
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from configs import base
from fp8jax.jobs import dispatch
from fp8jax.models import transformer
from fp8jax.models.mixer import Aux, GemmSite, Mixer
from fp8jax.ops.elementwise import rms_norm
from fp8jax.ops.swiglu_mlp import swiglu_mlp
from fp8jax.params import Param
from fp8jax.recipe import rules
from fp8jax.run import nonfinite
from fp8jax.step import train_step

COEFFICIENT = 0.5
EXPERTS = (0, 1)
SITES = tuple(
  site
  for e in EXPERTS
  for site in (
    GemmSite(f"gate_{e}", "BLD,DF->BLF", "norm"),
    GemmSite(f"up_{e}", "BLD,DF->BLF", "norm"),
    GemmSite(f"down_{e}", "BLF,FD->BLD", f"gated_{e}"),
  )
)


def _params(cfg):
  tree = {"norm": Param("D", init="ones", decay=False)}
  for e in EXPERTS:
    tree[f"router_{e}"] = Param("D", std=0.5)
    tree |= {f"{n}_{e}": Param("DF", std=cfg.init_std, inputs=1) for n in ("gate", "up")}
    tree[f"down_{e}"] = Param("FD", std=cfg.out_std, inputs=1)
  return tree


def _apply(p, s, x_BLD, context, cfg, run):
  h_BLD = rms_norm(x_BLD, p["norm"], cfg.norm_eps)
  wide = h_BLD.astype(jnp.float32)
  probs = jax.nn.softmax(jnp.stack([(wide * p[f"router_{e}"]).sum(-1) for e in EXPERTS]), axis=0)
  for e in EXPERTS:
    eqns, names = zip(*((site.eqn, site.name) for site in SITES[3 * e : 3 * e + 3]))
    y = swiglu_mlp(eqns, h_BLD, [p[n] for n in names], [s[n] for n in names], "linear")
    y = checkpoint_name(y, "linear")
    x_BLD += (probs[e][..., None] * y.astype(jnp.float32)).astype(x_BLD.dtype)
  weights = context.weights_BL
  tokens = jnp.maximum(weights.sum(-1), 1)
  is_first = (probs[0] > probs[1]).astype(jnp.float32)
  share = (weights * is_first).sum(-1) / tokens
  mean = (weights * probs[0]).sum(-1) / tokens
  balance = 2 * (share * mean + (1 - share) * (1 - mean))
  return x_BLD, Aux(
    {"load_balance": COEFFICIENT * (weights.sum(-1) * balance).sum()},
    {"first_expert": (weights * is_first).sum()},
  )


MOE = Mixer("moe", _params, SITES, _apply)


@pytest.fixture(autouse=True)
def tables(monkeypatch):
  monkeypatch.setitem(transformer.MIXERS, "moe_of_two", MOE)


MIXERS = {"model.mixers": ("attention_gqa", "moe_of_two"), "model.num_layers": 3}


def _runner(recipe="bf16", **changes):
  return harness.tiny_runner(recipe, **MIXERS, **changes)


@functools.cache
def _host():
  """A batch whose sequences have different numbers of tokens that count."""
  host = dict(harness.host_batches()[0])
  host["weights_BL"] = (np.arange(128) < 128 - 9 * np.arange(8)[:, None]).astype(np.float32)
  return host


def _oracle(params, cfg, host):
  """(loss, load-balancing loss, share of the first expert): of the definitions above, one sequence
  after the other, float32 and no part of the library but attention."""
  total = host["weights_BL"].sum()
  batch = {k: jnp.asarray(v) for k, v in host.items()}
  plain = harness.tiny_spec(harness.tiny_config("bf16", **MIXERS))
  sites = plain.sites()
  x_BLD = transformer.embed(params, sites, batch, cfg, plain.run)
  context = transformer.layer_context(batch, cfg, plain.run)
  balance, first = 0.0, 0.0
  for i in range(cfg.num_layers):
    p, s = jax.tree.map(lambda x, i=i: x[i], (params["layers"], sites["layers"][0]))
    attention = transformer.MIXERS["attention_gqa"].apply
    x_BLD, _ = attention(p["attn"], s["attn"], x_BLD, context, cfg, plain.run)
    p = p["moe"]
    h = x_BLD / jnp.sqrt(jnp.mean(x_BLD**2, -1, keepdims=True) + cfg.norm_eps) * p["norm"]
    logits = jnp.einsum("bld,ed->ble", h, jnp.stack([p["router_0"], p["router_1"]]))
    exp = jnp.exp(logits - logits.max(-1, keepdims=True))
    probs = exp / exp.sum(-1, keepdims=True)
    hidden = [jax.nn.silu(h @ p[f"gate_{e}"]) * (h @ p[f"up_{e}"]) for e in EXPERTS]
    x_BLD += sum(probs[..., e, None] * (hidden[e] @ p[f"down_{e}"]) for e in EXPERTS)
    for row, weights in enumerate(host["weights_BL"]):
      n = int(weights.sum())
      chosen = jax.nn.one_hot(jnp.argmax(probs[row, :n], -1), 2).mean(0)
      balance += COEFFICIENT * 2 * n * jnp.sum(chosen * probs[row, :n].mean(0))
      first += n * chosen[0]
  loss, _ = transformer.head_loss(x_BLD, params, sites, batch, cfg, plain.run)
  return (loss + balance) / total, (balance / total, first / total / cfg.num_layers)


LAYERWISE = {
  "optim.in_backward": True, "optim.grad_clip_norm": 0.0, "memory.remat_policy": "full",
  "optim.schedule": "constant", "optim.warmup_steps": 0,
}  # fmt: skip


@functools.cache
def _want():
  """(parameters, the oracle's values, its gradient)."""
  runner = _runner()
  params = jax.device_get(train_step.make_state(runner.spec).params)
  oracle = functools.partial(_oracle, cfg=runner.spec.model, host=_host())
  # Compiled whole: one by one, its operations are hundreds of programs.
  (want, (balance, first)), gradient = jax.jit(jax.value_and_grad(oracle, has_aux=True))(params)
  assert balance > 0.1 * COEFFICIENT and 0 < first < 1
  norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradient)))
  return params, [want, norm, balance, first], gradient


@pytest.mark.parametrize(
  "changes, tolerance",
  [
    pytest.param({"grad_accum_steps": 2}, 2e-5, id="microbatches"),
    pytest.param({"grad_accum_steps": 2, "memory.remat_policy": "full"}, 2e-5,
                 id="microbatches, layers recomputed", marks=pytest.mark.slow),
    pytest.param(LAYERWISE, 2e-5, id="layerwise", marks=pytest.mark.slow),
    pytest.param(
      {"memory.remat_policy": "full", "memory.save_layer_inputs": "bf16"}, 2e-2,
      id="compressed inputs", marks=pytest.mark.slow,
    ),
  ],
)  # fmt: skip
def test_aux_adds_up_exactly_over_layers_and_microbatches(changes, tolerance):
  params, want, _ = _want()
  runner = _runner(**changes)
  _, values = runner.step(
    train_step.make_state(runner.spec, jax.tree.map(jnp.asarray, params)), _host()
  )
  got = [values[k] for k in ("loss", "grad_norm", "aux/load_balance", "aux/first_expert")]
  np.testing.assert_allclose(got, want, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_aux_losses_are_differentiated(remat):
  params, _, gradient = _want()
  runner = _runner(**{"grad_accum_steps": 2, "memory.remat_policy": remat})
  found = jax.jit(functools.partial(train_step.gradients, runner.spec))(
    params, runner.sites, runner.spread.place(_host())
  )[1]
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(gradient)):
    np.testing.assert_allclose(
      a, b, atol=2e-5 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path)
    )  # fmt: skip


def test_the_first_bad_site_is_told_in_the_mixer_s_own_order():
  cfg = _runner().spec.model
  paths = [p for p in transformer.gemm_sites(cfg) if p != "head"]
  seen = {rules.layer_name(p, i): np.ones((3, 1)) for p in paths for i in range(3)}
  seen["head"] = np.ones((3, 1))
  for name in ("layers/1/moe/up_0", "layers/1/moe/gate_1", "layers/1/moe/down_0"):
    seen[name][0] = np.nan
  assert nonfinite.first_bad(cfg, seen, {}, 1.0).startswith("layers/1/moe/up_0: its input")


def test_declared_gemms_are_those_of_the_parameters():
  """Letters of every equation are those of its weight, in the order of the mixers."""
  for names in (harness.TINY.mixers, MIXERS["model.mixers"]):
    for name in names:
      mixer = transformer.MIXERS[name]
      params = mixer.params(harness.TINY)
      assert [s.name for s in mixer.sites] == [n for n, p in params.items() if p.inputs is not None]
      for site in mixer.sites:
        x, w = site.eqn.partition("->")[0].split(",")
        contracted, produced = params[site.name].gemm_letters
        assert w == contracted + produced and x.endswith(contracted) and not set(produced) & set(x)


CHANGES = {
  **MIXERS, "steps": 3, "global_batch": 2, "seq_len": 128, "eval.tokens": 256, "eval.batch": 2,
  "checkpoint.every": 2, "log.every": 1, "optim.warmup_steps": 1,
  "optim.decay_steps": 1, "memory.remat_policy": "linears", "mesh.data": 1, "eval.every": 0,
  "log.tensor_stats_every": 3, "eval.precisions": ("recipe",),
}  # fmt: skip


def _job(job, workdir, capsys, code=0, **changes):
  """What a job prints on stdout, or on stderr where it fails."""
  c = harness.tiny_config("tensor_delayed", **CHANGES | changes)
  assert dispatch.run(job, c, base.get_config("tensor_delayed"), "base", str(workdir)) == code
  out = capsys.readouterr()
  return out.err if code else out.out


@pytest.mark.slow  # compiles seven programs
def test_every_job_works_on_a_new_mixer(tmp_path, capsys, monkeypatch):
  """Train, resume, evaluate, memory, diagnose and calibrate; export says why it cannot."""
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  one = jax.devices()[:1]
  monkeypatch.setattr(jax, "devices", lambda *_: one)
  _job("train", tmp_path, capsys, steps=2)
  # Resumes; the step is proven again.
  out = _job("train", tmp_path, capsys, **{"checkpoint.accept_changes": ("steps",)})
  assert "layers/moe/down_1" in out
  lines = debug_runs.rows(tmp_path)
  steps = {line["step"]: line for line in lines if "aux/load_balance" in line}
  assert set(steps) == {1, 2, 3}
  evaluated = json.loads(_job("evaluate", tmp_path, capsys))
  assert evaluated
  _job("calibrate", tmp_path, capsys)
  (tmp_path / "nonfinite").mkdir()
  np.savez(tmp_path / "nonfinite" / "batch_0.npz", **{k: v[:2] for k, v in _host().items()})
  (tmp_path / "nonfinite" / "report.json").write_text('{"step": 3}')
  diagnosed = json.loads(_job("diagnose", tmp_path, capsys))
  assert diagnosed["first_bad_site"].startswith("none") and np.isfinite(diagnosed["loss"])
  assert len(diagnosed["amax_x_w_g"]) == 3 * (4 + 6) + 1
  memory = json.loads(_job("memory", tmp_path, capsys))
  kinds = {row["kind"].strip(): row for row in memory["rows"]}
  assert kinds["saved for backward: moe, f32"]["declared"] > 0
  assert memory["saved_compiled"] == pytest.approx(memory["saved_declared"], rel=0.02)
  error = _job("export", tmp_path, capsys, code=1)
  assert "moe_of_two" in error and "Hugging Face" in error
