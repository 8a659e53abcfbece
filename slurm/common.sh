# shellcheck shell=bash
# What the sbatch scripts beside this file share: start the ranks, and requeue at a time limit. They set `script`,
# their own path, source this and call run_job. README.md says what may be set.

set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
: "${script:?}"
stopped_code=75      # a signal ended the run after its round, saved: hkd_hpc/common/stop.py
early_usr2_code=140  # the signal met srun or the ranks before they listened

run_job() { # a preset or '', more arguments of hkd_hpc.train; ends this shell
    local code=0 outcome='' lost='' preset=$1
    shift
    reject_out "$@"
    enter_environment
    OUT=${OUT:-runs/${SLURM_JOB_NAME//\//_}-$SLURM_JOB_ID}
    OUT=${OUT/#'~/'/$HOME/}  # as the program takes it; no shell does so within quotes
    count_start
    choose_launcher
    run_ranks hkd_hpc.train --out "$OUT" --resume=auto ${preset:+--preset "$preset"} "$@" || code=$?
    [[ ! -e $HKD_SCRATCH/outcome ]] || outcome=$(<"$HKD_SCRATCH/outcome")
    [[ $code != 0 || -n $outcome ]] || code=1  # Open MPI's mpirun ends with 0 when it loses a node
    [[ -n $terminated ]] || remove_scratch || lost=1
    if [[ $outcome == "$stopped_code" || $code == "$early_usr2_code" ]]; then
        code=$stopped_code
        requeue "stopped by a signal" "$@"
    elif [[ -n $terminated && $(job_field Reason) == TimeLimit ]]; then
        requeue "killed at the time limit (the notice of sbatch --signal was shorter than a round and a save)" "$@"
    elif [[ -n $terminated ]]; then
        say "ended by SLURM: cancelled, requeued or preempted, after round $(last_round); a requeue resumes there"
    elif [[ $code != [02] && -n $lost ]]; then
        requeue "ended with code $code, and a node does not answer" "$@"
    fi
    exit "$code"
}

run_doctor() { # arguments of hkd_hpc.doctor; ends this shell
    local code=0
    reject_out "$@"
    enter_environment
    export HKD_TOLD_CODES='0 1'  # an error that all ranks know of: none of them is to be killed for it
    choose_launcher
    run_ranks hkd_hpc.doctor --out "${OUT:-runs}" "$@" || code=$?
    [[ $code != 0 || ! -e $HKD_SCRATCH/outcome ]] || code=$(<"$HKD_SCRATCH/outcome")
    remove_scratch || code=1
    exit "$code"
}

say() {
    printf 'job %s at %(%F %T)T: %s\n' "$SLURM_JOB_ID" -1 "$*"
}

fail() {
    printf 'slurm: %s\n' "$*" >&2
    exit 2
}

reject_out() { # the run's folder must be known here
    local argument
    for argument in "$@"; do
        [[ $argument != --out && $argument != --out=* ]] || fail "--out: set OUT=DIR before sbatch instead"
    done
}

job_field() { # what SLURM says about this job, a value without blanks; empty for nothing
    scontrol show job "$SLURM_JOB_ID" | awk -v RS='[ \n]+' -v key="$1=" \
        'index($0, key) == 1 && !seen++ { value = substr($0, length(key) + 1)
                                          if (value !~ /^(\(null\)|N\/A|0)$/) print value }'
}

# ---- environment

enter_environment() {
    VENV=${VENV-.venv}
    [[ -z ${SETUP-} || -r $SETUP ]] || fail "SETUP=$SETUP: cannot be read; name a file of shell lines"
    set +eu  # modules do not bear these
    # shellcheck disable=SC1090
    [[ -z ${SETUP-} ]] || source "$(realpath "$SETUP")"  # of a name without a slash, bash takes one on PATH
    eval "${SETUP_LINES-}"
    set -eu
    if [[ -n ${STAGE-} ]]; then
        # shellcheck disable=SC1091
        source "$here/stage_env.sh" use "$STAGE"
    elif [[ -n $VENV ]]; then
        [[ -r $VENV/bin/activate ]] || fail "VENV=$VENV: is no Python environment; name one that has hkd_hpc, or VENV= (empty) to go" \
            "without"
        # shellcheck disable=SC1091
        source "$VENV/bin/activate"
    fi
    python=() srun_arguments=()
    eval "python=(${PYTHON:-python}) srun_arguments=(${SRUN_ARGS-})"  # both are quoted as for the shell
    export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
    HKD_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')  # only ranks of this job can join it
    export HKD_TOKEN
    HKD_SCRATCH=${TMPDIR:-/tmp}/hkd-$(id -un)-$SLURM_JOB_ID  # rank.sh makes it, on each node
    export HKD_SCRATCH
    rm -rf "$HKD_SCRATCH"
    trap 'rm -rf "$HKD_SCRATCH"' EXIT
}

remove_scratch() { # on all nodes; fails if one does not answer
    rm -rf "$HKD_SCRATCH"
    [[ $SLURM_JOB_NUM_NODES == 1 ]] ||
        timeout 60 srun --mpi=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
            --cpus-per-task=1 --overlap rm -rf "$HKD_SCRATCH"
}

choose_launcher() { # LAUNCHER and MPI, where they are not set: whatever fits the MPI that Python finds
    local found kinds by
    found=$("${python[@]}" -m mpi4py --mpi-lib-version 2>/dev/null | tr -d '\0') || found=none
    if [[ -z ${LAUNCHER-}${MPI-} ]]; then
        kinds=$(srun --mpi=list 2>&1)
        case $found in
            "Open MPI"*) ! command -v mpirun >/dev/null || LAUNCHER=mpirun ;;
            *CRAY*) [[ $kinds != *cray_shasta* ]] || MPI=cray_shasta ;;
            MPICH* | Intel*) [[ $kinds != *pmi2* ]] || MPI=pmi2 ;;
        esac
    fi
    LAUNCHER=${LAUNCHER:-srun} MPI=${MPI:-none} by=$LAUNCHER
    case $LAUNCHER in
        srun)
            by+=" --mpi=$MPI"
            # srun warns of tasks that do not divide evenly, and heeds the allocation all the same; from 22.05 it does
            # not take the number of cores from the batch job by itself
            launcher=(env -u SLURM_NTASKS_PER_NODE srun --mpi="$MPI" --kill-on-bad-exit=1 --wait=0 --export=ALL
                --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${srun_arguments[@]}")
            ;;
        mpirun)
            # Open MPI starts one prted on each node by srun: the cores of one task are too few for all ranks of a node
            unset SRUN_CPUS_PER_TASK
            launcher=(mpirun -n "$SLURM_NTASKS")
            # Open MPI binds each rank to one core, however many cpus-per-task there are
            [[ $(mpirun --version) != *"Open MPI"* ]] || launcher+=(--bind-to none)
            ;;
        *) fail "LAUNCHER=$LAUNCHER is unknown; allowed: srun, mpirun" ;;
    esac
    say "$SLURM_NTASKS ranks by $by (MPI found: ${found%%[,$'\n']*})"
}

