"""Keys of evaluation: held-out loss, and tasks with verifiable answers."""

from fp8jax.evaluation.catalog import Options
from fp8jax.keys import NOTHING, key, section


# A table: a key a row, its meaning beside it.
# fmt: off
@section("eval", NOTHING)
class Eval:
  """Held-out loss, and tasks with verifiable answers."""

  tokens: int = key(8192, "Held-out tokens per source and evaluation, rounded up to whole batches; "
    "0: no held-out loss.", least=0, mapped=True)
  batch: int = key(8, "sequences per batch, over all devices", least=1, mapped=True)
  every: int = key(0, "steps; 0: before and after training only", least=0)
  precisions: tuple[str, ...] = key(("recipe", "bf16"), "Forward passes that are evaluated: "
    '"recipe" (that of training) and "bf16".', mapped=True)
  hf: str = key("", "--job=evaluate, export and generate: this Hugging Face folder instead of the "
    "workdir's checkpoint.", mapped=True)
  step: int = key(-1, "--job=evaluate, export and generate: which checkpoint; -1 is the newest",
    mapped=True)
  tasks: str = key("", "--job=evaluate: questions with verifiable answers, as a comma list of "
    'families of reasoning-gym, also with arguments ("chain_sum(max_terms=2)"), benchmarks '
    '("aime24"), .jsonl files of questions and .json task files. Prompts, outputs and verdicts go '
    "to WORKDIR/evaluation. How tokens are computed is in `generate` (precision, slots, "
    "cache_format); how they are drawn is in the task.", mapped=True)
  chat: bool = key(False, "write prompts with the tokenizer's chat template", mapped=True)
  questions: int = key(0, "per task, the first; 0: all, and 200 of a family", mapped=True)
  samples: int = key(0, "outputs per question (n of avg@n); 0: the task's own", mapped=True)
  temperature: float = key(-1.0, "of sampling; -1: the task's own", mapped=True)
  max_new_tokens: int = key(0, "tokens per output at most; 0: the task's own", mapped=True)
  seed: int = key(0, "of sampling", mapped=True)
  data_dir: str = key("assets/benchmarks", "folder of the benchmarks' data, which users bring",
    mapped=True)
  train_data: str = key("", 'JSONL of a training set ("messages", "question" or "prompt"): its '
    "questions are not asked.", mapped=True)
  allow_code_execution: bool = key(False, "Execute programs that the model writes "
    "(livecodebench_v5), in a sandbox; refused where there is none.", mapped=True)
  compare_with: str = key("", "Workdir of another run with the same tasks evaluated: its paired "
    "difference to this one.", mapped=True)

  @property
  def options(self) -> Options:
    """The settings that all tasks have in common."""
    return Options(
      self.data_dir, self.train_data, self.allow_code_execution, self.questions, self.samples,
      self.temperature, self.max_new_tokens,
    )


# fmt: on
