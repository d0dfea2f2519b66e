"""InfiR2's continued pre-training of Qwen2.5-7B in block FP8 (arXiv:2509.22536).

what:      40,000 steps of 4.2M tokens: 167.8B tokens (InfiXAI/InfiR2 scripts/CPT). What training
           computes has their values; the mesh is ours (they: TP 4 and 6 data workers)
command:   put Qwen/Qwen2.5-7B in assets/Qwen2.5-7B and a corpus in corpus/*.jsonl; once, anywhere,
           python launch.py --config=configs/cpt_7b.py --job=prepare \
             --out=assets/cpt_data --config.data.sources.main.kind=jsonl \
             --config.data.sources.main.path='corpus/*.jsonl'
           then on the GPUs
           python launch.py --config=configs/cpt_7b.py
hardware:  8 x H200 (compiled for them without a GPU, not yet run); more: see meshes
expected:  42.1 GiB per GPU (--job=memory at commit b865bd46); 12,096 FP8 GEMMs per step and GPU,
           all of them proven in the compiled program (make test-aot); loss and speed: not measured
meshes:    128 sequences per step, one per GPU in flight: --config.grad_accum_steps=A
           --config.eval.batch=E
             8 GPUs: A=16 E=8     mesh 2 x 4    (the defaults)
            16 GPUs: A=8  E=16    mesh 4 x 4
            32 GPUs: A=4  E=32    mesh 8 x 4
            64 GPUs: A=2  E=64    mesh 16 x 4
           128 GPUs: A=1  E=128   mesh 32 x 4
arms:      stable   warm-up and 35,000 steps in all, no decay, into runs/cpt_7b_stable
           decay    InfiR2's decay-only script: from step 35,000 of it, with its optimizer and its
                    place in the data, warm-up 0, 5,000 steps of decay. --config.init.workdir and
                    .step name another run (and .steps its last step + 5,000)
           any other text names a recipe
"""

from configs import base

ARMS = ("stable", "decay")


def get_config(arm="", name="cpt_7b"):
  """The configuration; `name` is that of the file whose arms these are."""
  recipe = "" if arm in ARMS else arm
  # The published scripts run Transformer Engine's default: scales rounded up to powers of two.
  c = base.get_config(recipe or "block_128_pow2")
  c.seed = 1236
  c.init.hf = "assets/Qwen2.5-7B"
  c.model.preset = "qwen25_7b"
  c.steps, c.global_batch, c.seq_len = 40_000, 128, 32_768
  c.grad_accum_steps = 16  # one sequence per GPU in flight on 8 GPUs
  c.data.sources = {"main": base.source("prepared", "assets/cpt_data/main")}
  c.data.heldout_fraction = 0.1  # --split 90,5,5
  c.data.cross_document = True  # no attention mask between documents
  c.optim.schedule = "wsd"
  c.optim.warmup_steps, c.optim.decay_steps = 5_000, 5_000
  c.optim.peak_lr, c.optim.min_lr = 1e-4, 1e-5
  c.optim.b1, c.optim.b2, c.optim.eps = 0.9, 0.95, 1e-8
  c.optim.weight_decay, c.optim.grad_clip_norm = 0.1, 1.0
  # 3584 / 4 and 1536 / 4 are whole scale tiles, so weights are gathered in FP8; an eighth is not.
  c.mesh.data, c.mesh.fsdp = -1, 4
  c.memory.remat_policy, c.memory.loss_chunk = "full", 2048
  c.eval.every, c.eval.tokens, c.eval.batch = 100, 10 * 128 * 32_768, 8
  c.eval.precisions = ("recipe",)  # as theirs; a BF16 pass besides would double the evaluation
  c.checkpoint.every, c.checkpoint.keep = 1_000, 3
  c.log.every = 1
  if arm == "stable":
    c.steps, c.optim.decay_steps = 35_000, 0
  if arm == "decay":
    c.init.workdir, c.init.step = f"runs/{name}_stable", 35_000
    c.optim.warmup_steps = 0
    c.checkpoint.accept_changes = ("steps", "optim.warmup_steps", "optim.decay_steps")
  return c
