#!/bin/bash
# FedHKD on CIFAR10 with the paper's settings: 10 clients and a server, NVIDIA or AMD GPUs, or CPUs alone.
#
#     sbatch slurm/fedhkd_cifar10.sh [section.key=value ...]
#
# Data first, on a login node: python -m hkd_hpc.data prepare cifar10 --dir data
# Partition, account, GPUs and time are sbatch's options or the lines below; README.md beside this file has the rest.
#SBATCH --job-name=fedhkd-cifar10
#SBATCH --ntasks=11
#SBATCH --cpus-per-task=2
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR2@120
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
##SBATCH --partition=gpu --account=my_project --gpus-per-node=1

[[ -n ${SLURM_JOB_ID-} ]] || { echo "$0: submit me with sbatch" >&2; exit 2; }
# sbatch runs a copy of this file; the original lies beside common.sh
script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
script=${script%" $*"}
# shellcheck disable=SC1091
source "$(dirname "$script")/common.sh"

run_job cifar10 "$@"
