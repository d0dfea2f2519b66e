"""Writes trl.npz: trl's DPO loss of given logits, its gradient and its rewards.

In an environment of its own, with trl 1.16.0 and torch 2.13.0, on a CPU:
  pip install trl==1.16.0 torch==2.13.0
  python tests/golden/write_trl.py

DPOTrainer._compute_loss runs as it is, in float64, on batches of trl's own collator; a model and
what else it asks of a trainer stand in. Rows are trl's: all chosen, then all rejected.
"""

import collections
import pathlib
import types

import numpy as np
import torch
import trl
from trl.trainer import dpo_trainer

SEED, VOCABULARY, PAD = 5, 13, 0
BETAS = (0.1, 0.6)
# Uneven prompts and answers; ids of the vocabulary.
PAIRS = (
  {"prompt_ids": [3, 4], "chosen_ids": [5, 6, 7, 1], "rejected_ids": [8, 1]},
  {"prompt_ids": [9], "chosen_ids": [2, 1], "rejected_ids": [4, 4, 5, 6, 10, 1]},
  {"prompt_ids": [7, 8, 9, 2], "chosen_ids": [1], "rejected_ids": [12, 1]},
)


def outputs(logits, labels):
  """What the trainer reads of a model."""
  counts = labels[:, 1:] != -100
  logp = torch.log_softmax(logits[:, :-1], -1)
  own = logp.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
  return types.SimpleNamespace(
    log_probs=own.masked_fill(~counts, 0), entropy=-(logp.exp() * logp).sum(-1),
    mean_logits=logits[:, :-1].mean(-1), is_top1=counts, aux_loss=None,
  )  # fmt: skip


class Model(torch.nn.Module):
  is_gradient_checkpointing = False

  def __init__(self, logits):
    super().__init__()
    self.logits = torch.nn.Parameter(logits)

  def forward(self, labels, **_):
    return outputs(self.logits, labels)


def trainer(model, reference, beta: float):
  same = lambda x: x  # noqa: E731
  accelerator = types.SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same)
  names = ("train", "eval")
  return types.SimpleNamespace(
    model=model, ref_model=reference, accelerator=accelerator, beta=beta, ld_alpha=None,
    precompute_ref_logps=False, f_divergence_type="reverse_kl", loss_types=["sigmoid"],
    loss_weights=[1.0], use_weighting=False, aux_loss_enabled=False, label_smoothing=0.0,
    args=types.SimpleNamespace(gradient_checkpointing_kwargs=None), _total_train_tokens=0,
    _tp_size=1, _metrics={name: collections.defaultdict(list) for name in names},
  )  # fmt: skip


def main():
  torch.manual_seed(SEED)
  batch = dpo_trainer.DataCollatorForPreference(pad_token_id=PAD)([dict(p) for p in PAIRS])
  shape = (*batch["input_ids"].shape, VOCABULARY)
  logits, reference = (2 * torch.randn(shape, dtype=torch.float64) for _ in range(2))
  stored = {
    "trl": np.array(trl.__version__), "betas": np.array(BETAS), "logits": logits.numpy(),
    "reference": reference.numpy(), "tokens": batch["input_ids"].numpy(),
    "completion": batch["completion_mask"].numpy(),
  }  # fmt: skip
  for i, beta in enumerate(BETAS):
    model = Model(logits.clone())
    asked = trainer(model, Model(reference), beta)
    loss = dpo_trainer.DPOTrainer._compute_loss(asked, model, batch, return_outputs=False)
    loss.backward()
    stored |= {f"{i}/loss": loss.detach().numpy(), f"{i}/gradient": model.logits.grad.numpy()}
    for name in ("chosen", "rejected", "margins", "accuracies"):
      stored[f"{i}/{name}"] = np.array(asked._metrics["train"][f"rewards/{name}"][0])
  np.savez_compressed(pathlib.Path(__file__).with_name("trl.npz"), **stored)
  print({k: v if v.ndim == 0 else v.shape for k, v in stored.items()})


if __name__ == "__main__":
  main()
