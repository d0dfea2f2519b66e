"""Tokenizes every source once, into files that training reads."""

import functools

import jax

from fp8jax import console as console_lib
from fp8jax.data import config as data_config
from fp8jax.data import pretokenize
from fp8jax.errors import UserError, writing
from fp8jax.run import workdir as workdir_lib
from fp8jax.run.restore import output_folder
from fp8jax.run.settings import Prepare


def run(data: data_config.DataConfig, config: Prepare, workdir: str, out: str = ""):
  """Tokenizes every source into ArrayRecord files."""
  if data.chat is not None:
    raise UserError(
      "--job=prepare writes documents; training reads conversations from the files themselves"
    )
  if jax.process_count() > 1:
    raise UserError("--job=prepare works in one process; leave the others out")
  target = output_folder(out, workdir, "prepared")
  console = console_lib.console(stderr=True)
  lock = functools.partial(workdir_lib.locked, flag="--out")
  with writing(target):
    return pretokenize.run(data, target, config.shard_tokens, console, config.processes, lock)
