"""Mistaken inputs end in one line that names them, never in a traceback."""

import contextlib
import errno
import json
import pathlib
import resource
import shutil
import socket
import subprocess
import sys

import grain
import jax
import jax.numpy as jnp
import ml_collections
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs import base
from fp8jax import mesh
from fp8jax.config import files as config_files
from fp8jax.config import named
from fp8jax.data import loader
from fp8jax.errors import ConfigErrors, UserError
from fp8jax.integrations import flax as fp8_flax
from fp8jax.jobs import calibrate
from fp8jax.ops import dots, site
from fp8jax.optim import quantized_moments, storage
from fp8jax.recipe import rules
from fp8jax.run import calibration, checkpoint, distributed, metrics_writer, provenance

ROOT = pathlib.Path(__file__).resolve().parents[2]

# --- configuration files -------------------------------------------------------------------------

_BASE = "from configs import base\ndef get_config(a=''):\n  c = base.get_config(a)\n"
_PARTIAL = "import ml_collections as m\ndef get_config(a=''):\n  return m.ConfigDict({'seed': 3})"
FILES = {
  "def get_config(": "line 1: '(' was never closed; the file is no valid Python",
  "def get_config(a=''):\n  raise RuntimeError('boom')": "line 2: RuntimeError: boom",
  "import nosuch": "line 1: ModuleNotFoundError: No module named 'nosuch'",
  "def get_config(a=''):\n  return {}['k']": "line 2: KeyError: 'k'",
  "def get_config(a=''):\n  open('no/file')": "line 2: FileNotFoundError: [Errno 2]",
  "def get_config(a=''):\n  raise ValueError('no arm')": "line 2: no arm",
  "def get_config(a=''):\n  of(a)\ndef of(a):\n  raise ValueError('arm')": "line 4: arm",
  "x = 1": "defines no get_config; write",
  "x = 1\n\0": "null bytes; the file is no valid Python",
  "x = 'ä'": "can't decode byte 0xe4",
  "import sys\nsys.exit(0)": "line 2: the file ends the program, sys.exit(0); remove the call",
  "def get_config(a=''):\n  raise SystemExit": "line 2: the file ends the program",
  "def get_config():\n  return 3": "get_config returned int, expected the ConfigDict of base.get",
  "def get_config(a=''):\n  pass": "get_config returned NoneType, expected the ConfigDict",
  "def get_config(a=''):\n  return {'steps': 3}": "get_config returned dict, expected",
  f"{_BASE}  c.unlock()\n  del c.memory\n  return c": "memory: missing; begin get_config with",
  f"{_BASE}  c.unlock()\n  del c.optim.b1\n  return c": "optim.b1: missing; begin get_config with",
  f"{_BASE}  c.steps = 'many'\n  return c": "line 4: TypeError: Could not override field 'steps'",
  f"{_BASE}  c.stepz = 3\n  return c": "line 4: AttributeError",
  f"{_BASE}  c.data.sources = {{'a.b': {{}}}}\n  return c": "line 4: the name 'a.b' has a dot, "
  "which separates keys; write 'a_b'",
  _PARTIAL: "calibrate, checkpoint, data",
}


@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
@pytest.mark.parametrize("more", [(), ("--config.steps=1",)], ids=["alone", "override"])
@pytest.mark.parametrize("text, message", FILES.items(), ids=[m[:26] for m in FILES.values()])
def test_broken_config_file_is_named_with_its_line(tmp_path, text, message, more, parse):
  """In one line, as in a sweep, which loads the file by its name."""
  path = tmp_path / "c.py"
  path.write_bytes(text.encode("latin-1"))
  with pytest.raises(SystemExit) as e:
    parse(f"--config={path}", *more)
  said = e.value.code
  assert said.startswith(f"error: {path}") and message in said and "\n" not in said
  with pytest.raises(UserError) as e:
    config_files.check_keys(named.load(str(path), {}), base.get_config())
  assert message in str(e.value)


def test_a_folder_is_no_config_file(tmp_path, parse):
  (tmp_path / "mine.py").write_text("")
  with pytest.raises(SystemExit, match="is a folder, not a file; .* has mine.py"):
    parse(f"--config={tmp_path}")


def _added():
  c = base.get_config()
  with c.unlocked():
    c.stepz = 4
  return c


