"""InfiR2's continued pre-training of Qwen2.5-1.5B in block FP8 (arXiv:2509.22536).

what:      40,000 steps of 4.2M tokens: 167.8B tokens (InfiXAI/InfiR2 scripts/CPT). What training
           computes has their values; the mesh is ours (they: TP 2 and 6 data workers)
command:   put Qwen/Qwen2.5-1.5B in assets/Qwen2.5-1.5B and text as configs/cpt_7b.py says, then
           python launch.py --config=configs/cpt_1p5b.py
hardware:  8 x H200 (not yet run); more, and the arms stable and decay: as configs/cpt_7b.py says
expected:  not yet measured
"""

from configs import base, cpt_7b

ARMS = cpt_7b.ARMS


def get_config(arm="", name="cpt_1p5b"):
  c = cpt_7b.get_config(arm, name)
  c.init.hf = "assets/Qwen2.5-1.5B"
  c.model.preset = "qwen25_1p5b"  # tied; the vocabulary is padded from 151,936 to 152,064 rows
  c.data.sources = {"main": base.source("prepared", "assets/cpt_data/main")}
  return c
