"""Methods of post-training quantization as values, and the combinations that make sense.

They act in the order of `ORDER`, however they are written: folds of the whole model, then layer by
layer scales of channels, codes, and biases.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fp8jax import calls
from fp8jax.errors import UserError, nearest
from fp8jax.models import transformer
from fp8jax.models.config import ModelConfig
from fp8jax.ptq import gptq, learned_rounding, rotate
from fp8jax.recipe.gemm import Recipe
from fp8jax.recipe.quant import Quant


@dataclasses.dataclass(frozen=True)
class RoundToNearest:
  """Every code is the nearest: what happens without Gptq and LearnedRounding."""


@dataclasses.dataclass(frozen=True)
class Rotate:
  """Random Hadamard rotations folded into weights (rotate.py).

  Attributes:
    r1: of the residual stream.
    r2: of the values of every head.
    online: R3 and R4, which no folder can hold: refused.
    seed: of the signs.
  """

  r1: bool = True
  r2: bool = True
  online: bool = False
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Equalize:
  """Equal ranges of weights with a linear path between them (fold.equalized)."""


@dataclasses.dataclass(frozen=True)
class SmoothQuant:
  """A share alpha of the activations' range goes into the weights (smooth.scales)."""

  alpha: float = 0.5


@dataclasses.dataclass(frozen=True)
class Awq:
  """Scales that spare loud channels the rounding (awq.search).

  Attributes:
    grid: exponents that are tried.
    clip: whether the amaxes of tiles are searched, too (awq.clipped).
  """

  grid: int = 20
  clip: bool = False


@dataclasses.dataclass(frozen=True)
class Gptq:
  """Codes column by column, later ones making up for earlier ones (gptq.quantize).

  Attributes:
    damp: added to the diagonal of the second moments, as a share of its mean.
    order: of the columns, one of gptq.ORDERS.
    block: columns of a chunk.
  """

  damp: float = 0.01
  order: gptq.Order = "as_is"
  block: int = 128


@dataclasses.dataclass(frozen=True)
class LearnedRounding:
  """Codes up or down by sign gradient descent (learned_rounding.learn)."""

  steps: int = 200


@dataclasses.dataclass(frozen=True)
class BiasCorrection:
  """The mean error goes into the biases that there are (bias.corrected)."""


Method = (
  RoundToNearest | Rotate | Equalize | SmoothQuant | Awq | Gptq | LearnedRounding | BiasCorrection
)
METHODS: dict[str, type] = {
  "rotate": Rotate, "equalize": Equalize, "smooth_quant": SmoothQuant, "awq": Awq,
  "round_to_nearest": RoundToNearest, "gptq": Gptq, "learned_rounding": LearnedRounding,
  "bias_correction": BiasCorrection,
}  # fmt: skip
ORDER = tuple(METHODS.values())
# Each chooses the codes.
CODES = (RoundToNearest, Gptq, LearnedRounding)
# Each chooses the scales of the same channels.
CHANNELS = (SmoothQuant, Awq)
# Each makes other numbers of weights that are 0.
FILLING = (Rotate, Gptq, LearnedRounding)
# The reason why a method cannot make codes of a Quant; "" without any.
PROBLEMS: dict[type, Callable[[Quant], str]] = {
  Gptq: gptq.problem, LearnedRounding: learned_rounding.problem,
}  # fmt: skip
# (method, field): the least and the largest value of a number, or the texts that it may be.
_VALUES: dict[tuple[type, str], tuple] = {
  (Rotate, "seed"): (0, 2**32 - 1), (SmoothQuant, "alpha"): (0, 1), (Awq, "grid"): (2, 100),
  (Gptq, "damp"): (0, 10), (Gptq, "order"): gptq.ORDERS, (Gptq, "block"): (1, 2**16),
  (LearnedRounding, "steps"): (1, 10_000),
}  # fmt: skip


def by_name(text: str) -> Method:
  """The method of a text such as "gptq", "gptq(damp=0.05)" or "rotate(r2=False)".

  Raises:
    UserError: no such method, no such field of it, or a value that it cannot have.
  """
  name, given = calls.parse(text)
  if name not in METHODS:
    near = nearest(name, METHODS)
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(METHODS)}"
    raise UserError(f"method {text!r} is unknown; {hint}")
  kind = METHODS[name]
  known = {field.name: field.default for field in dataclasses.fields(kind)}
  for key, value in given.items():
    if key not in known:
      fields = f"it has {', '.join(known)}" if known else "it has none"
      raise UserError(f"method {text!r} has no field {key!r}; {fields}")
    _check_value(text, kind, key, value, known[key])
  return kind(**{k: float(v) if isinstance(known[k], float) else v for k, v in given.items()})


