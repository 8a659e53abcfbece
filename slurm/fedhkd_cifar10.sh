#!/bin/bash
# FedHKD on CIFAR10 with the paper's settings: 10 clients and a server, NVIDIA or AMD GPUs, or CPUs alone.
#
#     sbatch slurm/fedhkd_cifar10.sh [section.key=value ...]
#
# Site options (partition, account, GPUs) go on sbatch's command line or into the lines below. A requeued job goes on
# from its last checkpoint. Data first, on a login node: python -m hkd_hpc.data prepare cifar10 --dir data
#SBATCH --job-name=fedhkd-cifar10
#SBATCH --ntasks=11
#SBATCH --cpus-per-task=2
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
##SBATCH --partition=gpu --account=my_project --gres=gpu:1

set -euo pipefail

VENV=${VENV-.venv}                                  # empty: use the python that modules or a container bring
DATA=${DATA-data}
OUT=${OUT-runs/fedhkd-cifar10-${SLURM_JOB_ID:?run me with sbatch}}
MPI=${MPI-none}                                     # srun --mpi=...; none: ranks find each other without an MPI

if [[ -n $VENV ]]; then
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
fi
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
umask 077
scratch=${TMPDIR:-/tmp}/hkd-$(id -un)-$SLURM_JOB_ID  # AMD: kernel caches of two jobs must not meet
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch"
export MIOPEN_USER_DB_PATH=$scratch/miopen MIOPEN_CUSTOM_CACHE_DIR=$scratch/miopen

# srun does not take cpus-per-task from the batch job by itself; without kill-on-bad-exit a dead rank leaves the others
srun --mpi="$MPI" --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --export=ALL \
    python -m hkd_hpc.train --preset cifar10 --out "$OUT" --resume "data.dir=$DATA" "$@"
