"""Scaling states of layers' sites: carried to other recipes, replaced one by one."""

import dataclasses
import types

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.errors import UserError
from fp8jax.formats import E4M3
from fp8jax.jobs import policy_runner
from fp8jax.ops import scaling, site
from fp8jax.phases import decide
from fp8jax.quantization import amax_history
from fp8jax.quantization.amax_history import ScalingState
from fp8jax.recipe.gemm import Gemm, Recipe
from fp8jax.recipe.quant import Quant, Static
from fp8jax.run import restore
from fp8jax.step import train_step


def made(sites, offset):
  """States whose every number says its layer: offset + layer's number."""
  found = {}
  for name, one in site.flatten(sites).items():
    if one.scaling_state is not None:
      numbers = [offset + int(layer.split("/")[1]) for layer in one.layer_names]
      fill = [
        np.full(x.shape, 0.0) for x in (one.scaling_state.amax_3, one.scaling_state.history_3H)
      ]
      for x in fill:
        x.T[...] = numbers
      found[name] = ScalingState(*map(np.float32, fill))
  return found


def by_layer(sites, states):
  """{layer's site: (amax of x, length of the history)}."""
  return {
    layer: (float(states[name].amax_3[i, 0]), states[name].history_3H.shape[-1])
    for name, one in site.flatten(sites).items()
    if name in states
    for i, layer in enumerate(one.layer_names)
  }


def spec(*rules):
  return harness.text_spec(**{"precision.rules": (*rules, (".*", "bf16"))})


def test_sites_that_keep_their_recipe_keep_their_scales_and_a_margin_changes_none():
  down = "tensor_delayed(steps=4)"
  old = spec(("layers/.*/mlp/down", down)).sites()
  new = spec(
    ("layers/0/mlp/down", f"{down[:-1]}, margin=2)"),
    ("layers/1/mlp/down", "tensor_delayed(steps=8)"),
    ("layers/2/mlp/down", down), ("layers/1/mlp/up", "e4m3_static"),
  ).sites()  # fmt: skip
  states = scaling.carried(old, made(old, 100), new, made(new, 200))
  assert by_layer(new, states) == {
    "layers/0/mlp/down": (100, 4), "layers/1/mlp/down": (201, 8), "layers/2/mlp/down": (102, 4),
    "layers/1/mlp/up": (201, 1),
  }  # fmt: skip
  shapes = {
    name: s.scaling_state.history_3H.shape
    for name, s in site.flatten(new).items()
    if s.scaling_state
  }
  assert {name: s.history_3H.shape for name, s in states.items()} == shapes


@pytest.mark.parametrize("nothing", [np.inf, 0.0])
def test_chosen_layers_begin_anew_and_no_others(nothing):
  sites = spec(("layers/.*/mlp/(down|up)", "tensor_delayed(steps=4)")).sites()
  states = scaling.carried(sites, made(sites, 100), sites, made(sites, 200), {"layers/1/mlp/up"})
  expected = {f"layers/{i}/mlp/{s}": (100 + i, 4) for i in range(3) for s in ("down", "up")}
  assert by_layer(sites, states) == {**expected, "layers/1/mlp/up": (201, 4)}
  # A batch that overflowed has no range to give, nor have zeros: the tensor keeps its own.
  fresh = made(sites, 200)
  fresh["layers/mlp/up"].amax_3[1, 0] = nothing
  states = scaling.carried(sites, made(sites, 100), sites, fresh, {"layers/1/mlp/up"})
  assert by_layer(sites, states) == {**expected, "layers/1/mlp/up": (101, 4)}
  up = states["layers/mlp/up"]
  assert np.asarray(up.amax_3)[1].tolist() == [
    101,
    *made(sites, 200)["layers/mlp/up"].amax_3[1, 1:],
  ]
  assert set(np.asarray(up.history_3H)[1, 0]) == {101} and np.isfinite(up.history_3H).all()
  # What is awaited takes the tensors that it lacks, and no others.
  old = made(sites, 100)
  old["layers/mlp/up"].amax_3[1, 2] = np.nan if nothing else 0
  states = scaling.carried(sites, old, sites, made(sites, 200), fill={"layers/1/mlp/up"})
  fresh = made(sites, 200)["layers/mlp/up"]
  assert by_layer(sites, states) == {**expected, "layers/1/mlp/up": (101, 4)}
  up = states["layers/mlp/up"]
  np.testing.assert_array_equal(up.amax_3[1, :2], old["layers/mlp/up"].amax_3[1, :2])
  assert up.amax_3[1, 2] == fresh.amax_3[1, 2]
  np.testing.assert_array_equal(up.history_3H[1, 2], fresh.history_3H[1, 2])


