"""FP8-LM's levels of optimization (arXiv:2310.18313 §2; MS-AMP's O1, O2, O3).

what:      make run's continued pre-training of SmolLM2-135M, master weights, gradients and moments
           kept as FP8-LM keeps them, one arm per level
command:   bash experiments/2023_fp8_lm/run.sh
hardware:  two CPU cores, 4 GB of memory
expected:  the held-out loss of arm float32 (their Fig. 4: curves coincide), at 16, 11, 6 and 6
           bytes per parameter
differs:   see README.md
"""

from configs import smollm2_cpt

# arm: master, gradients, moments.
ARMS = {
  "float32": ("float32", "float32", "float32"),
  "o1": ("f16", "e4m3", "float32"),
  "o2": ("f16", "e4m3", "fp8lm"),
  "o3": ("f16", "e4m3", "fp8lm"),
}


def get_config(arm="o2"):
  if arm not in ARMS:
    raise ValueError(f"unknown arm {arm!r}; expected one of {', '.join(ARMS)}")
  c = smollm2_cpt.get_config("fp8lm")
  c.precision.verify_fp8_gemms = True
  c.optim.master_format, c.optim.grad_format, c.optim.moment_format = ARMS[arm]
  return c
