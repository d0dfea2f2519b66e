"""A run on a Ray cluster.

command: ray job submit --working-dir . -- python experiments/launch/ray_job.py --config=FILE ...

One process drives the GPUs of one node. Ray starts the task again when its node is lost, and after
exit code 75; the same command goes on from the last checkpoint. Every other exit code ends the job
with it. --workdir is on shared storage.
"""

import subprocess
import sys

import ray


@ray.remote(num_gpus=8, max_retries=10, retry_exceptions=[InterruptedError])
def train(arguments):
  code = subprocess.run([sys.executable, "launch.py", *arguments]).returncode
  if code == 75:  # preempted, saved
    raise InterruptedError("launch.py was preempted")
  return code


if __name__ == "__main__":
  sys.exit(ray.get(train.remote(sys.argv[1:])))
