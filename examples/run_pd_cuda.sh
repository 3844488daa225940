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

set -euo pipefail
# shellcheck source=run_pd.sh
source "$(dirname "${BASH_SOURCE[0]}")/run_pd.sh"

prefill_env=(CUDA_VISIBLE_DEVICES="${PREFILL_DEVICES:-0}")
decode_env=(CUDA_VISIBLE_DEVICES="${DECODE_DEVICES:-1}")
vllm=(vllm serve)
modules=()
extra=cuda
run_pd "$@"
