#!/usr/bin/env bash
# Four nodes of eight GPUs, one launcher on each: sbatch scripts/slurm.sh configs/x.yaml [--KEY VALUE ...]
# Slurm sends SIGTERM two minutes before the end: the run saves and exits with 0, and resumes when it is queued again. When a
# node fails or the job is preempted, Slurm requeues it automatically.
#SBATCH --job-name=llamajax
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
config=$1
shift
# Gives all of a node's cores to its one task, which would otherwise get one core.
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
  .venv/bin/python -m llamajax.launch -- --config "$config" "$@"
