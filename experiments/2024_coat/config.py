"""COAT's optimizer and activations (arXiv:2410.19313).

what:      make run's continued pre-training of SmolLM2-135M with COAT's moments, alone and with its
           activations, and with masters and gradients in 16 bits besides
command:   bash experiments/2024_coat/run.sh
hardware:  two CPU cores, 4 GB of memory
expected:  held-out loss within +0.017 nats of arm float32 (their Tables 3 and 4: +0.013 to +0.017)
differs:   see README.md
"""

from configs import smollm2_cpt

# arm: what differs from float32 states and activations in the compute dtype.
ACTIVATIONS = {"memory.save_norm_inputs": "e4m3_16", "memory.save_gate_up": "e4m3_16"}
ARMS = {
  "float32": {},
  "moments": {"optim.moment_format": "coat"},
  "activations": ACTIVATIONS,
  "coat": {"optim.moment_format": "coat", **ACTIVATIONS},
  "lossless": {
    "optim.moment_format": "coat",
    "optim.master_format": "bf16_remainder",
    "optim.grad_format": "bf16_sr",
  },
}


def get_config(arm="coat"):
  if arm not in ARMS:
    raise ValueError(f"unknown arm {arm!r}; expected one of {', '.join(ARMS)}")
  # Scales per tensor from the present amax, inputs of GEMMs kept in FP8, as theirs.
  c = smollm2_cpt.get_config("tensor_current")
  c.memory.save_gemm_inputs = "quantized"
  c.precision.verify_fp8_gemms = True
  c.update_from_flattened_dict(ARMS[arm])
  return c
