"""Weights quantized once per step: the numbers of a step that quantizes them in each product."""

import dataclasses
import functools
import operator

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.compiled import collectives, workspace
from fp8jax.errors import ConfigError
from fp8jax.models import mixer
from fp8jax.ops import dots, scaling, site, stored_params, weight_operands
from fp8jax.quantization import tensor_stats
from fp8jax.recipe import rules
from fp8jax.run import start
from fp8jax.step import gradients, quantized_once, train_step

# The backend whose sums have one order: XLA may add those of the CPU's fast one in another.
SMALL = {
  "model.num_layers": 2, "memory.loss_chunk": 64, "seq_len": 128, "global_batch": 16,
  "grad_accum_steps": 2, "kernels.matmul": "reference", "optim.warmup_steps": 0,
}  # fmt: skip
HEAD = ("head", "bf16")
# By the length of windows: loud steps compile three times as long.
STATISTICS = {64: tensor_stats.QUIET, 128: tensor_stats.QUIET, 32: tensor_stats.LOUD}
MIXED = {
  "precision.rules": (HEAD, ("layers/1/attn/.*", "nvfp4"), ("layers/.*/down", "mxfp8"),
                      ("layers/.*", "tensor_current")),
  "precision.first_bf16": 1, "memory.save_gemm_inputs": "quantized",
  "optim.master_format": "bf16_remainder",
}  # fmt: skip
# Sites that share their input and one that does not, which compile in half the time.
FEW = (HEAD, ("layers/.*/attn/[qkv]|layers/.*/down", "tensor_current"), ("layers/.*", "bf16"))
CASES = {
  "a layer in BF16 and one not, 16-bit masters, layers recomputed": (
    {"precision.rules": FEW, "precision.first_bf16": 1,
     "optim.master_format": "bf16_remainder", "memory.remat_policy": "full"}, (2, 2, 1)),
}  # fmt: skip
SLOW = {
  "a layer in BF16 and one of three recipes": (MIXED, (2, 2, 1)),
  "compressed inputs of layers, gradients in 16 bits": (
    {"precision.rules": (HEAD, ("layers/.*", "tensor_current")), "optim.grad_format": "bf16_sr",
     "memory.remat_policy": "full", "memory.save_layer_inputs": "e4m3_16"}, None),
  "every statistic": (
    {"precision.rules": (HEAD, ("layers/.*", "tensor_current")), "precision.first_bf16": 1,
     "seq_len": 32, "memory.remat_policy": "full"}, (2, 1, 1)),
  "adapters beside float32": (
    {"precision.rules": (HEAD, ("layers/.*", "block_128")), "model.lora.rank": 4,
     "model.lora.base": "float32", "memory.remat_policy": "full"}, None),
  "adapters beside codes": (
    {"precision.rules": (HEAD, ("layers/.*", "block_128")), "model.lora.rank": 4,
     "model.lora.base": "block_fp8"}, None),
  "adapters beside codes that are gathered": (
    {"precision.rules": (HEAD, ("layers/.*", "halo_int8_2_hq")), "model.lora.rank": 4,
     "model.lora.base": "int8_h64"}, (1, 2, 1)),
  "histories, heads over devices, layers recomputed": (
    {"precision.rules": (HEAD, ("layers/.*", "tensor_delayed")), "memory.remat_policy": "full"},
    (2, 2, 2)),
  "rows, one microbatch": (
    {"precision.rules": (HEAD, ("layers/.*", "rowwise")), "grad_accum_steps": 1}, None),
  "blocks on a mesh, gradients in 16 bits": (
    {"precision.rules": (HEAD, ("layers/.*", "block_128_pow2")), "optim.grad_format": "bf16_sr",
     "memory.save_gemm_inputs": "quantized", "memory.remat_policy": "operands"}, (2, 4, 1)),
  "channel scales, E5M2 gradients under a loss scale": (
    {"precision.rules": (HEAD, ("layers/.*", "tensor_current_e5m2")),
     "precision.smooth_swiglu": "channel", "loss_scale.kind": "dynamic",
     "precision.compute_dtype": "float16"}, None),
  "adapters": ({"precision.rules": (HEAD, ("layers/.*", "block_128")), "model.lora.rank": 4,
                "model.lora.base": "bf16"}, (4, 1, 1)),
  "unit scaling, scales of activations": (
    {"precision.rules": (("head", "unit_head"), (".*", "unit_scaling")), "model.init_std": 1.0,
     "model.unit_scaling": "all", "model.residual_tau": 0.36, "model.tie_embeddings": False,
     "optim.grad_clip_norm": 0.0}, None),
  "random gradients, FP4 blocks": (
    {"precision.rules": (HEAD, ("layers/.*", "nvfp4_sr"))}, (1, 2, 2)),
}  # fmt: skip
BOTH = [pytest.param(*case, id=name) for name, case in CASES.items()]
BOTH += [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()]


