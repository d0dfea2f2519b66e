"""LNS-Madam: what rounding on a logarithmic grid does to updates, rates, and energy as arithmetic.

command: python experiments/2021_lns_madam/update_error.py    (seconds; float64 NumPy)

A weight is +-2^(k / gamma), k an integer. U(w) is the updated weight in full precision, rounded to
a number of the grid again. The error is sum((log2 |Q(U)| - log2 |U|)^2), as the paper measures it.
With stochastic rounding of gamma * log2 |U| its mean is sum(f (1 - f)) / gamma^2, f the fraction,
and f (1 - f) <= |gamma * log2 |U||. So the paper's bounds follow, d weights, rate r, gradient g:

- additive, U = w - r g: sqrt(d) / gamma * norm(log2 |U|): it has the weights in it;
- multiplicative, U = w 2^(-r g sign(w)): sqrt(d) r / gamma * norm(g), since k stays whole and
  |r g| alone is rounded: no weight is in it. With sign(g) for g: d r / gamma.
"""

import math
import pathlib
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "lab")]

import altair as alt  # noqa: E402
import design  # noqa: E402
import ledger  # noqa: E402
import numpy as np  # noqa: E402
import runs as runs_lib  # noqa: E402
import stability  # noqa: E402
import tensors  # noqa: E402

# gamma of masters lns16 to lns10: 16 octaves.
GAMMAS = {bits: 2 ** (bits - 5) for bits in (16, 14, 12, 10)}
# Weights of a layer at initialization, and gradients over their root mean square.
WEIGHTS, STD = 2**16, 0.02
UPDATES = ("additive", "multiplicative", "sign, multiplicative")
# In octaves: the paper's, and exp(-0.08 ...), which the search below chose. The additive rate moves
# the weights as far in the root mean square; 0.08 * STD is near Adam's 0.002 in the lab.
RATES = {"2^-7": 2.0**-7, "0.08 / ln 2": 0.08 / np.log(2)}
# Octaves below and above the standard deviation.
MAGNITUDES = np.arange(-6, 2.1, 0.5)


# --- the theorem ----------------------------------------------------------------------------------


def updated(kind: str, w, g, rate: float):
  """log2 of the magnitude of U(w), float64."""
  if kind == "additive":
    return np.log2(np.abs(w - rate * g))
  g = np.sign(g) if kind.startswith("sign") else g
  return np.log2(np.abs(w)) - rate * g * np.sign(w)


def mean_error(log_u, gamma: int) -> float:
  """The mean over stochastic rounding, exactly."""
  f = np.mod(gamma * log_u, 1.0)
  return float(np.sum(f * (1 - f)) / gamma**2)


def bound(kind: str, w, g, rate: float, gamma: int) -> float:
  """Of `mean_error`; see above."""
  root = np.sqrt(w.size) / gamma
  if kind == "additive":
    return float(root * np.linalg.norm(updated(kind, w, g, rate)))
  g = np.sign(g) if kind.startswith("sign") else g
  return float(root * rate * np.linalg.norm(g))


def on_grid(w, gamma: int):
  """The weights at numbers of the grid."""
  return np.sign(w) * 2.0 ** (np.rint(gamma * np.log2(np.abs(w))) / gamma)


# --- updates to the nearest, as stored masters are ------------------------------------------------


def rounded(kind: str, w, g, rate: float, gamma: int):
  """(U(w), it rounded to the nearest in log space)."""
  u = updated(kind, w, g, rate)
  sign = np.sign(w - rate * g) if kind == "additive" else np.sign(w)
  return sign * 2.0**u, sign * 2.0 ** (np.rint(gamma * u) / gamma)


def _stays(q, w):
  """Share of weights that an update does not move."""
  return float(np.mean(np.abs(q / w - 1) < 1e-9))


def _rate(kind: str, octaves: float) -> float:
  return octaves * np.log(2) * STD if kind == "additive" else octaves


def measure(bits: int, kind: str, octaves: float, seed: int = 0) -> dict[str, float]:
  """Errors of one update of N(0, STD^2) weights.

  Returns:
    {"error": of the rounded step, relative to the step in the root mean square; "lost": share of
    weights that do not move; "mean", "bound": of the theorem, per weight in octaves squared}.
  """
  rng, gamma, rate = np.random.default_rng(seed), GAMMAS[bits], _rate(kind, octaves)
  w, g = on_grid(STD * rng.standard_normal(WEIGHTS), gamma), rng.standard_normal(WEIGHTS)
  u, q = rounded(kind, w, g, rate, gamma)
  return {
    "error": float(np.linalg.norm(q - u) / np.linalg.norm(u - w)),
    "lost": _stays(q, w),
    "mean": mean_error(updated(kind, w, g, rate), gamma) / w.size,
    "bound": bound(kind, w, g, rate, gamma) / w.size,
  }


