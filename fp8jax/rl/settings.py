"""Keys of --job=rl."""

import dataclasses

from fp8jax.generation.settings import Sampling
from fp8jax.keys import key, section
from fp8jax.ops.policy_gradient import OBJECTIVES, Objective


@dataclasses.dataclass(frozen=True)
class Rules:
  """How an update is drawn.

  Attributes:
    prompts: P.
    samples: J.
    sampling: of the tokens; its temperature divides the logits of training too.
    rounds: of questions, where groups of equal rewards make way for others.
    updates: steps that share the groups.
    overlong: last tokens of a completion's limit over which a penalty grows from 0 to 1, which a
      completion without an end pays whole (DAPO, arXiv:2503.14476 §3.4); 0 for none.
  """

  prompts: int
  samples: int
  sampling: Sampling
  rounds: int = 1
  overlong: int = 0
  updates: int = 1


REWARD = "reward"  # rl.loss of a reward head
# Of a task's protocol, what these keys state of a rollout.
OF_COMPLETIONS = {
  "samples": "rl.samples", "temperature": "rl.temperature", "max_new_tokens": "rl.max_new_tokens",
}  # fmt: skip


# A table: a key a row, its meaning beside it.
# fmt: off
@section("rl")
class RL:
  """--job=rl: reinforcement learning from verified answers, or from preference pairs. An update
  draws `samples` completions of `prompts` questions with the present parameters, and takes
  `updates_per_rollout` steps on them; with `pairs` nothing is drawn.
  """

  tasks: str = key("", "Questions to learn from, a comma list as eval.tasks; questions that "
    "eval.tasks asks are left out.")
  questions: int = key(0, "per task, the first; 0: all, and 200 of a family", least=0)
  loss: str = key("grpo", 'Policy gradient: "grpo" (arXiv:2402.03300), "dapo" (arXiv:2503.14476: '
    "clip-higher, groups of equal rewards resampled, one mean over all tokens of a step), "
    '"dr_grpo" (arXiv:2503.20783: no deviation, no length). "rejection": cross entropy of the '
    "completions of a group's highest reward, where it is positive (STaR, RAFT); WORKDIR/kept has "
    'them as conversations that data.sources reads. "dpo" (arXiv:2305.18290): of `pairs`, or of '
    'the best and the worst completion of a group. "reward": of a reward head on `pairs` '
    "(model.reward_head), log(1 + exp(rejected - chosen)) of their scores (Bradley-Terry, "
    'arXiv:2203.02155).', choices=(*OBJECTIVES, REWARD), refused={"ppo": "a value head, which "
    "PPO's advantages come from, is not built; grpo, dapo and dr_grpo take the same clipped ratio "
    "with advantages relative to a group"})
  pairs: str = key("", 'JSON lines, a file or a glob, with "prompt", "chosen" and "rejected", '
    'texts or lists of messages, as trl reads them, for rl.loss="dpo" and "reward"; two rows of '
    'global_batch each. "" draws those of dpo from rl.tasks.')
  eval_pairs: str = key("", "Held-out pairs, all of which every evaluation ranks (eval.every, "
    "eval.batch), of a reward head.")
  beta: float = key(0.1, "dpo: reward of a log-ratio to the reference. The metrics rl/chosen, "
    "rl/rejected, rl/margin and rl/accuracy are trl's rewards/chosen, rejected, margins and "
    "accuracies.")
  reward_model: str = key("", "Hugging Face folder of a reward model, in the place of the tasks' "
    "verifiers: a completion's reward is its score, in the compute dtype. Of the same tokenizer.")
  prompts: int = key(8, "questions of a rollout", least=1)
  samples: int = key(8, "completions of a question, the group that advantages are relative to",
    least=2)
  updates_per_rollout: int = key(1, "Steps on the completions of a rollout, each on its part of "
    "the questions; from the second on clips act.", least=1)
  temperature: float = key(1.0, "of the sampler, and of the log-probabilities that train")
  max_new_tokens: int = key(256, "tokens of a completion", least=1)
  clip_low: float | None = key(None, "the ratio to the old policy counts from 1 - clip_low; the "
    "loss's own by default: 0.2")
  clip_high: float | None = key(None, "to 1 + clip_high: 0.2, of dapo 0.28")
  kl: float | None = key(None, "Weight of the k3 estimate of KL(policy || reference); the loss's "
    "own by default: 0.04 of grpo, 0 of the others. 0 has no reference.")
  reference: str = key("", "Hugging Face folder of the reference, of the model's own architecture; "
    '"" takes init.hf or init.workdir, and under model.lora the frozen base. It is multiplied in '
    "the recipe of training. A resumed run reads it again and refuses other weights.")
  reward: str = key("", 'Function (item, output) -> number in the place of the tasks\' verifiers, '
    '"rewards.py:NAME" or "package.module:NAME"; item has question, answer and data. A resumed run '
    "refuses another file.")
  most_correction: float = key(2.0, "Truncated importance sampling: a token counts min(exp(old - "
    "rollout), this) times, by its log-probabilities in training and in the rollout, which are the "
    "same bits under precision.invariant; 0 leaves the correction out.",
    least=0)
  rollout: str = key("", 'recipe of the layers that draws; "": that of training')
  max_resampling: int = key(8, "dapo: further rounds of questions in place of groups whose rewards "
    "are equal", least=0)
  overlong: int = key(0, "Last tokens of max_new_tokens over which a penalty grows from 0 to 1 "
    "(dapo's); 0: none", least=0)

  @property
  def objective(self) -> Objective:
    """The rule, with the keys that replace its own numbers."""
    own = {"clip_low": self.clip_low, "clip_high": self.clip_high, "kl": self.kl}
    own = {k: v for k, v in own.items() if v is not None}
    own["most_correction"] = self.most_correction
    if OBJECTIVES[self.loss].beta:
      own["beta"] = self.beta
    return dataclasses.replace(OBJECTIVES[self.loss], **own)

  @property
  def rules(self) -> Rules:
    """How an update is drawn; `seed` of the sampling is each rollout's own."""
    sampling = Sampling(temperature=self.temperature, max_new_tokens=self.max_new_tokens)
    return Rules(
      self.prompts, self.samples, sampling, 1 + self.max_resampling, self.overlong,
      self.updates_per_rollout,
    )


# fmt: on
