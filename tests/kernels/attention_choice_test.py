"""Which attention runs where, and the reasons against the others."""

import dataclasses

import pytest

from fp8jax.kernels import choose
from fp8jax.kernels.attention import tokamax_sm90
from fp8jax.kernels.attention.api import AttentionProblem
from fp8jax.kernels.choose import Choice, Device, Refusal

LONG = AttentionProblem(1, 32768, 16, 8, 128, "bfloat16", True, Device("gpu", 90))
SHORT = dataclasses.replace(LONG, length=2048)
AMPERE, CPU = Device("gpu", 80), Device("cpu")


@pytest.fixture
def has_tokamax(monkeypatch):
  monkeypatch.setattr(tokamax_sm90, "lacks", lambda: None)


@pytest.fixture
def lacks_tokamax(monkeypatch):
  monkeypatch.setattr(tokamax_sm90, "lacks", lambda: 'is not installed; pip install "x"')


@pytest.mark.usefixtures("has_tokamax")
@pytest.mark.parametrize("problem, backend", [
  (LONG, "tokamax"), (SHORT, "tokamax"),
  (dataclasses.replace(LONG, is_isolated=False), "cudnn"),
  (dataclasses.replace(SHORT, device=AMPERE), "cudnn"),
  (dataclasses.replace(SHORT, length=2000), "cudnn"),
  (dataclasses.replace(SHORT, head_dim=96), "cudnn"),
  (dataclasses.replace(SHORT, head_dim=64), "tokamax"),
  (dataclasses.replace(LONG, dtype="float32"), "xla"),
  (dataclasses.replace(LONG, device=CPU, dtype="float32"), "xla"),
  (dataclasses.replace(LONG, device=CPU), "xla"),  # a GPU would refuse it
])  # fmt: skip
def test_auto_isolates_documents_on_hopper_without_a_bias(problem, backend):
  found = choose.attention(problem)
  assert isinstance(found, Choice) and found.backend == backend


def test_devices_without_a_compute_capability_are_named_by_their_platform():
  assert [choose.name_of(d) for d in (CPU, Device("gpu"), AMPERE)] == ["cpu", "gpu", "sm_80"]


@pytest.mark.usefixtures("has_tokamax")
@pytest.mark.parametrize(
  "change", [{"device": AMPERE}, {"head_dim": 96}, {"length": 32767}], ids=str
)
def test_auto_refuses_a_large_bias_with_every_reason(change):
  found = choose.attention(dataclasses.replace(LONG, **change))
  assert isinstance(found, Refusal)
  for words in ("tokamax: ", "cudnn: isolates documents by an array of 2,048 MiB", "xla: isolates",
                "data.cross_document=True", "kernels.attention='cudnn'"):  # fmt: skip
    assert words in found.reason


@pytest.mark.usefixtures("lacks_tokamax")
def test_auto_says_that_it_takes_a_small_bias_for_want_of_tokamax():
  found = choose.attention(SHORT)
  assert found == Choice("cudnn", (
    'tokamax: is not installed; pip install "x"', "cudnn: isolation takes 8 MiB per device"
  ))  # fmt: skip
  refused = choose.attention(SHORT, "tokamax")
  assert isinstance(refused, Refusal) and "pip install" in refused.reason


@pytest.mark.usefixtures("lacks_tokamax")
@pytest.mark.parametrize("problem, length", [  # 256 MiB: 2 bytes, or of XLA 4 for each of 16 heads
  (SHORT, 11585), (dataclasses.replace(SHORT, sequences=2), 8192),
  (dataclasses.replace(SHORT, device=Device("gpu", 70)), 2048),
])  # fmt: skip
def test_auto_takes_a_bias_of_256_mib_and_none_that_is_larger(problem, length):
  choice = choose.attention(dataclasses.replace(problem, length=length))
  assert isinstance(choice, Choice)
  assert isinstance(choose.attention(dataclasses.replace(problem, length=length + 1)), Refusal)


@pytest.mark.parametrize("backend", ["cudnn", "xla"])
def test_a_large_bias_that_is_asked_for_by_name_is_allowed_and_said(backend):
  found = choose.attention(LONG, backend)
  assert isinstance(found, Choice) and found.backend == backend
  assert "isolation takes" in found.notes[0]


def test_another_version_of_tokamax_is_refused(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
  monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.18")
  reason = choose.attention(LONG, "tokamax").reason
  assert "is version 0.0.18, expected 0.0.17; pip install tokamax==0.0.17" in reason
