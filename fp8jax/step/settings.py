"""Keys of the trainer, section by section: the run, its model, precision, memory, data and reports.

Sections of jobs are in the settings.py of their folders. config/registry.py has all of them.
"""

import dataclasses
from typing import Any

from fp8jax.data import tokenize
from fp8jax.data.chat import samples
from fp8jax.kernels.attention import api as attention_api
from fp8jax.kernels.gemm import api as gemm_api
from fp8jax.keys import EXECUTION, NOTHING, RESULT, key, section
from fp8jax.models import config as model_config
from fp8jax.models import mlp_swiglu
from fp8jax.ops import residuals
from fp8jax.optim import fused_adamw, param_stats
from fp8jax.recipe import attention as attention_recipes

COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
_GEMM_INPUTS = tuple(form.value for form in residuals.GemmInput)


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


# A table: a key a row, its meaning beside it.
# fmt: off
@section("")
class Run:
  """The run as a whole."""

  seed: int = key(0, "of initial weights and of the order of documents", mapped=True)
  steps: int = key(100, "optimizer steps in the whole run", least=1, mapped=True)
  global_batch: int = key(8, "sequences per optimizer step, over all devices", least=1, mapped=True)
  grad_accum_steps: int = key(1, "microbatches per step; global_batch / grad_accum_steps sequences "
    "each", least=1, mapped=True)
  seq_len: int = key(256, "positions per sequence (L)", least=1, mapped=True)


@section("init", EXECUTION)
class Init:
  """The start of training."""

  hf: str = key("", "Hugging Face folder with safetensors to start from, or an id of its hub "
    '("Qwen/Qwen2.5-1.5B"), which is downloaded once; "" draws random weights.')
  adapters: str = key("", "Folder of adapters in PEFT's format to start from, beside init.hf; of "
    "evaluation, generation and export too, beside weights.hf. model.lora.rank=0 takes "
    "rank, alpha and targets from it.")
  workdir: str = key("", "Workdir of another run to start from, while this one has no checkpoint: "
    "with the whole state (weights, optimizer, scales, place in the data). "
    "checkpoint.accept_changes must name what differs from its configuration.")
  step: int = key(-1, "its checkpoint; -1 is the newest")
  weights_only: bool = key(False, "Of init.workdir the weights alone: another stage, with its own "
    "data, schedule and recipe, a fresh optimizer, and scales from its own first batch.")
  requantize: bool = key(False, "Whether codes of init.hf may be rounded a second time, by a "
    "recipe that has no such codes. Without it training starts from weights that its recipe "
    "rounds to the folder's codes, as far as there are any.")
  nudge: bool = key(False, "Start from weights one float32 ulp larger: the twin of a run, whose "
    "difference from it is the noise floor of the recipe.", affects=RESULT, mapped=True)
  untie: bool = key(False, "Start from weights of layers' products anywhere within half a step of "
    "bfloat16, which rounds them to what they were. Under scales that are powers of two, one "
    "weight in sixteen of a checkpoint in bfloat16 is half way between two codes of E4M3, and the "
    "smallest update decides where it goes (experiments/2026_qad). Of init.hf, or the weights of "
    "init.workdir, into float32 masters.", affects=RESULT)


@section("model")
class Model:
  """The architecture: a preset and what replaces its fields."""

  preset: str = key("debug", 'a name in models/presets.py, or "hf": read config.json of init.hf',
    mapped=True)
  num_layers: int | None = key(None, "The following keys override the preset where they are not "
    "None. N", mapped=True)
  hidden_size: int | None = key(None, "D", mapped=True)
  intermediate_size: int | None = key(None, "F", mapped=True)
  num_heads: int | None = key(None, "H", mapped=True)
  num_kv_heads: int | None = key(None, "G", mapped=True)
  head_dim: int | None = key(None, "K", mapped=True)
  vocab_size: int | None = key(None, "V", mapped=True)
  max_positions: int | None = key(None, "longest context the weights are for", mapped=True)
  rope_theta: float | None = key(None, "base of the rotary frequencies", mapped=True)
  tie_embeddings: bool | None = key(None, "whether the head is the embedding", mapped=True)
  init_std: float | None = key(None, "of random weights", mapped=True)
  residual_tau: float | None = key(None, "above 0: sqrt(1 - tau) x + sqrt(tau) norm(f(x)) in place "
    "of x + f(norm(x)) (µnit scaling, arXiv:2502.05967)", mapped=True)
  unit_scaling: str = key("none", 'factors that give tensors variance 1 at the start: '
    '"loss", of the gradient of logits; "all", of every operation beside linear layers, whose '
    "factors are their recipes' (unit scaling, arXiv:2303.11257; needs residual_tau; attention's "
    "is of max_positions, so train at that length)",
    choices=model_config.UNIT_SCALING, mapped=True)
  mixers: tuple[str, ...] | None = key(None, "blocks of a layer, names in models/transformer.py's "
    "MIXERS", mapped=True)
  reward_head: bool | None = key(None, "Whether the head gives a score, [D, 1] on the last token's "
    "final norm, in the place of logits: a reward model, of --job=rl with rl.loss='reward'. None: "
    "as the folder of init.hf, which may hold either.")


