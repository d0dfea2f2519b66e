"""From numbers to Optax values: a chain (OPTIMIZERS, weight decay) per parameter.

The learning rate multiplies a chain's output in the train step, by the step's own number: a skipped
update then loses its turn instead of delaying the schedule. Clipping is a factor on the gradients
as they are read, so that no second copy of them exists.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from fp8jax import params as params_lib
from fp8jax.errors import UserError
from fp8jax.kernels.adamw.reference import AdamWHparams
from fp8jax.keys import EXECUTION, key, section
from fp8jax.optim import quantized_moments, sparsity, storage
from fp8jax.optim.schedule import schedule
from fp8jax.params import Param


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """A row of OPTIMIZERS.

  Attributes:
    make: OptimizerConfig -> its Optax transformation, without rate and weight decay.
    decays: {moment that it keeps, a field of storage.Moments: key of optim that it decays by}.
    has_kernel: whether kernels/adamw computes it.
    apply: (value, update, rate) -> the updated value, in float32, of a chain's output; None is
      value - rate * update.
    decay: weight decay -> the transformation that adds it to the update.
    moves_zero: whether a parameter that is 0 may become another number.
  """

  make: Callable[..., optax.GradientTransformation]
  decays: Mapping[str, str]
  has_kernel: bool = False
  apply: Callable[[Any, Any, Any], Any] | None = None
  decay: Callable[[float], optax.GradientTransformation] = optax.add_decayed_weights
  moves_zero: bool = True

  def reads(self) -> set[str]:
    """The hyperparameters, keys of optim, that `make` and `decays` read."""
    given = _Recorded(OptimizerConfig)
    self.make(given)
    return {*given.names, *self.decays.values()}


class _Recorded:
  """An object, and the names of its attributes that are read."""

  def __init__(self, of: Any):
    self._of, self.names = of, set()

  def __getattr__(self, name: str) -> Any:
    self.names.add(name)
    return getattr(self._of, name)


def _madam(o) -> optax.GradientTransformation:
  """The gradient over its root mean square, at most 10: Madam's step (arXiv:2006.14560 §3)."""
  rms = optax.scale_by_rms(o.b2, o.eps, eps_in_sqrt=False, bias_correction=True)
  return optax.chain(rms, optax.clip(10.0))


def _multiplied(value, update, rate):
  """value * exp(-rate * update * its sign): the sign of a weight, and a 0, stay for ever."""
  return value * jnp.exp(-rate * jnp.sign(value) * update)


def _multiplicative_decay(decay: float) -> optax.GradientTransformation:
  """Every weight shrinks by the same factor, as decoupled decay has it: exp(-rate * decay)."""
  return optax.stateless(lambda u, w: jax.tree.map(lambda u, w: u + decay * jnp.sign(w), u, w))


_ADAM = {"mu": "b1", "nu": "b2"}
# Kingma & Ba 2015 (arXiv:1412.6980); Chen et al. 2023 (arXiv:2302.06675).
OPTIMIZERS = {
  "adam": Optimizer(lambda o: optax.scale_by_adam(o.b1, o.b2, o.eps), _ADAM, has_kernel=True),
  "lion": Optimizer(lambda o: optax.scale_by_lion(o.b1, o.b2), {"mu": "b2"}),
  # Optax's, which cites them. An update must be elementwise: update.py makes it in chunks.
  "adabelief": Optimizer(lambda o: optax.scale_by_belief(o.b1, o.b2, o.eps), _ADAM),
  "adamax": Optimizer(lambda o: optax.scale_by_adamax(o.b1, o.b2, o.eps), _ADAM),
  "nadam": Optimizer(lambda o: optax.scale_by_adam(o.b1, o.b2, o.eps, nesterov=True), _ADAM),
  "radam": Optimizer(lambda o: optax.scale_by_radam(o.b1, o.b2, o.eps), _ADAM),
  "rmsprop": Optimizer(
    # Eps is added to the root, as everywhere: inside it 1e-8 would act like 1e-4.
    lambda o: optax.scale_by_rms(o.b2, o.eps, eps_in_sqrt=False, bias_correction=True),
    {"nu": "b2"},
  ),
  # Multiplicative updates, for logarithmic masters (LNS-Madam, arXiv:2106.13914). Its bound of 3
  # root mean squares of the first weights is left out.
  "madam": Optimizer(
    _madam, {"nu": "b2"}, apply=_multiplied, decay=_multiplicative_decay, moves_zero=False
  ),
  "sgd": Optimizer(lambda o: optax.ema(o.b1, debias=False), {"mu": "b1"}),
}
SCHEDULES = ("wsd", "cosine", "constant")
DECAYS = ("rate", "schedule")


