#!/usr/bin/env bash
# A run that survives preemption and time limits: SLURM sends SIGTERM five minutes before the end,
# the run saves and exits 75, and the job goes back into the queue to resume from there.
#
#   sbatch --nodes=1 experiments/launch/slurm.sh --config=configs/cpt_7b.py --workdir=runs/cpt_7b
#
# One process per node drives all of its GPUs. SLURM's own SIGTERM before a preemption is answered in
# the same way. Exit code 130 (Ctrl-C, scancel --signal=INT) and errors are not requeued.
#SBATCH --job-name=fp8jax
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
set -u

distributed=()
if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then distributed=(--distributed); fi
srun "${PYTHON:-.venv/bin/python}" launch.py ${distributed[@]+"${distributed[@]}"} "$@"
code=$?
# 143: SIGTERM before training had begun, with nothing to save.
if [ "$code" = 75 ] || [ "$code" = 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$code"
