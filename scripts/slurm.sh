#!/usr/bin/env bash
# One process per GPU on four nodes of eight: sbatch scripts/slurm.sh configs/x.yaml [--KEY VALUE ...]
# Slurm sends SIGTERM two minutes before the end: the run saves, exits with 0, and goes on when it is queued again.
#SBATCH --job-name=llamajax
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
config=$1
shift
exec srun --kill-on-bad-exit=1 .venv/bin/python -m llamajax.train --config "$config" --distributed.enabled true "$@"