# ---- ranks

run_ranks() { # a module and its arguments; returns the launcher's exit code, and `terminated` if SIGTERM came
    local code=0 again=1 ranks
    terminated=''
    "${launcher[@]}" bash "$here/rank.sh" "${python[@]}" -m "$@" &
    ranks=$!
    trap 'again=1; kill -USR2 "$ranks" 2>/dev/null' USR1 USR2  # the launcher passes it on; some libraries take USR1
    trap 'again=1; terminated=1; kill -TERM "$ranks" 2>/dev/null' TERM
    while [[ -n $again ]]; do  # a signal ends `wait`, not the ranks
        again=''
        code=0
        wait "$ranks" || code=$?
    done
    return "$code"
}

# ---- requeue

last_round() { # of the newest checkpoint; 0 without one
    local round
    round=$(printf '%s\n' "$OUT"/checkpoints/round_*.h5 | sed -n 's/.*round_0*\([0-9][0-9]*\)\.h5$/\1/p' |
        sort -n | tail -n 1)
    echo "${round:-0}"
}

idle_requeues() { # requeues that found this round already
    if [[ -e $OUT/requeues ]]; then
        grep -cx "$(last_round)" "$OUT/requeues" || true
    else
        echo 0
    fi
}

count_start() { # a requeued job and a successor count as requeues; a job that somebody submits begins to count anew
    if [[ ${SLURM_RESTART_COUNT:-0} == 0 && -z ${HKD_FOLLOWS-} ]]; then
        rm -f "$OUT/requeues"
        return
    fi
    mkdir -p "$OUT"
    last_round >>"$OUT/requeues"
    say "${HKD_FOLLOWS:+follows job $HKD_FOLLOWS, }restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST, after" \
        "round $(last_round); requeues without a new round: $(idle_requeues) of at most ${MAX_IDLE_REQUEUES:-3}"
    (($(idle_requeues) <= ${MAX_IDLE_REQUEUES:-3})) || give_up
}

give_up() {
    say "no new round after round $(last_round) in ${MAX_IDLE_REQUEUES:-3} requeues (MAX_IDLE_REQUEUES):" \
        "not requeued again. The log says what ended the runs; if a round needs more time, submit again with a longer" \
        "--time and OUT=$OUT"
    exit 1
}

requeue() { # reason, arguments of the script: requeue this job or, where that is rejected, submit one that follows it
    local reason=$1 rejection successor
    shift
    (($(idle_requeues) < ${MAX_IDLE_REQUEUES:-3})) || give_up
    say "$reason, after round $(last_round): requeue"
    rejection=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) && return
    if successor=$(submit_successor "$@"); then
        say "requeue rejected ($rejection): job $successor resumes"
    else
        say "requeue rejected ($rejection), and so was a job that follows; resume by hand: submit again with OUT=$OUT"
    fi
}

submit_successor() { # arguments of the script; prints the new job's number. Run it in a subshell
    local options=(--parsable --export=ALL --dependency="afterany:$SLURM_JOB_ID" --job-name="$SLURM_JOB_NAME")
    local log pair value
    log=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *StdOut=//p')
    for pair in Partition:partition Account:account QOS:qos Reservation:reservation Features:constraint \
        Licenses:licenses TimeLimit:time NumNodes:nodes NumTasks:ntasks CPUs/Task:cpus-per-task MinMemoryNode:mem \
        MinMemoryCPU:mem-per-cpu TresPerNode:gres TresPerJob:gpus TresPerTask:gpus-per-task; do
        value=$(job_field "${pair%:*}")
        value=${value#gres[:/]}
        [[ $pair != *:gpus* ]] || value=${value#gpu:}
        [[ -z $value ]] || options+=("--${pair#*:}=$value")
    done
    [[ -z ${SLURM_NTASKS_PER_NODE-} ]] || options+=(--ntasks-per-node="$SLURM_NTASKS_PER_NODE")
    [[ $(job_field OverSubscribe) != NO ]] || options+=(--exclusive)
    export OUT HKD_FOLLOWS=$SLURM_JOB_ID
    # what this job left in the environment is not meant for the next one
    while read -r value; do unset "$value"; done < <(compgen -e | grep '^SLURM_' | grep -vx SLURM_CONF)
    sbatch "${options[@]}" --output="$log" "$script" "$@"
}