# fmt: off
@section("optim")
class OptimizerConfig:
  """An optimizer, its learning rate and the formats of its state.

  Attributes:
    steps: of the whole run; no key of this section.
    width: the model's hidden size, of base_width alone; no key either.
  """

  optimizer: str = key("adam", '"adam" (AdamW), or "lion" (arXiv:2302.06675), which has one moment '
    "and needs a learning rate three to ten times smaller; or, of Optax, \"adabelief\", "
    '"adamax", "nadam", "radam", "rmsprop" (b2 and eps alone), "sgd" (b1 alone: an average of '
    'gradients, 1 - b1 times the momentum of optax.sgd); "madam" (arXiv:2006.14560; b2 and eps '
    "alone), which multiplies weights by exp(-rate * gradient / its root mean square)",
    choices=OPTIMIZERS, mapped=True)
  moment_format: str = key("float32", 'Storage format of the moments: "float32", or a name in '
    'optim/storage.py: "coat" first (in experiments/moments the most exact in two bytes), or '
    '"sqrt_v", "e4m3_256", "fp8lm", "bf16", "bf16_sr"; "tensor_e4m3_e5m2" or such a pair of any '
    "formats. Norms and biases stay float32.")
  master_format: str = key("float32", 'Master weights: "float32"; "bf16_sr", rounded '
    'stochastically; "bf16_remainder", a float32 of which the BF16 half multiplies; "f16", scaled; '
    '"lns16", "lns14", "lns12", "lns10": logarithmic, emulated in float32.',
    choices=storage.MASTERS)
  grad_format: str = key("float32", 'Gradients between backward pass and update: "float32", '
    '"bf16_sr", or "e4m3".', choices=storage.GRADIENTS)
  grad_wire: str = key("float32", 'In which devices of a mesh send each other their terms of a '
    'weight\'s gradient: "float32"; "bf16", half of the bytes; "e4m3", a quarter, with a scale per '
    '128 elements; "e4m3_shared", with one scale of a tensor that the devices share (FP8-LM). The '
    "terms are summed in float32.", choices=storage.WIRES)
  schedule: str = key("wsd", '"wsd": linear warm-up, peak_lr, cosine to min_lr over the last '
    'decay_steps (arXiv:2509.22536); "cosine": warm-up, then cosine to min_lr, reached one step '
    'after the last; "constant": warm-up, then peak_lr',
    choices=SCHEDULES, mapped=True)
  peak_lr: float = key(0.001, "largest learning rate, reached after the warm-up", mapped=True)
  min_lr: float = key(0.0001, "where the tail ends: one step after the last", mapped=True)
  warmup_steps: int = key(10, "linear from 0", mapped=True)
  warmup_fraction: float = key(0.0, "> 0: of the steps, rounded down, instead of warmup_steps",
    least=0, mapped=True)
  decay_steps: int = key(20, "length of wsd's tail", mapped=True)
  b1: float = key(0.9, "decay of the first moment per step", mapped=True)
  b2: float = key(0.95, "decay of the second moment per step; Lion's second decay", mapped=True)
  eps: float = key(1e-08, "added to the root of the second moment", mapped=True)
  weight_decay: float = key(0.1, "decoupled (arXiv:1711.05101); not on norms and biases",
    mapped=True)
  decay_by: str = key("rate", 'What multiplies weight_decay: "rate", the learning rate; '
    '"schedule", the learning rate over peak_lr without factors of parameters: fully decoupled, '
    "w - weight_decay w at the peak", choices=DECAYS, mapped=True)
  grad_clip_norm: float = key(1.0, "global gradient norm; 0 turns clipping off", mapped=True)
  clip_groups: tuple[Any, ...] = key((), "Groups that are clipped by a norm of their own instead "
    "(grad_clip_norm=0): (regular expression on parameters of a layer, largest norm), the first "
    'that matches, e.g. (("layers/.*/attn/.*", 1.0), ("layers/.*", 2.0)). Parameters of no group '
    "are not clipped.", mapped=True)
  lr_multipliers: tuple[Any, ...] = key((), "(regular expression on parameters of a layer, factor "
    "on their learning rate), the first that matches.", mapped=True)
  base_width: int = key(0, "> 0: matrices of layers have sqrt(base_width / hidden size) times the "
    "learning rate, so that the best rate of this width is that of others (µnit scaling, "
    "arXiv:2502.05967); embedding, norms and head keep theirs", least=0, mapped=True)
  in_backward: bool = key(False, "Update every layer inside the backward pass (LOMO, "
    "arXiv:2306.09782), so that the gradients of one layer exist at a time. Needs grad_clip_norm "
    '0, grad_accum_steps 1, remat_policy "full", grad_format "float32", on_nonfinite "stop" and '
    "no loss scale.", affects=EXECUTION)
  on_nonfinite: str = key("stop", "At a loss, gradient or GEMM operand with a NaN or infinity: "
    '"stop", or "skip" the update and count. A dynamic loss scale is halved first, and stops at '
    "the smallest scale, 2^-24.", choices=("stop", "skip"), affects=EXECUTION, mapped=True)
  sparsity: str = key("none", '"2:4": of every four weights along the contraction of a linear '
    "layer only two are other than 0, at the start the largest in magnitude (arXiv:2104.08378)",
    choices=sparsity.CHOICES, mapped=True)
  steps: int = 0
  width: int = 0
  # fmt: on

  def problems(self) -> list[str]:
    """The problems of these numbers, in words."""
    texts = []
    phases = ["warmup_steps", "decay_steps"] if self.schedule == "wsd" else ["warmup_steps"]
    used = sum(getattr(self, name) for name in phases)
    if used > self.steps:
      words = " + ".join(f"optim.{name}" for name in phases)
      texts.append(f"{words} = {used} exceed steps={self.steps}; shorten the schedule")
    least, names = (0.0, "") if self.schedule == "constant" else (
      self.min_lr, f"optim.min_lr={self.min_lr} <= "
    )  # fmt: skip
    if not 0 <= least <= self.peak_lr:
      texts.append(f"need 0 <= {names}optim.peak_lr={self.peak_lr}")
    for name in ("b1", "b2"):
      if not 0 <= getattr(self, name) < 1:
        texts.append(f"optim.{name}={getattr(self, name)} must be in [0, 1)")
    for name in ("grad_clip_norm", "weight_decay", "warmup_steps", "decay_steps"):
      if getattr(self, name) < 0:
        texts.append(f"optim.{name}={getattr(self, name)} must not be negative")
    if self.eps <= 0:
      texts.append(f"optim.eps={self.eps} must be positive")
    if self.decay_by == "schedule" and not 0 <= self.weight_decay < 1:
      texts.append(
        f"optim.weight_decay={self.weight_decay} with optim.decay_by='schedule' is the share of a "
        "weight that a step takes; give less than 1, e.g. 1e-4"
      )
    if self.optimizer in OPTIMIZERS:
      if self.decay_by == "schedule" and OPTIMIZERS[self.optimizer].apply is not None:
        texts.append(
          f"optim.decay_by='schedule' with optim.optimizer={self.optimizer!r}, which multiplies "
          "weights: it has no subtracted decay; set optim.decay_by='rate'"
        )
      read = OPTIMIZERS[self.optimizer].reads()
      unread = set().union(*(row.reads() for row in OPTIMIZERS.values())) - read
      texts += [
        f"optim.{of.name}={getattr(self, of.name)} is not read by {self.optimizer!r}, which reads "
        f"{', '.join(sorted(read))}; leave it at its default, {of.default}"
        for of in dataclasses.fields(self)
        if of.name in unread and getattr(self, of.name) != of.default
      ]
      decays = {k: getattr(self, key) for k, key in OPTIMIZERS[self.optimizer].decays.items()}
      try:
        reasons = storage.moment_problems(self._moments(), decays.get("mu"), decays.get("nu"))
      except UserError as e:
        return [*texts, f"optim.{e}"]
      texts.extend(f"optim.moment_format={self.moment_format!r}: {reason}" for reason in reasons)
    return texts

  def _moments(self) -> storage.Moments:
    """The formats of moment_format, of the moments that the optimizer keeps."""
    formats, kept = storage.moments(self.moment_format), OPTIMIZERS[self.optimizer].decays
    return storage.Moments(**{name: getattr(formats, name) for name in kept})

  def bytes_per_parameter(self) -> dict[str, float]:
    """{"weight", "master", "gradient", "moments": bytes} of a large matrix, scales included.

    "weight" is the part of the master that GEMMs read as it is: the BF16 of "bf16_remainder" and
    "bf16_sr". "master" is the rest. Papers count master and moments: 4.08 bytes for
    "bf16_remainder" with "coat" (and 2 of weights), 6.08 for "float32" with "coat". The gradient
    counts 0 with in_backward, when the gradients of one layer exist at a time.
    """
    moments = self._moments()
    weight, master = storage.master_nbytes(storage.MASTERS[self.master_format])
    return {
      "weight": weight,
      "master": master,
      "gradient": storage.nbytes(storage.GRADIENTS[self.grad_format]) * (not self.in_backward),
      "moments": sum(
        storage.nbytes(getattr(moments, name)) for name in OPTIMIZERS[self.optimizer].decays
      ),
    }