@pytest.mark.parametrize(
  "c, message",
  [
    (None, "get_config returned NoneType"),
    ({"steps": 3}, "get_config returned dict"),
    (
      ml_collections.ConfigDict({"steps": 3}),
      "seed, sensitivity, seq_len, sharding, weights: missing; begin",
    ),
    (_added(), "'stepz' is no key; did you mean 'steps'"),
  ],
  ids=["None", "dict", "partial", "added"],
)
def test_what_get_config_returns_has_the_keys_of_base(c, message):
  with pytest.raises(UserError, match=message):
    config_files.check_keys(c, base.get_config())
  config_files.check_keys(base.get_config(), base.get_config())


@pytest.mark.parametrize(
  "flat, message",
  [
    ({"optim.grad_clip_norm": float("nan")}, "optim.grad_clip_norm=nan must be a finite number"),
    ({"optim.eps": float("inf")}, "optim.eps=inf must be"),
    ({"log.alarms": [["snr_db", "<", float("-inf")]]}, "log.alarms=-inf must be"),
    ({"steps": 10**22}, "must be at most 2147483647"),
    ({"prepare.shard_tokens": 10**17}, "must be below 2"),
  ],
)
def test_numbers_are_finite_and_of_a_size_that_can_be_counted(flat, message):
  problems = ConfigErrors()
  config_files.check_numbers({"ok": [1, 2.5, True, "x", None], **flat}, problems)
  assert len(problems.found) == 1 and message in problems.found[0]


# --- the command line of several processes -------------------------------------------------------


@pytest.mark.parametrize(
  "arguments, message",
  [
    (("foo", 2, 0), "must be host:port"),
    (("localhost:1", None, None), "needs --processes=N and --process=I"),
    (("localhost:1", 0, 0), "--processes=0 must be at least 1"),
    (("localhost:1", 2, 2), "--process=2 must be from 0 to 1"),
    # Nobody listens on port 1.
    (("localhost:1", 2, 1), "did not answer within --timeout=0 s"),
  ],
)
def test_processes_that_cannot_meet_are_told(arguments, message):
  with pytest.raises(SystemExit, match=message):
    distributed.initialize(*arguments, 0)


def test_process_0_that_waits_in_vain_says_so():
  """JAX itself aborts, with a stack trace."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  code = f"from fp8jax.run import distributed; distributed.initialize('localhost:{port}', 2, 0, 1)"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
  assert done.returncode == 1
  assert done.stderr.splitlines()[-1].startswith("error: not all 2 processes came within --time")


# --- files of a run ------------------------------------------------------------------------------


def test_broken_metrics_are_named_with_their_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "loss": 2.5}\n')
  assert metrics_writer.last_logged(str(tmp_path), "loss") == 2.5
  path.write_text(path.read_text() + '{"step": 2, "lo')  # killed while it wrote
  assert metrics_writer.last_logged(str(tmp_path), "loss") == 2.5
  path.write_text('{broken\n{"step": 1, "loss": 2.5}\n')
  with pytest.raises(UserError, match="metrics.jsonl:1 is no JSON: .*; delete the line"):
    metrics_writer.last_logged(str(tmp_path), "loss")


def test_broken_provenance_is_named(tmp_path):
  (tmp_path / "provenance.json").write_text("{")
  with pytest.raises(UserError, match="provenance.json is not JSON.*rename it"):
    provenance.history(str(tmp_path), 5, {})


def test_damaged_checkpoint_names_itself_and_the_older_one(tmp_path):
  workdir = str(tmp_path)
  saved = checkpoint.Checkpoints(workdir)
  meta = {"data_fingerprint": "", "weights_dtype": ""}
  meta |= dict.fromkeys(("config", "readers", "documents", "evaluations"), {})
  for step in (3, 6):
    items = dict(meta=checkpoint.ocp.args.JsonSave({**meta, "layout": checkpoint._LAYOUT}))
    saved._manager.save(step, args=checkpoint.ocp.args.Composite(**items))  # noqa: SLF001
  saved.wait()
  assert saved.meta(6) == meta
  (metadata,) = (tmp_path / "checkpoints/6/meta").glob("metadata")
  metadata.write_text("{")
  (tmp_path / "checkpoints/9").mkdir()
  saved = checkpoint.Checkpoints(workdir)
  for step, older in ((6, 3), (9, 6)):
    with pytest.raises(UserError) as e:
      saved.meta(step)
    assert f"checkpoints/{step} cannot be read (meta)" in str(e.value)
    assert f"go on from step {older}, move it away: mv {workdir}/checkpoints/{step} " in str(
      e.value
    )
  assert saved.meta(3) == meta
  items = dict(meta=checkpoint.ocp.args.JsonSave({"step": 12}))  # before layouts had numbers
  saved._manager.save(12, args=checkpoint.ocp.args.Composite(**items))  # noqa: SLF001
  saved.wait()
  with pytest.raises(UserError, match="step 12 .* is of another version of fp8jax"):
    saved.meta(12)
  saved.close()


def test_other_failures_to_save_are_not_called_a_full_disk(tmp_path):
  saved = checkpoint.Checkpoints(str(tmp_path))
  with pytest.raises(UserError, match="Permission denied; mend that, and the same command goes"):
    with saved._writing():  # noqa: SLF001
      raise PermissionError(errno.EACCES, "Permission denied")
  saved.close()
  with pytest.raises(
    UserError, match=r"--workdir='runs/\\udce9' is no text in this locale .*PYTHONU"
  ):
    checkpoint.Checkpoints("runs/\udce9")


def test_a_damaged_array_ends_in_one_line(tmp_path):
  """Reads of other arrays go on after the first has failed; each of them told of a closed loop."""
  code = """