def by_magnitude(bits: int, kind: str, octaves: float) -> list[float]:
  """Shares of weights of about 2^m * STD that an update does not move, m of MAGNITUDES."""
  gamma, rate, found = GAMMAS[bits], _rate(kind, octaves), []
  for m in MAGNITUDES:
    rng = np.random.default_rng(0)  # the same gradients beside every magnitude
    w = on_grid(STD * 2.0 ** (m + rng.uniform(-0.25, 0.25, 2**14)), gamma)
    _, q = rounded(kind, w, rng.standard_normal(2**14), rate, gamma)
    found.append(_stays(q, w))
  return found


# --- energy: a model ------------------------------------------------------------------------------

# Picojoules of an operation in 45 nm at 0.9 V (Horowitz, ISSCC 2014, figure 1.1.9).
PICOJOULES = {"int8 add": 0.03, "int32 add": 0.1, "int8 mult": 0.2, "fp16 add": 0.4,
              "fp16 mult": 1.1, "fp32 add": 0.9, "fp32 mult": 3.7}  # fmt: skip
# A multiply-accumulate. LNS adds exponents, shifts by their whole part (counted as an addition of
# 32 bits, the table has no shift) and adds up; its gamma = 8 bins of a dot product of 128 are
# multiplied by their constants once.
MACS = {
  "FP32": {"fp32 mult": 1, "fp32 add": 1},
  "FP16, sums in FP32": {"fp16 mult": 1, "fp32 add": 1},
  "INT8": {"int8 mult": 1, "int32 add": 1},
  "8-bit LNS": {"int8 add": 1, "int32 add": 2 + 8 / 128, "int8 mult": 8 / 128},
}
# Millijoules of an iteration of a GPT of 1.7B, read from the paper's figure; FP8's from "-55 %".
PAPER = {"FP32": 9e3, "FP16, sums in FP32": 5e3, "8-bit LNS": 0.95e3}


def energy(name: str) -> float:
  """Picojoules of a multiply-accumulate, arithmetic alone."""
  return sum(count * PICOJOULES[what] for what, count in MACS[name].items())


# --- training: of the lab's results ---------------------------------------------------------------


def _system(slug: str) -> design.System:
  (system,) = (s for s in runs_lib.SYSTEMS if s.slug == slug)
  return system


def _loss(result) -> float:
  """Training loss after the warm-up; infinite where the run diverged."""
  is_over = result.status == "finished"
  return float(np.mean(result.losses[result.warmup :])) if is_over else math.inf


def searched(of_runs: ledger.Index) -> dict[str, dict[str, float | None]]:
  """{arm: {rate: training loss}} of the lab's results, None where it diverged."""
  found = {}
  for (arm, rate), by_seed in stability.found(_system("2021_lns_madam_rates"), of_runs).items():
    loss = _loss(next(iter(by_seed.values())))
    found.setdefault(arm, {})[f"{rate:g}"] = loss if math.isfinite(loss) else None
  return found


def trained(of_runs: ledger.Index) -> dict[str, Any]:
  """{arm: training loss, mean of "seeds"}, the seeds that all arms have that were run."""
  of = {
    arm: by_seed
    for (arm, _), by_seed in stability.found(_system("2021_lns_madam"), of_runs).items()
  }
  seeds = sorted(set.intersection(*map(set, of.values()))) if of else []
  means = {arm: float(np.mean([_loss(by[s]) for s in seeds])) for arm, by in of.items() if seeds}
  return {"seeds": seeds} | means


def compared(of_runs: ledger.Index) -> dict[str, dict[str, Any]]:
  """{comparison: what the ledger says of it}."""
  kept = ("count", "effect", "low", "high", "verdict")
  return {
    f"{row.candidate} against {row.baseline}": {name: getattr(row, name) for name in kept}
    for row in ledger.rows(of_runs, [_system("2021_lns_madam")])
  }


