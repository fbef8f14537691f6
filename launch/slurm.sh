#!/bin/bash
# One torchrun agent per node: sbatch launch/slurm.sh [options of minidist train]
#SBATCH --job-name=minidist
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
# Slurm signals this script 120 s before the time limit, and before it takes the nodes back.
#SBATCH --signal=B:USR1@120

# The first node serves the rendezvous, so the job ends with it; the other nodes may be lost.
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# "Elastic runs" in docs/reference.md says why.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# SIGTERM to srun reaches all agents: the ranks save and end, and the job, queued again, continues in its run folder.
must_requeue=0
trap 'must_requeue=1; kill -TERM "$step"' USR1

srun --no-kill --kill-on-bad-exit=0 torchrun \
  --nnodes "1:$SLURM_JOB_NUM_NODES" --nproc-per-node 8 --max-restarts 100 --shutdown-timeout 90 \
  --rdzv-backend c10d --rdzv-endpoint "$head_node:29500" --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-conf last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=3 \
  -m minidist train --folder "runs/slurm-$SLURM_JOB_ID" "$@" &
step=$!
wait "$step"
status=$?
if [ "$must_requeue" -eq 1 ]; then
  wait "$step" # the first wait ended with the signal
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