@section("precision")
class Precision:
  """Recipes of the linear layers."""

  rules: tuple[Any, ...] = key((("head", "bf16"), ("layers/.*", "block_128")),
    "Which recipe each linear layer gets: (regular expression on the whole site name, recipe "
    'name), first match wins. Names are "head" and "layers/3/mlp/up" with the number of the '
    "layer. A site that no rule covers and a rule that decides nothing are errors.", mapped=True)
  sensitivity: str = key("", "sensitivity.json of --job=sensitivity: the rules that it chose "
    "replace `rules`, which are those that it measured. With two budgets in it FILE:max_loss or "
    "FILE:min_fp8. The run remembers the rules, not the file.")
  first_bf16: int = key(0, "so many first layers in recipe bf16, whatever the rules say", least=0,
    mapped=True)
  last_bf16: int = key(0, "so many last layers", least=0, mapped=True)
  schedule: tuple[Any, ...] = key((), "Other rules from a step on: ((first step, rules), ...), "
    'e.g. ((900, ((".*", "bf16"),)),).')
  policy: tuple[Any, ...] = key((), "Changes that the run makes to itself "
    "(experiments/guide/control.md), texts or mappings, e.g. (\"refresh(alarm='underflow')\", "
    "\"switch_recipe(to='bf16', k=3, looks=5)\", \"roll_back(z=6.0)\").")
  calibration: str = key("", "Table of --job=calibrate that delayed and static scales start from; "
    '"" takes the ranges of the first batch. Resuming with another table (by content, not by '
    'path) is refused; with "precision.calibration" in checkpoint.accept_changes, scales begin '
    "again from the table.")
  smooth_swiglu: str = key("none", "Smooth-SwiGLU (arXiv:2409.12517): the input of mlp/down is "
    "divided by the largest magnitude of its linear branch, which comes back in down's weight "
    '("channel") or output ("token"). Against outliers late in long runs (log.alarms warns); '
    "SwiGLU is then written in the compute dtype.", choices=mlp_swiglu.FORMS, mapped=True)
  attention: str = key("wide", "Attention's products, forward and backward: \"wide\" "
    "(compute_dtype); FlashAttention-3's E4M3 forward pass (arXiv:2407.08608) with rotated Q and K "
    'and scales per block ("fa3"), the same without rotation ("fa3_unrotated"), or as released, '
    'with scales per sequence and key head ("fa3_tensor"); SageBwd (arXiv:2603.02170), INT8 in six '
    'of seven products ("sage_bwd") or in the forward pass alone ("sage_fwd"); the six in E4M3 '
    '("sage_bwd_e4m3"). Emulated on any device; a GPU wants kernels.matmul="reference" for it.',
    choices=("wide", *attention_recipes.ATTENTIONS), mapped=True)
  invariant: bool = key(False, "A token's hidden states, logits and log-probability are the same "
    "bits whatever its batch, bucket, packing or microbatch, in training, scoring, prefill and "
    "decoding (experiments/guide/invariant.md). On a CPU; the forward pass is computed twice, "
    "32 tokens at a time, and a layer saves its input alone (memory.remat_policy='full').")
  verify_fp8_gemms: bool = key(True, "Inspect the step before it runs and stop if a GEMM is wider "
    "than its recipe says: on a GPU the very executable that then runs, on the CPU the program "
    "handed to XLA.", affects=NOTHING, mapped=True)
  compute_dtype: str = key("auto", "dtype of activations and of operands that no recipe narrows: "
    '"bfloat16", "float32", "float16" (with loss_scale.kind="dynamic"; not on the Hopper '
    'kernels), or "auto": bfloat16 on GPUs since Ampere, float32 on older ones, which have no '
    "BF16 units, and on the CPU (where XLA's bfloat16 is several times slower).",
    choices=("auto", *COMPUTE_DTYPES), mapped=True)


