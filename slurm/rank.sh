#!/bin/bash
# One rank, started by common.sh on its node: bash rank.sh COMMAND [ARGUMENT ...]

trap : TERM USR1 USR2  # they reach the program too; this shell waits for its end

(umask 077 && mkdir -p "$HKD_SCRATCH")
if [[ -L $HKD_SCRATCH || ! -O $HKD_SCRATCH ]]; then # what is said in it ends the job
    echo "hkd_hpc: $HKD_SCRATCH is not of $(id -un): somebody else made it; set TMPDIR to a folder of your own" >&2
    exit 1
fi

code=0
"$@" || code=$?
# A good end is told by a file too. As an exit code, 75 (stopped and saved) would make the launcher kill the ranks that
# are a moment slower to leave, and theirs would be the code that counts.
if [[ " ${HKD_TOLD_CODES:-0 75} " == *" $code "* ]]; then
    echo "$code" >"$HKD_SCRATCH/outcome"
    exit 0
fi
exit "$code"
