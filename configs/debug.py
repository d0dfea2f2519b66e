"""Two layers on the language reference that ships with Python: everything in seconds.

what:      a full run of the trainer (FP8 blocks, evaluation, checkpoint) on a 0.7M-parameter model
command:   python launch.py --config=configs/debug.py
hardware:  any CPU, under a minute; one device, also of a larger machine
expected:  held-out loss 5.17 -> 1.55 in 60 steps
"""

from configs import base


def get_config(arm=""):
  c = base.get_config(arm)
  c.steps = 60
  c.mesh.fsdp = 1
  c.eval.tokens = 4096
  return c
