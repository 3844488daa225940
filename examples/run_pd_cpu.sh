#!/usr/bin/env bash
# Prefill, decode and the proxy on the CPU of this machine, to try them out: 2 cores and 8 GiB do for a small model.
#
#   examples/run_pd_cpu.sh .cache/models/SmolLM2-135M-Instruct --max-model-len 4096     # made by `make demo`
#
# Environment variables of this script; run_pd.sh, below, has the others:
#   KV_CACHE_BYTES=1073741824   KV cache of each server
#   OMP_NUM_THREADS             of each server; half of the cores
#   PYTHON                      runs all three; .venv/bin/python of this checkout if it exists, else python3

set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
if [[ -z ${PYTHON-} && -x $here/../.venv/bin/python ]]; then
    PYTHON=$(cd "$here/.." && pwd)/.venv/bin/python
fi
: "${CONNECTOR_CONFIG:="{\"host\": \"127.0.0.1\"}"}" "${KV_CACHE_BYTES:=$((1 << 30))}"
# shellcheck source=run_pd.sh
source "$here/run_pd.sh"

cores=$(nproc)
threads=${OMP_NUM_THREADS:-$((cores > 1 ? cores / 2 : 1))}
# Not bound: both servers would bind their threads to the same cores.
prefill_env=(OMP_NUM_THREADS="$threads" VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}")
decode_env=("${prefill_env[@]}")
# `vllm serve` of the CPU build looks for a distribution that is called vllm.
vllm=("$PYTHON" -m vllm.entrypoints.openai.api_server --enforce-eager --block-size 32
    --kv-cache-memory-bytes "$KV_CACHE_BYTES" --model)
modules=(vllm mooncake)
extra=cpu
run_pd "$@"
