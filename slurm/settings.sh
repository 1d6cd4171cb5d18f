# shellcheck shell=bash
# Environment of every process of a job, for NCCL, gloo, Ray and torch, besides what rlhfspec_mega/cluster/environment.py
# gives workers under any launcher. job.sh sources it; the reasons stand here.

# The network of NCCL's and gloo's connections, where a node has several. Ray takes the same (slurm/ray_node.py).
if [[ -n ${INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
fi
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}       # without it, NCCL's errors have no cause
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1    # a failed collective ends its process instead of hanging
export NCCL_CUMEM_ENABLE=0                  # else NCCL's buffers lie in memory that sleeping engines cannot give back
# Only this attempt's processes may join its Ray cluster: other users of the network reach its ports.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
export RAY_worker_niceness=0                # with Ray's default, 15, whatever else computes starves the workers
export PYTHONUNBUFFERED=1                   # logs are whole when a process is killed
