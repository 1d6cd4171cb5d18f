# shellcheck shell=bash
# What all job scripts share. A script sets the variables at its top, sources this file, and calls run_job "$@".
#
# run_job writes a directory per attempt, OUTPUT_DIR/NAME.slurm/attempt-N, with one log of each part; starts Ray on
# several nodes; runs train.py on the first; and brings the job back if its run can be resumed.

# Exit statuses of train.py and of ray_node.py.
DONE=0 REFUSED=2 SAVED=75 TERMINATED=143 # REFUSED: another attempt would not mend it

say() { echo "$(date +%H:%M:%S) slurm: $*"; }

run_job() {
    cd "$REPO" || exit "$REFUSED"
    REPO=$(pwd -P)
    # A task of an array has an id of its own, but one of them has that of the whole array, too.
    JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    JOB=${JOB:-$SLURM_JOB_ID}
    read_arguments "$@"
    check_container
    open_attempt
    # shellcheck source=slurm/settings.sh
    source "$REPO/slurm/settings.sh"
    stop_asked=""
    trap 'stop_asked=USR1; forward_stop' USR1 # ahead of the time limit, by --signal
    trap 'stop_asked=TERM' TERM               # by scancel; the run has got it from Slurm, too
    local status=0
    if check_nodes_and_start_ray; then
        train
        status=$?
    else
        status=$?
    fi
    end_nodes
    conclude "$status"
}

# The same for an array: the arguments are a file and overrides; a line of the file is one task's overrides.
run_job_of_line() {
    local file=$1 words=() line=""
    shift
    [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || line=$(lines_of "$file" | sed -n "${SLURM_ARRAY_TASK_ID}p")
    if [[ -z $line ]]; then
        say "$file has no line ${SLURM_ARRAY_TASK_ID:-}: submit with --array=1-N for its N lines."
        exit "$REFUSED"
    fi
    if ! line=$(xargs -n 1 printf '%s\n' <<<"$line"); then # xargs, because words may be quoted
        say "line $SLURM_ARRAY_TASK_ID of $file has a quote without its other one."
        exit "$REFUSED"
    fi
    mapfile -t words <<<"$line"
    run_job "$@" "${words[@]}"
}

# The lines of an array's file that count.
lines_of() { grep -vE '^[[:space:]]*(#|$)' "$1"; }

# --- names -----------------------------------------------------------------------------------------------------------

is_given() { [[ $GIVEN == *" $1 "* ]]; }

# NAME and OUTPUT_DIR from the overrides, else of the job; RUN_DIR is the directory of the run. ARGUMENTS are those of
# train.py, and GIVEN their names: what the command line says is not said again.
read_arguments() {
    NAME=$SLURM_JOB_NAME-$JOB
    OUTPUT_DIR=${OUTPUT_DIR:-$REPO/outputs}
    GIVEN="" ARGUMENTS=()
    local argument
    for argument in "$@"; do
        case $argument in
            output_dir=*)
                OUTPUT_DIR=${argument#output_dir=} # links are followed: a container sees only what is mounted
                continue
                ;;
            name=*) NAME=${argument#name=} ;;
        esac
        GIVEN+=" ${argument%%=*} "
        ARGUMENTS+=("$argument")
    done
    OUTPUT_DIR=$(realpath -m "$OUTPUT_DIR")
    RUN_DIR=$OUTPUT_DIR/$NAME
}

# The directory of this attempt, with a word that only this job knows.
open_attempt() {
    local parent=$RUN_DIR.slurm attempt=1
    while [[ -e $parent/attempt-$attempt ]]; do attempt=$((attempt + 1)); done
    ATTEMPT=$parent/attempt-$attempt
    if ! mkdir -p "$ATTEMPT/nodes"; then
        say "$ATTEMPT cannot be created: set output_dir= to a directory that this job may write to."
        exit "$REFUSED"
    fi
    CANARY=$SLURM_JOB_ID.$RANDOM$RANDOM
    printf %s "$CANARY" >"$ATTEMPT/canary"
    say "attempt $attempt of job $JOB ($SLURM_JOB_NAME) on $(all_nodes | paste -sd, -); logs in $ATTEMPT"
}

all_nodes() {
    local size=${SLURM_HET_SIZE:-0} group
    if ((size == 0)); then
        scontrol show hostnames "$SLURM_JOB_NODELIST"
        return
    fi
    for ((group = 0; group < size; group++)); do group_nodes "$group"; done
}

# Of one component of a heterogeneous job.
group_nodes() {
    local list=SLURM_JOB_NODELIST_HET_GROUP_$1
    scontrol show hostnames "${!list}"
}

# --- steps -----------------------------------------------------------------------------------------------------------

check_container() {
    case ${CONTAINER:-} in
        "" | pyxis:* | apptainer:*) return ;;
    esac
    say "CONTAINER=$CONTAINER is neither pyxis:IMAGE nor apptainer:IMAGE nor empty."
    exit "$REFUSED"
}

