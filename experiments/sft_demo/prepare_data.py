"""Conversations for configs/sft_smollm2.py, and questions for configs/rl_smollm2.py: sums.

command: python experiments/sft_demo/prepare_data.py assets/sft_demo

All are made here, without a download. stage1.jsonl: a question and its working each; stage2.jsonl:
two questions each, the second about the first sum; learned.jsonl, held_out.jsonl: questions with
their answers, no sum of which is in another file.
"""

import json
import pathlib
import random
import sys

COUNT, LEARNED, HELD_OUT = 92, 200, 48


def working(a: int, b: int) -> str:
  """a + b digit by digit."""
  lines, carry = [], 0
  for place, (x, y) in enumerate(zip(f"{a:02d}"[::-1], f"{b:02d}"[::-1])):
    total = int(x) + int(y) + carry
    plus = f" + {carry}" if carry else ""
    lines.append(f"{('Ones', 'Tens')[place]}: {x} + {y}{plus} = {total}.")
    carry = total // 10
  return " ".join(lines) + f" The answer is {a + b}."


def conversation(rng: random.Random, turns: int) -> dict:
  a, b, c = (rng.randrange(10, 100) for _ in range(3))
  messages = [
    {"role": "user", "content": f"What is {a} + {b}?"},
    {"role": "assistant", "content": working(a, b)},
  ]
  if turns == 2:
    a, b = (a + b) % 100, c
    messages += [
      {"role": "user", "content": f"And {a} + {b}?"},
      {"role": "assistant", "content": working(a, b)},
    ]
  return {"messages": messages}


def questions(folder: pathlib.Path):
  """Writes learned.jsonl and held_out.jsonl."""
  texts = "".join((folder / f"stage{n}.jsonl").read_text() for n in (1, 2))
  pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if f" {a} + {b}?" not in texts]
  chosen = random.Random(3).sample(pairs, LEARNED + HELD_OUT)
  for name, part in (("learned", chosen[:LEARNED]), ("held_out", chosen[LEARNED:])):
    rows = [
      {"question": f"What is {a} + {b}?", "answer": str(a + b), "verifier": "exact"}
      for a, b in part
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: pathlib.Path):
  folder.mkdir(parents=True, exist_ok=True)
  for turns in (1, 2):
    rng = random.Random(turns)
    lines = [json.dumps(conversation(rng, turns)) + "\n" for _ in range(COUNT)]
    (folder / f"stage{turns}.jsonl").write_text("".join(lines))
  questions(folder)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