def spec_of(changes, shape, form="per_step"):
  changes = {**SMALL, "memory.weight_operands": form, **changes}
  return harness.tiny_spec(harness.tiny_config("bf16", **changes), shape)


@pytest.mark.parametrize("changes, shape", BOTH)
def test_gradients_are_the_same_to_the_bit(changes, shape):
  """Loss, gradients, and what sites observe."""
  found = {}
  for form in ("per_step", "per_product"):
    spec = spec_of(changes, shape, form)
    state, batch = harness.make_state(spec), harness.placed_uneven_batch(spec)
    sites = spec.sites(statistics=STATISTICS[spec.flat["seq_len"]])
    if sites["layers"][0]["attn"]["q"].recipe.is_stateful:
      state = train_step.calibrate(spec, state, batch, 0)
      sites = scaling.with_states(sites, state.scaling_states)
    params = harness.random_adapters(state.params) if spec.model.lora else state.params
    scale = None if spec.loss_scale.kind == "none" else 4.0
    take = jax.jit(functools.partial(gradients.gradients, spec, scale=scale))
    found[form] = jax.device_get(take(params, sites, batch))
  loss, gradient, *_ = found["per_step"]
  assert np.isfinite(loss) and all(np.any(g) for g in jax.tree.leaves(gradient))
  harness.assert_trees_equal(*found.values())


@pytest.mark.slow
def test_mapped_trials_of_both_phases_have_the_numbers_of_single_runs():
  """Two trials in one program, sums of microbatches in place, in the second phase's recipe too."""
  changes = {
    "precision.rules": (HEAD, ("layers/.*", "tensor_current")), "memory.remat_policy": "full",
    "precision.schedule": ((2, (HEAD, ("layers/0/.*", "bf16"), ("layers/.*", "rowwise"))),),
  }  # fmt: skip
  spec = spec_of(changes, None)
  assert gradients.adds_in_place(spec) and len(spec.precision.phases) == 2
  batch = harness.placed_uneven_batch(spec)
  trials = [train_step.make_state(spec_of({**changes, "seed": n}, None)).params for n in (0, 1)]
  stack = jax.tree.map(lambda *x: jnp.stack(x), *trials)
  for phase in (0, 1):
    sites = spec.sites(phase=phase)
    take = functools.partial(gradients.gradients, batch=batch)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), sites)
    mapped = jax.jit(jax.vmap(lambda p, s, take=take: take(spec, p, s)))(stack, two)
    for n, params in enumerate(trials):
      single = functools.partial(take, spec_of(changes, None, "per_product"), sites=sites)
      found = jax.tree.map(lambda x, n=n: x[n], mapped)
      harness.assert_trees_equal(found, jax.jit(single)(params))