# srun with what every step of a job needs: steps share all of the job's CPUs, memory and GPUs, and have its environment.
step() {
    local container=()
    if [[ ${CONTAINER:-} == pyxis:* ]]; then
        # Every step is a container of its own; in /tmp are the sockets by which the run reaches Ray.
        container=(
            --container-image="${CONTAINER#pyxis:}" --container-workdir="$REPO"
            --container-mounts="/tmp:/tmp,$REPO:$REPO,$OUTPUT_DIR:$OUTPUT_DIR${MOUNTS:+,$MOUNTS}"
        )
    fi
    unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE # of sbatch's command line; they would count for steps, too
    exec srun --export=ALL --overlap --mem=0 --cpu-bind=none --kill-on-bad-exit=1 "${container[@]}" "$@"
}

# The command that runs Python with these arguments on a node, as an array PYTHON_COMMAND.
python_command() {
    PYTHON_COMMAND=("$PYTHON" "$@")
    if [[ ${CONTAINER:-} == apptainer:* ]]; then
        PYTHON_COMMAND=(
            apptainer exec --nv --bind "/tmp,$REPO,$OUTPUT_DIR${MOUNTS:+,$MOUNTS}" --pwd "$REPO" "${CONTAINER#apptainer:}"
            "${PYTHON_COMMAND[@]}"
        )
    fi
}

# --- nodes -----------------------------------------------------------------------------------------------------------

