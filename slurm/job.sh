# shellcheck shell=bash
# What all job scripts share. A script sets the variables at its top, sources this file, and calls run_job "$@".
#
# run_job writes a directory per attempt, OUTPUT_DIR/NAME.slurm/attempt-N, with one log of each part; starts Ray on
# several nodes; runs train.py on the first; and brings the job back if its run can be resumed.

say() { echo "$(date +%H:%M:%S) slurm: $*"; }

run_job() {
    cd "$REPO" || exit 2
    read_names "$@"
    open_attempt
    # shellcheck source=slurm/settings.sh
    source "$REPO/slurm/settings.sh"
    stop_asked=""
    trap 'stop_asked=USR1; forward_stop' USR1  # ahead of the time limit, by --signal
    trap 'stop_asked=TERM' TERM                # by scancel; the run has got it from Slurm, too
    local status=0
    if check_nodes_and_start_ray; then
        train "$@"
        status=$?
    else
        status=$?
    fi
    end_nodes
    conclude "$status"
}

# The same for an array: the arguments are a file and overrides; a line of the file is one task's overrides.
run_job_of_line() {
    local file=$1 line words=()
    shift
    line=$(grep -vE '^[[:space:]]*(#|$)' "$file" | sed -n "${SLURM_ARRAY_TASK_ID:-}p")
    if [[ -z $line ]]; then
        say "$file has no line ${SLURM_ARRAY_TASK_ID:-}: submit with --array=1-N for its N lines."
        exit 2
    fi
    mapfile -t words < <(xargs -n 1 printf '%s\n' <<<"$line")  # xargs, because words may be quoted
    run_job "$@" "${words[@]}"
}

# --- names -----------------------------------------------------------------------------------------------------------

GIVEN=""  # options on the command line; what it says is not said again

is_given() { [[ $GIVEN == *" $1 "* ]]; }

# NAME and OUTPUT_DIR from the overrides, else of the job; RUN_DIR is the directory of the run.
read_names() {
    NAME=${SLURM_JOB_NAME}-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    OUTPUT_DIR=$(realpath -m "${OUTPUT_DIR:-$REPO/outputs}")
    local argument
    for argument in "$@"; do
        GIVEN+=" ${argument%%=*} "
        case $argument in
            name=*) NAME=${argument#name=} ;;
            output_dir=*) OUTPUT_DIR=$(realpath -m "${argument#output_dir=}") ;;
        esac
    done
    RUN_DIR=$OUTPUT_DIR/$NAME
}

# The directory of this attempt, with a word that only this job knows.
open_attempt() {
    local parent=$RUN_DIR.slurm attempt=1
    while [[ -e $parent/attempt-$attempt ]]; do attempt=$((attempt + 1)); done
    ATTEMPT=$parent/attempt-$attempt
    if ! mkdir -p "$ATTEMPT/nodes"; then
        say "$ATTEMPT cannot be created: set output_dir= to a directory that this job may write to."
        exit 2
    fi
    CANARY=$SLURM_JOB_ID.$RANDOM$RANDOM
    printf %s "$CANARY" >"$ATTEMPT/canary"
    say "attempt $attempt of job $SLURM_JOB_ID ($SLURM_JOB_NAME) on $(all_nodes | paste -sd, -); logs in $ATTEMPT"
}

all_nodes() {
    local size=${SLURM_HET_SIZE:-0} group
    if ((size == 0)); then
        scontrol show hostnames "$SLURM_JOB_NODELIST"
        return
    fi
    for ((group = 0; group < size; group++)); do group_nodes "$group"; done
}

group_nodes() {
    local list=SLURM_JOB_NODELIST_HET_GROUP_$1
    scontrol show hostnames "${!list}"
}

# --- nodes -----------------------------------------------------------------------------------------------------------

# srun with what every step of a job needs: steps share all of the job's CPUs, memory and GPUs. Containers: see README.
step() {
    local container=()
    case ${CONTAINER:-} in
        "") ;;
        pyxis:*)
            # Every step is a container of its own; in /tmp are the sockets by which the run reaches Ray.
            container=(
                --container-image="${CONTAINER#pyxis:}" --container-workdir="$REPO"
                --container-mounts="/tmp:/tmp,$REPO:$REPO,$OUTPUT_DIR:$OUTPUT_DIR${MOUNTS:+,$MOUNTS}"
            )
            ;;
        apptainer:*) ;;
        *)
            say "CONTAINER=$CONTAINER is neither pyxis:IMAGE nor apptainer:IMAGE nor empty."
            return 2
            ;;
    esac
    exec srun --overlap --mem=0 --cpu-bind=none --kill-on-bad-exit=1 "${container[@]}" "$@"
}

