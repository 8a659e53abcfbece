#!/bin/bash
# Puts a Python environment on the nodes' own disks: many ranks that import torch from a network disk are slow.
#
#     bash slurm/stage_env.sh pack .venv env.tar         once, on a login node; env.tar.zst is compressed
#     source slurm/stage_env.sh use env.tar              in a job: unpacked once on each of its nodes, and active
#
# Or STAGE=env.tar before sbatch, or as a line of `setup` in a site file. It lies in ${TMPDIR:-/tmp}/hkd-env-<uid>-<size
# and time of the tar>; jobs on one node share it, and it stays. Venvs only: the Python that they were made from must be on
# the nodes.

stage_say() {
    printf 'stage_env: %s: %s\n' "$(uname -n)" "$*" >&2
}

stage_pack() ( # environment, tar
    set -euo pipefail
    from=$1 to=$2 part=$2.part-$$ compress=()
    [[ -e $from/bin/activate ]] || { stage_say "$from is no Python environment: it has no bin/activate"; exit 1; }
    trap 'rm -f "$part"' EXIT
    [[ $to != *.zst ]] || compress=(--zstd)
    tar "${compress[@]}" -cf - -C "$(cd "$from" && pwd -P)" . >"$part"  # as the name of a file, a:b is on host a
    mv "$part" "$to"
)

stage_use() { # tar: unpack it on all nodes of this job, and activate it in this shell
    local tar folder on_nodes=()
    [[ -f $1 && -r $1 ]] || { stage_say "$1 is missing: bash slurm/stage_env.sh pack .venv $1"; return 1; }
    tar=$(realpath "$1")
    folder=${TMPDIR:-/tmp}/hkd-env-$(id -u)-$(stat -Lc %s-%Y "$tar")
    [[ ${SLURM_JOB_NUM_NODES:-1} == 1 ]] ||
        on_nodes=(srun --mpi=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
            --cpus-per-task=1 --overlap)
    "${on_nodes[@]}" bash "$(realpath "${BASH_SOURCE[0]}")" unpack "$tar" "$folder" || return 1
    # shellcheck disable=SC1091
    source "$folder/bin/activate"
}

stage_unpack() ( # tar, folder: on this node, unless another job has done so
    set -euo pipefail
    umask 077
    tar=$1 folder=$2 parent=$(dirname "$2")
    [[ -w $parent ]] || { stage_say "$parent (TMPDIR) is not there or cannot be written to"; exit 1; }
    exec {lock}>>"$folder.lock"
    flock "$lock"
    if [[ -d $folder ]]; then
        [[ -O $folder ]] || { stage_say "$folder belongs to somebody else"; exit 1; }
        exit 0
    fi
    need_kb=$(($(stat -Lc %s "$tar") / 1024))
    [[ $tar != *.zst ]] || need_kb=$((4 * need_kb))  # roughly
    free_kb=$(df -Pk "$parent" | awk 'NR == 2 { print $4 }')
    ((need_kb < free_kb)) || { stage_say "no space in $parent: $((need_kb / 1024 + 1)) MB are needed, $((free_kb / 1024))" \
        "free; set TMPDIR to a disk of the node with more"; exit 1; }
    part=$(mktemp -d "$folder.part-XXXXXX")
    trap 'rm -rf "$part"' EXIT
    tar -xf "$tar" -C "$part" || { stage_say "$tar cannot be unpacked into $parent"; exit 1; }
    stage_move "$part" "$folder"
    chmod 700 "$part"
    mv -T "$part" "$folder"
)

stage_move() { # environment, where it will lie: the paths in the files of bin
    local file old new=$2
    # shellcheck disable=SC1091
    old=$(set +eu; source "$1/bin/activate" >/dev/null 2>&1; printf %s "$VIRTUAL_ENV")
    while IFS= read -r -d '' file; do
        OLD=$old NEW=$new awk '
            function swapped(line, old, new,    at, out) {
                while ((at = index(line, old))) {
                    out = out substr(line, 1, at - 1) new
                    line = substr(line, at + length(old))
                }
                return out line
            }
            function moved(line) { # what lies beside the environment stays where it is
                return swapped(swapped(line, ENVIRON["OLD"], ENVIRON["NEW"]), "$VIRTUAL_ENV/..", ENVIRON["OLD"] "/..")
            }
            NR == 1 && index($0, "#!" ENVIRON["OLD"]) == 1 { # by sh, as pip does: a path may be long or have blanks
                quote = sprintf("%c", 39)
                print "#!/bin/sh"
                print quote quote quote "exec" quote " \"" moved(substr($0, 3)) "\" \"$0\" \"$@\""
                print quote " " quote quote quote
                next
            }
            { print moved($0) }' "$file" >"$file.moved"
        chmod --reference="$file" "$file.moved"
        mv "$file.moved" "$file"
    done < <(grep -lIZsF -e "$old" -e "\$VIRTUAL_ENV/.." "$1"/bin/*)
}

case "${1-} $#" in
    "pack 3") stage_pack "$2" "$3" ;;
    "unpack 3") stage_unpack "$2" "$3" ;;
    "use 2") # a job must not go on without it; a shell that somebody types in must not end
        stage_use "$2" || { [[ $- == *i* ]] && return 1; exit 1; }
        ;;
    *) stage_say "bash stage_env.sh pack VENV TAR, or in a job: source stage_env.sh use TAR" && false ;;
esac