@section("kernels", EXECUTION)
class Kernels:
  """Backends asked for by name or by "auto"; kernels/choose.py decides."""

  matmul: str = key("auto", 'FP8 GEMM: "auto" or one of kernels/gemm. On a GPU "auto" never '
    'emulates; "reference" does, "emulated_sm90" with Hopper\'s sums of 14 bits, "exact" in '
    'integers. "dequantized", on a CPU alone, takes the reference\'s codes and adds all of K in '
    "float32: experiments in half the extra time.",
    choices=("auto", *gemm_api.BACKENDS), altering=("emulated_sm90",), mapped=True)
  attention: str = key("auto", '"xla", "cudnn" (GPUs since Ampere, 16-bit activations; isolates '
    'documents by an L x L bias), "tokamax" (Hopper, 16-bit activations, extra `attention`; no '
    'such bias), or "auto": cudnn on a GPU, with isolated documents tokamax, else xla. A bias '
    "above 256 MiB must be asked for by name.", choices=("auto", *attention_api.BACKENDS),
    mapped=True)
  optimizer: str = key("auto", "AdamW's update: \"xla\", \"mosaic_sm90\" (one pass over gradient, "
    'master and moments, in place; an error where a matrix cannot be moved by it), or "auto" '
    "(mosaic_sm90 where it can; timed with COAT's moments and 16-bit masters, see GPUs).",
    choices=fused_adamw.CHOICES, mapped=True)


@section("memory", EXECUTION)
class Memory:
  """Residuals of the backward pass, and operands."""

  remat_policy: str = key("none", 'Activations that the backward pass recomputes: "none"; '
    '"linears" saves outputs of linear layers and of attention and recomputes norms, SwiGLU and '
    'quantization; "operands" also saves the FP8 operands of save_gemm_inputs="quantized"; "full" '
    "saves only the input of every layer.", choices=model_config.REMAT, mapped=True)
  save_gemm_inputs: str = key("none", "Forms of the residuals (ops/residuals.py; bytes of each: "
    'experiments/guide/memory.md). save_gemm_inputs: "none" saves the input x of a linear layer '
    'unquantized, or the sources of its prologue; "quantized" saves the FP8 operand of the weight '
    "gradient instead, as Transformer Engine does. Same numbers. Refused with "
    'remat_policy="linears", which computes it again.', choices=_GEMM_INPUTS, mapped=True)
  save_norm_inputs: str = key("none", 'The others: "none" (as they are, and the inputs of linear '
    'layers that no kernel makes of them), "bf16", '
    '"e4m3_16" (groups of 16 channels, 1.06 bytes per element; COAT) or "e4m3_128" (1.01 bytes). '
    "Compressed copies serve gradients alone. inputs of norms: the residual stream, twice per "
    "layer", choices=residuals.QUANTS, affects=RESULT, mapped=True)
  save_gate_up: str = key("none", "gate and up", choices=residuals.QUANTS, affects=RESULT,
    mapped=True)
  save_layer_inputs: str = key("none", 'with remat_policy="full": the input of every layer',
    choices=residuals.QUANTS, affects=RESULT, mapped=True)
  weight_operands: str = key("per_product", 'How often the quantized weights of layers are made: '
    '"per_product" by each product that multiplies them, in each microbatch; "per_step" once, '
    "gathered, in both orientations: the same codes and scales for about 2 bytes per parameter on "
    "each device.", choices=model_config.WEIGHT_OPERANDS, mapped=True)
  loss_chunk: int = key(256, "positions per chunk of the cross-entropy", least=1, mapped=True)
  gpu_fraction: float = key(0.0, "Share of a GPU's memory that JAX takes at its start "
    "(XLA_PYTHON_CLIENT_MEM_FRACTION, which the environment may set instead); 0 leaves JAX's own, "
    "0.75.", least=0)


