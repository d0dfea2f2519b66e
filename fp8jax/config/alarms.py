"""Alarms that a configuration states: which statistic of which sites, and the limits."""

from fp8jax import patterns
from fp8jax.step.settings import Alarm

# The quantities that a rule may test, with the advice when it fires.
ADVICE = {
  "saturation": "its scale is too small for what came: a shorter history or a margin "
  "(tensor_delayed(steps=16, margin=1)), or current scales (tensor_current, block_128)",
  "underflow": "its range is too wide for one scale: finer tiles (block_128, mxfp8), E5M2 for "
  "activations (tensor_current_e5m2) or gradients (block_128_hybrid), or bf16 for this site",
  "snr_db": "narrowing loses too much of it: finer tiles (block_128, mxfp8) or bf16 for this site",
  "amax": "it grows: lower optim.peak_lr, or give this site bf16",
  "nonfinite": "something upstream overflowed: lower optim.peak_lr, or give this site bf16",
  "kurtosis": "few elements hold most of it and set its scale: finer tiles (block_128, mxfp8), "
  "bf16 for this site, or precision.smooth_swiglu if it is the input of mlp/down",
  "alignment": "gate and up weights of a channel are parallel, which makes it grow with the square "
  "of its input: precision.smooth_swiglu, finer tiles (block_128), or bf16 for this site",
}


def read_alarms(stated) -> tuple[Alarm, ...]:
  """log.alarms of a config.

  Raises:
    ValueError: not (statistic, "<" or ">", number[, regular expression]).
  """
  alarms = []
  for i, entry in enumerate(stated):
    good = isinstance(entry, (tuple, list)) and len(entry) in (3, 4)
    good = good and entry[0] in list(ADVICE) and entry[1] in ("<", ">")
    good = (
      good and isinstance(entry[2], (int, float)) and all(isinstance(e, str) for e in entry[3:])
    )
    if not good:
      raise ValueError(
        f"log.alarms[{i}]={entry!r} is no rule such as ('underflow', '>', 0.3) or ('snr_db', '<', "
        f"10.0, 'layers/.*/g'); statistics are {', '.join(ADVICE)}"
      )
    for problem in filter(None, map(patterns.problem, entry[3:])):
      raise ValueError(f"log.alarms[{i}]: {problem}")
    alarms.append(Alarm(entry[0], entry[1], float(entry[2]), *entry[3:]))
  return tuple(alarms)