import sys, jax
from fp8jax.run import checkpoint
from fp8jax.errors import UserError
ocp, told = checkpoint.ocp, 0
tree = {str(i): jax.random.normal(jax.random.key(i), (4000,)) for i in range(6)}
saved = checkpoint.Checkpoints(sys.argv[1])
saved._manager.save(2, args=ocp.args.Composite(params=ocp.args.PyTreeSave(tree)))
saved.wait()
for path in (saved._manager.directory / "2" / "params" / "d").iterdir():
  path.write_bytes(b"x" * len(path.read_bytes()))
for _ in range(20):
  try:
    saved.restore_params(2, jax.eval_shape(lambda: tree))
  except UserError as e:
    told += "cannot be read (params)" in str(e) and "move it away" in str(e)
assert told == 20
"""
  done = subprocess.run(
    [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=ROOT
  )
  assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("when", ["wait", "close"])
def test_a_disk_that_fills_while_saving_ends_in_one_line(tmp_path, capfd, when):
  """Files that may not grow stand for it: TensorStore reports both alike, with another errno."""
  saved = checkpoint.Checkpoints(str(tmp_path))

  def save(step, size):
    w = jax.random.normal(jax.random.key(0), size)  # which does not compress
    items = dict(params=checkpoint.ocp.args.PyTreeSave({"w": w}))
    saved._manager.save(step, args=checkpoint.ocp.args.Composite(**items))  # noqa: SLF001

  save(1, 8)
  saved.wait()
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
  try:
    save(2, 2**18)
    with pytest.raises(UserError, match="make room there, and .* from step 1") as e:
      getattr(saved, when)()
    assert f"{tmp_path}/checkpoints cannot be written: File too large" in str(e.value)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert "Traceback" not in capfd.readouterr().err


def test_a_checkpoint_larger_than_the_disk_is_refused_before_training(tmp_path, monkeypatch):
  sharding = NamedSharding(mesh.make((2, 2, 2)), PartitionSpec(None, "fsdp"))
  tree = {
    "split": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding),
    "copied": jnp.ones((10,), jnp.bfloat16), "key": jax.random.key(0),
  }  # fmt: skip
  saved = checkpoint.Checkpoints(str(tmp_path))
  usage = shutil.disk_usage(tmp_path)
  for free in (8 * 4 * 4 + 10 * 2, 8 * 4 * 4 + 10 * 2 - 1):
    monkeypatch.setattr(shutil, "disk_usage", lambda _, n=free: usage._replace(free=n))
    told = pytest.raises(UserError, match="needs 0 MB and .* has 0 MB free; .* make room")
    with told if free % 2 else contextlib.nullcontext():
      saved.check_room(tree)
  saved.close()


def test_death_of_a_data_worker_is_told_apart_from_other_errors():
  def fail(message):
    raise RuntimeError(message)

  for message, error in (
    ("Worker process was terminated unexpectedly with exit code -9. Search", UserError),
    ("something else", RuntimeError),
  ):
    stream = grain.MapDataset.source([message]).map(fail).to_iter_dataset()
    iterator = loader._Resumable(iter(stream))  # noqa: SLF001
    with pytest.raises(error, match=message[:20]) as e:
      next(iterator)
    assert type(e.value) is error


@pytest.mark.parametrize("rows", ["5", '[{"amax": true}]', '[{"amax": 1e300}]', "[4]"])
def test_calibration_tables_hold_float32_amaxes(tmp_path, rows):
  path = tmp_path / "t.json"
  row = {"site": "head", "tensor": "x"}
  rows = [row | r if isinstance(r, dict) else r for r in json.loads(rows)] if rows != "5" else 5
  path.write_text(json.dumps({"format": calibration.FORMAT, "rows": rows}))
  with pytest.raises(UserError, match=r"field .rows.*, expected a|no float32 number >= 0"):
    calibration.read(str(path))


def test_a_table_that_cannot_be_written_is_refused_before_the_work(tmp_path):
  (tmp_path / "file").write_text("")
  for path in (tmp_path / "file/table.json", tmp_path):
    with pytest.raises(UserError, match="--out: cannot write"):
      calibrate._check_writable(str(path), "--out")  # noqa: SLF001
  calibrate._check_writable(str(tmp_path / "new/table.json"), "--out")  # noqa: SLF001


# --- the library ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_operands_that_fp8_cannot_hold_are_refused(dtype):
  good, bad = jnp.ones((128, 128)), jnp.ones((128, 128), dtype)
  for x, w in ((good, bad), (bad, good)):
    for product in (
      lambda x, w, s: dots.dot("TD,DF->TF", x, w, s),
      lambda x, w, s: dots.dot_general(x, w, (((1,), (0,)), ((), ())), s),
    ):
      with pytest.raises(TypeError, match=f"is {dtype}, expected a floating-point dtype"):
        product(x, w, site.single("block_128"))
  with pytest.raises(TypeError, match="x is a list, expected an array"):
    dots.dot("TD,DF->TF", [[1.0]], good, site.single("block_128"))


@pytest.mark.parametrize("m, n, k, letter", [(0, 8, 8, "T"), (8, 0, 8, "F"), (8, 8, 0, "D")])
def test_products_of_nothing_are_refused(m, n, k, letter):
  x, w = jnp.ones((m, k)), jnp.ones((k, n))
  with pytest.raises(ValueError, match=f"gives {letter} size 0: no scale can be made"):
    dots.dot("TD,DF->TF", x, w, site.single("block_128"))
  with pytest.raises(ValueError, match="size 0: no scale can be made"):
    dots.dot_general(x, w, (((1,), (0,)), ((), ())), site.single("block_128"))


@pytest.mark.parametrize("b1, b2", [(-0.5, 0.9), (1.5, 0.9), (0.9, 1.0), (0.9, float("nan"))])
def test_decay_rates_of_adam_are_in_their_range(b1, b2):
  for name in ("float32", "coat"):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
      quantized_moments.scale_by_adam(b1, b2, moment_format=name)


def test_names_where_values_are_wanted_say_how_to_get_these():
  with pytest.raises(TypeError, match="mu is 'coat', expected a Quant.*moment_format=\"coat\""):
    quantized_moments.scale_by_adam(moment_format=storage.Moments("coat"))
  with pytest.raises(ValueError, match="did you mean 'coat'"):
    quantized_moments.scale_by_adam(moment_format="coats")
  module = fp8_flax.LinenDotGeneral("block_128")
  with pytest.raises(TypeError, match=r"linen_dot_general\('block_128'\)"):
    module.init({}, jnp.ones((2, 2)), jnp.ones((2, 2)), (((1,), (0,)), ((), ())))


def test_histories_of_delayed_scales_are_bounded():
  with pytest.raises(ValueError, match="Delayed.steps=1000000000 must be from 1 to 65536"):
    rules.recipe_by_name("tensor_delayed(steps=1000000000)")


@pytest.mark.parametrize(
  "key, value, expected",
  [
    ("steps", None, "a whole number"),
    ("steps", True, "a whole number"),
    ("optim.peak_lr", None, "a number"),
    ("data.tokenizer", None, "a text"),
    ("checkpoint.accept_changes", (1,), "a tuple, each entry a text"),
    ("log.profile", ("a", "b"), "a tuple, each entry a whole number"),
    ("model.mixers", (1,), "a tuple, each entry a text, or None"),
    ("sharding.weights", {"D": ("data", 3)},
     "a group, each entry a text, or a tuple, each entry a text"),
  ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(key, value, expected):
  c = base.get_config()
  *above, last = key.split(".")
  node = c[above[0]] if above else c
  with node.ignore_type():
    node[last] = ml_collections.ConfigDict(value) if isinstance(value, dict) else value
  with pytest.raises(UserError) as e:
    config_files.check_keys(c, base.get_config())
  assert str(e.value).endswith(f"{key}={value!r}: expected {expected}")
