"""Conversations for configs/sft_smollm2.py: sums with their working, made here, no download.

command: python experiments/sft_demo/prepare_data.py assets/sft_demo

stage1.jsonl: one question each; stage2.jsonl: two questions each, the second about the first sum.
"""

import json
import pathlib
import random
import sys

COUNT = 92


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


def main(folder: pathlib.Path):
  folder.mkdir(parents=True, exist_ok=True)
  for turns in (1, 2):
    rng = random.Random(turns)
    lines = [json.dumps(conversation(rng, turns)) + "\n" for _ in range(COUNT)]
    (folder / f"stage{turns}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
