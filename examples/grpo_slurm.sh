#!/bin/bash
# GRPO with precision: jetrl_fp8 on several nodes: a Ray cluster inside a Slurm allocation, and NeMo-RL's driver on its
# first node.
#
#   sbatch --nodes=4 --gpus-per-node=8 examples/grpo_slurm.sh conf/grpo_qwen3_32b_4n8g.yaml [KEY=VALUE ...]
#
# Every node needs the same environment and this checkout at the same path (a shared file system, or a container image
# named in JETRL_CONTAINER), and the environment below. NEMO_RL names a checkout of NeMo-RL, release 0.7.
#SBATCH --job-name=jetrl-grpo
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

CONFIG=${1:?usage: sbatch --nodes=N --gpus-per-node=8 $0 CONFIG [KEY=VALUE ...]}
shift
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
: "${NEMO_RL:?set NEMO_RL to a checkout of github.com/NVIDIA-NeMo/RL at v0.7.0}"

export PYTHONPATH="$NEMO_RL:$PWD${PYTHONPATH:+:$PYTHONPATH}"
# All of NeMo-RL's workers run in this environment instead of one that uv makes for each kind.
export NEMO_RL_PY_EXECUTABLES_SYSTEM=1
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
# The model that Hugging Face's is converted to once, where all nodes see it.
export NRL_MEGATRON_CHECKPOINT_DIR=${NRL_MEGATRON_CHECKPOINT_DIR:-$PWD/results/megatron}

PORT=${JETRL_RAY_PORT:-6379}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
GPUS=${SLURM_GPUS_ON_NODE:-8}
STEP=(srun --nodes=1 --ntasks=1 --overlap)
if [[ -n ${JETRL_CONTAINER:-} ]]; then
    STEP+=(--container-image="$JETRL_CONTAINER" --container-mounts="${JETRL_MOUNTS:-$PWD:$PWD,$NEMO_RL:$NEMO_RL}")
    STEP+=(--container-workdir="$PWD")
fi
ADDRESS=$("${STEP[@]}" --nodelist="$HEAD" hostname --ip-address | awk '{print $1}')

"${STEP[@]}" --nodelist="$HEAD" \
    ray start --head --block --node-ip-address="$ADDRESS" --port="$PORT" --num-gpus="$GPUS" --disable-usage-stats &
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n +2); do
    "${STEP[@]}" --nodelist="$node" \
        ray start --block --address="$ADDRESS:$PORT" --num-gpus="$GPUS" --disable-usage-stats &
done
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

WANTED=$((SLURM_JOB_NUM_NODES * GPUS))
"${STEP[@]}" --nodelist="$HEAD" python - "$ADDRESS:$PORT" "$WANTED" <<'PYTHON'
import sys
import time

import ray

address, wanted = sys.argv[1], int(sys.argv[2])
deadline = time.monotonic() + 600
while True:
    try:
        ray.init(address=address, log_to_driver=False)
        break
    except ConnectionError:
        if time.monotonic() > deadline:
            raise
        time.sleep(5)
while ray.cluster_resources().get("GPU", 0) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"after 600 s Ray has {ray.cluster_resources().get('GPU', 0):g} of {wanted} GPUs")
    time.sleep(5)
PYTHON

export RAY_ADDRESS="$ADDRESS:$PORT"
"${STEP[@]}" --nodelist="$HEAD" \
    python -m jetrl_megatron.integrations.nemo_rl grpo --config "$CONFIG" "$@" cluster.num_nodes="$SLURM_JOB_NUM_NODES"