@section("data")
class Data:
  """Documents or conversations, and how they become windows."""

  tokenizer: str = key("", '"bytes", a tokenizer.json, a Hugging Face folder or an id of its hub; '
    "\"\" takes init.hf's, or bytes without one.", mapped=True)
  eos: str = key("", "token that ends a document; \"\" takes the tokenizer folder's eos_token",
    mapped=True)
  # Nothing, or other tokens, as the fingerprint of the data tells.
  bos: str = key("auto", '"auto": documents and prompts begin as the tokenizer begins a text '
    "(Llama 3's <|begin_of_text|>; SmolLM2 and Qwen write nothing); \"none\" leaves that out",
    choices=tokenize.BOS, affects=EXECUTION, mapped=True)
  sources: dict[str, Any] = key({}, "name -> source, made by configs.base.source()", opened=True,
    mapped=True)
  heldout_fraction: float = key(0.1, "fraction of documents never trained on, chosen by a hash of "
    "their text", mapped=True)
  cross_document: bool = key(False, "may attention cross document boundaries inside a window?",
    mapped=True)
  on_malformed: str = key("error", "Bad UTF-8, broken JSON, missing field, empty; of conversations "
    'unknown roles and empty answers: "error" or "skip".', choices=tokenize.POLICIES, mapped=True)
  on_long: str = key("split", 'Longer than a window: documents "split" over windows, "error" or '
    '"skip"; samples of conversations "error", "skip" or "truncate", which cuts their end off.',
    mapped=True)
  shuffle_windows: int = key(1024, "Windows per block that is shuffled, so that the windows of one "
    "long document do not fill whole batches; prepared sources are shuffled over the whole epoch, "
    "whatever the number. A block of every source is held in memory (12 bytes per token) and read "
    "again on resume. 0: in the order of the documents.", least=0, mapped=True)
  workers: int = key(0, "worker processes per source, in a resumed run as many as before; 0 "
    "tokenizes in threads", least=0, affects=EXECUTION, mapped=True)
  prefetch: int = key(2, "batches held ready", least=0, affects=EXECUTION, mapped=True)
  chat_template: str = key("", "For conversations, supervised fine-tuning (source(chat=...)). A "
    ".jinja file; \"\" takes the chat template of the tokenizer's folder.")
  template_date: str = key("", "date that a template writes as today's, YYYY-MM-DD")
  samples_per_step: int = key(0, "Samples per optimizer step, over all devices, packed into "
    "global_batch windows of seq_len.", least=0)
  epochs: float = key(0.0, "Passes over the samples; > 0 replaces steps by epochs x samples / "
    "samples_per_step, rounded down.", least=0)
  on_untrained: str = key("error", 'samples without a trained token: "error" or "skip"',
    choices=samples.UNTRAINED_POLICIES)


@section("loss_scale")
class LossScale:
  """Loss scaling (Micikevicius et al. 2017, arXiv:1710.03740 §3.2): a factor on the loss and its
  inverse on the gradients, so that small ones do not underflow.
  """

  kind: str = key("none", '"none", or "dynamic": from 256, halve at a non-finite gradient, double '
    'after 2000 good steps. For precision.compute_dtype="float16"; bfloat16 and float32 gradients '
    "and FP8 scales need none.", choices=("none", "dynamic"))
  # No keys: a run that needs others has not been seen.
  start: float = 256.0
  growth_interval: int = 2000


@section("distill")
class Distill:
  """Distillation: the loss is a KL divergence from a teacher, by default the weights that training
  starts from, unquantized (quantization-aware distillation, arXiv:2601.20088).
  """

  weight: float = key(0.0, "w of the loss (1 - w) CE + w t^2 KL(teacher || student), CE being the "
    "cross entropy of the text: 0 has no teacher, 1 has the KL alone", least=0)
  temperature: float = key(1.0, "t, which divides the logits of both (arXiv:1503.02531)")
  teacher: str = key("", "Hugging Face folder of the teacher, of the model's own architecture and "
    'vocabulary. "" takes init.hf or init.workdir, and under model.lora the frozen base, which '
    "costs no memory. A resumed run reads it again and refuses other weights.")


@section("mesh", EXECUTION, mapped=True)
class Mesh:
  """Devices per axis; one may be -1: the devices that are left. All 1: one device, also of a larger
  machine.
  """

  data: int = key(1, "copies of the model")
  fsdp: int = key(-1, "shards of parameters and optimizer state that are gathered for use")
  tensor: int = key(1, "shards of heads, feed-forward and vocabulary")
  collectives_in_flight: int = key(1, "On several GPUs, collectives that XLA's schedule may have "
    "under way beside products; above 1 a layer's gradients are also spread in its own pass. "
    "8 puts more bytes beside products than 1 (experiments/guide/meshes.md). Experimental in XLA, "
    "and run by us on no GPU. Nothing elsewhere.", least=1)
  spare_multiprocessors: int = key(0, "On several GPUs, multiprocessors on which the Hopper GEMM "
    "starts no program. A GEMM holds its multiprocessors until it ends, and a collective that "
    "finds none free waits. NCCL takes one per channel. Run by us on no GPU.", least=0)


