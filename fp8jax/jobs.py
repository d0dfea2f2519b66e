"""The jobs of the launcher: one function each, and the last stop for errors users can fix."""

import dataclasses
import errno
import json
import os
import shlex
import socket
import sys
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging

from fp8jax import (
  account,
  batches,
  calibration,
  checkpoint,
  compilation_cache,
  config,
  config_file,
  diagnose,
  evaluate,
  hub,
  machine,
  report,
  target,
  train,
  writers,
)
from fp8jax import step as step_lib
from fp8jax.data import loader, prepare
from fp8jax.errors import UserError, missing_package, nearest, nearest_key, one_line
from fp8jax.kernels import backend
from fp8jax.models import export_folder, hf, hf_config, transformer
from fp8jax.ops import site as site_lib
from fp8jax.ops import smooth, weights

NAMES = ("train", "evaluate", "prepare", "export", "calibrate", "diagnose", "memory")


def run(job: str, c: config.Config, base: config.Config, name: str, workdir: str) -> int:
  """Runs one job; returns the process's exit code.

  Args:
    job: one of NAMES.
    c: the configuration.
    base: configs/base.py's, for the printed difference.
    name: the config's file name and arm, for the default workdir.
    workdir: or "".
  """
  logging.set_verbosity(logging.WARNING)  # Orbax narrates every file at INFO
  workdir = os.path.expanduser(workdir) or os.path.join("runs", _stem(name))
  if note := compilation_cache.enable():
    print(note, file=sys.stderr)
  try:
    config_file.check_keys(c, base)
    return _run(job, c, base, workdir)
  except (UserError, train.NonFinite, OSError) as e:
    is_full = isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) and not e.filename
    where = f"; nothing more can be written to {workdir}" if is_full else ""
    print(f"error: {e}{where}", file=sys.stderr)
    return 1
  except ModuleNotFoundError as e:
    print(f"error: {missing_package(e)}", file=sys.stderr)
    return 1
  except jax.errors.JaxRuntimeError as e:
    if _OUT_OF_MEMORY not in str(e):
      raise
    print(f"error: {_out_of_memory(e, sys.argv)}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return 130


def _run(job: str, c: config.Config, base: config.Config, workdir: str) -> int:
  if job == "evaluate" and c.eval.hf:
    c.init.hf, c.model.preset = c.eval.hf, "hf"
  if job not in ("train", "evaluate"):  # which read the table; it may be yet to be written
    c.precision.calibration = ""
  if job == "prepare":  # needs neither the model nor the mesh that the data are for
    hub.fetch({c.data.tokenizer or c.init.hf: hub.TOKENIZER})
    print(writers.to_json(_prepare(c, workdir)))
    return 0
  if job == "memory":  # needs neither weights nor data, nor the devices
    hub.fetch({c.init.hf: hub.WEIGHTS} if c.model.preset == "hf" else {})
    print(writers.to_json(_memory(c)))
    return 0
  machine.check_platform(jax.default_backend(), jax.config.jax_platforms, jax.__version__)
  hub.fetch({c.data.tokenizer: hub.TOKENIZER, c.init.hf: hub.WEIGHTS})
  plan = config.resolve(c, jax.device_count(), backend.current_device())
  if job == "train":
    return train.run(plan, workdir, config.flatten(base)).get("exit_code", 0)
  jobs = {
    "evaluate": _evaluate, "export": _export, "calibrate": _calibrate, "diagnose": _diagnose,
  }  # fmt: skip
  result = jobs[job](plan, workdir)
  if jax.process_index() == 0:
    print(writers.to_json(result))
  return 0


_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def _out_of_memory(e: Exception, argv: list[str]) -> str:
  """One line: what did not fit, and the command that shows where the memory goes."""
  shown = " ".join(str(e).split("\n")[0].split())
  command = [a for a in argv if not a.lstrip("-").startswith("job")]
  return (
    f"out of memory: {shown}. Where it goes: {shlex.join(['python', *command, '--job=memory'])}; "
    "smaller: more accumulation, memory.remat='full', optim.moments='coat'"
  )


def environment(c: config.Config) -> dict[str, str]:
  """Environment variables that a configuration asks for; to be set before JAX meets its devices."""
  fraction = c.memory.gpu_fraction
  return {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(fraction)} if fraction else {}


def _stem(name: str) -> str:
  path, _, arm = name.partition(":")
  stem = os.path.splitext(os.path.basename(path))[0]
  return f"{stem}_{arm}" if arm else stem


# --- jobs ----------------------------------------------------------------------------------------


def _evaluate(plan: config.Plan, workdir: str):
  """Held-out loss and perplexity of a checkpoint or a Hugging Face folder."""
  if plan.config.eval.hf:
    params, _ = hf.load_params(plan.config.eval.hf, plan.model, plan.run.layout)
    path = os.path.expanduser(plan.config.precision.calibration)
    memories = calibration.begin(plan, path)[0] if path else {}
    phase, where = 0, {"hf": plan.config.eval.hf}
  else:
    params, step, meta = _restore_params(plan, workdir)
    table, trained = (
      x.get("precision.calibration") for x in (config.identity(plan), meta["config"])
    )
    if table and table != trained:
      raise UserError(
        f"precision.calibration={plan.config.precision.calibration!r} is not the table that the "
        f"checkpoint of step {step} was trained with, and evaluation takes the scales of the "
        "checkpoint; set precision.calibration=''"
      )
    phase, where = plan.phase(max(step - 1, 0)), {"workdir": workdir, "step": step}
    memories = _restore_memories(plan, workdir, step, meta, phase)
  evaluator = evaluate.Evaluator(plan)
  heldout = evaluator.run(params, memories, phase)
  counted = {"heldout": heldout, "documents_passed_over": evaluator.passed_over}
  return {"device": report.device_line(plan), **where, **counted}


def _prepare(c: config.Config, workdir: str):
  """Tokenizes every source into ArrayRecord files."""
  if jax.process_count() > 1:
    raise UserError("--job=prepare works in one process; leave the others out")
  target = _folder_of(c.prepare.path, workdir, "prepared")
  out = writers.console(stderr=True)
  return prepare.run(config.resolve_data(c), target, c.prepare.shard_tokens, out)


def _memory(c: config.Config):
  """Bytes per device by kind, declared and found in the compiled step."""
  plan, devices = target.resolve(target.without_files(c), c.memory.target)
  out = writers.console(stderr=True)
  rows = account.declared(plan)
  out.print(f"compiling the step for {c.memory.target or devices[0].device_kind}")
  found, summary = account.compiled(plan, target.lower(plan, devices))
  rows += found
  out.print(report.account_table(rows, summary))
  return {"rows": [dataclasses.asdict(row) for row in rows], **summary}


def _export(plan: config.Plan, workdir: str):
  """Writes a checkpoint as a Hugging Face folder."""
  target = _folder_of(plan.config.export.path, workdir, "hf")
  never = {workdir: "the run's own folder", plan.config.init.hf: "the folder of init.hf"}
  export_folder.check_other(target, _local(never))
  export_folder.check(target)  # before work that takes long; `claim` checks again
  params, step, meta = _restore_params(plan, workdir)
  began_with = {meta["config"].get("init.hf", ""): "the folder that training started from"}
  export_folder.check_other(target, _local(began_with))
  params = weights.master(params)
  if plan.config.export.merge_smooth:
    params = _merge_smooth(plan, params)
  dtype = plan.config.export.dtype
  dtype = meta["weights_dtype"] if dtype == "auto" else dtype
  source = os.path.join(workdir, "hf_source")
  source = source if os.path.isdir(source) else ""
  base = hf_config.read_json(source, "config.json") if source else None
  hf.save_params(target, params, plan.model, dtype, base, source=source)
  return {"folder": target, "step": step, "dtype": dtype}


def _local(folders: dict[str, str]) -> dict[str, str]:
  return {hub.local(folder): what for folder, what in folders.items() if folder}


def _merge_smooth(plan: config.Plan, params):
  """The parameters with Smooth-SwiGLU's scales per channel, those of held-out text, folded in."""
  c, mlp = plan.config, params["layers"]["mlp"]
  sites = plan.sites(evaluate.BF16)
  look = jax.jit(lambda p, b: transformer.channel_scales(p, sites, b, plan.model, plan.run))
  spread = batches.Spread(plan.run.layout, c.eval.batch)
  s_NF = jnp.full(mlp["up"].shape[::2], smooth.EPSILON)
  for source in plan.data.sources:
    counts = loader.Counts()
    for batch in loader.heldout_batches(
      plan.data, source, spread.local_rows, c.export.merge_smooth, spread.shard, counts
    ):
      s_NF = jnp.maximum(s_NF, look(params, spread.place(batch)))
    for what, number in counts.summary_everywhere().items():
      text = f"held-out documents of {source} passed over as {what}: {number}"
      writers.console(stderr=True).print(text)
  up, down = jax.jit(smooth.fold)(mlp["up"], mlp["down"], s_NF)
  return {**params, "layers": {**params["layers"], "mlp": {**mlp, "up": up, "down": down}}}


def _calibrate(plan: config.Plan, workdir: str):
  """Writes the range of every tensor of every site, over some training batches."""
  c, step = plan.config, 0
  path = _folder_of(c.calibrate.path, workdir, "calibration.json")
  _check_writable(path, "calibrate.path")  # before the work, whose result would be lost
  if os.path.isdir(os.path.join(workdir, "checkpoints")):
    params, step, _ = _restore_params(plan, workdir)
  elif c.init.hf:
    params, _ = hf.load_params(c.init.hf, plan.model, plan.run.layout)
  else:
    params = step_lib.make_state(plan).params
  fingerprint = loader.fingerprint(plan.data)
  spread = batches.Spread(plan.run.layout, plan.microbatch, c.accumulation)
  counts = loader.Counts()
  stream = loader.train_batches(plan.data, spread.local_batch, spread.shard, counts)
  placed = (spread.place(next(stream)) for _ in range(c.calibrate.batches))
  try:
    table = calibration.run(plan, params, placed, step=step, fingerprint=fingerprint)
  finally:
    stream.close()
  writers.write_json(*os.path.split(path), table)
  return {
    "table": path, "rows": len(table["rows"]), "batches": table["batches"], "step": step,
    "documents_passed_over": counts.summary_everywhere(),
  }  # fmt: skip


def _diagnose(plan: config.Plan, workdir: str):
  """Repeats the pass over the batch that a run stopped at."""
  name = os.path.join(workdir, "nonfinite", f"batch_{jax.process_index()}.npz")
  if not os.path.exists(name):
    raise FileNotFoundError(
      f"{name} does not exist: no run in {workdir} stopped at a non-finite value"
    )
  with np.load(name) as saved:
    host = dict(saved)
  # The run may have gone on since.
  with open(os.path.join(workdir, "nonfinite", "report.json")) as f:
    step = json.load(f)["step"]
  params, _, _ = _restore_params(plan, workdir, step)
  spread = batches.Spread(plan.run.layout, plan.microbatch, plan.config.accumulation)
  found = diagnose.report(plan, params, spread.place(host), plan.phase(max(step - 1, 0)))
  return {"step": step, **found}


def _restore_params(plan: config.Plan, workdir: str, step: int | None = None):
  """(parameters, step, meta) of a checkpoint; without a step, of the one that eval.step chooses."""
  if not os.path.isdir(workdir):  # Orbax would create it
    raise FileNotFoundError(f"{workdir} does not exist; train first, or name another --workdir")
  saved = checkpoint.Checkpoints(workdir, plan.config.checkpoint.keep)
  step = saved.find(plan.config.eval.step if step is None else step)
  meta = saved.meta(step)
  changes = {
    k: v for k, v in config.diff(config.identity(plan), meta["config"]).items()
    if k.startswith("model.")
  }  # fmt: skip
  if changes:
    raise config.ConfigError(
      [f"{k} is {new} here and {old} in the checkpoint" for k, (old, new) in changes.items()]
    )
  # As that run kept them, whatever this configuration says.
  kept = meta["config"].get("optim.master", "float32")
  plan = dataclasses.replace(plan, optim=dataclasses.replace(plan.optim, master=kept))
  params = saved.restore_params(step, step_lib.abstract_params(plan))
  saved.close()
  return params, step, meta


def _restore_memories(plan: config.Plan, workdir: str, step: int, meta, phase: int):
  remembered = site_lib.remembered(plan.sites(phase=phase)) if step else {}
  if meta.get("remembered", remembered) != remembered:
    print(
      f"the scales of step {step} are other recipes'; those of {workdir} are chosen anew from what "
      "is evaluated",
      file=sys.stderr,
    )
    return {}
  saved = checkpoint.Checkpoints(workdir, plan.config.checkpoint.keep)
  memories = saved.restore_memories(step, step_lib.abstract_state(plan, step).memories)
  saved.close()
  return memories


def _check_writable(path: str, key: str):
  """Makes the folder of a file that is to be written.

  Raises:
    UserError: it cannot be made or written; names the configuration's key.
  """
  folder = os.path.dirname(os.path.abspath(path))
  try:
    os.makedirs(folder, exist_ok=True)
    reason = "" if os.access(folder, os.W_OK) else "no permission to write"
  except OSError as e:
    reason = e.strerror or str(e)
  if os.path.isdir(path):
    reason = f"{path} is a folder"
  if reason:
    raise UserError(f"{key}: cannot write {path}: {reason}; name another file")


def _folder_of(path: str, workdir: str, name: str) -> str:
  """`path`, or a folder of that name under the workdir."""
  return os.path.expanduser(path) if path else os.path.join(workdir, name)


# --- command line --------------------------------------------------------------------------------


def initialize_distributed(coordinator, processes, process, timeout: int):
  """Joins the other processes; exits with one line if that is impossible.

  Args:
    coordinator: host:port of process 0; None, like the next two, under a scheduler that JAX knows.
    processes: their number.
    process: index of this one.
    timeout: seconds to wait for the others.
  """
  if coordinator is not None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
      sys.exit(f"error: --coordinator={coordinator!r} must be host:port, for example node1:1234")
    if processes is None or process is None:
      sys.exit("error: --coordinator needs --processes=N and --process=I, too")
    if not 0 <= process < processes:
      sys.exit(
        f"error: --process={process} must be from 0 to {processes - 1}, as --processes={processes}"
        if processes > 0
        else f"error: --processes={processes} must be at least 1"
      )
    if process > 0:
      _await_coordinator(host, int(port), timeout)
  # At its own time limit JAX aborts the process, with a stack trace: ours comes first.
  timer = threading.Timer(timeout, _give_up, (processes, timeout))
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(coordinator, processes, process, initialization_timeout=timeout + 60)
  except (ValueError, RuntimeError) as e:
    sys.exit(
      f"error: the processes did not find each other: {one_line(e)[:300]}. Is process 0 up, and "
      "its host:port reachable from here?"
    )
  finally:
    timer.cancel()


def _give_up(processes: int | None, timeout: int):
  """Ends the process from a thread of its own: the main one waits inside of JAX."""
  print(
    f"error: not all {processes or ''} processes came within --timeout={timeout} s. Are all of "
    "them started, each with its own --process, and is process 0 reachable from each?",
    file=sys.stderr, flush=True,
  )  # fmt: skip
  os._exit(1)


def _await_coordinator(host: str, port: int, timeout: int):
  """Returns when process 0 listens; JAX would end the process with a fatal error instead."""
  deadline = time.monotonic() + timeout
  while True:
    try:
      socket.create_connection((host, port), timeout=1).close()
      return
    except OSError as e:
      if time.monotonic() > deadline:
        sys.exit(
          f"error: --coordinator={host}:{port} did not answer within --timeout={timeout} s ({e}). "
          "Is process 0 up, and reachable from here?"
        )
      time.sleep(0.2)


def parse_flags(argv: list[str], base: config.Config) -> list[str]:
  """absl's parser, with one-line errors that name the nearest valid file, key or value."""
  path, job = (_value_of(name, argv) for name in ("config", "job"))
  path = path and path.partition(":")[0]
  if path is None and not any(a.lstrip("-").startswith("help") for a in argv[1:]):
    sys.exit("error: --config=FILE is required, for example --config=configs/debug.py")
  if path is not None and not os.path.isfile(path):
    if os.path.isdir(path):
      sys.exit(f"error: --config={path} is a folder, not a file{_nearest_file(path)}")
    sys.exit(f"error: no config file {path!r}{_nearest_file(path)}")
  if job:
    near = nearest(job, NAMES)
    if job not in NAMES:
      hint = f"did you mean {near!r}?" if near else "there is no such job"
      sys.exit(f"error: --job={job!r} is not one of {', '.join(map(repr, NAMES))}; {hint}")
  try:
    rest = flags.FLAGS(argv)
    flags.FLAGS["config"].value  # noqa: B018  (without an override, the file runs only here)
    return rest
  except (AttributeError, KeyError) as e:
    known = config.flatten(base)
    for arg in argv[1:]:
      key = arg.lstrip("-").partition("=")[0]
      if key.startswith("config.") and key.removeprefix("config.") not in known:
        near = nearest_key(key.removeprefix("config."), known)
        hint = (
          f"did you mean --config.{near}?" if near else "there is none like it, see configs/base.py"
        )
        sys.exit(f"error: unknown key --{key}; {hint}")
    if "has no attribute 'get_config'" in str(e):
      sys.exit(f"error: {path} defines no get_config; write `def get_config(arm='')` in it")
    sys.exit(f"error: {path}: {type(e).__name__}: {str(e).strip(chr(34))}")
  except flags.UnrecognizedFlagError as e:
    near = nearest_key(e.flagname, config.flatten(base))
    is_key = near is not None and near.rpartition(".")[2] == e.flagname.rpartition(".")[2]
    sys.exit(f"error: {e}" + f"; did you mean --config.{near}?" * is_key)
  except (flags.Error, ValueError) as e:
    # absl quotes the traceback of a config file that raised; its last line says why.
    sys.exit(f"error: {str(e).strip().splitlines()[-1].removeprefix('ValueError: ')}")
  except SyntaxError as e:
    sys.exit(f"error: {e.filename}, line {e.lineno}: {e.msg}; the config file is no valid Python")
  except Exception as e:  # of the user's file
    frames = traceback.extract_tb(e.__traceback__)
    lines = [f.lineno for f in frames if path and f.filename.endswith(path)]
    where = f"{path}, line {lines[-1]}" if lines else path
    sys.exit(f"error: {where}: {type(e).__name__}: {e}")


def _value_of(flag: str, argv: list[str]) -> str | None:
  """What --flag=VALUE or --flag VALUE gives."""
  for arg, following in zip(argv[1:], [*argv[2:], ""]):
    name, is_joined, value = arg.lstrip("-").partition("=")
    if name == flag and arg.startswith("-"):
      return value if is_joined else following
  return None


def _nearest_file(path: str) -> str:
  folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
  have = sorted(f for f in os.listdir(folder) if f.endswith(".py")) if os.path.isdir(folder) else []
  near = nearest(os.path.basename(path), have)
  if near:
    return f"; did you mean {os.path.join(folder, near)}?"
  return f"; {folder} has {', '.join(have)}" if have else ""
