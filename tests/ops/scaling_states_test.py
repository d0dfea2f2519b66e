"""Scaling states of layers' sites: carried to other recipes, replaced one by one."""

import harness
import numpy as np

from fp8jax.ops import scaling, site
from fp8jax.quantization.amax_history import ScalingState


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


def test_chosen_layers_begin_anew_and_no_others():
  sites = spec(("layers/.*/mlp/(down|up)", "tensor_delayed(steps=4)")).sites()
  states = scaling.carried(sites, made(sites, 100), sites, made(sites, 200), {"layers/1/mlp/up"})
  expected = {f"layers/{i}/mlp/{s}": (100 + i, 4) for i in range(3) for s in ("down", "up")}
  assert by_layer(sites, states) == {**expected, "layers/1/mlp/up": (201, 4)}
  # A batch that overflowed has no range to give: the tensor keeps its own.
  fresh = made(sites, 200)
  fresh["layers/mlp/up"].amax_3[1, 0] = np.inf
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
  old["layers/mlp/up"].amax_3[1, 2] = np.nan
  states = scaling.carried(sites, old, sites, made(sites, 200), fill={"layers/1/mlp/up"})
  fresh = made(sites, 200)["layers/mlp/up"]
  assert by_layer(sites, states) == {**expected, "layers/1/mlp/up": (101, 4)}
  up = states["layers/mlp/up"]
  np.testing.assert_array_equal(up.amax_3[1, :2], old["layers/mlp/up"].amax_3[1, :2])
  assert up.amax_3[1, 2] == fresh.amax_3[1, 2]
  np.testing.assert_array_equal(up.history_3H[1, 2], fresh.history_3H[1, 2])
