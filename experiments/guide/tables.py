"""Writes the tables of this folder's pages that follow from the code.

command: python experiments/guide/tables.py

A page holds a table between `<!-- table: NAME -->` and `<!-- end -->`. tests/guide_test.py fails
where a table is not what the code says.
"""

import json
import pathlib
import re

from fp8jax.config import registry
from fp8jax.data.chat import encode
from fp8jax.data.chat.template import ChatTemplate
from fp8jax.export import served
from fp8jax.formats import FORMATS
from fp8jax.models.hf import schemes
from fp8jax.optim import storage
from fp8jax.recipe.gemm import PASSES, Backward, accumulate_name
from fp8jax.recipe.library import RECIPES
from fp8jax.recipe.papers import PAPERS
from fp8jax.recipe.quant import Delayed, Quant
from fp8jax.recipe.served import SERVED

HERE = pathlib.Path(__file__).resolve().parent
_GOLDEN = HERE.parents[1] / "tests" / "golden"
_CLIENTS, _TEMPLATES = _GOLDEN / "fp8_clients.json", _GOLDEN / "chat_templates"
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)


def _markdown(head: tuple[str, ...], rows) -> str:
  lines = [head, ("---",) * len(head), *rows]
  return "".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |\n" for line in lines)


def _quant(quant: Quant) -> str:
  past = quant.source
  return f"`{quant}`" + (
    f" ({past.reduce} of {past.steps} steps)" if isinstance(past, Delayed) else ""
  )


def recipes(named=RECIPES) -> str:
  """Every named recipe: its Quants by tensor, accumulation by product."""
  rows = []
  for name, recipe in named.items():
    uses = recipe.uses()
    tensors = [", ".join(map(_quant, uses[t])) or "compute dtype" for t in "xwg"]
    gemms = (recipe.fwd, recipe.dgrad, recipe.wgrad)
    how = "/".join(accumulate_name(g.accumulate) if g.is_quantized else "-" for g in gemms)
    rows.append((f"`{name}`", *tensors, how))
  head = ("recipe", "x", "w", "g", "accumulation: forward/dgrad/wgrad")
  return _markdown(head, rows)


def papers() -> str:
  """The same of papers' recipes, and what their products do besides."""
  rows = []
  for name, recipe in PAPERS.items():
    uses = recipe.uses()
    tensors = [", ".join(map(_quant, uses[t])) or "compute dtype" for t in "xwg"]
    gemms = [getattr(recipe, p) for p in PASSES]
    besides = ["dequantized operands backward"] * (recipe.backward is Backward.DEQUANTIZED)
    for tensor, how in (("w", recipe.estimate_w), ("x", recipe.estimate_x)):
      besides += [f"{type(how).__name__} on d{tensor}"] * (how is not None)
    besides += ["compensation"] * gemms[0].compensates
    besides += ["rotated rows"] * any(any(g.rotate_rows) for g in gemms)
    besides += ["gains"] * any(g.gain is not None for g in gemms)
    rows.append((f"`{name}`", *tensors, ", ".join(besides) or "-"))
  return _markdown(("recipe", "x", "w", "g", "besides"), rows)


def number_formats() -> str:
  """Every named format: its numbers, and the dtype that stores them."""
  rows = []
  for name, f in FORMATS.items():
    special = " and ".join(["infinity"] * f.has_inf + ["NaN"] * f.has_nan) or "-"
    numbers = (f"{f.max:.6g}", f"{f.smallest:.4g}", special)
    rows.append((f"`{name}`", str(f.bits), *numbers, f"`{f.dtype}`" + " (cast)" * f.is_native))
  head = ("format", "bits", "largest", "smallest above 0", "specials", "stored in")
  return _markdown(head, rows)


def config_keys() -> str:
  """Every key with its default and its meaning."""
  rows = [
    (f"`{key.name}`", f"`{registry.shown_default(key)}`", key.meaning)
    for key in registry.KEYS.values()
  ]
  return _markdown(("key", "default", "meaning"), rows)


