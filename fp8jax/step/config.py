"""The sections of a resolved configuration that no subject below has a type for.

`config/resolve.py` makes them; the keys, defaults and meanings are those of configs/base.py.
"""

import dataclasses

from fp8jax.evaluation import catalog
from fp8jax.generation.sampling import Sampling

# Forward passes that an evaluation may take: the recipes of training, and 16 bits everywhere.
EVAL_PRECISIONS = ("recipe", "bf16")
# Sets of sites that --job=sensitivity measures alone.
SENSITIVITY_GROUPS = ("tensors", "kinds", "layers")


@dataclasses.dataclass(frozen=True)
class InitConfig:
  """The start of training.

  Attributes:
    hf: folder or hub id of Hugging Face weights; "" draws random weights.
    workdir: workdir of another run to continue from; "" for none.
    step: the checkpoint of that workdir, in optimizer steps; -1 is the newest.
    weights_only: whether only its weights are taken, for another stage.
  """

  hf: str
  workdir: str
  step: int
  weights_only: bool = False


@dataclasses.dataclass(frozen=True)
class KernelsConfig:
  """Backends asked for by name or by "auto"; kernels/choose.py decides.

  Attributes:
    matmul: of FP8 GEMMs, a key of kernels/gemm/api.py BACKENDS or "auto".
    optimizer: of AdamW, one of optim/fused_adamw.py CHOICES.
    attention: one of kernels/attention/api.py BACKENDS or "auto".
  """

  matmul: str
  optimizer: str
  attention: str = "auto"


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
  """Loss scaling (Micikevicius et al. 2017, arXiv:1710.03740 §3.2).

  Attributes:
    kind: "none" or "dynamic".
    start: the first scale, a power of two.
    growth_interval: finite optimizer steps after which the scale doubles.
  """

  kind: str
  start: float
  growth_interval: int


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Held-out evaluation.

  Attributes:
    tokens: held-out tokens per source and evaluation, rounded up to whole batches; 0: none.
    batch: sequences per batch, over all devices.
    every: optimizer steps between evaluations; 0: before and after training only.
    precisions: the forward passes, of EVAL_PRECISIONS.
    hf: Hugging Face folder that --job=evaluate and export take instead of a checkpoint; "" for
      none.
    step: the checkpoint that --job=evaluate and export take, in steps; -1 is the newest.
    tasks: names of tasks with verifiable answers, evaluation/catalog.py; "" for none.
    options: of all tasks.
    chat: whether prompts are written with the chat template.
    seed: of sampling.
    compare_with: workdir of another run, whose evaluation of the same tasks is compared; "" for
      none.
  """

  tokens: int
  batch: int
  every: int
  precisions: tuple[str, ...]
  hf: str
  step: int
  tasks: str
  options: catalog.Options
  chat: bool
  seed: int
  compare_with: str


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When a run is saved, and which changes a resumed run accepts.

  Attributes:
    every: optimizer steps between checkpoints; 0: only at the end and on interruption.
    keep: how many checkpoints to keep, the newest.
    accept_changes: flat keys whose change a resumed run accepts; "data" is the data's content.
  """

  every: int
  keep: int
  accept_changes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Alarm:
  """Fires where a statistic of a quantized tensor lies beyond a bound.

  Attributes:
    statistic: a key of config/alarms.py ADVICE.
    relation: ">" or "<".
    bound: in the statistic's unit (shares from 0 to 1, decibels, the tensor's own).
    sites: regular expression on "layers/3/mlp/up/g", site and tensor.
  """

  statistic: str
  relation: str
  bound: float
  sites: str = ".*"

  def is_met_by(self, value: float) -> bool:
    return value > self.bound if self.relation == ">" else value < self.bound


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """The reports of a run.

  Attributes:
    every: optimizer steps between lines where there is no terminal.
    tensorboard: whether metrics are also written for TensorBoard.
    report: whether training ends with a report.
    tracker: the package that metrics are also sent to, or "".
    tensor_stats_every: optimizer steps between loud steps; 0: never.
    alarms: checked in loud steps.
    profile_start: optimizer steps before the first that is traced.
    profile_steps: steps that are traced for XProf; 0: none.
  """

  every: int
  tensorboard: bool
  report: bool
  tracker: str
  tensor_stats_every: int
  alarms: tuple[Alarm, ...]
  profile_start: int = 0
  profile_steps: int = 0


