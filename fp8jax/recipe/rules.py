"""Which recipe every linear layer gets: ordered rules, first match wins."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from fp8jax import calls, patterns
from fp8jax.errors import UserError, nearest
from fp8jax.recipe import library, papers, served
from fp8jax.recipe.gemm import PASSES, Accumulate, Recipe, accumulate_by_name
from fp8jax.recipe.quant import Delayed, Static

_OWN: dict[str, Recipe] = {}  # by `add`


def add(recipe: Recipe) -> str:
  """Lets configurations name a recipe of one's own; for the file that defines get_config.

  Returns:
    The name for precision.rules: "mine_5d1c07e2" of a recipe "mine". It ends in a digest of the
    definition, so that no run is resumed, skipped or compared as one of another definition.

  Raises:
    ValueError: the recipe's name is not of letters, digits and underscores.
  """
  if not re.fullmatch(r"\w+", recipe.name):
    raise ValueError(
      f"Recipe.name={recipe.name!r}: expected letters, digits and underscores, such as 'mine'"
    )
  text = json.dumps(recipe.to_dict(), sort_keys=True)
  name = f"{recipe.name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
  _OWN[name] = dataclasses.replace(recipe, name=name)
  return name


def recipe_by_name(name: str) -> Recipe:
  """A recipe of library.py, papers.py, served.py or `add`, with other numbers if the name gives
  some.

  Args:
    name: "block_128", or with options in parentheses: "tensor_delayed(steps=16, margin=1)", any
      fields of Delayed; "rowwise(accumulate=fast)", for all products that FP8 multiplies, or
      "tensor_current(accumulate=precise/precise/128)", for fwd, dgrad and wgrad.

  Raises:
    ValueError: no such recipe, no such option of it, or a value that it cannot have.
  """
  base, opening, options = name.partition("(")
  known = library.RECIPES | papers.PAPERS | served.SERVED | _OWN
  recipes = known | served.MEASURED
  if base not in recipes or (opening and not options.endswith(")")):
    near = nearest(base, recipes)
    hint = f"did you mean {near!r}?" if near else "none is like it."
    raise ValueError(
      f"unknown recipe {name!r}; {hint} Known: {', '.join(known)}; FORMAT_dynamic and "
      "FORMAT_weights of the formats of fp8jax/recipe/served.py"
    )
  recipe = recipes[base]
  if not opening:
    return recipe
  delays, accumulate = _options(name, options[:-1])
  try:
    if accumulate:
      if not any(getattr(recipe, p).multiplies_codes for p in PASSES):
        raise ValueError("it has no product of codes, whose accumulation could be another")
      recipe = recipe.with_accumulate(name, accumulate)
  except ValueError as e:
    raise ValueError(f"recipe {name!r}: {e}") from e
  if not delays:
    return recipe
  sources = [q.source for uses in recipe.uses().values() for q in uses]
  takes = Static if set(delays) == {"margin"} else Delayed
  if not any(isinstance(source, Delayed | takes) for source in sources):
    raise ValueError(f"recipe {name!r}: {base} has no delayed scales to give numbers to")
  return recipe.with_delays(name, delays)


def unquantized(name: str) -> str:
  """The name of the recipe that quantizes nothing: "bf16", or one with the same gains.

  Raises:
    ValueError: no recipe has these gains and quantizes nothing.
  """
  gains = [getattr(recipe_by_name(name), p).gain for p in PASSES]
  for other in (library.BF16, *papers.PAPERS.values()):
    if not other.is_quantized and [getattr(other, p).gain for p in PASSES] == gains:
      return other.name
  raise ValueError(
    f"recipe {name!r} has gains {gains}, and no recipe of papers.PAPERS has them unquantized, as a "
    "forward pass in 'bf16' needs; add one, or leave 'bf16' out of eval.precisions"
  )


def with_wider_margin(name: str, by: int, most: int) -> str | None:
  """The name of a recipe with a margin wider by so many powers of two.

  Returns:
    None where there is none: all scales are current, or the margin is the widest already.
  """
  margins = [
    q.source.margin
    for uses in recipe_by_name(name).uses().values()
    for q in uses
    if isinstance(q.source, Delayed | Static)
  ]
  if not margins or max(margins) >= most:
    return None
  base, stated = calls.parse(name, words=True)
  stated.pop("margin", None)
  return calls.write(base, {**stated, "margin": min(max(margins) + by, most)}, words=True)


def outlasts(given: str, own: str) -> bool:
  """Whether a recipe that a policy gave holds on where the schedule's is `own` from now on.

  It does not where that is wide; and one with a margin, which is of a recipe, not beside another.
  """
  if not recipe_by_name(own).is_quantized:
    return False
  (base, stated), (own_base, own_stated) = (calls.parse(n, words=True) for n in (given, own))
  if "margin" not in stated:
    return True
  return (base, stated | {"margin": 0}) == (own_base, own_stated | {"margin": 0})


def _options(name: str, option: str) -> tuple[dict[str, Any], tuple[Accumulate, ...]]:
  """(fields of Delayed, accumulation by pass) that "steps=16, accumulate=fast" names."""
  kinds = {f.name: type(f.default) for f in dataclasses.fields(Delayed)}
  delays, accumulate = {}, ()
  try:
    if set("(#") & set(option) or option.rstrip()[-1:] in ("", ","):
      raise ValueError
    for key, value in calls.parse(name, words=True)[1].items():
      option = f"{key}={value}"
      if key == "accumulate":
        accumulate = tuple(accumulate_by_name(part.strip()) for part in value.split("/"))
        accumulate = accumulate * len(PASSES) if len(accumulate) == 1 else accumulate
        if len(accumulate) != len(PASSES):
          raise ValueError
      else:
        delays[key] = calls.whole(key, value) if kinds[key] is int else kinds[key](value)
  except (KeyError, ValueError) as e:
    hint = f" ({e})" if isinstance(e, UserError) else ""
    known = ", ".join(f"{k}={Delayed.__dataclass_fields__[k].default}" for k in kinds)
    raise ValueError(
      f"recipe {name!r}: {option.strip()!r} is none of {known}, accumulate=fast, "
      f"accumulate=precise, accumulate=N, accumulate=FWD/DGRAD/WGRAD of these, each once{hint}"
    ) from e
  return delays, accumulate


def layer_name(path: str, layer: int) -> str:
  """ "layers/mlp/up" of layer 3 is "layers/3/mlp/up": what rules are matched against."""
  first, _, rest = path.partition("/")
  return f"{first}/{layer}/{rest}"


def range_name(path: str, start: int, stop: int, num_layers: int) -> str:
  """Name of a site stacked over layers start..stop-1: the path itself if these are all."""
  if (start, stop) == (0, num_layers):
    return path
  return layer_name(path, start).replace(f"/{start}/", f"/{start}-{stop - 1}/", 1)


def names_of_layers(name: str, layers: Sequence[int]) -> list[str]:
  """The `layer_name` of each layer that a site with this `range_name` is stacked over."""
  return [layer_name(path_of(name), i) for i in layers]


def path_of(name: str) -> str:
  """Where the declaration tree has the weight of a site: the name without its range of layers."""
  return re.sub(r"^layers/\d+-\d+/", "layers/", name)


def first_last_rules(first: int, last: int, num_layers: int) -> tuple[tuple[str, str], ...]:
  """Rules that give the first and last so many layers recipe 'bf16'."""
  chosen = [*range(first), *range(num_layers - last, num_layers)]
  if not chosen:
    return ()
  return ((f"layers/({'|'.join(map(str, chosen))})/.*", "bf16"),)


def match(names: Sequence[str], rules) -> dict[str, str]:
  """First matching rule wins, on the whole name.

  Args:
    names: site names, one per layer.
    rules: ordered (regular expression, value) pairs.

  Raises:
    ValueError: a name that no rule covers, or a rule that decides nothing.
  """
  try:
    number_of, problems = {name: patterns.first(rules, name) for name in names}, []
  except UserError as e:  # no rule in a reasonable time
    raise UserError(f"precision.rules: {e}") from e
  if missing := [name for name, number in number_of.items() if number < 0]:
    problems.append(
      f"no rule in precision.rules covers {_some(missing)}; add one, for example ('.*', 'bf16')"
    )
  for pattern, value in patterns.used(rules, names, so=False):
    problems.append(
      f"rule ({pattern!r}, {value!r}) in precision.rules decides nothing: it matches no site of "
      f"{_some(names)}, or earlier rules already did"
    )
  if problems:
    raise ValueError("; ".join(problems))
  return {name: rules[number][1] for name, number in number_of.items()}


def _some(names: Sequence[str], most: int = 8) -> str:
  """Names, layers abbreviated: those of layer 0 stand for the others'."""
  shown = [n for n in names if not patterns.of_layer(n)[0]] or list(names)
  rest = len(names) - len(shown[:most])
  return ", ".join(shown[:most]) + (f" and {rest} more" if rest else "")


