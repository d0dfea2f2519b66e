"""Keys of evaluation: tasks with verifiable answers, and the noise floor."""

from fp8jax.keys import NOTHING, key, section


# A table: a key a row, its meaning beside it.
# fmt: off
@section("eval", NOTHING, mapped=True)
class Tasks:
  """Tasks with verifiable answers."""

  tasks: str = key("", "--job=evaluate: questions with verifiable answers, as a comma list of "
    'families of reasoning-gym, also with arguments ("chain_sum(max_terms=2)"), benchmarks '
    '("aime24"), .jsonl files of questions and .json task files; each with samples, temperature or '
    'max_new_tokens in place of its own ("aime24(samples=4, temperature=0.6)"). Prompts, outputs '
    "and verdicts go to WORKDIR/evaluation. Training asks them where a policy has "
    "metric='accuracy', in the first forward pass of eval.precisions. How tokens are computed is "
    "in `generate` (slots, cache_format, and precision for this job); how they are drawn is in the "
    "task.")
  chat: bool = key(False, "write prompts with the tokenizer's chat template")
  questions: int = key(0, "per task, the first; 0: all, and 200 of a family", least=0)
  seed: int = key(0, "of sampling")
  data_dir: str = key("assets/benchmarks", "folder of the benchmarks' data, which users bring")
  train_data: str = key("", 'JSONL of a training set ("messages", "question" or "prompt"): its '
    "questions are not asked.")
  allow_code_execution: bool = key(False, "Execute programs that the model writes "
    "(livecodebench_v5), in a sandbox; refused where there is none.")
  compare_with: str = key("", "Workdir of another run with the same tasks evaluated: its paired "
    "difference to this one.")


@section("noise", NOTHING, mapped=True)
class Noise:
  """--job=noise: the difference of a model, in its recipe, from itself one ulp away."""

  recipes: tuple[str, ...] = key((), 'Other recipes of the layers to measure too, as '
    '("block_128", "bf16"); beside that of the checkpoint, or of precision.rules.')
  tokens: int = key(1024, "tokens of every source's held-out documents, or of noise.text", least=1)
  text: str = key("", 'text file to measure on; "": held-out documents')


# fmt: on
