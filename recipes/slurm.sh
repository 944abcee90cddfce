#!/bin/bash
# Many machines under Slurm, one launcher on each:
#     sbatch --nodes 2 --gpus-per-node 8 recipes/slurm.sh --config recipes/smollm2/cone.yaml
# GPUS says how many processes a machine gets, CONFIG how they share the model, PORT where they meet on the first one.
#SBATCH --job-name=hyperattn
#SBATCH --ntasks-per-node=1
set -euo pipefail
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}} PORT=${PORT:-29500}
export CONFIG=${CONFIG:-recipes/accelerate_configs/fsdp2_machines.yaml}
export FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Each machine reads its own SLURM_NODEID, hence the quotes.
srun bash -c 'exec accelerate launch --config_file "$CONFIG" --num_machines "$SLURM_NNODES" \
    --num_processes "$((SLURM_NNODES * GPUS))" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$FIRST" --main_process_port "$PORT" recipes/finetune.py "$@"' finetune "$@"