@section("sharding", EXECUTION, mapped=True)
class Sharding:
  """Mesh axes of the dimensions."""

  weights: dict[str, str | tuple[str, ...]] = key(
    {"D": "fsdp", "F": "tensor", "H": "tensor", "G": "tensor", "V": "tensor"},
    "mesh axes that split each dimension of the weights: letter -> axes, see axes.py for the "
    "letters", opened=True)
  acts: dict[str, str | tuple[str, ...]] = key(
    {"B": ("data", "fsdp"), "F": "tensor", "H": "tensor", "G": "tensor", "V": "tensor"},
    "mesh axes that split each dimension of the activations: letter -> axes, see axes.py",
    opened=True)


@section("weights", NOTHING, mapped=True)
class Weights:
  """The weights that evaluate, export, generate and sensitivity read."""

  hf: str = key("", "this Hugging Face folder, or an id of its hub, instead of the workdir's "
    "checkpoint; its config.json says what the model is")
  step: int = key(-1, "the workdir's checkpoint of this step; -1 is the newest")


@section("eval", NOTHING, mapped=True)
class Eval:
  """Held-out loss."""

  tokens: int = key(8192, "Held-out tokens per source and evaluation, rounded up to whole batches; "
    "0: no held-out loss.", least=0)
  batch: int = key(8, "sequences per batch, over all devices", least=1)
  every: int = key(0, "steps; 0: before and after training only", least=0, mapped=False)
  precisions: tuple[str, ...] = key(("recipe", "bf16"), "Forward passes that are evaluated: "
    '"recipe" (that of training) and "bf16".')


@section("checkpoint", NOTHING)
class Checkpoint:
  """When a run is saved, and which changes a resumed run accepts."""

  every: int = key(50, "steps; 0: only at the end and on interruption", least=0)
  keep: int = key(2, "newest checkpoints to keep", least=1)
  accept_changes: tuple[str, ...] = key((), "Keys whose change a resumed run may accept although "
    'they alter the result, e.g. ("optim.peak_lr",); "data" is the content of the data, "job" that '
    "of another job.")


@section("log", NOTHING)
class Log:
  """The reports of a run."""

  every: int = key(10, "steps between lines where there is no terminal", least=1, mapped=True)
  tensorboard: bool = key(True, "write curves and heat maps to WORKDIR/tensorboard", mapped=True)
  report: bool = key(True, "write WORKDIR/report.html at the end (extra `report`); --job=report at "
    "any time", mapped=True)
  tracker: str = key("", 'also to "trackio" or "wandb" (extra `track`), as they are set up',
    choices=("", "trackio", "wandb"))
  profile: tuple[int, int] = key((10, 0), "(steps before, steps of) a trace in WORKDIR/profile for "
    "XProf (`pip install xprof; xprof --logdir=WORKDIR/profile`); programs are compiled in the "
    "first steps. (10, 0): none.")
  tensor_stats_every: int = key(0, "Steps between snapshots of the ranges and rounding errors of "
    "every tensor of every site; 0: never.", least=0)
  param_stats: str = key("off", "Gradient norm, update norm, norm and count of gradients that are "
    "not finite, in steps of log.tensor_stats_every: of every layer's parameters (\"params\"), or "
    "of the groups that optim.clip_groups and optim.lr_multipliers make (\"groups\").",
    choices=param_stats.LEVELS)
  source_loss: bool = key(False, "the mean loss of each source's tokens in every step, as "
    "sources/NAME/loss beside its share (one more sum of a step; same numbers otherwise)")
  alarms: tuple[Any, ...] = key(
    (("saturation", ">", 0.01), ("underflow", ">", 0.3), ("snr_db", "<", 15.0),
     ("alignment", ">", 0.9), ("kurtosis", ">", 1e4, ".*/mlp/down/x")),
    "Rules of alarms, checked in steps of log.tensor_stats_every (none where that is 0): "
    '(statistic, "<" or ">", bound[, regular expression on site/tensor]). Statistics: saturation '
    "and underflow (shares), snr_db, amax, nonfinite; where a scale covers a whole axis, "
    "kurtosis, and for x of mlp/down alignment, the largest |cosine| of the weights of gate and "
    "up over its channels. Independent weights stay below 0.3; SmolLM2-135M has 0.5 to 0.86, and "
    "0.96 in its first layer. A normal distribution has kurtosis 3, that input about 100 in most "
    "of its layers, up to 2e5 in some; beyond 1e4 the largest is over 100 times the rms.")


# fmt: on
