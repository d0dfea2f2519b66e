"""InfiR2's supervised fine-tuning of the 1.5B model in block FP8, two stages (arXiv:2509.22536).

what:      as configs/sft_7b.py, with the 1.5B model's learning rates (their TP 2)
command:   train configs/cpt_1p5b.py, put the data where configs/sft_7b.py says, then
           python launch.py --config=configs/sft_1p5b.py:stage1
           python launch.py --config=configs/sft_1p5b.py:stage2
hardware:  8 x H200 (not yet run); needs the extra "attention"
expected:  not yet measured
arms:      as configs/sft_7b.py

The sources disagree; the scripts are followed:
  weight decay   0 in the script, 0.05 on the model card
  RoPE base      1e6 as in continued pre-training; their trainer has 1e4 in a file for Qwen2.5-Math
  vocabulary     152,064 rows as in continued pre-training; that file says 151,936
"""

from configs import cpt_1p5b, sft_7b

ARMS = sft_7b.ARMS


def get_config(arm=""):
  c = sft_7b.get_config(arm, "sft_1p5b", cpt_1p5b, "cpt_1p5b")
  c.optim.peak_lr, c.optim.min_lr = 5e-5, 5e-6
  return c
