"""Tokenizes every source once, into files that training reads."""

import jax

from fp8jax import console as console_lib
from fp8jax.config import resolve
from fp8jax.data import pretokenize
from fp8jax.errors import UserError
from fp8jax.jobs.restore import folder_of
from fp8jax.step import run_spec


def run(c: run_spec.Config, workdir: str):
  """Tokenizes every source into ArrayRecord files."""
  if jax.process_count() > 1:
    raise UserError("--job=prepare works in one process; leave the others out")
  target = folder_of(c.prepare.path, workdir, "prepared")
  out = console_lib.console(stderr=True)
  return pretokenize.run(resolve.resolve_data(c), target, c.prepare.shard_tokens, out)