@pytest.mark.parametrize("recipe", ["tensor_delayed(steps=4)", "e4m3_static"])
def test_a_scale_of_gradients_that_began_as_zeros_is_that_of_the_first_others(rng, recipe):
  """As of a layer before one that begins as zeros. A scale of 1 would flush them for ever."""
  x, w = rng.standard_normal((64, 128)), 0.05 * rng.standard_normal((128, 64))
  small = (1e-4 * rng.standard_normal((64, 64))).astype(np.float32)

  def loss(one, w, factors):
    return (fp8jax.dot("BD,DF->BF", jnp.float32(x), w, one) * factors).sum()

  one = site.calibrate(site.single(recipe), lambda s: loss(s, jnp.float32(w), 0 * small))
  want = x.T @ small.astype(np.float64)
  errors = []
  for _ in range(3):
    seen, gradient = jax.grad(loss, (0, 1))(one, jnp.float32(w), small)
    errors.append(np.linalg.norm(gradient - want) / np.linalg.norm(want))
    one = site.update(one, seen)
  assert max(errors[1:]) < 0.08, errors
  assert one.scaling_state.amax_3[2] == np.abs(small).max()


def test_what_has_a_scale_of_its_own_waits_for_nothing():
  own, static = Quant(E4M3), Quant(E4M3, source=Static())
  recipe = Recipe("mixed", Gemm(static, own), Gemm(static, own), Gemm(static, static))
  sites = {"a": site.single(recipe, name="a")}
  for amaxes, wanted in (([3, 0, 5], []), ([3, np.nan, 5], []), ([0, 1, 5], ["a"])):
    states = {"a": amax_history.calibrated(recipe, np.float32(amaxes))}
    assert scaling.unknown(sites, states) == wanted


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stop_gradient", "branch"])
def test_a_site_that_a_calibration_does_not_reach_is_named_and_multiplies_nothing(rng, is_stopped):
  x, w = jnp.ones((8, 16)), jnp.float32(rng.standard_normal((16, 8)))
  reached, missed = (site.single("tensor_delayed(steps=4)", name=n) for n in ("online", "target"))

  def loss(sites):
    y = fp8jax.dot("BD,DF->BF", x, w, sites[0]).sum()
    if is_stopped:
      return y + jax.lax.stop_gradient(fp8jax.dot("BD,DF->BF", x, w, sites[1])).sum()
    branch = lambda s: fp8jax.dot("BD,DF->BF", x, w, s).sum()  # noqa: E731
    return y + jax.lax.cond(y > 1e9, branch, lambda s: 0.0, sites[1])

  with pytest.raises(ValueError, match="site 'target': the loss does not reach it"):
    site.calibrate((reached, missed), loss)
  online, target = jax.jit(lambda sites: site.calibrate(sites, loss))((reached, missed))
  assert np.isfinite(fp8jax.dot("BD,DF->BF", x, w, online)).all()
  assert np.isnan(fp8jax.dot("BD,DF->BF", x, w, target)).all()


