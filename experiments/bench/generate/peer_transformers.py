"""transformers' side of bench.py, in an environment with torch: rounds of generation, as JSON.

command: oracle/bin/python experiments/bench/generate/peer_transformers.py FOLDER < request.json

The request has "prompts" (token ids, one length), "new_tokens" and "rounds".
"""

import json
import os
import sys
import time

import torch
import transformers


@torch.no_grad()
def main():
  request = json.load(sys.stdin)
  load = {"dtype": torch.float32}
  model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **load).eval()
  ids = torch.tensor(request["prompts"])
  count = request["new_tokens"]
  settings = dict(do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0)

  def once():
    start, used = time.perf_counter(), time.process_time()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    tokens = out[:, ids.shape[1] :].tolist()
    return time.perf_counter() - start, time.process_time() - used, tokens

  once()
  seconds, cpu_seconds, tokens = zip(*(once() for _ in range(request["rounds"])))
  versions = {"torch": torch.__version__, "transformers": transformers.__version__}
  threads = {"threads": torch.get_num_threads(), "cpus": os.cpu_count()}
  times = {"seconds": seconds, "cpu_seconds": cpu_seconds}
  print(json.dumps({**times, "tokens": tokens[-1], **versions, **threads}))


if __name__ == "__main__":
  main()
