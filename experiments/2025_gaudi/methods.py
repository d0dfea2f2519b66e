"""Gaudi's scale methods as Quants, and SmolLM2-135M multiplied in each of them on E4M3 to 240.

what:      KL and loss of two texts by scale method, paired by window with the unquantized model
command:   python experiments/2025_gaudi/methods.py          (resumes; then the table of README)
needs:     assets/smollm2-135m (make run), assets/corpora (experiments/corpora/prepare.py all)
hardware:  one CPU core, 4 GB of memory; the CPU-seconds stand in the table
"""

import functools
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "lab")]

import served  # noqa: E402
import tensors  # noqa: E402

from fp8jax.formats import E4M3_240, by_name  # noqa: E402
from fp8jax.recipe.gemm import Accumulation, Gemm  # noqa: E402
from fp8jax.recipe.quant import WHOLE, Largest, LeastError, Quant, Scale, Static  # noqa: E402

TOKENS, BASE = 1024, "maxabs_hw"
# Whose null arms run too; the largest change of KL by an ulp is the null of all.
NULLS = (BASE, "maxabs_pow2")
# Back-off 1/2 of weights and 1/4 of activations, of every maxabs method.
_HALF, _QUARTER = Largest(2.0), 2
# All of the hardware's four scales are among those of amax times these, whatever the amax.
_HW = LeastError(tuple(2.0**k for k in range(16, -20, -4)))
# Powers of two around amax / 240: from two binades of room to three that saturate.
_POW2 = LeastError(tuple(2.0**k for k in (0, 1, 2, -1, -2, -3)))


def weight(scale: Scale, clip, tile=(WHOLE, WHOLE)) -> Quant:
  return Quant(E4M3_240, tile, scale, clip=clip)


def activation(scale: Scale, margin: int = _QUARTER) -> Quant:
  return Quant(E4M3_240, scale=scale, source=Static(margin))


def biased(bias: int) -> Quant:
  """The codes read with this exponent bias: a scale of 2^(7 - bias) for every tensor."""
  return Quant(by_name(f"e4m3(bias={bias}, inf=True)"), scale=Scale.ONE)


def methods() -> dict[str, tuple[Quant, Quant]]:
  """{name: (weight, activation)}."""
  channel = (1, WHOLE)
  act = {"hw": activation(Scale.GAUDI2), "pow2": activation(Scale.POW2)}
  made = {"unit_scale": (biased(7), biased(7))}
  made |= {f"hw_aligned_single_scale 2^{7 - b}": (biased(b), biased(b)) for b in (3, 11, 15)}
  made |= {
    "maxabs_hw": (weight(Scale.GAUDI2, _HALF), act["hw"]),
    "maxabs_pow2": (weight(Scale.POW2, _HALF), act["pow2"]),
    "maxabs_arbitrary": (weight(Scale.F32, _HALF), activation(Scale.F32)),
    "maxabs_hw_opt_weight": (weight(Scale.GAUDI2, _HW), act["hw"]),
    "maxabs_pow2_opt_weight": (weight(Scale.POW2, _POW2), act["pow2"]),
  }
  for name, quant in act.items():
    made[f"act_{name}_weights_pcs_maxabs_pow2"] = (weight(Scale.POW2, _HALF, channel), quant)
    made[f"act_{name}_weights_pcs_opt_pow2"] = (weight(Scale.POW2, _POW2, channel), quant)
  # Not the paper's: what the back-off costs.
  full = Largest()
  made["maxabs_hw, no back-off"] = (weight(Scale.GAUDI2, full), activation(Scale.GAUDI2, 0))
  made["maxabs_pow2, no back-off"] = (weight(Scale.POW2, full), activation(Scale.POW2, 0))
  made["maxabs_arbitrary, no back-off"] = (weight(Scale.F32, full), activation(Scale.F32, 0))
  return made


def run(kept: served.Kept):
  model = functools.cache(lambda: served.smollm2(TOKENS))
  for name, (w, x) in methods().items():
    gemm = Gemm(x, w, Accumulation.PRECISE)
    kept(name, lambda gemm=gemm, name=name: model().measure(gemm, has_null=name in NULLS))


def table(arms) -> str:
  """Of every method: KL and loss of both texts, and KL against the default's."""
  head, rows, others = ["method"], [], len(arms) - 1
  nulls = {text: served.null(arms.values(), text) for text in served.TEXTS}
  for text, title in served.TEXTS.items():
    head += [f"KL, {title}", "loss, %", f"KL against {BASE}, null {nulls[text]:.1e}", ""]
  for name, of in arms.items():
    row = [name]
    for text in served.TEXTS:
      windows = of[text]["windows"]
      row += [served.shown(served.kl(windows), ".4f"), served.shown(served.loss(windows), "+.2f")]
      if name == BASE:
        row += ["", ""]
        continue
      i = served.kl_against(windows, arms[BASE][text]["windows"], 2 * others)
      row += [served.shown(i, "+.4f"), served.word(i, nulls[text])]
    rows.append(row)
  return tensors.markdown(head, rows)


if __name__ == "__main__":
  results = served.Kept(HERE / "results.json")
  run(results)
  tensors.write_table(HERE, table(results.arms))
