"""Sensitivity of SmolLM2-135M's linear layers on the Python language reference.

what:      --job=sensitivity of the imported weights, half of the documents held out
command:   python launch.py --config=experiments/sensitivity/config.py --job=sensitivity
           --workdir=runs/sensitivity
hardware:  two CPU cores, 6 GB of memory; one device, also of a larger machine
expected:  see README.md
"""

from configs import smollm2_cpt

ARMS = ("block_128",)


def get_config(arm="block_128"):
  if arm not in ARMS:
    raise ValueError(f"unknown arm {arm!r}; expected one of {', '.join(ARMS)}")
  c = smollm2_cpt.get_config(arm)
  c.data.heldout_fraction = 0.5
  return c
