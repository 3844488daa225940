#!/usr/bin/env bash
# Prefill on one CUDA GPU of this machine, decode on another, and the proxy. Not yet run on hardware: its commands are
# tested, with a stand-in for vLLM.
#
#   examples/run_pd_cuda.sh Qwen/Qwen3-8B --max-model-len 8192
#   PREFILL_DEVICES=0,1 DECODE_DEVICES=2,3 examples/run_pd_cuda.sh Qwen/Qwen3-32B --tensor-parallel-size 2
#   CONNECTOR_CONFIG='{"protocol": "tcp"}' examples/run_pd_cuda.sh Qwen/Qwen3-8B     # not over RDMA
#
# Environment variables of this script; run_pd.sh, below, has the others:
#   PREFILL_DEVICES=0 DECODE_DEVICES=1   CUDA_VISIBLE_DEVICES of P and of D
#   PD_CONNECTOR_SECRET                  of both; a random one if it is not set and CONNECTOR_CONFIG names no secret_file.
#                                        With it, D copies from P's GPU (CUDA IPC) where it can

set -euo pipefail
# shellcheck source=run_pd.sh
source "$(dirname "${BASH_SOURCE[0]}")/run_pd.sh"

prefill_env=(CUDA_VISIBLE_DEVICES="${PREFILL_DEVICES:-0}")
decode_env=(CUDA_VISIBLE_DEVICES="${DECODE_DEVICES:-1}")
vllm=(vllm serve)
modules=()
extra=cuda
# Exported, so that no command line shows it.
[[ -v PD_CONNECTOR_SECRET || $CONNECTOR_CONFIG == *'"secret_file"'* ]] ||
    export PD_CONNECTOR_SECRET=$(head -c 32 /dev/urandom | base64)
run_pd "$@"
