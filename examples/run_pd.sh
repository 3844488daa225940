# shellcheck shell=bash
# Sourced by run_pd_cpu.sh, run_pd_cuda.sh and run_pd_npu.sh: starts a prefill server (P), a decode server (D) and the
# proxy on this machine, waits until they serve, and ends all of them on Ctrl-C, on SIGTERM, and when one of them ends.
#
#   run_pd_PLATFORM.sh MODEL [ARGUMENT OF BOTH vLLM SERVERS ...]
#
# MODEL is a directory or a name on the Hugging Face hub. Environment variables, and what they are by default:
#   PROXY_HOST=127.0.0.1 PROXY_PORT=8000   where clients connect
#   PREFILL_PORT=8100 DECODE_PORT=8200     where P and D listen, on 127.0.0.1
#   PREFILL_ARGS= DECODE_ARGS=             arguments of P alone and of D alone, separated by blanks
#   CONNECTOR_CONFIG={}                    settings of the connector on both (kv_connector_extra_config), as JSON
#   LOAD_FAILURE_POLICY=recompute          what D does when a pull fails: recompute or fail. With recompute it also
#                                          computes the prompts of requests that come while P is down
#   READY_TIMEOUT=600                      seconds until all three must serve
#   STOP_TIMEOUT=15                        seconds until what was told to end is killed; put it above a
#                                          --shutdown-timeout that you pass
#   LOG_DIR=.cache/run_pd                  one log for each of the three
#   PYTHON=python3                         what runs the proxy
#   DRY_RUN=                               1 prints the commands and starts nothing
# All three use a VLLM_API_KEY of the environment.
#
# When all three serve, D proves P with a prompt of 300 words (docs/reliability.md), so that what you ask is pulled. All
# go on if it does not.
#
# Exit status: 130 and 143 after Ctrl-C and SIGTERM, 1 when one of the three failed, 2 for what cannot be started.
#

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${PROXY_HOST:=127.0.0.1}" "${PROXY_PORT:=8000}" "${PREFILL_PORT:=8100}" "${DECODE_PORT:=8200}"
[[ $PROXY_HOST == *:* ]] && proxy_url="http://[$PROXY_HOST]:$PROXY_PORT" || proxy_url="http://$PROXY_HOST:$PROXY_PORT"
: "${PREFILL_ARGS:=}" "${DECODE_ARGS:=}" "${CONNECTOR_CONFIG:="{}"}" "${LOAD_FAILURE_POLICY:=recompute}"
: "${READY_TIMEOUT:=600}" "${STOP_TIMEOUT:=15}" "${LOG_DIR:=$root/.cache/run_pd}" "${PYTHON:=python3}" "${DRY_RUN:=}"

# What a platform's script sets before it calls run_pd.
vllm=()        # the command of a server, up to the model
prefill_env=() # P's variables, as NAME=VALUE
decode_env=()  # D's
modules=()     # what $PYTHON must have beside what the proxy imports
extra=         # of this project, which brings it all

names=() # of what has been started
pids=()  # its processes, which lead process groups

