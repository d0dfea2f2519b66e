"""Scaling FP8 training to trillion-token LLMs (arXiv:2409.12517).

what:      make run's continued pre-training of SmolLM2-135M, delayed scales with Smooth-SwiGLU,
           moments in E4M3 and E5M2, an F16 master
command:   bash experiments/2024_trillion_token/run.sh
hardware:  two CPU cores, 4 GB of memory
expected:  the held-out loss of arm float32 (their Fig. 5: on par with BF16), at 4 bytes per
           parameter for master and moments; the divergence that Smooth-SwiGLU prevents comes after
           200 billion tokens and is a test of its own (tests/models/smooth_swiglu_test.py)
differs:   see README.md
"""

from configs import smollm2_cpt

# arm: what differs from float32 states and plain SwiGLU.
STATES = {"optim.master_format": "f16", "optim.moment_format": "tensor_e4m3_e5m2"}
ARMS = {
  "float32": {},
  "moments": STATES,
  "token": {"precision.smooth_swiglu": "token"},
  "channel": {"precision.smooth_swiglu": "channel"},
  "all": {"precision.smooth_swiglu": "channel", **STATES},
}


def get_config(arm="all"):
  if arm not in ARMS:
    raise ValueError(f"unknown arm {arm!r}; expected one of {', '.join(ARMS)}")
  # Their amax history is as long as one global step.
  c = smollm2_cpt.get_config("tensor_delayed_latest")
  c.precision.verify_fp8_gemms = True
  c.update_from_flattened_dict(ARMS[arm])
  return c