def trainings() -> dict[str, Any]:
  """What the results of the lab say today; the rest of results.json is computed here."""
  of = ledger.read()
  return {"rates": searched(of), "trained": trained(of), "compared": compared(of)}


def _trained_tables(found: dict) -> list[str]:
  """Losses by bits, and what the ledger says of two of them."""
  of = found["trained"]
  arms = {"Adam": "adam", "Madam": "madam"}
  losses = [[how, *(f"{of[f'{arm}, {bits} bits']:.3f}" for bits in GAMMAS)]
            for how, arm in arms.items() if f"{arm}, 10 bits" in of]  # fmt: skip
  rows = [
    [name, str(row["count"]), f"{row['effect']:+.2f}", f"[{row['low']:+.2f}, {row['high']:+.2f}]",
     row["verdict"]]
    for name, row in found["compared"].items()
  ]  # fmt: skip
  return [
    "Training loss after the warm-up by bits of the weights, 512 steps, mean of the "
    f"{len(of['seeds'])} seeds that every arm has (weights in float32, Adam: {of['bf16']:.3f}):\n",
    tensors.markdown(["", *map(str, GAMMAS)], losses),
    "\nPaired by seed, all of them, in the [ledger](../ledger.md):\n",
    tensors.markdown(["comparison", "seeds", "effect, %", "interval, %", "verdict"], rows),
  ]


def tables(found: dict) -> str:
  rows = [
    [*name.split(", "), f"{100 * row['error']:.3g}", f"{100 * row['lost']:.3g}",
     f"{row['mean']:.2e}", f"{row['bound']:.2e}"]
    for name, row in found["updates"].items()
  ]  # fmt: skip
  head = ["bits", "update", "octaves a step", "error, % of the step", "weights that stay, %",
          "mean error, octaves² a weight", "its bound"]  # fmt: skip
  made = [
    "One update, rounded to the nearest, and the theorem's error with stochastic rounding:\n",
    tensors.markdown(head, rows),
    "\nTraining loss after the warm-up by peak rate, 147 steps, seed 100:\n",
  ]
  rates = list(dict.fromkeys(rate for by_rate in found["rates"].values() for rate in by_rate))
  shown = [[arm, *(f"{by[r]:.3f}" if by.get(r) else "diverged" if r in by else "-" for r in rates)]
           for arm, by in found["rates"].items()]  # fmt: skip
  made.append(tensors.markdown(["arm", *rates], shown) if shown else "no run yet")
  made += ["", *_trained_tables(found)]
  made.append("\nEnergy of a multiply-accumulate, a model: operations times their energy:\n")
  least = found["energy"]["FP32"]
  rows = [
    [name, f"{pj:.3f}", f"{100 * (pj / least - 1):+.0f}",
     f"{100 * (PAPER[name] / PAPER['FP32'] - 1):+.0f}" if name in PAPER else "-"]
    for name, pj in found["energy"].items()
  ]  # fmt: skip
  head = ["arithmetic", "pJ", "against FP32, %", "paper's iteration against FP32, %"]
  return "\n".join([*made, tensors.markdown(head, rows)])


def main():
  found = {
    "updates": {
      f"{bits}, {kind}, {rate}": measure(bits, kind, octaves)
      for rate, octaves in RATES.items()
      for bits in GAMMAS
      for kind in UPDATES[:2]
    },
    "stays": {
      f"{bits} {kind}": by_magnitude(bits, kind, RATES["0.08 / ln 2"])
      for bits in GAMMAS
      for kind in UPDATES[:2]
    },
    **trainings(),
    "energy": {name: energy(name) for name in MACS},
  }
  values = [
    {"magnitude": float(m), "lost": 100 * lost, "update": name.partition(" ")[2],
     "bits": name.partition(" ")[0]}
    for name, shares in found["stays"].items()
    for m, lost in zip(MAGNITUDES, shares, strict=True)
  ]  # fmt: skip
  chart = (
    alt.Chart(alt.Data(values=values))
    .mark_line(point=True)
    .encode(
      x=alt.X("magnitude:Q", title="weight, octaves from the standard deviation"),
      y=alt.Y("lost:Q", title="weights that an update does not move, %"),
      color=alt.Color("bits:N", sort=list(map(str, GAMMAS))),
    )
    .properties(width=300, height=240)
    .facet(column=alt.Column("update:N", title=None))
  )
  tensors.write(HERE, found, tables(found), chart)


if __name__ == "__main__":
  main()