@dataclasses.dataclass(frozen=True)
class ParamOptimizer:
  """The optimizer of one parameter, and the formats that it is stored in.

  Attributes:
    path: its name, "layers/mlp/gate".
    transformation: an Optax transformation of this parameter alone, without the learning rate.
    master, gradient: values of storage.MASTERS and storage.GRADIENTS.
    lead: number of first axes along which every entry is a tensor: 1 for stacked layers.
    seed: of stochastic rounding.
    is_large: False for norms and biases, which are float32 and have no kernel.
    rule: hyperparameters if the transformation is AdamW, else None.
    backend: "xla": Optax's operations; or the kernel that `fused_adamw.choose` chose.
    note: why it has no kernel; "" if none was asked for.
    sharding: on a mesh, for the kernel; None on a single device.
    is_frozen: whether it is not trained; `master` is then its format, of storage.FROZEN.
    inputs: axes that its GEMM contracts, 0 if none does.
    apply: see Optimizer.
    decay: step -> share of the value that a step takes, whatever its rate; None where the
      transformation has the decay.
    sparse: axis of the contraction whose weights are 2:4 sparse; None: dense.
  """

  path: str
  transformation: optax.GradientTransformationExtraArgs
  master: Any
  gradient: Any
  lead: int
  seed: int
  is_large: bool = True
  rule: AdamWHparams | None = None
  backend: str = "xla"
  note: str = ""
  sharding: Any = None
  is_frozen: bool = False
  inputs: int = 0
  apply: Callable[[Any, Any, Any], Any] | None = None
  decay: optax.Schedule | None = None
  sparse: int | None = None

  @property
  def gradient_dtype(self):
    return self.gradient.format.dtype if self.gradient else jnp.dtype(jnp.float32)


