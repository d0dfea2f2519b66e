"""Keys of evaluation's tasks with verifiable answers."""

import dataclasses

from fp8jax.keys import NOTHING, key, section


@dataclasses.dataclass(frozen=True)
class Options:
  """Settings of all tasks of an evaluation.

  Attributes:
    data_dir: folder of the benchmarks' data.
    train_data: JSONL of a training set, whose questions are not asked; "" for none.
    allow_code: whether programs that the model writes are executed.
    questions: per task, the first ones; 0: all, or reasoning_gym_tasks.SIZE of a family.
    samples, temperature, max_new_tokens: instead of the task's own; 0, -1 and 0 leave those.
  """

  data_dir: str = ""
  train_data: str = ""
  allow_code: bool = False
  questions: int = 0
  samples: int = 0
  temperature: float = -1.0
  max_new_tokens: int = 0


# A table: a key a row, its meaning beside it.
# fmt: off
@section("eval", NOTHING, mapped=True)
class Tasks:
  """Tasks with verifiable answers."""

  tasks: str = key("", "--job=evaluate: questions with verifiable answers, as a comma list of "
    'families of reasoning-gym, also with arguments ("chain_sum(max_terms=2)"), benchmarks '
    '("aime24"), .jsonl files of questions and .json task files. Prompts, outputs and verdicts go '
    "to WORKDIR/evaluation. How tokens are computed is in `generate` (precision, slots, "
    "cache_format); how they are drawn is in the task.")
  chat: bool = key(False, "write prompts with the tokenizer's chat template")
  questions: int = key(0, "per task, the first; 0: all, and 200 of a family")
  samples: int = key(0, "outputs per question (n of avg@n); 0: the task's own")
  temperature: float = key(-1.0, "of sampling; -1: the task's own")
  max_new_tokens: int = key(0, "tokens per output at most; 0: the task's own")
  seed: int = key(0, "of sampling")
  data_dir: str = key("assets/benchmarks", "folder of the benchmarks' data, which users bring")
  train_data: str = key("", 'JSONL of a training set ("messages", "question" or "prompt"): its '
    "questions are not asked.")
  allow_code_execution: bool = key(False, "Execute programs that the model writes "
    "(livecodebench_v5), in a sandbox; refused where there is none.")
  compare_with: str = key("", "Workdir of another run with the same tasks evaluated: its paired "
    "difference to this one.")

  @property
  def options(self) -> Options:
    """The settings that all tasks have in common."""
    return Options(
      self.data_dir, self.train_data, self.allow_code_execution, self.questions, self.samples,
      self.temperature, self.max_new_tokens,
    )


# fmt: on