# The command that runs Python with these arguments on a node, as an array PYTHON_COMMAND.
python_command() {
    PYTHON_COMMAND=("$PYTHON")
    if [[ ${CONTAINER:-} == apptainer:* ]]; then
        PYTHON_COMMAND=(apptainer exec --nv --bind "/tmp,$REPO,$OUTPUT_DIR${MOUNTS:+,$MOUNTS}" --pwd "$REPO" "${CONTAINER#apptainer:}" "$PYTHON")
    fi
    PYTHON_COMMAND+=("$@")
}

# Check every node and, if there are several, start Ray on them. Returns 2 if that cannot be mended by another attempt.
check_nodes_and_start_ray() {
    local names groups=() count
    names=$(all_nodes | paste -sd, -)
    count=$(all_nodes | wc -l)
    ((${SLURM_HET_SIZE:-0} > 0)) && groups=(--het-group="0-$((SLURM_HET_SIZE - 1))")
    GPUS=${GPUS_PER_NODE:-$(gpus_of_job)}
    CPUS=${CPUS_PER_NODE:-$SLURM_CPUS_ON_NODE}
    python_command "$REPO/slurm/ray_node.py" --directory "$ATTEMPT" --canary "$CANARY" --job "$SLURM_JOB_ID" \
        --nodes "$names" --cpus "$CPUS" --gpus "$GPUS" --gpu-memory-gib "${GPU_MEMORY_GIB:-0}" \
        --object-store-gib "${OBJECT_STORE_GIB:-8}" --interface "${INTERFACE:-}" --training "${TRAINING_NODES:-}" \
        --seconds "$((NODE_SECONDS + 60))"  # this script decides first
    ((count == 1)) && PYTHON_COMMAND+=(--only-check)
    (step "${groups[@]}" --ntasks-per-node=1 --cpus-per-task="$CPUS" "${PYTHON_COMMAND[@]}") >"$ATTEMPT/nodes.log" 2>&1 &
    NODES_PID=$!
    if ((count == 1)); then
        wait_for_end "$NODES_PID"
        local status=$?
        NODES_PID=""
        ((status == 0)) && return 0
        show_end "$ATTEMPT/nodes.log"
        return "$status"
    fi
    wait_until_ready "$names"
}

gpus_of_job() {
    local gpus=${SLURM_GPUS_ON_NODE:-0}
    echo "${gpus##*:}"
}

wait_until_ready() {
    local end=$((SECONDS + NODE_SECONDS)) begun=$SECONDS
    until [[ -e $ATTEMPT/ready ]]; do
        if [[ -n $stop_asked ]]; then
            say "SIG$stop_asked came before the nodes were ready."
            return 75
        fi
        if ! kill -0 "$NODES_PID" 2>/dev/null; then
            NODES_PID=""
            break
        fi
        ((SECONDS <= end)) || break
        sleep 0.5
    done
    if [[ -e $ATTEMPT/ready ]]; then
        say "Ray runs on $1, its head at $(cat "$ATTEMPT/ready")"
        return 0
    fi
    say "the nodes are not ready after $((SECONDS - begun)) s"
    why_not_ready "$1"
}