# Of a frozen parameter: no state, and nothing that moves it.
_NOTHING = cast(optax.GradientTransformationExtraArgs, optax.identity())


def leaves(optim: OptimizerConfig, declaration, seed: int = 0, base: str = "bf16"):
  """A tree of ParamOptimizer like the declaration.

  Norms and biases are float32 and without weight decay.

  Args:
    base: storage of frozen linear layers, a key of storage.FROZEN. Frozen embeddings and heads are
      BF16, frozen norms and biases float32.
  """

  def one(path: str, p: Param) -> ParamOptimizer:
    own = zlib.crc32(f"{seed}/{path}".encode())
    lead = int(p.letters.startswith("N"))
    if not p.trainable:
      format = storage.FROZEN[base if lead and p.inputs else "bf16"] if p.decay else None
      return ParamOptimizer(
        path, _NOTHING, format, None, lead, own, False, is_frozen=True, inputs=p.inputs or 0
      )
    moments = storage.moments(optim.moment_format if p.decay else "float32")
    mask = quantized_moments.StorageMask(quantized=True, lead=lead)
    optimizer = OPTIMIZERS[optim.optimizer]
    if p.init == "zeros" and not optimizer.moves_zero:
      raise UserError(
        f"optim.optimizer={optim.optimizer!r} multiplies, and {path} starts at 0, where it would "
        "stay for ever: take another optimizer, or a model without biases and adapters"
      )
    decays = {name: getattr(optim, key) for name, key in optimizer.decays.items()}
    transformation = quantized_moments.stored(
      optimizer.make(optim), moments, decays, mask=mask, seed=own
    )
    rule = decay = None
    if p.decay and optim.decay_by == "schedule":
      share = optim.weight_decay / optim.peak_lr if optim.peak_lr else 0.0
      decay = lambda step: share * schedule(optim)(step)  # noqa: E731
    elif p.decay:
      transformation = optax.chain(transformation, optimizer.decay(optim.weight_decay))
      if optimizer.has_kernel:
        rule = AdamWHparams(optim.b1, optim.b2, optim.eps, optim.weight_decay)
    formats = (storage.MASTERS[optim.master_format], storage.GRADIENTS[optim.grad_format])
    master, gradient = formats if p.decay else (None, None)
    sparse = sparsity.axis_of(path, p) if optim.sparsity == sparsity.TWO_OF_FOUR else None
    rule = rule if sparse is None else None  # the kernel has no masks
    return ParamOptimizer(
      path, transformation, master, gradient, lead, own, p.decay, rule, apply=optimizer.apply,
      decay=decay, sparse=sparse,
    )  # fmt: skip

  return params_lib.unflatten(
    {path: one(path, p) for path, p in params_lib.flatten(declaration).items()}
  )