# Check every node and, if there are several, start Ray on them. Returns REFUSED if another attempt would not mend it.
check_nodes_and_start_ray() {
    local names groups=() count
    names=$(all_nodes | paste -sd, -)
    count=$(all_nodes | wc -l)
    ((${SLURM_HET_SIZE:-0} > 0)) && groups=(--het-group="0-$((SLURM_HET_SIZE - 1))")
    GPUS=${SLURM_GPUS_ON_NODE:-0}
    GPUS=${GPUS##*:}
    CPUS=$SLURM_CPUS_ON_NODE
    python_command "$REPO/slurm/ray_node.py" --directory "$ATTEMPT" --canary "$CANARY" --job "$SLURM_JOB_ID" \
        --nodes "$names" --cpus "$CPUS" --gpus "$GPUS" --gpu-memory-gib "${GPU_MEMORY_GIB:-0}" \
        --object-store-gib "${OBJECT_STORE_GIB:-8}" --interface "${INTERFACE:-}" --training "${TRAINING_NODES:-}" \
        --seconds "$((NODE_SECONDS + 60))" # this script decides first
    ((count == 1)) && PYTHON_COMMAND+=(--only-check)
    (step "${groups[@]}" --ntasks-per-node=1 --cpus-per-task="$CPUS" "${PYTHON_COMMAND[@]}") >"$ATTEMPT/nodes.log" 2>&1 &
    NODES_PID=$!
    wait_until_ready "$names" "$count"
}

# All nodes are ready: one has passed its checks, several have joined Ray.
wait_until_ready() {
    local end=$((SECONDS + NODE_SECONDS)) begun=$SECONDS
    until [[ -e $ATTEMPT/ready ]]; do
        if [[ -n $stop_asked ]]; then
            say "SIG$stop_asked came before the nodes were ready."
            return "$SAVED"
        fi
        if ! kill -0 "$NODES_PID" 2>/dev/null; then
            wait "$NODES_PID" && (($2 == 1)) && return 0
            say "the nodes were given up after $((SECONDS - begun)) s"
            why_given_up "$1"
            return
        fi
        if ((SECONDS > end)); then
            say "the nodes are not ready after $((SECONDS - begun)) s"
            show_end "$ATTEMPT/nodes.log"
            name_missing "$1"
            return "$REFUSED"
        fi
        sleep 0.5
    done
    say "Ray runs on $1, its head at $(cat "$ATTEMPT/ready")"
}

# After the step on all nodes has ended: show why. Returns REFUSED if another attempt would not mend it.
why_given_up() {
    show_end "$ATTEMPT/nodes.log"
    grep -q "Exited with exit code $REFUSED" "$ATTEMPT/nodes.log" && return "$REFUSED" # of ray_node.py
    grep -q "launch failed" "$ATTEMPT/nodes.log" || return 1
    name_missing "$1" # Slurm could not reach them
    return "$REFUSED"
}

name_missing() {
    local name missing=()
    for name in ${1//,/ }; do
        [[ -e $ATTEMPT/nodes/$name.json ]] || missing+=("$name")
    done
    if ((${#missing[@]} == 0)); then
        say "all nodes have passed their checks, but not all have joined Ray: see $ATTEMPT/ray-*.log"
        return
    fi
    say "these nodes have not joined: ${missing[*]}. Look at them (scontrol show node), or submit again with" \
        "--exclude=$(IFS=, && echo "${missing[*]}")"
}

end_nodes() {
    [[ -n ${NODES_PID:-} ]] || return 0
    local end=$((SECONDS + 20))
    kill -USR2 "$NODES_PID" 2>/dev/null # srun sends it on to every node
    while kill -0 "$NODES_PID" 2>/dev/null && ((SECONDS < end)); do sleep 0.2; done
    kill -KILL "$NODES_PID" 2>/dev/null # what is left of the step ends with the job
    NODES_PID=""
}

# --- the run ---------------------------------------------------------------------------------------------------------

# Run train.py on the first node; its output goes to the job's and to train.log. Returns its exit status.
train() {
    local first overrides=() group=() tee status
    first=$(all_nodes | head -n 1)
    add_override name "$NAME"
    add_override output_dir "$OUTPUT_DIR"
    add_override cluster "$CLUSTER"
    add_override cluster.nodes "$(all_nodes | wc -l)"
    ((GPUS == 0)) || add_override cluster.devices_per_node "$GPUS"
    [[ -e $ATTEMPT/ready ]] && overrides+=(launcher=ray "launcher.address=$(cat "$ATTEMPT/ready")")
    # Only a run that this job has begun: another one of this name is refused in every attempt.
    if [[ -d $RUN_DIR && $(cat "$RUN_DIR.slurm/job" 2>/dev/null) == "$JOB" ]]; then add_override trainer.resume true; fi
    echo "$JOB" >"$RUN_DIR.slurm/job"
    # Slurm before 23.02 does not say when the job ends; train.py saves ahead of that time (trainer.save_before_end).
    export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-$(job_end)}
    ((${SLURM_HET_SIZE:-0} > 0)) && group=(--het-group=0)
    python_command "$REPO/train.py" "${overrides[@]}" "${ARGUMENTS[@]}"
    say "train.py ${overrides[*]} ${ARGUMENTS[*]}"
    exec 3> >(tee "$ATTEMPT/train.log")
    tee=$!
    (step "${group[@]}" --nodes=1 --ntasks=1 --nodelist="$first" --cpus-per-task="$CPUS" "${PYTHON_COMMAND[@]}") >&3 2>&1 &
    TRAIN_PID=$!
    exec 3>&-
    [[ $stop_asked != USR1 ]] || forward_stop # it came before there was anything to send it to
    wait_for_end "$TRAIN_PID"
    status=$?
    TRAIN_PID=""
    wait_for_end "$tee" # the log is complete
    return "$status"
}

# To the array `overrides` of the caller, unless the command line says otherwise.
add_override() {
    is_given "$1" || overrides+=("$1=$2")
}

job_end() {
    local text
    text=$(scontrol show job "$JOB" -o | grep -oP -m1 '\bEndTime=\K\S+')
    date -d "$text" +%s 2>/dev/null || echo 9999999999
}

forward_stop() {
    [[ -z ${TRAIN_PID:-} ]] || kill -USR1 "$TRAIN_PID" 2>/dev/null
}

# `wait` returns early for a signal that is trapped; this returns the exit status of the process.
wait_for_end() {
    local status last
    while true; do
        wait "$1"
        status=$?
        kill -0 "$1" 2>/dev/null || break
    done
    wait "$1" 2>/dev/null
    last=$?
    ((last == 127)) && return "$status" # bash has told it already
    return "$last"
}

# --- the end of an attempt -------------------------------------------------------------------------------------------

# Exit, or have Slurm start this job again, by train.py's exit status.
conclude() {
    local status=$1 state
    if ((status == DONE)); then
        say "done"
        exit 0
    fi
    ((status == SAVED)) || show_failure "$status"
    if ((status == REFUSED)) && ! may_be_mended; then
        say "another attempt would not mend this: the job is not requeued"
        exit "$REFUSED"
    fi
    state=$(job_state)
    if [[ $state == CANCELLED* || $state == TIMEOUT || $state == COMPLETING ]]; then
        say "the job is $state: it is not requeued; name=$NAME trainer.resume=true goes on with its run"
        exit "$status"
    fi
    if ! attempts_left "$status"; then
        say "$MAX_ATTEMPTS attempts came no further than step $(newest_checkpoint): the job is not requeued"
        exit "$status"
    fi
    say "requeued; the next attempt goes on from step $(newest_checkpoint)"
    if ! insist scontrol requeue "$JOB"; then
        say "Slurm did not requeue the job: submit it again with name=$NAME trainer.resume=true"
        exit "$status"
    fi
    sleep 60 # Slurm ends this script
    exit "$status"
}

# Run a command that asks Slurm's controller, which may be away for a moment, up to ten times in a minute.
insist() {
    local attempt
    for attempt in 1 2 3 4 5 6 7 8 9 10; do
        "$@" && return 0
        ((attempt == 10)) || sleep 6
    done
    return 1
}

# Such as RUNNING, also for a job that is being pre-empted; empty if Slurm does not say.
job_state() {
    insist squeue --noheader --jobs="$JOB" --format=%T 2>/dev/null | head -n 1
}

# Whether a refusal came from something that passes: Ray lost a node before the run had its workers, or the lock of a
# run whose node has died is still held by a network file system.
may_be_mended() {
    [[ -e $ATTEMPT/train.log ]] || return 1
    [[ -e $ATTEMPT/ready ]] && grep -qE "Ray cluster at .* (cannot be joined|is too small|had no room)|No Ray cluster answers" \
        "$ATTEMPT/train.log" && return 0
    ((${SLURM_RESTART_COUNT:-0} > 0)) && grep -q "is in use by" "$ATTEMPT/train.log"
}

newest_checkpoint() {
    local latest
    latest=$(cat "$RUN_DIR/checkpoints/latest" 2>/dev/null)
    echo "${latest#step_}" | grep -E '^[0-9]+$' || echo 0
}

# Whether the job may come back: fewer than MAX_ATTEMPTS failures in a row have left the same newest checkpoint. An
# attempt that was stopped by a signal is no failure.
attempts_left() {
    local file=$RUN_DIR.slurm/failures job="" step before=0 count=0
    (($1 == SAVED || $1 == TERMINATED)) && return 0
    step=$(newest_checkpoint)
    [[ -e $file ]] && read -r job before count <"$file"
    if [[ $job == "$JOB" ]] && ((step == before)); then count=$((count + 1)); else count=1; fi
    echo "$JOB $step $count" >"$file"
    ((count < MAX_ATTEMPTS))
}

show_failure() {
    say "attempt failed with status $1 after $SECONDS s"
    [[ -e $ATTEMPT/train.log ]] || return 0 # what kept the nodes from starting has been shown
    show_end "$ATTEMPT/train.log"
    show_end "$ATTEMPT/nodes.log"
}

# The last lines of a log without those in which Slurm reports that it ends the other processes of a failed step.
show_end() {
    local lines
    lines=$(grep -vE ': (Exited with exit code|Killed|Terminated|Force Terminated)|_step_signal: Terminating|STEP .* CANCELLED|forcing job termination|Job step aborted|support for cpu binding' "$1" | tail -n 15)
    if [[ -n $lines ]]; then
        say "the last lines of $1:"
        echo "${lines//$'\n'/$'\n'    }" | sed '1s/^/    /'
    fi
}
