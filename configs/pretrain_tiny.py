"""Models of 0.8, 3 and 6 million parameters from random weights, for comparisons of recipes.

what:      a decoder with a vocabulary of 4,096 tokens on one corpus; 1,048,576 tokens unless steps
           say otherwise. Every matrix is whole tiles of 128×128, so that each recipe fits
command:   python experiments/corpora/prepare.py all    (once)
           python launch.py --config=configs/pretrain_tiny.py:3m-python_docs-block_128
hardware:  one CPU core, 2 GB of memory; minutes (experiments/lab.md)
expected:  experiments/ledger.md
arms:      SIZE-CORPUS-RECIPE, each may be left out: 0p8m, 3m (default) or 6m; a corpus of
           experiments/corpora/prepare.py (python_docs), or a mixture of some (ja_en_code); a
           recipe (bf16), or "float32": `bf16` that computes in float32. All others compute in
           bfloat16, on a CPU too, where "auto" would take float32
"""

from configs import base

FOLDER = "assets/corpora"
CORPORA = ("python_docs", "brown", "python_code", "man_de", "man_fr", "man_ja", "speeches")
# Corpora of equal shares of tokens, each a source with a loss of its own.
MIXTURES = {"ja_en_code": ("man_ja", "brown", "python_code")}
# Layers, hidden size, inner size of the MLP, heads and heads of keys and values, each of 64.
SIZES = {
  "0p8m": (2, 128, 256, 2, 1),  # 819,840 parameters
  "3m": (3, 256, 768, 4, 2),  # 3,409,664
  "6m": (6, 256, 768, 4, 2),  # 5,770,496; a sixth of the linear layers in the last layer
}


def get_config(arm=""):
  size, corpus, recipe = _parts(arm)
  c = base.get_config("bf16" if recipe == "float32" else recipe)
  c.precision.compute_dtype = "float32" if recipe == "float32" else "bfloat16"
  c.model.preset = "debug"  # every size of it is set here
  layers, hidden, inner, heads, kv_heads = SIZES[size]
  c.model.num_layers, c.model.hidden_size, c.model.intermediate_size = layers, hidden, inner
  c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = heads, kv_heads, 64
  c.model.vocab_size = 4096
  c.data.tokenizer = f"{FOLDER}/bpe_4096/tokenizer.json"
  c.data.eos = "<|endoftext|>"
  names = MIXTURES.get(corpus, (corpus,))
  c.data.sources = {name: base.source("text", f"{FOLDER}/{name}/**/*.txt") for name in names}
  c.mesh.fsdp = 1
  c.steps, c.global_batch, c.seq_len = 512, 8, 256
  # Warm up, hold, cosine tail over the last eighth.
  c.optim.schedule, c.optim.warmup_steps, c.optim.decay_steps = "wsd", 64, 64
  c.optim.peak_lr, c.optim.min_lr = 2e-3, 2e-4
  c.eval.tokens, c.eval.batch, c.eval.every = 65536, 8, 0
  c.checkpoint.every, c.checkpoint.keep = 128, 1
  c.log.every, c.log.report, c.log.tensorboard = 64, False, False
  return c


def _parts(arm: str) -> list[str]:
  """[size, corpus, recipe] of an arm, each of which may be left out."""
  words, chosen = arm.split("-"), ["3m", "python_docs"]
  for i, known in enumerate((SIZES, (*CORPORA, *MIXTURES))):
    if words and words[0] in known:
      chosen[i] = words.pop(0)
  return [*chosen, "-".join(words) or "bf16"]
