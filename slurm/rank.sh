#!/bin/bash
# One rank, started by common.sh on its node: bash rank.sh COMMAND [ARGUMENT ...]

trap : TERM USR1 USR2  # they reach the program too; this shell waits for its end

# One mask of GPUs. SLURM may set all of these, but on AMD the others count among what ROCR's has left.
[[ -n ${GPU-} || ! -e /dev/kfd ]] || GPU=amd
if [[ ${GPU-} == amd && -n ${ROCR_VISIBLE_DEVICES-} ]]; then
    unset HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL
fi

# MIOpen's kernel caches of two jobs must not meet, nor lie on a network disk.
export MIOPEN_USER_DB_PATH=$HKD_SCRATCH/miopen MIOPEN_CUSTOM_CACHE_DIR=$HKD_SCRATCH/miopen
(umask 077 && mkdir -p "$MIOPEN_USER_DB_PATH")

code=0
"$@" || code=$?
# A good end is told by a file too. As an exit code, 75 (stopped and saved) would make the launcher kill the ranks that
# are a moment slower to leave, and theirs would be the code that counts.
if [[ $code == 0 || $code == 75 ]]; then
    echo "$code" >"$HKD_SCRATCH/outcome"
    exit 0
fi
exit "$code"