@dataclasses.dataclass(frozen=True)
class ExportConfig:
  """What --job=export writes.

  Attributes:
    path: folder to write; "" is WORKDIR/hf.
    format: one of models/hf/fp8_export.py FORMATS.
    dtype: of the wide weights, a key of models/hf/weights.py DTYPES, or "auto": as imported,
      bfloat16 beside FP8.
    fold_smooth_batches: held-out batches per source that Smooth-SwiGLU's scales are measured over
      before they are folded into the weights; 0 leaves the weights as trained.
    strategy: of "compressed-tensors", one of models/hf/fp8_formats.py STRATEGIES.
    scale_fmt: of "hf-fp8-block", one of models/hf/fp8_formats.py SCALE_FMTS, or "auto": as trained.
    requantize: whether weights that training multiplied with other codes are quantized anew.
    input_scales: table of --job=calibrate that static scales of inputs come from; "" for none.
    gate_tokens: tokens per source that logits are compared on, rounded up to whole batches.
    gate_text: text file that they come from; "" for held-out documents.
    max_kl: largest mean KL from the source's logits, in nats per token.
    client_python: interpreter with transformers that reads the folder too; "" for none.
    push_to: repository of the Hugging Face hub to upload to; "" for none.
  """

  path: str
  format: str
  dtype: str
  fold_smooth_batches: int
  strategy: str
  scale_fmt: str
  requantize: bool
  input_scales: str
  gate_tokens: int
  gate_text: str
  max_kl: float
  client_python: str
  push_to: str


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
  """What --job=calibrate reads and writes.

  Attributes:
    path: table to write; "" is WORKDIR/calibration.json.
    batches: training batches to watch.
    method: of amaxes of delayed and static scales, one of quantization/clipping.py METHODS.
    percentile: of method "percentile".
  """

  path: str
  batches: int
  method: str = "amax"
  percentile: float = 99.99


@dataclasses.dataclass(frozen=True)
class SensitivityConfig:
  """The measurements of --job=sensitivity, and the budgets of its rules.

  Attributes:
    path: folder of its results; "" is WORKDIR/sensitivity.
    tokens: held-out tokens per source, of both halves together.
    groups: measured alone, of SENSITIVITY_GROUPS.
    top: how many sites are measured alone.
    max_loss: budget of loss above BF16's, in percent; 0 for none.
    min_fp8: budget of FLOPs in low precision, a share; 0 for none.
  """

  path: str
  tokens: int
  groups: tuple[str, ...]
  top: int
  max_loss: float
  min_fp8: float


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
  """The completions of --job=generate.

  Attributes:
    hf: Hugging Face folder that is taken instead of a checkpoint; "" for none.
    prompts: file of prompts; "" reads standard input.
    out: JSON lines to write; "" streams to standard output.
    precision: the forward pass, of EVAL_PRECISIONS.
    cache_format: of keys and values, of generation/cache.py FORMATS.
    slots: sequences that are decoded together.
    max_length: tokens of prompt and completion that a slot holds; 0: as many as needed.
    num_samples: completions per prompt.
    stop_tokens: names of tokens that end a completion, beside the model's own.
    chat_template, template_date: data's, for prompts that are chats.
    sampling: how tokens are drawn.
  """

  hf: str
  prompts: str
  out: str
  precision: str
  cache_format: str
  slots: int
  max_length: int
  num_samples: int
  stop_tokens: tuple[str, ...]
  chat_template: str
  template_date: str
  sampling: Sampling


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
  """What --job=prepare writes.

  Attributes:
    path: folder of tokenized documents to write; "" is WORKDIR/prepared.
    shard_tokens: tokens per ArrayRecord file.
    processes: that tokenize; 0 chooses.
  """

  path: str
  shard_tokens: int
  processes: int = 0
