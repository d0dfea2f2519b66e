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


def get_config(arm=""):
  """The base configuration. `arm`, the text after a colon in --config=FILE:ARM, names a recipe."""
  c = registry.base()
  if arm:
    c.precision.rules = (("head", "bf16"), ("layers/.*", arm))
  c.data.sources = ConfigDict({"main": source(kind="pydoc")})
  return c


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
