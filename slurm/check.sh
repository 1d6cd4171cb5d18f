#!/bin/bash
# The plan of a job against what Slurm has, before it waits in a queue: what sbatch would refuse, and what train.py would.
#   slurm/check.sh [sbatch's options] slurm/colocated.sbatch model.path=DIR ...
# Options before the script's name are sbatch's (--nodes=8 --partition=gpu ...), the others train.py's. Starts nothing;
# exit status 2 if the run does not fit.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
PYTHON=${PYTHON:-$PWD/.venv/bin/python}

options=()
while (($# > 0)) && [[ $1 != *.sbatch ]]; do
    case $1 in  # in the one form that value_of looks for
        -N | --nodes | -p | --partition | --gpus-per-node)
            declare -A long=([-N]=--nodes [-p]=--partition)
            options+=("${long[$1]:-$1}=${2:-}")
            shift
            ;;
        -N*) options+=("--nodes=${1#-N}") ;;
        -p*) options+=("--partition=${1#-p}") ;;
        *) options+=("$1") ;;
    esac
    shift
done
if (($# == 0)); then
    sed -n '2,5s/^# *//p' "${BASH_SOURCE[0]}"
    exit 2
fi
script=$1
shift

# The value of an sbatch option for a component of the job (0, or 1 after the script's hetjob and the command line's
# colon): the last of the command line, else that of the script; empty if neither has it.
value_of() {
    {
        sed -n 's/^#SBATCH //p' "$script" | awk -v wanted="$2" '/^hetjob/ { at++ } at + 0 == wanted'
        printf '%s\n' "${options[@]}" | awk -v wanted="$2" '$0 == ":" { at++ } at + 0 == wanted'
    } | sed -n "s/^--$1=//p" | tail -n 1
}

if ! command -v sbatch >/dev/null; then
    echo "There is no sbatch on this machine: run this on a login node, or python train.py ... dry_run=true anywhere."
    exit 2
fi
if answer=$(sbatch --test-only "${options[@]}" "$script" 2>&1); then
    echo "$answer"
else
    echo "sbatch refuses the job: $answer"
    exit 2
fi
partition=$(value_of partition 0)
((${#partition} == 0)) || export SBATCH_PARTITION=$partition

# The plan of one run with these overrides.
plan() {
    local given=" $* " overrides=() nodes gpus
    [[ $given == *" cluster="* ]] || overrides+=("cluster=${CLUSTER:-1n8g}")
    nodes=$(value_of nodes 0)
    if grep -q '^#SBATCH hetjob' "$script"; then
        overrides+=(placement=separate "placement.training_nodes=$nodes")
        nodes=$((nodes + $(value_of nodes 1)))
    fi
    [[ $given == *" cluster.nodes="* ]] || overrides+=("cluster.nodes=$nodes")
    gpus=$(value_of gpus-per-node 0)
    [[ $given == *" cluster.devices_per_node="* || ${gpus##*:} == 0 ]] || overrides+=("cluster.devices_per_node=${gpus##*:}")
    "$PYTHON" train.py "${overrides[@]}" "$@" dry_run=true
}

if ! grep -q run_job_of_line "$script"; then
    plan "$@"
    exit
fi
file=${1:?"an array needs a file of overrides, one line per run"}
shift
status=0
while read -r line; do
    echo "--- $line"
    mapfile -t words < <(xargs -n 1 printf '%s\n' <<<"$line")
    plan "$@" "${words[@]}" || status=$?
done < <(grep -vE '^[[:space:]]*(#|$)' "$file")
exit "$status"
