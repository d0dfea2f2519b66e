"""Tensors of a real model for error tables, and how a table is written.

`captured` runs SmolLM2-135M (make run fetches the weights) forward and backward once over 2,048
held-out tokens of the Python documentation, linears in float32, `gradients` gives gradients of the
weights of several smaller batches. `write` keeps numbers with their
provenance in results.json, a picture in errors.svg and the table between the markers of README.md.
"""

import json
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import altair as alt  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import vl_convert  # noqa: E402

from configs import smollm2_cpt  # noqa: E402
from fp8jax import params as params_lib  # noqa: E402
from fp8jax.config import resolve  # noqa: E402
from fp8jax.data import loader  # noqa: E402
from fp8jax.kernels import choose  # noqa: E402
from fp8jax.models import transformer  # noqa: E402
from fp8jax.models.hf import weights  # noqa: E402
from fp8jax.ops import products  # noqa: E402
from fp8jax.report import charts, page  # noqa: E402
from fp8jax.run import provenance  # noqa: E402

LENGTH, SEQUENCES = 512, 4
# Beginnings of columns that are no shares.
AS_IT_IS = ("times", "bytes", "GiB", "dB", "k ")
_TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.S)


def smollm2(
  recipe: str = "bf16", length: int = LENGTH, sequences: int = SEQUENCES, batches: int = 1,
  **changes,
):  # fmt: skip
  """(spec, params, held-out batches) of SmolLM2-135M; `changes` of its configuration."""
  c = smollm2_cpt.get_config(recipe)
  c.update_from_flattened_dict(changes)
  c.init.hf = str(ROOT / c.init.hf)
  c.seq_len, c.eval.batch = length, sequences
  spec = resolve.resolve(c, 1, choose.current_device())
  params, _ = weights.load_params(c.init.hf, spec.model)
  drawn = loader.heldout_batches(spec.data, "main", sequences, batches)
  return spec, params, [{name: jnp.asarray(x) for name, x in batch.items()} for batch in drawn]


def captured() -> dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
  """{site: (x [tokens, in], w [in, out], g [tokens, out]) of its layers, the last one first}."""
  spec, params, (batch,) = smollm2(**{"memory.remat_policy": "full"})

  def loss(params):
    return transformer.loss(params, spec.sites(), batch, spec.model, spec.run)

  return watched(loss, params, LENGTH * SEQUENCES)[0]


def watched(loss, params, tokens: int, sites: str = "layers/"):
  """({site: (x, w, g) of its layers as `captured`}, gradients) of one backward pass.

  Args:
    sites: how the names of those that are kept begin.
  """
  seen: dict[str, list] = {}
  multiply = products.weight_gradient

  def watching(spec, x, g, dtype, inputs, w=None, *kept):
    def keep(x, w, g):
      # As NumPy's own first: a callback that computes with JAX waits for itself.
      x, g = (np.asarray(t).reshape(tokens, -1) for t in (x, g))
      seen.setdefault(spec.name, []).append((x, np.asarray(w).reshape(x.shape[1], -1), g))

    if spec.name.startswith(sites):
      jax.debug.callback(keep, x, w, g)
    return multiply(spec, x, g, dtype, inputs, w, *kept)

  products.weight_gradient = watching
  gradient = jax.block_until_ready(jax.jit(jax.grad(loss))(params))
  jax.effects_barrier()
  products.weight_gradient = multiply
  return seen, gradient


def gradients(count: int, every: int = 10) -> Iterator[dict[str, jax.Array]]:
  """{site: float32 [layers, ...]} of the mean loss of a batch, of every so many layers.

  `count` batches of 256 held-out tokens, one after the other, at SmolLM2's own weights.
  """
  spec, params, batches = smollm2(length=256, sequences=1, batches=count)

  @jax.jit
  def gradient(params, batch):
    def loss(params):
      total = transformer.loss(params, spec.sites(), batch, spec.model, spec.run)
      return total / jnp.sum(batch["weights_BL"])

    layers = params_lib.flatten(jax.grad(loss)(params)["layers"])
    return {name: g[::every] for name, g in layers.items() if not name.endswith("norm")}

  for batch in batches:
    yield gradient(params, batch)


def write(here: pathlib.Path, results: dict, table: str, chart: alt.TopLevelMixin):
  """The numbers, the picture and the table of an experiment's folder."""
  kept = {"results": results, "provenance": provenance.provenance({}, "seeds in the script", 0)}
  (here / "results.json").write_text(json.dumps(kept, indent=1) + "\n")
  page.write(str(here / "errors.svg"), vl_convert.vegalite_to_svg(charts.spec(chart)))
  write_table(here, table)


def write_table(here: pathlib.Path, table: str, name: str = "table"):
  """The table of a folder's page alone, or of several the one behind <!-- NAME -->."""
  readme = here / "README.md"
  place = re.compile(_TABLE.pattern.replace("table", name), _TABLE.flags)
  readme.write_text(place.sub(lambda m: f"{m[1]}{table}\n{m[2]}", readme.read_text()))
  print(table)


def markdown(head: list[str], rows: list[list[str]]) -> str:
  return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def cells(row: dict[str, float]) -> list[str]:
  """To three digits: shares and errors in percent, what is named so as it is."""
  shown = [v if k.startswith(AS_IT_IS) else 100 * v for k, v in row.items()]
  return [f"{v:.3g}" if abs(v) < 1000 else f"{v:.0f}" for v in shown]


def tables(parts: dict[str, tuple[list[str], dict[str, dict[str, float]]]]) -> str:
  """{title: (head, {row: {column: value}})} as Markdown."""
  return "\n\n".join(
    f"{title}:\n\n{markdown(head, [[name, *cells(row)] for name, row in rows.items()])}"
    for title, (head, rows) in parts.items()
  )