run_pd() { # MODEL [ARGUMENT...]
    if [[ $# -eq 0 || $1 == -h || $1 == --help ]]; then
        usage
        exit $(($# == 0 ? 2 : 0))
    fi
    local model=$1
    shift
    local prefill_args decode_args policy="\"kv_load_failure_policy\": \"$LOAD_FAILURE_POLICY\", "
    read -ra prefill_args <<<"$PREFILL_ARGS"
    read -ra decode_args <<<"$DECODE_ARGS"
    local prefill=(env "${prefill_env[@]}" "${vllm[@]}" "$model" --host 127.0.0.1 --port "$PREFILL_PORT"
        --kv-transfer-config "$(connector kv_producer)" "$@" "${prefill_args[@]}")
    local decode=(env "${decode_env[@]}" "${vllm[@]}" "$model" --host 127.0.0.1 --port "$DECODE_PORT"
        --kv-transfer-config "$(connector kv_consumer "$policy")" "$@" "${decode_args[@]}")
    local proxy=("$PYTHON" -m pd_proxy --host "$PROXY_HOST" --port "$PROXY_PORT"
        --prefill "http://127.0.0.1:$PREFILL_PORT" --decode "http://127.0.0.1:$DECODE_PORT")
    # A D that may compute a prompt whose pull fails may compute those that no P serves.
    [[ $LOAD_FAILURE_POLICY != recompute ]] || proxy+=(--without-prefill decode)
    if [[ $DRY_RUN == 1 ]]; then
        print_words "${prefill[@]}"
        print_words "${decode[@]}"
        print_words "${proxy[@]}"
        return
    fi
    check "$model"
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
    trap stop_all EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    say "starting P, D and the proxy; their logs are in $LOG_DIR"
    SECONDS=0
    start prefill "${prefill[@]}"
    start decode "${decode[@]}"
    start proxy "${proxy[@]}"
    wait_ready prefill "http://127.0.0.1:$PREFILL_PORT"
    wait_ready decode "http://127.0.0.1:$DECODE_PORT"
    wait_ready proxy "$proxy_url"
    prove
    tell_what_next
    while check_running; do
        wait -n "${pids[@]}" || true
    done
}

usage() { # the comments at the top of both files
    sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"
    echo
    sed -n '/^# shellcheck/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

connector() { # ROLE [MEMBER...]: prints the value of --kv-transfer-config
    printf '{"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector", "kv_role": "%s", ' "$1"
    printf '%s"kv_connector_extra_config": %s}' "${2-}" "$CONNECTOR_CONFIG"
}

print_words() { # WORD...: as a shell would read them
    local line
    printf -v line '%q ' "$@"
    echo "${line% }"
}

say() { echo "$*" >&2; }

die() { # STATUS MESSAGE...
    local status=$1
    shift
    say "error: $*"
    exit "$status"
}

check() { # MODEL: ends with a message that says what to do where something is missing
    local model=$1 name missing
    ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || die 2 "this is bash $BASH_VERSION; 4.4 or newer is needed"
    for name in READY_TIMEOUT STOP_TIMEOUT PROXY_PORT PREFILL_PORT DECODE_PORT; do
        [[ ${!name} =~ ^[0-9]{1,5}$ ]] || die 2 "$name is '${!name}'; it must be a whole number"
    done
    if [[ $PROXY_PORT == "$PREFILL_PORT" || $PROXY_PORT == "$DECODE_PORT" || $PREFILL_PORT == "$DECODE_PORT" ]]; then
        die 2 "PROXY_PORT, PREFILL_PORT and DECODE_PORT must differ: $PROXY_PORT, $PREFILL_PORT, $DECODE_PORT"
    fi
    for name in PROXY_PORT PREFILL_PORT DECODE_PORT; do
        if (: <>"/dev/tcp/127.0.0.1/${!name}") 2>/dev/null; then
            die 2 "something listens on port ${!name} already; choose another one with $name"
        fi
    done
    case $model in
    /* | ./* | ../*) [[ -e $model ]] || die 2 "there is no model at $model" ;;
    esac
    for name in curl "$PYTHON" "${vllm[0]}"; do
        command -v "$name" >/dev/null ||
            die 2 "there is no command '$name' here: install it, or activate the environment that has it"
    done
    missing=$("$PYTHON" -c 'import sys; from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])' aiohttp msgspec starlette uvicorn "${modules[@]}")
    [[ -z $missing ]] ||
        die 2 "$PYTHON has no $missing: run pip install '.[$extra,proxy]' in $root, or name another PYTHON"
    mkdir -p "$LOG_DIR" || die 2 "the logs need a directory that can be written: choose one with LOG_DIR"
    # A server binds its port before it loads, and listens afterwards: until then, a second one could take it.
    hold "$LOG_DIR/lock" LOG_DIR
    for name in PROXY_PORT PREFILL_PORT DECODE_PORT; do
        hold "${TMPDIR:-/tmp}/run_pd.$UID.${!name}" "$name"
    done
}

hold() { # FILE NAME: ends if another run, or one of its servers, holds a file; else this one does until all have ended
    local lock
    command -v flock >/dev/null || return 0
    exec {lock}>"$1" || die 2 "$1 cannot be written"
    flock -n "$lock" || die 2 "another run of this script uses this $2 already (${!2}); choose another one"
}

start() { # NAME COMMAND...
    # A process group of its own, by which all that it starts can be ended. Not a session of its own: Linux may schedule
    # those as groups, in which vLLM's busy waiting starves its other threads (docs/deploy.md, "autogroup").
    set -m
    "${@:2}" </dev/null >"$LOG_DIR/$1.log" 2>&1 &
    set +m
    names+=("$1")
    pids+=($!)
}

wait_ready() { # NAME URL
    until curl --noproxy '*' -sf -m 2 -o /dev/null "$2/health"; do
        check_running
        ((SECONDS < READY_TIMEOUT)) ||
            die_of "$1" "did not serve within READY_TIMEOUT=$READY_TIMEOUT s"
        sleep 0.5
    done
    say "$1 serves after $SECONDS s"
}

prove() { # says whether D has found that P computes the same keys and values, which it tries with its first prompt
    [[ ! $CONNECTOR_CONFIG =~ \"canary\":\ *\"off\" ]] || return 0
    local prompt asked outcome='' log=$LOG_DIR/decode.log deadline=$((SECONDS + 30))
    prompt=$(head -c 2300 "$root/LICENSE" | tr -cs '[:alpha:]' ' ')
    # In the background, so that a signal and the end of a server are noticed. The proxy adds the API key.
    curl --noproxy '*' -sf -m 31 -o /dev/null "$proxy_url/v1/completions" \
        -H 'Content-Type: application/json' -d "{\"prompt\": \"$prompt\", \"max_tokens\": 1}" &
    asked=$!
    while [[ -z $outcome ]] && ((SECONDS < deadline)); do
        check_running
        if [[ -n $asked ]] && ! kill -0 "$asked" 2>/dev/null; then
            wait "$asked" || outcome=refused
            asked=
        fi
        sleep 0.5
        outcome=${outcome:-$(canary_outcome)}
    done
    [[ -z $asked ]] || wait "$asked" || true
    case $outcome in
    proven) say "D has proven P: both compute the same keys and values" ;;
    differs) say "D has NOT proven P, which computes other keys and values: see $log, and canary in docs/settings.md" ;;
    refused) say "D will prove P with the first prompt of 17 tokens (AMX: a block) or more; this one was refused" ;;
    '') say "D has not proven P within 30 s; the first of 17 tokens (AMX: a block) or more may still: see $log" ;;
    *) say "D has not proven P with the first prompt ($outcome); the next of 17 tokens (AMX: a block) may: see $log" ;;
    esac
}

canary_outcome() { # prints how the first prompt that D has compared with P's has ended, if one has
    curl --noproxy '*' -sf -m 2 "http://127.0.0.1:$DECODE_PORT/metrics" |
        sed -n 's/^vllm:pd_canaries_total{.*outcome="\([a-z]*\)".* [1-9].*/\1/p' || true
}

check_running() { # ends with a message where one of the three has ended
    local i status=0
    for i in "${!pids[@]}"; do
        kill -0 "${pids[i]}" 2>/dev/null && continue
        wait "${pids[i]}" || status=$?
        die_of "${names[i]}" "has ended with status $status"
    done
}

die_of() { # NAME REASON
    die 1 "$1 $2; the end of its log:
$(tail -n 30 "$LOG_DIR/$1.log" | sed 's/^/  /')"
}

tell_what_next() {
    local body='{"prompt": "San Francisco is a", "max_tokens": 16}'
    say "All three serve; try
  curl $proxy_url/v1/completions -H 'Content-Type: application/json' -d '$body'
and see what D has pulled from P:
  curl -s http://127.0.0.1:$DECODE_PORT/metrics | grep ^vllm:pd_pull
Ctrl-C ends all three."
}

stop_all() {
    local status=$? pid deadline=$((SECONDS + STOP_TIMEOUT))
    trap '' HUP INT TERM
    trap - EXIT
    say "ending P, D and the proxy"
    for pid in "${pids[@]}"; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    for pid in "${pids[@]}"; do
        while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do
            sleep 0.1
        done
        kill -KILL -- "-$pid" 2>/dev/null || true # what is left of its group
    done
    wait
    for pid in "${pids[@]}"; do
        while kill -0 -- "-$pid" 2>/dev/null && ((SECONDS < deadline + 2)); do
            sleep 0.1
        done
    done
    exit "$status"
}