def optimizer_state() -> str:
  """Bytes per parameter of every named format of moments, masters and gradients."""
  rows = []
  for name, moments in storage.MOMENTS.items():
    size = storage.nbytes(moments.mu) + storage.nbytes(moments.nu)
    formats = f"`{moments.mu}`, `{moments.nu}`"
    rows.append(("`optim.moment_format`", f"`{name}`", formats, f"{size:.2f}"))
  for key, presets, nbytes in (
    ("master_format", storage.MASTERS, lambda how: sum(storage.master_nbytes(how))),
    ("grad_format", storage.GRADIENTS, storage.nbytes),
  ):
    for name, how in presets.items():
      rows.append((f"`optim.{key}`", f"`{name}`", f"`{how}`", f"{nbytes(how):.2f}"))
  rows = [(*row[:2], row[2].replace("`None`", "float32"), row[3]) for row in rows]
  return _markdown(("key", "value", "stored as", "bytes per parameter"), rows)


def export_formats() -> str:
  """How each format of an export holds the weights of each recipe's forward GEMM."""
  blocks = [schemes.fp8(schemes.FINE_GRAINED, scale_fmt=fmt) for fmt in schemes.SCALE_FMTS]
  rows = []
  for name, recipe in (RECIPES | SERVED).items():
    w, x = recipe.fwd.rhs, recipe.fwd.lhs
    if w is None:
      rows.append((f"`{name}`", *("quantized",) * 4))
      continue
    kept = ["kept" if f.holds(w) else "-" for f in blocks]
    for method in (schemes.COMPRESSED, schemes.MODELOPT):
      try:
        made = served.scheme(w, x, method)
        kept.append(f"`{made.container}`" if method == schemes.COMPRESSED else "kept")
      except ValueError:
        kept.append("-")
    rows.append((f"`{name}`", *kept))
  head = ("recipe", "`hf-fp8-block`", "`hf-fp8-block`, `ue8m0`", "`compressed-tensors`",
          "`modelopt`")  # fmt: skip
  return _markdown(head, rows)


def fp8_clients() -> str:
  """The findings of tests/golden/check_fp8_clients.py."""
  found = json.loads(_CLIENTS.read_text())
  rows = [
    (
      f"`{r['folder']}`", f"`{r['format']}`", f"{r['quantized_in_client']} of {r['matrices']}",
      f"{r['largest_relative_difference']:.0e}", f"{r['kl_from_back']:.1e}",
      f"{r['kl_from_recipe']:.1e}" if "kl_from_recipe" in r else "",
      f"{r['kl_of_noise_floor']:.1e}" if "kl_of_noise_floor" in r else "",
      f"{r['kl_from_source']:.1e}",
    )
    for r in found["folders"]
  ]  # fmt: skip
  head = ("folder", "container", "matrices quantized there", "weights, largest relative difference",
          "KL from our weights", "KL from our pass in the recipe", "its noise floor",
          "KL from the source")  # fmt: skip
  versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
  return _markdown(head, rows) + f"\n{versions}\n"


def template_masks() -> str:
  """The trained text of every sample that a conversation of two turns with thoughts becomes."""
  golden = json.loads((_TEMPLATES / "rendered.json").read_text())
  chat = golden["conversations"]["thoughts"]["messages"]
  rows = []
  for path in sorted(_TEMPLATES.glob("*.jinja")):
    template = ChatTemplate(path.read_text(), golden["special_tokens"], golden["date"])
    for number, one in enumerate(encode.render(template, chat), 1):
      trained = ", ".join(f"`{json.dumps(one.text[a:b])[1:-1]}`" for a, b in one.spans)
      rows.append((f"`{path.stem}`", str(number), trained))
  return _markdown(("template", "sample", "trained text, turn by turn"), rows)


TABLES = {
  "recipes": recipes, "papers": papers, "number_formats": number_formats,
  "config_keys": config_keys, "optimizer_state": optimizer_state, "export_formats": export_formats,
  "fp8_clients": fp8_clients, "template_masks": template_masks,
}  # fmt: skip


def current(page: str) -> str:
  """The page with its tables as the code has them."""
  return _MARKED.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], page)


def main():
  for path in sorted(HERE.glob("*.md")):
    path.write_text(current(path.read_text()))


if __name__ == "__main__":
  main()
