"""Every key there is, with its default, unit and meaning. Other configs are thin differences.

what:      the schema; on its own it trains the two-layer debug model on bytes
command:   python launch.py --config=configs/debug.py
hardware:  any
expected:  not a run of its own

Override any key on the command line: --config.optim.peak_lr=3e-4. An unknown key or a value of the
wrong type is refused.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arm=""):
  """The base configuration. `arm`, the text after a colon in --config=FILE:ARM, names a recipe."""
  c = ConfigDict()

  c.seed = 0  # of initial weights and of the order of documents
  c.steps = 100  # optimizer steps in the whole run
  c.global_batch = 8  # sequences per optimizer step, over all devices

  c.grad_accum_steps = 1  # microbatches per step; global_batch / grad_accum_steps sequences each
  c.seq_len = 256  # positions per sequence (L)

  c.init = ConfigDict()
  # Hugging Face folder with safetensors to start from, or an id of its hub ("Qwen/Qwen2.5-1.5B"),
  # which is downloaded once; "" draws random weights.
  c.init.hf = ""

  # Workdir of another run to start from, while this one has no checkpoint: with the whole state
  # (weights, optimizer, scales, place in the data). checkpoint.accept_changes must name what
  # differs from its configuration.
  c.init.workdir = ""
  c.init.step = -1  # its checkpoint; -1 is the newest
  # Of init.workdir the weights alone: another stage, with its own data, schedule and recipe, a
  # fresh optimizer, and scales from its own first batch.
  c.init.weights_only = False

  c.model = ConfigDict()
  c.model.preset = "debug"  # a name in models/presets.py, or "hf": read config.json of init.hf
  # The following keys override the preset where they are not None.
  c.model.num_layers = placeholder(int)  # N
  c.model.hidden_size = placeholder(int)  # D
  c.model.intermediate_size = placeholder(int)  # F
  c.model.num_heads = placeholder(int)  # H
  c.model.num_kv_heads = placeholder(int)  # G
  c.model.head_dim = placeholder(int)  # K
  c.model.vocab_size = placeholder(int)  # V
  c.model.max_positions = placeholder(int)  # longest context the weights are for
  c.model.rope_theta = placeholder(float)  # base of the rotary frequencies
  c.model.init_std = placeholder(float)  # of random weights
  c.model.mixers = placeholder(tuple)  # blocks of a layer, names in models/transformer.py's MIXERS

  # Low-rank adapters (arXiv:2106.09685) beside a frozen model.
  c.model.lora = ConfigDict()
  c.model.lora.rank = 0  # of the adapters; 0 trains every parameter instead
  c.model.lora.alpha = 16.0  # the adapter's product is multiplied by alpha / rank
  # Regular expressions on names of linear layers: "attn/q", "mlp/.*".
  c.model.lora.targets = ("attn/.*", "mlp/.*")
  # Storage of the frozen linear layers: "block_fp8" (E4M3 codes with a scale per 128x128, which
  # block recipes multiply as they are; those of a checkpoint in FP8 to the bit) or "bf16".
  c.model.lora.base = "block_fp8"

  c.precision = ConfigDict()
  # Which recipe each linear layer gets: (regular expression on the whole site name, recipe name),
  # first match wins. Names are "head" and "layers/3/mlp/up" with the number of the layer. A site
  # that no rule covers and a rule that decides nothing are errors.
  c.precision.rules = (("head", "bf16"), ("layers/.*", arm or "block_128"))
  c.precision.first_bf16 = 0  # so many first layers in recipe bf16, whatever the rules say
  c.precision.last_bf16 = 0  # so many last layers
  # Other rules from a step on: ((first step, rules), ...), e.g. ((900, ((".*", "bf16"),)),).
  c.precision.schedule = ()
  # Changes that the run makes to itself (experiments/guide/control.md), texts or mappings, e.g.
  # ("refresh(alarm='underflow')", "switch_recipe(to='bf16', k=3, looks=5)", "roll_back(z=6.0)").
  c.precision.policy = ()
  # Table of --job=calibrate that delayed and static scales start from; "" takes the ranges of the
  # first batch. Resuming with another table (by content, not by path) is refused; with
  # "precision.calibration" in checkpoint.accept_changes, scales begin anew from the table.
  c.precision.calibration = ""
  # Smooth-SwiGLU (arXiv:2409.12517): the input of mlp/down is divided by the largest magnitude of
  # its linear branch, which comes back in down's weight ("channel") or output ("token"). Against
  # outliers late in long runs (log.alarms warns); SwiGLU is then written in the compute dtype.
  c.precision.smooth_swiglu = "none"
  # Inspect the step before it runs and stop if a GEMM is wider than its recipe says: on a GPU the
  # very executable that then runs, on the CPU the program handed to XLA.
  c.precision.verify_fp8_gemms = True
  # dtype of activations and of operands that no recipe narrows: "bfloat16", "float32", "float16"
  # (with loss_scale.kind="dynamic"; not on the Hopper kernels), or "auto": bfloat16 on GPUs since
  # Ampere, float32 on older ones, which have no BF16 units, and on the CPU (where XLA's bfloat16 is
  # several times slower).
  c.precision.compute_dtype = "auto"

  c.kernels = ConfigDict()
  # FP8 GEMM: "auto" or one of kernels/gemm. On a GPU "auto" never emulates; "reference"
  # does.
  c.kernels.matmul = "auto"
  # "xla", "cudnn" (GPUs since Ampere, 16-bit activations; isolates documents by an L x L bias),
  # "tokamax" (Hopper, 16-bit activations, extra `attention`; no such bias), or "auto": cudnn on a
  # GPU, with isolated documents tokamax, else xla. A bias above 256 MiB must be asked for by name.
  c.kernels.attention = "auto"
  # AdamW's update: "xla", "mosaic_sm90" (one pass over gradient, master and moments, in place; an
  # error where a matrix cannot be moved by it), or "auto" (mosaic_sm90 where it can). The default
  # changes after a measurement on a GPU.
  c.kernels.optimizer = "xla"

  c.memory = ConfigDict()
  # Activations that the backward pass recomputes: "none"; "linears" saves outputs of linear layers
  # and of attention and recomputes norms, SwiGLU and quantization; "operands" also saves the FP8
  # operands of save_gemm_inputs="quantized"; "full" saves only the input of every layer.
  c.memory.remat_policy = "none"
  # Forms of the residuals (ops/residuals.py; bytes of each: experiments/guide/memory.md).
  # save_gemm_inputs: "none" saves the input x of a linear layer unquantized, or the sources of its
  # prologue; "quantized" saves the FP8 operand of the weight gradient instead, as Transformer
  # Engine does. Same numbers. Refused with remat_policy="linears", which computes it again.
  c.memory.save_gemm_inputs = "none"
  # The others: "none" (as differentiation has them), "bf16", "e4m3_16" (groups of 16 channels, 1.06
  # bytes per element; COAT) or "e4m3_128" (1.01 bytes). Compressed copies serve gradients alone.
  c.memory.save_norm_inputs = "none"  # inputs of norms: the residual stream, twice per layer
  c.memory.save_gate_up = "none"  # gate and up
  c.memory.save_layer_inputs = "none"  # with remat_policy="full": the input of every layer
  c.memory.loss_chunk = 256  # positions per chunk of the cross-entropy
  # Share of a GPU's memory that JAX takes at its start (XLA_PYTHON_CLIENT_MEM_FRACTION, which the
  # environment may set instead); 0 leaves JAX's own, 0.75.
  c.memory.gpu_fraction = 0.0

  c.aot = ConfigDict()  # ahead-of-time compilation
  # --job=memory compiles for these devices: "h200:8" is eight H200s, which need not be here; "" is
  # the devices at hand.
  c.aot.topology = ""

  c.data = ConfigDict()
  # "bytes", a tokenizer.json, a Hugging Face folder or an id of its hub; "" takes init.hf's, or
  # bytes without one.
  c.data.tokenizer = ""
  c.data.eos = ""  # token that ends a document; "" takes the tokenizer folder's eos_token
  c.data.sources = ConfigDict({"main": source(kind="pydoc")})  # name -> source
  c.data.heldout_fraction = (
    0.1  # fraction of documents never trained on, chosen by a hash of their text
  )
  c.data.cross_document = False  # may attention cross document boundaries inside a window?
  # Bad UTF-8, broken JSON, missing field, empty; of conversations unknown roles and empty answers:
  # "error" or "skip".
  c.data.on_malformed = "error"
  # Longer than a window: documents "split" over windows, "error" or "skip"; samples of
  # conversations "error", "skip" or "truncate", which cuts their end off.
  c.data.on_long = "split"
  # Windows per block that is shuffled, so that the windows of one long document do not fill whole
  # batches; prepared sources are shuffled over the whole epoch, whatever the number. A block of
  # every source is held in memory (12 bytes per token) and read again on resume. 0: in the order
  # of the documents.
  c.data.shuffle_windows = 1024
  c.data.workers = 0  # worker processes per source; 0 tokenizes in threads
  c.data.prefetch = 2  # batches held ready

  # For conversations, supervised fine-tuning (source(chat=...)). A .jinja file; "" takes the chat
  # template of the tokenizer's folder.
  c.data.chat_template = ""
  c.data.template_date = ""  # date that a template writes as today's, YYYY-MM-DD
  # Samples per optimizer step, over all devices, packed into global_batch windows of seq_len.
  c.data.samples_per_step = 0
  # Passes over the samples; > 0 replaces steps by epochs x samples / samples_per_step, rounded
  # down.
  c.data.epochs = 0.0
  c.data.on_untrained = "error"  # samples without a trained token: "error" or "skip"

  c.optim = ConfigDict()
  c.optim.optimizer = "adam"  # AdamW, or "lion"
  # Storage format of the moments: "float32", or a name in optim/storage.py: "coat" first (in
  # experiments/moments the most exact in two bytes), or "sqrt_v", "tensor_e4m3_e5m2", "e4m3_256",
  # "fp8lm", "bf16", "bf16_sr". Norms and biases stay float32.
  c.optim.moment_format = "float32"
  # Master weights: "float32"; "bf16_sr", rounded stochastically; "bf16_remainder", a float32 of
  # which the BF16 half multiplies; "f16", scaled.
  c.optim.master_format = "float32"
  # Gradients between backward pass and update: "float32", "bf16_sr", or "e4m3".
  c.optim.grad_format = "float32"
  c.optim.schedule = "wsd"  # "wsd" (warm up, hold, cosine tail), "cosine" or "constant"
  c.optim.peak_lr = 1e-3  # largest learning rate, reached after the warm-up
  c.optim.min_lr = 1e-4  # where the tail ends: one step after the last
  c.optim.warmup_steps = 10  # linear from 0
  c.optim.warmup_fraction = 0.0  # > 0: of the steps, rounded down, instead of warmup_steps
  c.optim.decay_steps = 20  # length of wsd's tail
  c.optim.b1 = 0.9  # decay of Adam's first moment per step
  c.optim.b2 = 0.95  # decay of Adam's second moment per step
  c.optim.eps = 1e-8  # added to the root of the second moment
  c.optim.weight_decay = 0.1  # decoupled; not on norms and biases
  c.optim.grad_clip_norm = 1.0  # global gradient norm; 0 turns clipping off
  # Groups that are clipped by a norm of their own instead (grad_clip_norm=0): (regular expression
  # on parameters of a layer, largest norm), the first that matches, e.g.
  # (("layers/.*/attn/.*", 1.0), ("layers/.*", 2.0)). Parameters of no group are not clipped.
  c.optim.clip_groups = ()
  # (regular expression on parameters of a layer, factor on their learning rate), the first that
  # matches.
  c.optim.lr_multipliers = ()
  # Update every layer inside the backward pass (LOMO, arXiv:2306.09782), so that the gradients of
  # one layer exist at a time. Needs grad_clip_norm 0, grad_accum_steps 1, remat_policy "full",
  # grad_format "float32", on_nonfinite "stop" and no loss scale.
  c.optim.in_backward = False
  # At a loss, gradient or GEMM operand with a NaN or infinity: "stop", or "skip" the update and
  # count. A dynamic loss scale is halved first, and stops at the smallest scale, 2^-24.
  c.optim.on_nonfinite = "stop"

  # Multiplies the loss, and divides the gradients, so that small gradients do not underflow.
  c.loss_scale = ConfigDict()
  # "none", or "dynamic": halve at a non-finite gradient, double after so many good steps. For
  # precision.compute_dtype="float16"; bfloat16 and float32 gradients and FP8 scales need none.
  c.loss_scale.kind = "none"
  c.loss_scale.start = 256.0  # scale of the first step
  c.loss_scale.growth_interval = 2000  # good steps before it doubles

  # Devices per axis; one may be -1: whatever is left. All 1: one device, also of a larger machine.
  c.mesh = ConfigDict()
  c.mesh.data = 1  # copies of the model
  c.mesh.fsdp = -1  # shards of parameters and optimizer state that are gathered for use
  c.mesh.tensor = 1  # shards of heads, feed-forward and vocabulary

  c.sharding = ConfigDict()
  # Mesh axes that split each dimension of the weights: letter -> axes, see axes.py for the letters.
  c.sharding.weights = ConfigDict(
    dict(D="fsdp", F="tensor", H="tensor", G="tensor", V="tensor"), type_safe=False
  )
  # Mesh axes that split each dimension of the activations: letter -> axes, see axes.py.
  c.sharding.acts = ConfigDict(
    dict(B=("data", "fsdp"), F="tensor", H="tensor", G="tensor", V="tensor"), type_safe=False
  )

  c.eval = ConfigDict()
  # Held-out tokens per source and evaluation, rounded up to whole batches; 0: no held-out loss.
  c.eval.tokens = 8192
  c.eval.batch = 8  # sequences per batch, over all devices
  c.eval.every = 0  # steps; 0: before and after training only
  # Forward passes that are evaluated: "recipe" (that of training) and "bf16".
  c.eval.precisions = ("recipe", "bf16")
  # --job=evaluate, export and generate: this Hugging Face folder instead of the workdir's
  # checkpoint.
  c.eval.hf = ""
  c.eval.step = -1  # --job=evaluate, export and generate: which checkpoint; -1 is the newest
  # --job=evaluate: questions with verifiable answers, as a comma list of families of reasoning-gym,
  # also with arguments ("chain_sum(max_terms=2)"), benchmarks ("aime24"), .jsonl files of questions
  # and .json task files. Prompts, outputs and verdicts go to WORKDIR/evaluation. How tokens are
  # computed is in `generate` (precision, slots, cache_format); how they are drawn is in the task.
  c.eval.tasks = ""
  c.eval.chat = False  # write prompts with the tokenizer's chat template
  c.eval.questions = 0  # per task, the first; 0: all, and 200 of a family
  c.eval.samples = 0  # outputs per question (n of avg@n); 0: the task's own
  c.eval.temperature = -1.0  # of sampling; -1: the task's own
  c.eval.max_new_tokens = 0  # tokens per output at most; 0: the task's own
  c.eval.seed = 0  # of sampling
  c.eval.data_dir = "assets/benchmarks"  # folder of the benchmarks' data, which users bring
  # JSONL of a training set ("messages", "question" or "prompt"): its questions are not asked.
  c.eval.train_data = ""
  # Execute programs that the model writes (livecodebench_v5), in a subprocess with limits.
  c.eval.allow_code_execution = False
  # Workdir of another run with the same tasks evaluated: its paired difference to this one.
  c.eval.compare_with = ""

  c.checkpoint = ConfigDict()
  c.checkpoint.every = 50  # steps; 0: only at the end and on interruption
  c.checkpoint.keep = 2  # newest checkpoints to keep
  # Keys whose change a resumed run may accept although they alter the result, e.g.
  # ("optim.peak_lr",).
  c.checkpoint.accept_changes = ()

  c.log = ConfigDict()
  c.log.every = 10  # steps between lines where there is no terminal
  c.log.tensorboard = True  # write curves and heat maps to WORKDIR/tensorboard
  c.log.report = (
    True  # write WORKDIR/report.html at the end (extra `report`); --job=report at any time
  )
  c.log.tracker = ""  # also to "trackio" or "wandb" (extra `track`), as they are set up
  # WORKDIR/profile gets a trace of so many steps for XProf (`pip install xprof; xprof
  # --logdir=WORKDIR/profile`); 0: none.
  c.log.profile_steps = 0
  c.log.profile_start = 10  # steps before the trace, in which programs are compiled
  # Steps between looks at the ranges and rounding errors of every tensor of every site; 0: never.
  c.log.tensor_stats_every = 0
  # Rules of alarms, checked in steps of log.tensor_stats_every (none where that is 0):
  # (statistic, "<" or ">", bound[, regular expression on site/tensor]).
  # Statistics: saturation and underflow (shares), snr_db, amax, nonfinite; where a scale covers a
  # whole axis, kurtosis, and for x of mlp/down alignment, the largest |cosine| of the weights of
  # gate and up over its channels. Independent weights stay below 0.3; SmolLM2-135M has 0.5 to 0.86,
  # and 0.96 in its first layer. A normal distribution has kurtosis 3, that input about 100 in most
  # of its layers, up to 2e5 in some; beyond 1e4 the largest is over 100 times the rms.
  c.log.alarms = (
    ("saturation", ">", 0.01), ("underflow", ">", 0.3), ("snr_db", "<", 15.0),
    ("alignment", ">", 0.9), ("kurtosis", ">", 1e4, ".*/mlp/down/x"),
  )  # fmt: skip

  c.export = ConfigDict()
  c.export.path = ""  # folder to write; "" is WORKDIR/hf
  # "hf-bf16": all weights in export.dtype. "hf-fp8-block": FP8 as DeepSeek-V3 and Qwen publish it,
  # 128x128. "compressed-tensors": FP8 as llm-compressor writes it, by export.strategy.
  c.export.format = "hf-bf16"
  # Of weights that are not FP8: "bfloat16", "float16", "float32", or "auto": as imported, else
  # bfloat16.
  c.export.dtype = "auto"
  c.export.strategy = "channel"  # compressed-tensors: what shares a scale: channel, block, tensor
  # hf-fp8-block: "float32", "ue8m0" (powers of two), or "auto": as training multiplied.
  c.export.scale_fmt = "auto"
  # Whether an FP8 format that cannot hold the codes of training gets new ones, from the masters.
  c.export.requantize = False
  # compressed-tensors: table of --job=calibrate that static scales of inputs come from; "": servers
  # scale every token.
  c.export.input_scales = ""
  # The gate: the logits of the written folder are compared with the source's on so many tokens, of
  # every data source's held-out documents or of gate_text.
  c.export.gate_tokens = 1024
  c.export.gate_text = ""  # text file to compare on; "": held-out documents
  c.export.max_kl = 0.1  # nats per token; a folder that differs more is not written
  # Python of an environment with torch, transformers and, by format, accelerate or
  # compressed-tensors, which then reads the folder too, on the CPU: "torch-env/bin/python".
  c.export.client_python = ""
  c.export.push_to = ""  # repository of the Hugging Face hub, ORG/NAME; made private if new
  # After training with precision.smooth_swiglu="channel": fold its scales, measured over so many
  # held-out batches of every source, into up and down, for FP8 inference with plain SwiGLU. In 16
  # and 32 bits the model stays the same. 0: weights as trained.
  c.export.fold_smooth_batches = 0

  c.calibrate = ConfigDict()
  c.calibrate.path = ""  # table to write; "" is WORKDIR/calibration.json
  c.calibrate.batches = 8  # training batches to watch
  # Amax of a delayed or static scale: "amax", the largest magnitude; "percentile", below which are
  # so many percent of the elements; or "mse", the one with the least squared error. The last two
  # saturate outliers.
  c.calibrate.method = "amax"
  c.calibrate.percentile = 99.99  # of method "percentile"

  # --job=sensitivity, on one device: the loss that each linear layer's forward GEMM loses by its
  # recipe (precision.rules), with eval.hf's weights, the workdir's checkpoint's, or init.hf's.
  c.sensitivity = ConfigDict()
  c.sensitivity.path = (
    ""  # folder of results, to which the same command adds; "": WORKDIR/sensitivity
  )
  # Held-out tokens per source, rounded up to whole batches of eval.batch: rules are chosen on one
  # half and reported on the other. Memory: tokens x layers x hidden_size x 4 bytes on the host.
  c.sensitivity.tokens = 8192
  # Switched on alone and measured, beside all at once: "kinds" (mlp/up of all layers), "layers",
  # and "tensors" (inputs or weights of all sites).
  c.sensitivity.groups = ("tensors", "kinds", "layers")
  c.sensitivity.top = 20  # sites measured alone, the most sensitive by estimate
  # Budget of a set of precision.rules: percent that the held-out loss may exceed BF16's; 0: none.
  c.sensitivity.max_loss = 0.25
  # Budget of another set: the least share of the sites' forward FLOPs that is quantized; 0: none.
  c.sensitivity.min_fp8 = 0.9

  c.prepare = ConfigDict()
  c.prepare.path = ""  # folder to write tokenized documents to; "" is WORKDIR/prepared
  c.prepare.shard_tokens = 100_000_000  # tokens per ArrayRecord file
  c.prepare.processes = 0  # that tokenize; 0: one per core, and one for less than 8 MiB of files

  c.generate = ConfigDict()  # --job=generate, on one device
  c.generate.hf = ""  # this Hugging Face folder instead of the workdir's checkpoint (eval.step)
  # File of prompts: JSON lines with "prompt" (text) or "messages" (a chat, written by the
  # tokenizer's template); any other file has a prompt per line. "" reads lines of standard input.
  c.generate.prompts = ""
  # JSON lines to write, one per completion as it ends; "" streams texts to standard output.
  c.generate.out = ""
  c.generate.precision = "recipe"  # forward pass: "recipe" (that of training) or "bf16"
  # Keys and values of past tokens: "compute" (precision.compute_dtype), or "e4m3" with a float32
  # scale per head of every token.
  c.generate.cache_format = "compute"
  c.generate.slots = 8  # sequences that are decoded together
  c.generate.max_length = 0  # tokens of prompt and completion a slot holds; 0: as many as needed
  c.generate.num_samples = 1  # completions per prompt
  c.generate.temperature = 0.0  # 0 takes the best token
  c.generate.top_p = 1.0  # the smallest set of tokens that has this probability; 1 keeps all
  c.generate.top_k = 0  # so many most probable tokens; 0 keeps all
  c.generate.max_new_tokens = 256  # tokens per completion at most
  c.generate.stop = ()  # texts at which a completion ends
  c.generate.stop_tokens = ()  # names of tokens that end one, beside the model's own
  c.generate.seed = 0  # of all draws
  c.lock()  # a key that is not above is an error, in other configs too
  c.sharding.weights.unlock()  # but any letter may be split
  c.sharding.acts.unlock()
  return c


# The columns of conversations, unless a source says otherwise.
_FIELDS = {"messages": "messages", "sharegpt": "conversations", "prompt": "prompt,completion"}


def source(kind="text", path="", field="", dataset="", split="train", weight=1.0, chat=""):
  """One entry of data.sources.

  kind     "pydoc" (ships with Python), "text" (a document per file), "jsonl" (per line), "parquet"
           (per row), "datasets" (Hugging Face's), "tfds", "prepared" (written by --job=prepare)
  path     glob of files; for datasets a folder that save_to_disk wrote; for tfds its data_dir; for
           prepared its folder
  field    key or column of the text; "" is "text", and of conversations those below
  dataset  tfds: name[/config][:version]; datasets: name[:configuration]
  split    tfds and datasets: split or slice of one
  weight   share of tokens; conversations: 1
  chat     "": documents; or the format of conversations: "messages" (OpenAI's, in the column
           "messages"), "sharegpt" ("from" and "value", in "conversations"), "prompt" (two columns,
           "prompt,completion")
  """
  field = field or _FIELDS.get(chat, "text")
  return ConfigDict(
    dict(kind=kind, path=path, chat=chat, field=field, dataset=dataset, split=split, weight=weight)
  )
