"""Chats of many turns, with host memory for their KV caches and without: ``python -m benchmarks.multi_turn``.

Several conversations take turns on vLLM servers on CPU whose device cache holds about two of them. When it is a
conversation's turn again, the device has evicted it: a server without host memory computes the whole history once
more, one with it copies the history back. All servers are alive together and get the same requests, one request at a
time over all of them and each server first in its turn, so that whatever else the machine does hits all alike. They
are vLLM with the tier and with the connector but no host memory; ``--also`` adds vLLM without a connector, and vLLM
whose device cache holds all conversations, which no tier can surpass.

The histories are made of the first server's greedy answers, so that every answer is compared on its own. The model is
the demonstration's SmolLM2-135M. The device is this machine's memory as well: a load is a copy from memory to memory,
which on an accelerator goes over its bus, and computing is slow here, which favours the tier.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.quickstart import metrics, model, questions
from examples.quickstart.servers import Server, ServerFailed, Servers, free_ports

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
LOGS = ROOT / ".cache" / "multi_turn"
HOST, SERVED_NAME, SALT = "127.0.0.1", "chat", "multi-turn"
READY_TIMEOUT_S = 240.0
BLOCK_TOKENS, ITEM = 32, {"float32": 4, "bfloat16": 2}
CHARACTERS_PER_TOKEN = 4.8  # of the licence, which the conversations are about
TEMPLATE_TOKENS = 12  # of the chat template, around a question and its answer
SYSTEM_TOKENS = 40
DEVICE_CONVERSATIONS = 2
COLUMN = 26  # characters of the table's
WITHOUT, WITH = "connector, no host memory", "connector, host memory"
PLAIN, LARGE = "no connector", "device cache for all"
SOURCES = {"local_compute": "computed", "local_cache_hit": "on the device", "external_kv_transfer": "loaded"}
ALSO = {"plain": PLAIN, "large": LARGE}


@dataclass(frozen=True)
class Sizes:
    """How much there is to remember."""

    conversations: int
    turns: int
    document_tokens: int  # what a conversation begins with
    question_tokens: int
    answer_tokens: int
    block_bytes: int

    @property
    def blocks(self) -> int:
        """Of one conversation at its end, with a tenth to spare as tokens are estimated from characters."""
        turn = self.question_tokens + self.answer_tokens + TEMPLATE_TOKENS
        return -(-int(1.1 * (SYSTEM_TOKENS + self.document_tokens + self.turns * turn)) // BLOCK_TOKENS)

    def device_bytes(self, name: str) -> int:
        return (self.conversations if name == LARGE else DEVICE_CONVERSATIONS) * self.blocks * self.block_bytes

    @property
    def host_bytes(self) -> int:
        return self.conversations * self.blocks * self.block_bytes


def block_bytes(directory: Path, dtype: str) -> int:
    """Bytes of a block of the model's cache."""
    config = json.loads((directory / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = config["num_hidden_layers"] * config["num_key_value_heads"] * 2 * head_size * ITEM[dtype]
    return int(token) * BLOCK_TOKENS


class Texts:
    """What the users say: parts of the licence, a different one each time."""

    def __init__(self, sizes: Sizes) -> None:
        self._words = " ".join((ROOT / "LICENSE").read_text().split())
        self._sizes = sizes

    def question(self, conversation: int, turn: int) -> str:
        """What a user says first, with the document that the conversation is about, and in later turns."""
        place = conversation * len(self._words) // self._sizes.conversations
        if turn == 0:
            return f"Text {conversation}:\n{self._part(place, self._sizes.document_tokens)}\nWhat is it about?"
        return f"What does this mean? {self._part(place + turn * 997, self._sizes.question_tokens)}"

    def _part(self, start: int, tokens: int) -> str:
        length = round(tokens * CHARACTERS_PER_TOKEN)
        start %= len(self._words)
        return (self._words * (2 + length // len(self._words)))[start : start + length]


@dataclass
class Variant:
    """One server and what was measured at it."""

    name: str
    server: Server
    answers: list[list[questions.Answer]]  # by turn and conversation
    before: metrics.Snapshot
    after: metrics.Snapshot

    def first_token_ms(self, turns: Sequence[int]) -> list[float]:
        return [1e3 * (answer.first_token_s or answer.total_s) for turn in turns for answer in self.answers[turn]]

    def grown(self, name: str, **labels: str) -> float:
        """What a counter has counted."""
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    def prompt_tokens(self, source: str) -> int:
        return round(self.grown("vllm:prompt_tokens_by_source_total", source=source))

    @property
    def decode_ms(self) -> float:
        """Milliseconds a token behind the first."""
        tokens = self.grown("vllm:generation_tokens_total") - self.grown("vllm:request_success_total")
        return 1e3 * self.grown("vllm:request_decode_time_seconds_sum") / tokens


def command(name: str, port: int, sizes: Sizes, arguments: argparse.Namespace) -> list[str]:
    """The command line of a server."""
    options: dict[str, object] = {
        "model": MODEL,
        "served-model-name": SERVED_NAME,
        "host": HOST,
        "port": port,
        "dtype": arguments.dtype,
        "block-size": BLOCK_TOKENS,
        "kv-cache-memory-bytes": sizes.device_bytes(name),
        "max-model-len": sizes.blocks * BLOCK_TOKENS,
        "max-num-batched-tokens": max(2048, sizes.blocks * BLOCK_TOKENS),
    }
    if name not in ALSO.values():
        tier = {"cpu_bytes_to_use": sizes.host_bytes, "cpu_store": arguments.store} if name == WITH else {}
        connector = {"kv_connector": "PDConnector", "kv_connector_module_path": "pd_connector", "kv_role": "kv_both"}
        options["kv-transfer-config"] = json.dumps({**connector, "kv_connector_extra_config": {"host": HOST, **tier}})
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    return [*words, *(str(word) for option, value in options.items() for word in (f"--{option}", value))]


@contextmanager
def running(names: Sequence[str], sizes: Sizes, arguments: argparse.Namespace) -> Iterator[list[Variant]]:
    """The servers, ready, and ended with the context."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(arguments.threads),
    }
    with Servers() as servers:
        started = []
        for name, port in zip(names, free_ports(len(names), HOST), strict=True):
            log = LOGS / f"{name.replace(', ', '-').replace(' ', '-')}.log"
            words = command(name, port, sizes, arguments)
            url = f"http://{HOST}:{port}"
            started.append(servers.start(Server(name, words, url=url, log=log, environment=environment, cwd=ROOT)))
        servers.wait_ready(started, READY_TIMEOUT_S)
        nothing = metrics.Snapshot(())
        yield [Variant(server.name, server, [], nothing, nothing) for server in started]


def chat(variants: Sequence[Variant], sizes: Sizes) -> None:
    """All turns of all conversations, at all servers."""
    texts = Texts(sizes)
    histories: list[list[str]] = [[] for _ in range(sizes.conversations)]
    for variant in variants:
        variant.before = metrics.scrape(variant.server.url)
    for turn in range(sizes.turns):
        for variant in variants:
            variant.answers.append([])
        for conversation, history in enumerate(histories):
            history.append(texts.question(conversation, turn))
            prompt = questions.Prompt(messages=tuple(history), max_tokens=sizes.answer_tokens)
            question = questions.Question(f"turn {turn} of {conversation}", (prompt,), stream=True)
            first = (turn * sizes.conversations + conversation) % len(variants)
            for variant in (*variants[first:], *variants[:first]):
                variant.answers[turn] += questions.ask(variant.server.url, SERVED_NAME, question, SALT)
            history.append(variants[0].answers[turn][conversation].text)
    time.sleep(1.0)  # the last stores, and vLLM's count of them
    for variant in variants:
        variant.after = metrics.scrape(variant.server.url)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and 90th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=10)[-1]


def first_token_cell(values: tuple[float, float], tier: tuple[float, float]) -> str:
    ratios = "/".join(f"{value / best:.1f}" for value, best in zip(values, tier, strict=True))
    text = f"{values[0]:.0f} {values[1]:.0f}" + (f" ({ratios})" if values != tier else "")
    return f"{text:>{COLUMN}}"


def report(variants: Sequence[Variant], sizes: Sizes) -> None:
    """Times, then tokens, then what the tier did."""
    tier = variants[-1]
    prompts = [statistics.median(answer.prompt_tokens for answer in turn) for turn in tier.answers]
    print("\ntime to first token in ms, median and 90th percentile; in brackets, how many times faster the tier is")
    print(f"  {'turn':6} {'prompt':>6}  " + "  ".join(f"{variant.name:>{COLUMN}}" for variant in variants))
    later = list(range(1, sizes.turns))
    for label, turns in [*((str(turn + 1), [turn]) for turn in range(sizes.turns)), ("2 on", later)]:
        best = spread(tier.first_token_ms(turns))
        cells = [first_token_cell(spread(variant.first_token_ms(turns)), best) for variant in variants]
        print(f"  {label:6} {statistics.median(prompts[turn] for turn in turns):6.0f}  " + "  ".join(cells))
    print("  prompt tokens")
    for source, label in SOURCES.items():
        counts = (f"{variant.prompt_tokens(source):>{COLUMN},}" for variant in variants)
        print(f"  {label:15}" + "  ".join(counts))
    print(f"  {'ms a token':15}" + "  ".join(f"{variant.decode_ms:>{COLUMN}.2f}" for variant in variants))
    report_answers(variants)
    report_tier(tier)
    for variant in variants:
        if variant.name in {WITHOUT, WITH}:
            report_calls(variant)


def report_answers(variants: Sequence[Variant]) -> None:
    reference = [answer for turn in variants[0].answers for answer in turn]
    for variant in variants[1:]:
        pairs = zip(reference, (answer for turn in variant.answers for answer in turn), strict=True)
        equal = sum(one.text == other.text for one, other in pairs)
        verdict = "all equal" if equal == len(reference) else "NOT ALL EQUAL"
        print(f"{variant.name}: {equal} of {len(reference)} answers are those of: {variants[0].name}   {verdict}")


def report_tier(tier: Variant) -> None:
    print(f"tokens loaded from host memory: {tier.grown('vllm:pd_host_tokens_total'):,.0f}")
    for kind, event in (("store", "stored"), ("load", "loaded")):
        moved = tier.grown("vllm:pd_host_bytes_total", event=event)
        copies = tier.grown("vllm:pd_host_copy_seconds_count", kind=kind)
        seconds = tier.grown("vllm:pd_host_copy_seconds_sum", kind=kind)
        failed = tier.grown("vllm:pd_host_failures_total", event=kind)
        mean = 1e3 * seconds / max(copies, 1)
        print(f"{event:6} {moved / 1e6:8,.0f} MB in {copies:4.0f} copies, {mean:6.2f} ms each, {failed:.0f} failed")
    cached, room = (tier.after.total(f"vllm:pd_host_blocks_{name}") for name in ("cached", "capacity"))
    print(f"{cached:.0f} of {room:.0f} host blocks hold something")


def report_calls(variant: Variant, longest: int = 6) -> None:
    """The longest calls into the connector, but for the registration of the caches at the start."""
    calls = {
        sample.label("call"): 1e3 * sample.value
        for sample in variant.after.samples
        if sample.name == "vllm:pd_connector_call_seconds_max" and not sample.label("call").endswith("kv_caches")
    }
    worst = sorted(calls.items(), key=lambda call: -call[1])[:longest]
    print(f"{variant.name}: the longest calls: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in worst))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--document-tokens", type=int, default=600, help="what a conversation begins with")
    parser.add_argument("--question-tokens", type=int, default=60)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--dtype", choices=tuple(ITEM), default="float32")
    parser.add_argument("--store", choices=("eager", "lazy"), default="eager", help="the tier's cpu_store")
    parser.add_argument("--threads", type=int, default=1, help="of each server's kernels (1)")
    parser.add_argument("--also", nargs="*", choices=tuple(ALSO), default=[], help="more servers")
    return parser.parse_args(words)


def kept_figures(variants: Sequence[Variant], sizes: Sizes) -> dict[str, Any]:
    """What ``report`` prints, as it is kept. A ratio is of the connector without host memory to that with it."""
    reference = [answer.text for turn in variants[0].answers for answer in turn]
    servers = {variant.name: figures_of(variant, reference, sizes) for variant in variants}
    without, tier = servers[WITHOUT], servers[WITH]
    ratios = {
        "first_turn": without["first_turn_ms"]["p50"] / tier["first_turn_ms"]["p50"],
        "later_turns_p50": without["later_turns_ms"]["p50"] / tier["later_turns_ms"]["p50"],
        "later_turns_p90": without["later_turns_ms"]["p90"] / tier["later_turns_ms"]["p90"],
        "ms_a_token": without["ms_a_token"] / tier["ms_a_token"],
        "computed": without["prompt_tokens"]["computed"] / max(tier["prompt_tokens"]["computed"], 1),
    }
    return {"answers": len(reference), "servers": servers, "ratios": ratios}


def figures_of(variant: Variant, reference: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """One server's figures; ``reference`` are the first one's answers."""
    texts = (answer.text for turn in variant.answers for answer in turn)
    return {
        "first_turn_ms": percentiles(variant.first_token_ms([0])),
        "later_turns_ms": percentiles(variant.first_token_ms(range(1, sizes.turns))),
        "ms_a_token": variant.decode_ms,
        "prompt_tokens": {label: variant.prompt_tokens(source) for source, label in SOURCES.items()},
        "equal": sum(one == other for one, other in zip(texts, reference, strict=True)),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Of few values, the 99th is nearly the longest."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{rank}": round(cuts[rank - 1], 1) for rank in (50, 90, 99)}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print, and return the figures."""
    arguments = parse(words)
    try:
        if not model.is_made(MODEL):
            model.make(MODEL)
    except model.ModelError as error:
        sys.exit(str(error))
    sizes = Sizes(
        arguments.conversations, arguments.turns, arguments.document_tokens, arguments.question_tokens,
        arguments.answer_tokens, block_bytes(MODEL, arguments.dtype),
    )  # fmt: skip
    print(
        f"{sizes.conversations} conversations of {sizes.turns} turns, {arguments.dtype}, {arguments.threads} threads; "
        f"KV cache of the device {sizes.device_bytes(WITH) >> 20} MiB ({DEVICE_CONVERSATIONS * sizes.blocks} blocks), "
        f"host memory {sizes.host_bytes >> 20} MiB, cpu_store {arguments.store}"
    )
    names = [*(ALSO[word] for word in arguments.also), WITHOUT, WITH]
    start = time.monotonic()
    try:
        with running(names, sizes, arguments) as variants:
            ready = time.monotonic()
            chat(variants, sizes)
            ended = time.monotonic()
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log in {LOGS}:\n{error.log_tail}")
    report(variants, sizes)
    print(f"{ready - start:.0f} s to start the servers, {ended - ready:.0f} s of chat")
    return kept_figures(variants, sizes)


if __name__ == "__main__":
    main()
