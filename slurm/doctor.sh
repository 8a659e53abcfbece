#!/bin/bash
# Is this machine fit for a run? The examination of hkd_hpc.doctor, with as many ranks as --ntasks says, started as runs are.
#
#     sbatch slurm/doctor.sh [--json] [--strict] [section.key=value ...]
#
# Give it the nodes, tasks, cores and GPUs that the run will have. OUT (default: runs) is the folder in which runs would write.
#SBATCH --job-name=doctor
#SBATCH --ntasks=11
#SBATCH --cpus-per-task=2
#SBATCH --time=00:15:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue
##SBATCH --partition=gpu --account=my_project --gpus-per-node=1

[[ -n ${SLURM_JOB_ID-} ]] || { echo "$0: submit me with sbatch" >&2; exit 2; }
# sbatch runs a copy of this file; the original lies beside common.sh
script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
script=${script%" $*"}
# shellcheck disable=SC1091
source "$(dirname "$script")/common.sh"

run_doctor "$@"
