"""Values that a command line gives to keys: --config.optim.peak_lr=1e-3."""

from absl import flags
from ml_collections import config_flags


class _OrNone(flags.ArgumentParser):
  """A parser of absl that also takes None, the value of an optional key that is not stated."""

  def __init__(self, parser: flags.ArgumentParser):
    self._parser, self.syntactic_help = parser, parser.syntactic_help

  def parse(self, argument):
    return None if argument == "None" else self._parser.parse(argument)

  def flag_type(self) -> str:
    return self._parser.flag_type()


def take_none():
  """Lets flags of numbers and switches take None; files.check_keys says where it is a value."""
  parsers = {int: flags.IntegerParser(), float: flags.FloatParser(), bool: flags.BooleanParser()}
  for kind, parser in parsers.items():
    config_flags.register_flag_parser_for_type(kind, _OrNone(parser))