def all_names(paths: Sequence[str], num_layers: int) -> list[str]:
  """The names of sites, one per layer, layer by layer; those in no layer last."""
  stacked = [p for p in paths if p.startswith("layers/")]
  in_layers = [layer_name(p, i) for i in range(num_layers) for p in stacked]
  return in_layers + [p for p in paths if not p.startswith("layers/")]


def segments(paths: Sequence[str], num_layers: int, rules) -> list[tuple[int, int, dict[str, str]]]:
  """Runs of layers that share every recipe: (start, stop, {path: recipe name}).

  Args:
    paths: names of the stacked sites, "layers/mlp/up"; others are matched as they are and appear in
      every run.
    rules: see `match`.
  """
  stacked = [p for p in paths if p.startswith("layers/")]
  single = [p for p in paths if not p.startswith("layers/")]
  chosen = match(all_names(paths, num_layers), rules)
  runs: list[tuple[int, int, dict[str, str]]] = []
  for i in range(num_layers):
    recipe_of = {p: chosen[layer_name(p, i)] for p in stacked} | {p: chosen[p] for p in single}
    if runs and runs[-1][2] == recipe_of:
      runs[-1] = (runs[-1][0], i + 1, recipe_of)
    else:
      runs.append((i, i + 1, recipe_of))
  return runs