@pytest.mark.slow
def test_weights_are_gathered_once_whatever_the_microbatches():
  """Codes of both orientations, three quarters of which come from other devices."""
  rules = {"precision.rules": (HEAD, ("layers/.*", "tensor_current")), "model.num_layers": 2}
  spec = spec_of({**rules, "grad_accum_steps": 4}, (1, 4, 1))
  state, batch, sites = harness.step_arguments(spec)
  take = jax.jit(functools.partial(gradients.gradients, spec))
  text = take.lower(state.params, sites, batch).compile().as_text()
  rows = collectives.account(text, dict(spec.run.layout.mesh.shape))
  codes = [r.nbytes for r in rows if r.kind == "all-gather" and r.dtype == "u8"]
  weights = 2 * (4 * 128 * 512 + 3 * 128 * 512)  # q, k, v, o; gate, up, down
  assert sum(codes) == 2 * weights * 3 // 4


def test_the_first_lines_say_which_weights_and_how_many_bytes():
  """128 channels, 512 of q and of the MLP; 1 byte per code, a float32 scale per 128x128, twice."""
  spec = spec_of({"precision.rules": (HEAD, ("layers/.*/down", "quartet"),
                                      ("layers/.*/up", "fp4_dge"), ("layers/.*", "block_128")),
                  "precision.first_bf16": 1}, None)  # fmt: skip
  account = quantized_once.account(spec)
  sites = ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate")
  assert account.names == tuple(f"layers/1-1/{name}" for name in sites)
  assert account.nbytes == 5 * 2 * (128 * 512 + 4 * 4)
  kinds, text = workspace.peak(spec, 0)[1], start.weights_line(spec)
  assert kinds[workspace.ONCE] == account.nbytes
  assert text.startswith("weights of 5 sites quantized once per step, ")
  assert "layers/0-0/attn/q, " in text
  assert "layers/0-0/mlp/down (not quantized in both of its products)" in text
  assert "layers/1-1/mlp/up (its gradient or its product reads the weight itself)" in text
  assert "layers/1-1/mlp/down (rounded at random in each microbatch)" in text


def test_the_account_is_of_the_arrays_that_are_made():
  spec = spec_of(MIXED, (2, 2, 2))
  state, batch, sites = harness.step_arguments(spec)
  made = jax.eval_shape(
    lambda p, s, b: quantized_once.of_layers(spec, p, s, b), state.params, sites, batch
  )
  weights = jax.tree.leaves(made, is_leaf=lambda x: isinstance(x, stored_params.WeightOperands))
  bits = {"float8_e4m3fn": 8, "float4_e2m1fn": 4, "float32": 32}
  arrays = jax.tree.leaves([(w.fwd, w.dgrad) for w in weights])
  whole = sum(x.size * bits[str(x.dtype)] for x in arrays) // 8
  arrays = quantized_once.account(spec).arrays
  assert len(weights) == len(quantized_once.account(spec).names) == 7
  # Heads and the MLP lie on two devices along `tensor`; the scales of whole rows on both.
  assert whole / 2 <= quantized_once.account(spec).nbytes < whole / 2 * 1.01
  assert {str(x.dtype) for x in arrays} == {"float8_e4m3fn", "float4_e2m1fn", "float32"}


@pytest.mark.parametrize("base, shape, share", [
  ("block_fp8", None, 1), ("e4m3", (2, 1, 2), 2), ("e4m3", (1, 2, 1), 1), ("float32", None, 1),
])  # fmt: skip
def test_codes_of_a_base_count_as_what_is_made_of_them(base, shape, share):
  """Both orientations: Hopper's products read weights along K, and turn one of them otherwise."""
  recipe = "tensor_current" if base == "e4m3" else "block_128"
  changes = {"precision.rules": (HEAD, ("layers/.*", recipe)), "model.lora.rank": 4,
             "model.lora.base": base}  # fmt: skip
  spec = spec_of(changes, shape)
  account = quantized_once.account(spec)
  assert (len(account.names), account.by_product) == (7, {})
  state, batch, sites = harness.step_arguments(spec)
  (made,) = jax.eval_shape(
    lambda p, s, b: quantized_once.of_layers(spec, p, s, b), state.params, sites, batch
  )
  weights = jax.tree.leaves(made, is_leaf=lambda x: isinstance(x, stored_params.WeightOperands))
  codes = [
    x.size for x in jax.tree.leaves([(w.fwd, w.dgrad) for w in weights]) if x.dtype.itemsize == 1
  ]
  assert sum(codes) / share <= account.nbytes < sum(codes) / share * 1.01


