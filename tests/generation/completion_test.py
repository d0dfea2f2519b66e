"""Text of growing completions: certain pieces, stop texts across tokens, unfinished characters."""

import numpy as np
import pytest

from fp8jax.generation.completion import Growing, TextStream


def _decode(tokens):
  return b"".join(VOCABULARY[t] for t in tokens).decode("utf-8", "replace")


VOCABULARY = [b"a", b"b", b"ab", b"ba", b"\n", b"END", b"E", b"N", b"D", "é".encode(), b"\xe2\x82",
              b"\xac", b"\xe2", b" ", b"\n\n"]  # fmt: skip
STOPS = [(), ("END",), ("\n\n",), ("ab\n", "bb"), ("é€", "END\n"), ("aab",)]


@pytest.mark.parametrize("stop", STOPS)
def test_text_ends_before_the_first_stop_text_wherever_tokens_end(rng, stop):
  for _ in range(300):
    tokens = rng.integers(0, len(VOCABULARY), rng.integers(1, 12)).tolist()
    stream, given = TextStream(_decode, stop), ""
    used = 0
    for used in range(1, len(tokens) + 1):
      given += stream.push(tokens[used - 1])
      if stream.is_stopped:
        break
    given += stream.finish()
    whole = _decode(tokens[:used])
    places = [whole.find(s) for s in stop if s in whole]
    want = whole[: min(places)] if places else whole
    assert (given, stream.text) == (want, want)
    # As early as can be: without the last token no stop text was there, or its bytes were not.
    before = _decode(tokens[: used - 1])
    assert not places or not any(s in before for s in stop) or before.endswith("\ufffd")


@pytest.mark.parametrize(
  "stop, text",
  [(("\n", "ab"), "x z"), (("ab", "\n"), "x z"), (("b\n", "ab"), "x z"), (("\n", "b\n"), "x za")],
)
def test_of_two_stop_texts_that_one_token_completes_the_earlier_ends_the_text(stop, text):
  stream = TextStream(lambda tokens: "".join(("x ", "zab\n")[token] for token in tokens), stop)
  given = stream.push(0) + stream.push(1) + stream.finish()
  assert (given, stream.text, stream.is_stopped) == (text, text, True)


def test_a_piece_is_given_out_once_no_stop_text_can_begin_with_it():
  stream = TextStream(_decode, ("END",))
  pieces = [stream.push(t) for t in (0, 6, 0, 6, 7, 1)]  # a E a E N b
  assert pieces == ["a", "", "Ea", "", "", "ENb"]


def test_bytes_of_a_character_wait_for_its_last():
  stream = TextStream(_decode, ())
  assert [stream.push(t) for t in (10, 11, 12, 0)] == ["", "€", "", "\ufffda"]
  stream = TextStream(_decode, ())
  assert stream.push(10) == "" and stream.finish() == "\ufffd"


def test_reasons_of_an_end():
  def grown(tokens, **options):
    growing = Growing(_decode, ("bb",), frozenset({4}), frozenset({5}), limit=4)
    for token in tokens:
      growing.push(token, -0.5)
    return growing.result

  assert grown([0, 4]).finish_reason == "eos" and grown([0, 4]).text == "a"
  assert grown([0, 5]).finish_reason == "stop" and grown([0, 5]).text == "a"
  assert grown([0, 2, 1]).finish_reason == "stop" and grown([0, 2, 1]).text == "aa"
  assert grown([0, 1, 0, 0]).finish_reason == "length" and grown([0, 1, 0]) is None
  assert grown([0, 0, 0, 4]).finish_reason == "eos"
  np.testing.assert_array_equal(grown([0, 2, 1]).tokens, [0, 2, 1])
