"""A run on a Ray cluster.

command: ray job submit --working-dir . -- python experiments/launch/ray_job.py --config=FILE ...

One process drives the GPUs of one node. Ray starts the task again when its node is lost, and after
exit code 75; the same command goes on from the last checkpoint. --workdir is on shared storage.
"""

import subprocess
import sys

import ray


@ray.remote(num_gpus=8, max_retries=10, retry_exceptions=True)
def train(arguments):
  subprocess.run([sys.executable, "launch.py", *arguments], check=True)


if __name__ == "__main__":
  ray.get(train.remote(sys.argv[1:]))
