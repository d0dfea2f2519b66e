"""Values that a command line gives to keys: --config.optim.peak_lr=1e-3."""

from absl import flags
from ml_collections import config_flags

from fp8jax.config import registry
from fp8jax.config.files import Config


class _OrNone(flags.ArgumentParser):
  """A parser of absl that also takes None, the value of an optional key that is not stated."""

  def __init__(self, parser: flags.ArgumentParser):
    self._parser, self.syntactic_help = parser, parser.syntactic_help

  def parse(self, argument):
    return None if argument == "None" else self._parser.parse(argument)

  def flag_type(self) -> str:
    return self._parser.flag_type()


def with_none(c: Config):
  """Takes None for an optional tuple, which absl's parser of tuples reads as a text of one."""
  for one in registry.KEYS.values():
    if one.type is tuple and one.is_optional and registry.at(c, one.name) in (("None",), (None,)):
      *above, last = one.name.split(".")
      registry.at(c, ".".join(above))[last] = None


def take_none():
  """Lets flags of numbers and switches take None; files.check_keys says where it is a value."""
  parsers = {int: flags.IntegerParser(), float: flags.FloatParser(), bool: flags.BooleanParser()}
  for kind, parser in parsers.items():
    config_flags.register_flag_parser_for_type(kind, _OrNone(parser))