REFUSED = {
  "no weight": ({"precision.rules": ((".*", "bf16"),)},
                "(layers/attn/q: not quantized in both of its products; and so on); set memory."),
  "layers that move": (
    {"optim.in_backward": True, "optim.grad_clip_norm": 0.0, "grad_accum_steps": 1,
     "memory.remat_policy": "full", "precision.rules": (HEAD, ("layers/.*", "block_128"))},
    "memory.weight_operands='per_step' with optim.in_backward=True"),
  "an invariant pass": (
    {"precision.invariant": True, "memory.remat_policy": "full",
     "precision.rules": (HEAD, ("layers/.*", "fp8_dynamic"))},
    "its products read the weights in another form"),
}  # fmt: skip


@pytest.mark.parametrize("changes, said", REFUSED.values(), ids=REFUSED)
def test_refusals(changes, said):
  with pytest.raises(ConfigError, match="memory.weight_operands") as e:
    spec_of(changes, None)
  assert said in str(e.value)


@pytest.mark.parametrize("other, why", [("nvfp4", None), ("nvfp4_ste", "shares a scale with")])
def test_weights_of_one_input_share_a_scale_or_none_is_made_ahead(rng, other, why):
  """Two products of x with the larger amax of both weights, as by product; or both by product."""
  ws = {"gate": rng.standard_normal((2, 64, 32), np.float32),
        "up": 3 * rng.standard_normal((2, 64, 32), np.float32)}  # fmt: skip
  recipes = {"gate": rules.recipe_by_name("nvfp4"), "up": rules.recipe_by_name(other)}
  share = lambda q, tensor: dataclasses.replace(q, is_joint=tensor == "w")  # noqa: E731
  backends = ("reference",) * 3
  sites = {
    name: site.fresh(recipe.map_quants(share), name, (0, 2), backends=backends)
    for name, recipe in recipes.items()
  }
  eqn = "BLD,DF->BLF"
  declared = [mixer.GemmSite(name, eqn, "x") for name in ws]
  made = weight_operands.of_block(declared, ws, sites, {"B": 1, "L": 32}, jnp.float32)
  if why:
    against = weight_operands.reasons(declared, ws, sites, {"B": 1, "L": 32}, jnp.float32)
    assert made == {} and why in against["gate"] and "both of its products" in against["up"]
    return
  x = rng.standard_normal((1, 32, 64), np.float32)
  for layer in range(2):
    of_this = functools.partial(jax.tree.map, operator.itemgetter(layer))
    own, of_layer = of_this((ws, sites))
    quiet = [dataclasses.replace(s, tap=np.asarray(s.tap)) for s in of_layer.values()]
    wanted = dots.dots((eqn, eqn), x, tuple(own.values()), quiet)
    ahead = of_this(tuple(made[name] for name in ws))
    frozen = [stored_params.Weight(w, None, None, is_frozen=True) for w in ahead]
    harness.assert_trees_equal(dots.dots((eqn, eqn), x, frozen, quiet), wanted)
  alone = dots.dot(eqn, x, own["gate"], quiet[0])
  assert np.any(alone != wanted[0])  # by its own, smaller amax


def test_a_weight_in_operands_is_read_by_its_products_alone():
  made = stored_params.WeightOperands(None, None, None, (3, 4))
  weight = stored_params.Weight(made, None, None)
  for read in (stored_params.value, stored_params.compute_copy):
    with pytest.raises(TypeError, match=r"a weight \(3, 4\) that is quantized once per step"):
      read(weight)
