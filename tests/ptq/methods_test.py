"""Methods as texts, and combinations that are refused with their fix."""

import dataclasses
import types

import pytest

from fp8jax import formats
from fp8jax.errors import UserError
from fp8jax.models.config import ModelConfig
from fp8jax.ptq import methods as m
from fp8jax.recipe.quant import Quant, Rounding

LLAMA = ModelConfig(
  architecture="llama", vocab_size=40, hidden_size=72, intermediate_size=56, num_layers=2,
  num_heads=6, num_kv_heads=2, head_dim=8, max_positions=16,
)  # fmt: skip
QWEN2 = dataclasses.replace(LLAMA, architecture="qwen2", qkv_bias=True)
INT4, TOKEN = Quant(formats.INT4, (1, 128)), Quant(formats.INT8, (1, 0))


def _recipes(*pairs):
  """{site: the part of a Recipe that is read}, of (activations, weights)."""
  forward = [types.SimpleNamespace(lhs=lhs, rhs=rhs) for lhs, rhs in pairs]
  return {f"layers/0/mlp/{i}": types.SimpleNamespace(fwd=fwd) for i, fwd in enumerate(forward)}


WEIGHT_ONLY, BOTH = _recipes((None, INT4)), _recipes((TOKEN, TOKEN), (TOKEN, TOKEN), (None, None))


@pytest.mark.parametrize(
  ("text", "method"),
  [
    ("gptq(damp=0.05, order='by_activation')", m.Gptq(0.05, "by_activation")),
    ("rotate(r2=False)", m.Rotate(r2=False)),
    ("smooth_quant(alpha=0.75)", m.SmoothQuant(0.75)),
    ("learned_rounding(steps=20)", m.LearnedRounding(20)),
    *((name, kind()) for name, kind in m.METHODS.items()),
  ],
)
def test_methods_are_their_texts(text, method):
  assert m.by_name(text) == method
  assert m.name_of(method) == text


@pytest.mark.parametrize(
  ("text", "word"),
  [
    ("gtpq", "did you mean 'gptq'"),
    ("zzz", "there are rotate, equalize"),
    ("gptq(dampening=1)", "it has damp, order, block"),
    ("equalize(x=1)", "it has none"),
    ("gptq(damp=-1)", "a number from 0 to 10"),
    ("gptq(damp=True)", "a number from 0 to 10"),
    ("gptq(order='random')", "'as_is', 'by_activation'"),
    ("awq(grid=1.5)", "a whole number from 2 to 100"),
    ("rotate(r1=1)", "True or False"),
    ("smooth_quant(alpha=1.5)", "from 0 to 1"),
  ],
)
def test_texts_that_are_no_method_are_refused(text, word):
  with pytest.raises(UserError, match=word):
    m.by_name(text)


def test_they_act_in_one_order():
  written = (m.BiasCorrection(), m.Gptq(), m.Awq(), m.Equalize(), m.Rotate())
  assert m.in_order(written) == (m.Rotate(), m.Equalize(), m.Awq(), m.Gptq(), m.BiasCorrection())


GOOD = [
  ((), WEIGHT_ONLY, None),
  ((m.RoundToNearest(),), BOTH, LLAMA),
  ((m.Awq(), m.Gptq()), WEIGHT_ONLY, LLAMA),
  ((m.Awq(),), BOTH, LLAMA),  # with activations quantized, too
  ((m.Rotate(), m.Equalize(), m.SmoothQuant(), m.Gptq(), m.BiasCorrection()), BOTH, QWEN2),
  ((m.LearnedRounding(),), _recipes((None, Quant(formats.E2M1, (1, 16)))), None),
  ((m.Gptq(),), _recipes((None, Quant(formats.LNS8, (1, 16)))), None),
  ((m.RoundToNearest(),), _recipes((None, Quant(formats.LOGFMT8, (1, 16)))), None),
]
BAD = [
  ((m.Gptq(), m.LearnedRounding()), WEIGHT_ONLY, None, "each choose the codes: keep one"),
  ((m.Awq(), m.SmoothQuant()), BOTH, None, "same channels: keep one"),
  ((m.Gptq(), m.Gptq(0.1)), WEIGHT_ONLY, None, "2 times: once is enough"),
  ((m.SmoothQuant(),), WEIGHT_ONLY, None, "leave activations unquantized.*Take awq"),
  ((m.Rotate(online=True),), BOTH, None, "R3 and R4.*take rotate"),
  ((m.Rotate(False, False),), BOTH, None, "rotates nothing"),
  ((m.Rotate(),), BOTH, dataclasses.replace(LLAMA, residual_tau=0.4), "leave rotate.. out"),
  ((m.BiasCorrection(),), BOTH, LLAMA, "'llama'.*no biases.*leave it out"),
  ((m.RoundToNearest(),), _recipes((None, None)), None, "no weight is quantized"),
  ((m.LearnedRounding(),), _recipes((None, Quant(formats.LNS8, (1, 16)))), None, "take gptq"),
  ((m.Gptq(),), _recipes((None, Quant(formats.LOGFMT8, (1, 16)))), None, "fixed grid"),
  (
    (m.Gptq(),), _recipes(*[(None, Quant(formats.E4M3, rounding=Rounding.STOCHASTIC))] * 2), None,
    "layers/0/mlp/0 and 1 more.*rounding='nearest'",
  ),
]  # fmt: skip


@pytest.mark.parametrize(("methods", "recipes", "cfg"), GOOD)
def test_combinations_that_make_sense_have_no_problem(methods, recipes, cfg):
  assert m.check(methods, recipes, cfg) == []


@pytest.mark.parametrize(("methods", "recipes", "cfg", "words"), BAD)
def test_combinations_that_make_none_are_refused_with_the_fix(methods, recipes, cfg, words):
  (text,) = m.check(methods, recipes, cfg)
  with pytest.raises(UserError, match=words):
    raise UserError(text)
