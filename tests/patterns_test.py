"""Rules by regular expressions: whole matches, the first one, and rules that decide nothing."""

import concurrent.futures
import signal
import time

import pytest

from fp8jax import patterns

RULES = (("layers/1/.*", 1), ("up", 2), ("layers/.*/up", 3), ("layers/1/.*", 1), ("head", 4))


@pytest.mark.parametrize("name, number", [
  ("layers/1/up", 0), ("layers/11/up", 2), ("layers/11/up/x", -1), ("up", 1), ("xhead", -1),
])  # fmt: skip
def test_the_first_whole_match_wins(name, number):
  assert patterns.first(RULES, name) == number
  assert patterns.matches(r"layers/\d/.*", [name, "a\nlayers/1/up"]) == [name] * (number == 0)


def test_a_rule_that_is_there_twice_decides_once():
  names = ["layers/1/up", "layers/11/up", "tail"]
  assert patterns.used(RULES, names) == [RULES[0], RULES[2]]
  assert patterns.used(RULES, names, so=False) == [RULES[1], RULES[3], RULES[4]]


def test_layers_and_problems():
  names = ("layers/12/mlp/up", "layers/2-25/mlp/up", "head", "layers/3/")
  assert [patterns.of_layer(n) for n in names] == [(12, "mlp/up"), *((None, n) for n in names[1:])]
  assert patterns.problem("a.*") == "" and "7 is no regular expression" in patterns.problem(7)
  assert patterns.problem("(").startswith("'(' is no regular expression: missing )")


def test_a_pattern_has_a_limit_over_all_its_names_and_in_every_thread(monkeypatch):
  monkeypatch.setattr(patterns, "SECONDS", 0.2)
  names, begin = [f"layers/{i}/attn/q" for i in range(40)], time.perf_counter()
  for _ in range(3):
    problem = patterns.problem("((.+)+)+Z", names)
    assert problem.startswith("'((.+)+)+Z' takes longer than 0.2 s to match 'layers/0/attn/q': ")
    assert problem.endswith("write each repeat once and none around another, '.*X' for '((.+)+)+X'")
  assert time.perf_counter() - begin < 2  # names have no limit each
  assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
  with concurrent.futures.ThreadPoolExecutor(1) as pool:  # no alarm rings there
    problem = pool.submit(patterns.problem, "((.+)+)+Y", names).result(timeout=60)
    assert "takes a time that has no limit outside of the main thread" in problem
    rule = [(r"layers/(1|3)/.*/(q|k)", 0)]
    assert [pool.submit(patterns.first, rule, n).result() for n in names[:4]] == [-1, 0, -1, 0]


def test_a_count_beyond_pythons_is_no_regular_expression():
  assert patterns.problem("a{99999999999}").endswith("the repetition number is too large")
