"""Texts NAME(key=value, ...): read, written, and refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8jax import calls
from fp8jax.errors import UserError
from fp8jax.evaluation import catalog
from fp8jax.recipe import rules

LITERALS = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
  | st.text("ab,()'\"\\\n=é "),
  lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text("a', "), inner),
  max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["a", "b_1", "Ä"]), LITERALS))
def test_reading_inverts_writing(fields):
  text = calls.write("name", fields)
  assert calls.parse(text) == ("name", fields)


@pytest.mark.parametrize("text, words, expected", [
  ("gcd", False, ("gcd", {})),
  ("gcd()", False, ("gcd", {})),
  (" f ( a = 1 ,\n b = 'x, c=(' , )", False, ("f", {"a": 1, "b": "x, c=("})),
  ("f(a=(1, [2, {'b': -3}]))", False, ("f", {"a": (1, [2, {"b": -3}])})),
  ("f(a=fast, b = precise/ precise/128)", True, ("f", {"a": "fast", "b": "precise/ precise/128"})),
  ("f(ä=é, b=1)", True, ("f", {"ä": "é", "b": "1"})),  # columns of Python's are bytes
])  # fmt: skip
def test_texts_that_are_accepted(text, words, expected):
  assert calls.parse(text, words) == expected


@pytest.mark.parametrize("text, reason", [
  ("x y", "invalid syntax"), ("", "invalid syntax"), ("a.b(c=1)", "another form"),
  ("f(1)", "another form"), ("f(**{'a': 1})", "another form"), ("f(a=1)(b=2)", "another form"),
  ("f(a=1, a=2)", "a is there twice"), ("f(a=g(b=1))", "malformed node"),
  ("f(a=word)", "malformed node"), ("f(a=" + "-" * 9999 + "1)", ""),
  ("f(a=016)", "016 begins with 0; write 16"),
  ("f(a='é017', b=-(0_9))", "0_9 begins with 0; write 9"),
])  # fmt: skip
def test_texts_that_are_refused(text, reason):
  with pytest.raises(UserError) as e:
    calls.parse(text)
  assert repr(text) in str(e.value) and reason in str(e.value)


@pytest.mark.parametrize("name", [
  "tensor_delayed()", "tensor_delayed(steps=1,)", "tensor_delayed(steps=(1))",
  "tensor_delayed(steps='1')", "tensor_delayed(steps=1.5)", "tensor_delayed(steps=1, steps=2)",
  "tensor_delayed(16)", "tensor_delayed(accumulate=#\n1)", "tensor_delayed(step=1)",
  "tensor_delayed(accumulate=fast/fast)", "tensor_delayed(steps=True)",
])  # fmt: skip
def test_recipes_are_refused_by_an_error_that_names_the_options(name):
  with pytest.raises(ValueError) as e:
    rules.recipe_by_name(name)
  assert repr(name) in str(e.value) and "is none of steps=1024" in str(e.value)


@pytest.mark.parametrize("stated, steps", [
  ("1_000", 1000), ("0x10", 16), ("1e3", "write steps=1000"), ("016", "write 16"),
  ("1.5", "no whole number"),
])  # fmt: skip
def test_numbers_of_recipes_are_those_of_python(stated, steps):
  name = f"tensor_delayed(steps={stated})"
  if isinstance(steps, str):
    with pytest.raises(ValueError, match=f"steps={stated}.*{steps}"):
      rules.recipe_by_name(name)
  else:
    assert rules.recipe_by_name(name).fwd.lhs.source.steps == steps


def test_a_wider_margin_keeps_the_other_options():
  name = rules.with_wider_margin("tensor_delayed(margin=1, accumulate=fast/precise/128)", 1, 3)
  assert name == "tensor_delayed(accumulate=fast/precise/128, margin=2)"
  assert rules.with_wider_margin("tensor_delayed", 5, 3) == "tensor_delayed(margin=3)"


@pytest.mark.parametrize("text, said", [
  ("016", "write 16"), ("1e3", "write n=1000"), ("-" * 9999 + "1", "no whole"), ("x", "no whole"),
])  # fmt: skip
def test_a_text_that_is_no_whole_number_is_refused_with_one(text, said):
  with pytest.raises(UserError, match=said):
    calls.whole("n", text)
  assert calls.whole("n", "0x10") == 16


def test_commas_within_a_task_do_not_part_it():
  names = "a, b(x=1,y=2),f(c='(',d=(1, 2)),it's.jsonl,b's.jsonl,g(.json"
  assert catalog.split(names) == ["a", "b(x=1,y=2)", "f(c='(',d=(1, 2))", "it's.jsonl",
                                  "b's.jsonl", "g(.json"]  # fmt: skip