def name_of(method: Method) -> str:
  """The shortest text of which `by_name` makes it."""
  name = next(name for name, kind in METHODS.items() if type(method) is kind)
  fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)
            if getattr(method, f.name) != f.default}  # fmt: skip
  return calls.write(name, fields) if fields else name


def _check_value(text: str, kind: type, key: str, value: Any, default: Any):
  wanted = (int, float) if isinstance(default, float) else type(default)
  is_right = isinstance(value, wanted) and isinstance(value, bool) == isinstance(default, bool)
  limits = _VALUES.get((kind, key), ())
  if isinstance(default, str):
    if value not in limits:
      raise UserError(f"method {text!r}: {key} must be one of {', '.join(map(repr, limits))}")
  elif not is_right or (limits and not limits[0] <= value <= limits[1]):
    what = {bool: "True or False", int: "a whole number", float: "a number"}[type(default)]
    limited = f" from {limits[0]} to {limits[1]}" if limits else ""
    raise UserError(f"method {text!r}: {key} must be {what}{limited}")


def in_order(methods: Iterable[Method]) -> tuple[Method, ...]:
  """The methods as they act."""
  return tuple(sorted(methods, key=lambda method: ORDER.index(type(method))))


def check(
  methods: Sequence[Method], recipes: Mapping[str, Recipe], cfg: ModelConfig | None = None
) -> list[str]:
  """The problems of these methods with a model that is served so, in words with the fix.

  Args:
    methods: in any order.
    recipes: of every linear layer's site; only `fwd` is read.
    cfg: the model, for what its architecture cannot have.

  Returns:
    One text per problem; empty without any.
  """
  texts = _combined(methods)
  quants: dict[Quant, list[str]] = {}  # of weights, and their sites
  for site, recipe in recipes.items():
    if recipe.fwd.rhs is not None:
      quants.setdefault(recipe.fwd.rhs, []).append(site)
  if not quants:
    texts.append(
      "no weight is quantized: give layers a recipe of quantized weights in precision.rules, such "
      "as w4a16 or fp8_dynamic"
    )
  has_activations = any(r.fwd.rhs is not None and r.fwd.lhs is not None for r in recipes.values())
  for method in methods:
    if isinstance(method, SmoothQuant) and quants and not has_activations:
      texts.append(
        f"{name_of(method)} moves outliers of activations into the weights, and these recipes "
        "leave activations unquantized: the weights would only get worse. Take awq(), or a recipe "
        "that quantizes activations"
      )
    problem = PROBLEMS.get(type(method), lambda quant: "")
    for quant, sites in quants.items():
      if reason := problem(quant):
        more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
        texts.append(f"{name_of(method)} on {quant} ({sites[0]}{more}): {reason}")
    if isinstance(method, Rotate):
      texts += _of_rotation(method, cfg)
    if isinstance(method, BiasCorrection) and cfg is not None and not _has_biases(cfg):
      texts.append(
        f"{name_of(method)} with architecture {cfg.architecture!r}, whose linear layers have no "
        "biases to hold the correction: leave it out"
      )
  return texts


def _combined(methods: Sequence[Method]) -> list[str]:
  texts = []
  kinds = [type(method) for method in methods]
  for kind in ORDER:
    if kinds.count(kind) > 1:
      name = next(n for n, k in METHODS.items() if k is kind)
      texts.append(f"{name} is there {kinds.count(kind)} times: once is enough")
  for group, what in ((CODES, "the codes"), (CHANNELS, "the scales of the same channels")):
    names = [name_of(m) for m in methods if isinstance(m, group)]
    if len({type(m) for m in methods if isinstance(m, group)}) > 1:
      texts.append(f"{' and '.join(names)} each choose {what}: keep one of them")
  return texts


def _of_rotation(method: Rotate, cfg: ModelConfig | None) -> list[str]:
  texts = [] if cfg is None else rotate.problems(cfg)
  if method.online:
    texts.append(
      f"{name_of(method)}: R3 and R4 rotate activations while a server runs, and a folder of "
      "weights cannot ask for that; take rotate(), whose R1 and R2 are folded"
    )
  if not (method.r1 or method.r2):
    texts.append(f"{name_of(method)} rotates nothing: set r1 or r2, or leave it out")
  return texts


def _has_biases(cfg: ModelConfig) -> bool:
  """Whether some linear layer has a bias: a parameter named after its weight."""
  return any(
    f"{site.name}_bias" in mixer.params(cfg)
    for mixer in transformer.mixers(cfg) for site in mixer.sites
  )  # fmt: skip