@pytest.mark.parametrize("recipe", ["tensor_delayed(steps=4)", "e4m3_static"])
def test_a_step_waits_for_gradients_that_are_not_all_zero(rng, recipe):
  """The first two batches train nothing: zeros are multiplied, and what follows is scaled."""
  spec = harness.one_layer_spec(recipe)
  batch = {key: jnp.asarray(x) for key, x in harness.weighted_batch(rng).items()}
  nothing = batch | {"weights_BL": 0 * batch["weights_BL"]}
  at_work, said = policy_runner.PolicyRunner(spec, lambda *of: said.append(of)), []
  state = at_work.calibrated(train_step.make_state(spec), nothing, 0)
  first = state.scaling_states
  names = scaling.unknown(spec.sites(), first)
  assert len(names) == 7 and not scaling.unknown(spec.sites(), first, "xw")
  at_work.await_scales(state, 0, 0)
  for step, given in enumerate((nothing, nothing, batch, batch)):
    state = at_work.refreshed(state, lambda: given, step, 0)  # noqa: B023
    is_known = step > 1
    assert bool(at_work.policy_state.refresh) != is_known
    for name, now in state.scaling_states.items():
      np.testing.assert_array_equal(now.amax_3[..., :2], first[name].amax_3[..., :2])
      assert np.all(now.amax_3[..., 2] > 0) == is_known
  assert ["of 7 sites" in str(events) for _, events in said if events] == [True, True]
  wanted = train_step.calibrate(spec, state, batch, 0).scaling_states
  for name, now in state.scaling_states.items():
    np.testing.assert_array_equal(now.amax_3[..., 2], wanted[name].amax_3[..., 2])
  # A tensor may be zero for ever: the wait ends.
  begun = dataclasses.replace(state, scaling_states=first)
  for step, awaited in ((15, 7), (16, 0)):
    at_work.set(decide.PolicyState())
    at_work.await_scales(begun, step, 0)
    assert len(at_work.policy_state.refresh) == awaited
    at_work.await_scales(begun, 15, 0)
    at_work.refreshed(begun, lambda: nothing, step, 0)
    assert len(at_work.policy_state.refresh) == awaited


def test_a_refresh_on_a_batch_without_gradients_is_over_with_it(rng):
  """x and w are of that batch, and gradients keep their range; the next batch changes nothing."""
  spec = harness.one_layer_spec("e4m3_static", **{"precision.policy": ("refresh(every=2)",)})
  one, other = (
    {key: jnp.asarray(x) for key, x in harness.weighted_batch(rng).items()} for _ in range(2)
  )
  nothing = other | {"weights_BL": 0 * other["weights_BL"]}
  at_work = policy_runner.PolicyRunner(spec, lambda *_: None)
  state = train_step.calibrate(spec, train_step.make_state(spec), one, 0)
  fresh = train_step.calibrate(spec, state, nothing, 0).scaling_states
  made = at_work.refreshed(state, lambda: nothing, 2, 0).scaling_states
  for name, now in made.items():
    np.testing.assert_array_equal(now.amax_3[..., :2], fresh[name].amax_3[..., :2])
    np.testing.assert_array_equal(now.amax_3[..., 2], state.scaling_states[name].amax_3[..., 2])
  assert not at_work.policy_state.refresh


def test_a_job_has_the_scales_that_a_checkpoint_knows(monkeypatch, capsys):
  """None of gradients is read. Of a site without an x those of all other sites stay."""
  spec = harness.one_layer_spec("e4m3_static")
  sites = spec.sites()
  amaxes = {name: [[3.0, 2.0, 0.0]] for name in scaling.states(sites)}
  saved = types.SimpleNamespace(close=lambda: None)
  saved.restore_scaling_states = lambda *_: {
    name: amax_history.calibrated(site.flatten(sites)[name].recipe, np.float32(of))
    for name, of in amaxes.items()
  }
  monkeypatch.setattr(restore.checkpoint, "Checkpoints", lambda *_: saved)
  read = restore.restore_scaling_states(spec, "", 2, {}, 0)
  assert read.keys() == amaxes.keys() and not capsys.readouterr().err
  assert restore.sites_with_scales(spec, 0, read)
  amaxes["layers/mlp/up"] = [[0.0, 2.0, 5.0]]
  read = restore.restore_scaling_states(spec, "", 2, {}, 0)
  assert amaxes.keys() - read.keys() == {"layers/mlp/up"}
  assert "await, of 1 sites, a batch with finite amaxes above 0; curr" in capsys.readouterr().err
  for states in (read, saved.restore_scaling_states()):
    with pytest.raises(UserError, match="site layers/mlp/up: 'e4m3_static' takes scales from"):
      restore.sites_with_scales(spec, 0, states)
