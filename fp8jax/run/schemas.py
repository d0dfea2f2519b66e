"""Types of the files in a workdir, as far as anything reads them; other fields may be there.

records.read and records.rows refuse a file that is of another type. Fields of a type that is not
`total` may be missing: results are also kept without every file and field.
"""

# ruff: noqa: UP013 (a table of types)

from typing import Annotated, Any, Required, TypedDict

import numpy as np
from msgspec import Meta

from fp8jax.phases import decide
from fp8jax.records import Number

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Rules = list[tuple[str, str]]
# A divisor: a positive float32, of which 2^-149 is the smallest.
Positive = Annotated[float, Meta(ge=2.0**-149, le=float(np.finfo(np.float32).max))]
# {source: {precision: {"loss", "perplexity", "tokens"}}}, see evaluator.Evaluator.run.
Evaluation = dict[str, dict[str, dict[str, Number]]]

# --- a run ---------------------------------------------------------------------------------------

Told = TypedDict("Told", {"place": str, "text": Required[str]}, total=False)
Exponents = TypedDict("Exponents", {"first_exponent": int, "shares": list[float]})

Refresh = TypedDict("Refresh", {"before": str, "after": str})


class Row(TypedDict, total=False):
  """A row of metrics.jsonl; its other fields are metrics, each a Number."""

  step: Required[Count]
  loss: Number
  numerics: dict[str, dict[str, dict[str, Number]]]
  exponents: dict[str, dict[str, Exponents]]
  param_stats: dict[str, dict[str, Number]]
  refresh: Refresh
  alarms: list[Told]
  actions: list[Told]


# Keys of the flat configuration that reports compute with.
Flat = TypedDict("Flat", {
  "steps": Count, "seed": int, "global_batch": Size, "seq_len": Size, "optim.warmup_steps": int,
  "optim.peak_lr": float, "precision.rules": Rules,
}, total=False)  # fmt: skip
Config = TypedDict("Config", {"resolved": Flat, "changed": dict[str, Any]}, total=False)
Summary = TypedDict("Summary", {
  "step": Required[Count], "steps": Count, "evaluations": dict[str, Evaluation],
  "seconds": dict[str, float], "fp8_flops_share": float, "fp8_gemm_bytes_share": float,
  "accuracies": dict[str, dict[str, Number]],
}, total=False)  # fmt: skip


class Leg(TypedDict, total=False):
  """The provenance of one process of a run."""

  from_step: Count
  config: Flat
  devices: str


class Provenance(Leg, total=False):
  """provenance.json: the last leg, and those before it.

  `shares` is that of batch_sharding.Batches, `job` trained; earlier versions state neither.
  """

  earlier: list[Leg]
  processes: Count
  shares: Count
  job: str


Failure = TypedDict("Failure", {"step": Required[Count], "first_bad_site": str | None}, total=False)
Gemm = TypedDict("Gemm", {"lhs": dict | None})
Definition = TypedDict("Definition", {"fwd": Gemm, "dgrad": Gemm, "wgrad": Gemm})
Backends = TypedDict("Backends", {"fwd": str, "dgrad": str, "wgrad": str})
Site = TypedDict("Site", {
  "from_step": Count, "site": str, "layers": int, "m_n_k": list[int], "recipe": str,
  "backends": Backends, "definition": Definition, "notes": list[str],
})  # fmt: skip


class Checkpoint(TypedDict, total=False):
  """`meta` of a checkpoint."""

  config: Required[dict[str, Any]]
  job: str
  data_fingerprint: Required[str]
  readers: Required[dict[str, Any]]
  weights_dtype: Required[str]
  documents: Required[dict[str, int]]
  evaluations: Required[dict[str, Evaluation]]
  remembered: dict[str, str]
  seconds: dict[str, float]
  policy: decide.PolicyState


# --- what other jobs leave beside it -------------------------------------------------------------

MemoryRow = TypedDict(
  "MemoryRow", {"kind": str, "declared": float | None, "compiled": float | None}
)
Memory = TypedDict("Memory", {"declared": float, "peak": float, "rows": list[MemoryRow]})

CalibrationRow = TypedDict("CalibrationRow", {
  "site": Required[str], "tensor": Required[str], "amax": Required[float], "scale": Positive,
}, total=False)  # fmt: skip
Calibration = TypedDict("Calibration", {
  "format": Required[str], "rows": Required[list[CalibrationRow]], "loss": str, "tokens": Count,
  "smooth_swiglu": str,
}, total=False)  # fmt: skip

NoiseRow = TypedDict("NoiseRow", {"recipe": str, "kl": Number, "dlogp": Number, "top1": float})
NoiseFloor = TypedDict("NoiseFloor", {"weights": dict[str, Any], "rows": list[NoiseRow]})

Measurement = TypedDict("Measurement", {"name": str, "value": Any})
Estimate = tuple[float, float, float]  # with the ends of its interval
Effect = TypedDict("Effect", {"loss_percent": Estimate, "kl": Estimate})
Group = TypedDict("Group", {"group": str, "name": str, "loss_percent": Estimate, "kl": Estimate})
Estimated = TypedDict("Estimated", {"x": Effect, "w": Effect, "both": Effect})
SensitiveSite = TypedDict("SensitiveSite", {
  "name": str, "layer": int | None, "kind": str, "measured": Effect | None,
  "estimated": Estimated,
})  # fmt: skip
Arm = TypedDict("Arm", {
  "arm": str, "bf16_flops": float, "report": Effect, "runs_of_layers": int, "rules": Rules,
})  # fmt: skip
Budget = TypedDict("Budget", {"budget": str, "arms": Annotated[list[Arm], Meta(min_length=1)]})
Halves = TypedDict("Halves", {"choose": int, "report": int})
Sensitivity = TypedDict("Sensitivity", {
  "tokens": Halves, "weights": dict[str, Any],
  "sites": Annotated[list[SensitiveSite], Meta(min_length=1)], "groups": list[Group],
  "budgets": list[Budget],
})  # fmt: skip