# Say what kept the nodes from being ready: what they said themselves, else which of them did not come. Returns 2 if
# another attempt would not mend it.
why_not_ready() {
    local name missing=()
    show_end "$ATTEMPT/nodes.log"
    for name in ${1//,/ }; do
        [[ -e $ATTEMPT/nodes/$name.json ]] || missing+=("$name")
    done
    if own_lines "$ATTEMPT/nodes.log" | grep -q .; then
        grep -q "Exited with exit code 2" "$ATTEMPT/nodes.log" && return 2  # ray_node.REFUSED
        return 1
    fi
    ((${#missing[@]} > 0)) || return 1
    say "these nodes have not joined: ${missing[*]}. Look at them (scontrol show node), or submit again with" \
        "--exclude=$(IFS=,; echo "${missing[*]}")"
    return 2
}

end_nodes() {
    [[ -n ${NODES_PID:-} ]] || return 0
    local end=$((SECONDS + 20))
    kill -USR2 "$NODES_PID" 2>/dev/null  # srun sends it on to every node
    while kill -0 "$NODES_PID" 2>/dev/null && ((SECONDS < end)); do sleep 0.2; done
    kill -KILL "$NODES_PID" 2>/dev/null  # what is left of the step ends with the job
    NODES_PID=""
}

# --- the run ---------------------------------------------------------------------------------------------------------

# Run train.py on the first node; its output goes to the job's and to train.log. Returns its exit status.
train() {
    local first overrides=()
    first=$(all_nodes | head -n 1)
    add_override name "$NAME"
    add_override output_dir "$OUTPUT_DIR"
    add_override cluster "$CLUSTER"
    add_override cluster.nodes "$(all_nodes | wc -l)"
    ((GPUS == 0)) || add_override cluster.devices_per_node "$GPUS"
    if [[ ${SLURM_RESTART_COUNT:-0} -gt 0 && -d $RUN_DIR ]]; then add_override trainer.resume true; fi
    [[ -e $ATTEMPT/ready ]] && overrides+=(launcher=ray "launcher.address=$(cat "$ATTEMPT/ready")")
    [[ -n $stop_asked ]] && return 75
    # Slurm before 23.02 does not say when the job ends; train.py saves ahead of that time (trainer.save_before_end).
    export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$(job_end)}
    python_command "$REPO/train.py" "${overrides[@]}" "$@"
    say "train.py ${overrides[*]} $*"
    local group=()
    ((${SLURM_HET_SIZE:-0} > 0)) && group=(--het-group=0)
    exec 3> >(tee "$ATTEMPT/train.log")
    local tee=$!
    (step "${group[@]}" --nodes=1 --ntasks=1 --nodelist="$first" --cpus-per-task="$CPUS" "${PYTHON_COMMAND[@]}") >&3 2>&1 &
    TRAIN_PID=$!
    exec 3>&-
    wait_for_end "$TRAIN_PID"
    local status=$?
    TRAIN_PID=""
    wait_for_end "$tee"  # the log is complete
    return "$status"
}

# To the array `overrides` of the caller, unless the command line says otherwise.
add_override() {
    is_given "$1" || overrides+=("$1=$2")
}

job_end() {
    local text
    text=$(scontrol show job "$SLURM_JOB_ID" -o | grep -oP -m1 '\bEndTime=\K\S+')
    date -d "$text" +%s 2>/dev/null || echo 9999999999
}

forward_stop() {
    [[ -z ${TRAIN_PID:-} ]] || kill -USR1 "$TRAIN_PID" 2>/dev/null
}

# `wait` returns early for a signal that is trapped; this returns the exit status of the process.
wait_for_end() {
    local status=0
    while true; do
        wait "$1"
        status=$?
        kill -0 "$1" 2>/dev/null || break
    done
    wait "$1" 2>/dev/null && return 0
    local last=$?
    ((last == 127)) && return "$status"
    return "$last"
}

# --- the end of an attempt -------------------------------------------------------------------------------------------

# Exit, or have Slurm start this job again, by train.py's exit status: 0 done, 2 bad input, 75 saved, else it failed.
conclude() {
    local status=$1
    if ((status == 0)); then
        say "done"
        exit 0
    fi
    ((status == 75)) || show_failure "$status"
    if ((status == 2)); then
        say "another attempt would not mend this: the job is not requeued"
        exit 2
    fi
    if [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null | head -n 1) != RUNNING ]]; then
        say "the job was cancelled or is at its end: it is not requeued; trainer.resume=true goes on with $NAME"
        exit "$status"
    fi
    if ! attempts_left; then
        say "$MAX_ATTEMPTS attempts came no further than step $(newest_checkpoint): the job is not requeued"
        exit "$status"
    fi
    say "requeued; the next attempt goes on from step $(newest_checkpoint)"
    if ! scontrol requeue "$SLURM_JOB_ID"; then
        say "Slurm did not requeue the job: submit it again with name=$NAME trainer.resume=true"
        exit "$status"
    fi
    sleep 60  # Slurm ends this script
    exit "$status"
}

newest_checkpoint() {
    local latest
    latest=$(cat "$RUN_DIR/checkpoints/latest" 2>/dev/null)
    echo "${latest#step_}" | grep -E '^[0-9]+$' || echo 0
}

# Whether the job may come back: fewer than MAX_ATTEMPTS attempts in a row have left the same newest checkpoint.
attempts_left() {
    local file=$RUN_DIR.slurm/progress step before=0 count=0
    step=$(newest_checkpoint)
    [[ -e $file ]] && read -r before count <"$file"
    if ((step == before)); then count=$((count + 1)); else count=1; fi
    echo "$step $count" >"$file"
    ((count < MAX_ATTEMPTS))
}

show_failure() {
    say "attempt failed with status $1 after $SECONDS s"
    [[ -e $ATTEMPT/train.log ]] || return 0  # what kept the nodes from starting has been shown
    show_end "$ATTEMPT/train.log"
    show_end "$ATTEMPT/nodes.log"
}

own_lines() { grep -vE '^(srun|slurmstepd)[^:]*: ' "$1"; }  # a log without what Slurm adds when a step ends

show_end() {
    local lines
    lines=$(own_lines "$1" | tail -n 15)
    if [[ -n $lines ]]; then
        say "the last lines of $1:"
        echo "${lines//$'\n'/$'\n'    }" | sed '1s/^/    /'
    fi
}
