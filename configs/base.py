"""Every key at its default. Other configs are thin differences.

what:      the schema; on its own it trains the two-layer debug model on bytes
command:   python launch.py --config=configs/debug.py
hardware:  any
expected:  not a run of its own

Each key is declared once, with its type, default, meaning and bounds, in the settings of the folder
that owns it (fp8jax/config/registry.py lists them). `python launch.py --help-config` prints all of
them, `--explain optim.peak_lr` one; experiments/guide/configuration.md is the same as a table.
Override any key on the command line: --config.optim.peak_lr=3e-4. An unknown key or a value of the
wrong type is refused.
"""

from ml_collections import ConfigDict

from fp8jax.config import registry
from fp8jax.recipe import rules


def get_config(arm=""):
  """The base configuration.

  arm  the text after a colon in --config=FILE:ARM: a recipe; or "guide", or "guide,RECIPE": the
       preset of configs/fp8_guide.py below what the file itself sets
  """
  c = registry.base()
  preset, comma, recipe = arm.partition(",")
  if preset == "guide":
    arm = recipe if comma else "tensor_delayed(margin=1)"
    _guide(c, rules.recipe_by_name(arm).is_stateful)
  if arm:
    c.precision.rules = (("head", "bf16"), ("layers/.*", arm))
  c.data.sources = ConfigDict({"main": source(kind="pydoc")})
  return c


def _guide(c, is_stateful):
  """Numerics and policies of configs/fp8_guide.py; those of scales where a recipe keeps some."""
  c.precision.last_bf16 = 1  # first_bf16 = 1, too, from three layers on
  c.loss_scale.kind = "dynamic"  # from 2^8
  c.optim.on_nonfinite = "skip"
  c.optim.schedule = "cosine"
  c.optim.peak_lr = 3e-4
  c.optim.min_lr = 1e-5
  c.optim.weight_decay = 0.01  # .01 to .02
  c.optim.grad_clip_norm = 1.0
  c.log.tensor_stats_every = 10  # 100 in long runs
  c.log.alarms = (
    ("saturation", ">", 0.01), ("underflow", ">", 0.3), ("nonfinite", ">", 0.0),
  )  # fmt: skip
  of_scales = (
    "refresh(every=2000)",  # every few thousand steps, or on a failure
    "refresh(alarm='underflow')",
    "widen_margin(alarm='saturation')",
  )
  c.precision.policy = (
    *(of_scales if is_stateful else ()),
    "switch_recipe(to='bf16', alarm='any', k=3, looks=5, back_after=20)",
    "roll_back(z=6.0, window=32, skip=2)",
  )
  c.checkpoint.every = 20


# The columns of conversations, unless a source says otherwise.
_FIELDS = {"messages": "messages", "sharegpt": "conversations", "prompt": "prompt,completion"}


def source(kind="text", path="", field="", dataset="", split="train", weight=1.0, chat=""):
  """One entry of data.sources.

  kind     "pydoc" (ships with Python), "text" (a document per file), "jsonl" (per line), "parquet"
           (per row), "datasets" (Hugging Face's), "tfds", "prepared" (written by --job=prepare)
  path     glob of files; for datasets a folder that save_to_disk wrote; for tfds its data_dir; for
           prepared its folder
  field    key or column of the text; "" is "text", and of conversations those below
  dataset  tfds: name[/config][:version]; datasets: name[:configuration]
  split    tfds and datasets: split or slice of one
  weight   share of tokens; conversations: 1
  chat     "": documents; or the format of conversations: "messages" (OpenAI's, in the column
           "messages"), "sharegpt" ("from" and "value", in "conversations"), "prompt" (two columns,
           "prompt,completion")
  """
  field = field or _FIELDS.get(chat, "text")
  return ConfigDict(
    dict(kind=kind, path=path, chat=chat, field=field, dataset=dataset, split=split, weight=weight)
  )
