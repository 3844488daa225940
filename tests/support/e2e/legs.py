"""Both legs of a request at once, as a router sends them that gives each transfer a name."""

import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.support.e2e.client import AnyPrompt, Completion, KVTransferParams
from tests.support.e2e.pair import Pair, Traffic, control_keys, end_lease, make_prompt
from tests.support.waiting import until
from transfer.control.client import ControlClient
from transfer.control.messages import Follow, Followed


@dataclass(frozen=True, slots=True)
class Legs:
    """The answers to both legs."""

    prefill: Completion
    decode: Completion


class Router:
    """Sends requests to a pair of servers under names of its own. Asks once where P's control channel is."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        params = pair.prefill.client.prefill(make_prompt(40, ("where", pair.name, time.monotonic())))
        end_lease(params, control_keys(pair.prefill))
        self._host, self._port = params["remote_host"], params["remote_port"]

    def prefill_params(self, name: str) -> KVTransferParams:
        """Return what the prefill leg of a transfer carries."""
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}

    def decode_params(self, name: str, **changes: object) -> KVTransferParams:
        """Return what the decode leg of a transfer carries."""
        control = {"remote_host": self._host, "remote_port": self._port}
        return {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": name, **control, **changes}

    def send(
        self,
        prompt: AnyPrompt,
        max_tokens: int = 16,
        *,
        decode_first_s: float = 0.0,
        name: str = "",
        **options: object,
    ) -> Legs:
        """Send both legs and wait for both answers.

        ``decode_first_s`` is the time by which the decode leg is earlier; the prefill leg is if it is negative.
        """
        name = name or uuid.uuid4().hex

        def prefill() -> Completion:
            time.sleep(max(decode_first_s, 0.0))
            return self.pair.prefill.client.complete(prompt, 1, kv_transfer_params=self.prefill_params(name), **options)

        def decode() -> Completion:
            time.sleep(max(-decode_first_s, 0.0))
            return self.pair.decode_leg(prompt, self.decode_params(name), max_tokens, **options)

        with ThreadPoolExecutor(2) as threads:
            legs = threads.submit(prefill), threads.submit(decode)
            return Legs(legs[0].result(), legs[1].result())

    def assert_right_though_preempted(self, prompts: Sequence[list[int]], own: Sequence[list[int]]) -> None:
        """Prompts that P preempts, because of its ``own`` long answers, are started over and give the right outputs."""
        client, before = self.pair.prefill.client, self.transfers()
        with ThreadPoolExecutor(len(own) + len(prompts)) as clients:
            answered = [clients.submit(client.complete, prompt, 500) for prompt in own]
            until(lambda: client.metrics().value("vllm:num_requests_running") == len(own))
            answers = list(clients.map(self.send, prompts))
        assert [each.result().status for each in answered] == [200] * len(own)
        for prompt, legs in zip(prompts, answers, strict=True):
            self.pair.assert_right(legs.decode, prompt)
        self.wait_for("complete", number=len(prompts), since=before)
        assert self.transfers().get("restarted", 0.0) > before.get("restarted", 0.0)

    def assert_nothing_is_left(self, prompts: Sequence[list[int]]) -> None:
        """Clients leave the decode legs of prompts at ever later moments, while P computes and after that."""
        with self.pair.traffic() as traffic, ThreadPoolExecutor(1) as clients:
            for number, prompt in enumerate(prompts):
                name = uuid.uuid4().hex
                complete, params = self.pair.prefill.client.complete, self.prefill_params(name)
                prefill = clients.submit(complete, prompt, 1, kv_transfer_params=params)
                self.pair.decode.client.abandon(
                    prompt, 0.005 * 1.4**number, 100, kv_transfer_params=self.decode_params(name)
                )
                assert prefill.result().status == 200
        assert traffic.leases("expired") == 0

    def assert_right(
        self, prompt: AnyPrompt, *, decode_first_s: float = 0.0, hit: int = 0, expected: Completion | None = None
    ) -> Traffic:
        """A prompt of which the decode server holds ``hit`` tokens is pulled, and gives the right output."""
        with self.pair.traffic() as traffic:
            legs = self.send(prompt, decode_first_s=decode_first_s)
        assert legs.prefill.status == 200, legs.prefill.body
        assert traffic.failures() == 0
        assert traffic.source("external_kv_transfer") == len(prompt) - 1 - hit
        assert traffic.source("local_compute") == 1
        assert traffic.pulled("pulls") == self.pair.decode_ranks
        assert (traffic.leases("granted"), traffic.leases("released")) == (1, 1)
        self.pair.assert_right(legs.decode, prompt, expected)
        return traffic

    def wait_for(self, *events: str, number: float = 1.0, since: Mapping[str, float]) -> None:
        """Wait until P has counted so many more transfers of any of these events than ``since`` has."""

        def counted() -> float:
            now = self.transfers()
            return sum(now.get(event, 0.0) - since.get(event, 0.0) for event in events)

        until(
            lambda: counted() >= number,
            lambda: f"{number:g} transfers {' or '.join(events)}: {self.transfers()}, before {dict(since)}",
        )

    def followed(self, name: str) -> Followed:
        """Return what P tells of a transfer to who knows nothing of it."""
        client = ControlClient(keys=control_keys(self.pair.prefill))
        try:
            return client.request(self._host, self._port, Follow("", name), 10.0).result()
        finally:
            client.close()

    def transfers(self) -> dict[str, float]:
        """Return P's count of transfers by name, by event."""
        samples = self.pair.prefill.client.metrics().samples
        return {labels["event"]: value for name, labels, value in samples if name == "vllm:pd_transfers_total"}
