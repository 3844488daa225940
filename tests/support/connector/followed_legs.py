"""Both legs of a prompt at once, in one process: a prefill engine that computes it, a decode worker that follows it."""

from dataclasses import dataclass
from typing import Any

from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.session import PeerSession
from tests.support.connector.chunked_prompts import ChunkedPrompt, FollowingClient, follow
from tests.support.connector.engines import (
    DECODE,
    MODEL,
    OURS,
    PREFILL,
    THEIRS,
    Blocks,
    DecodeWorker,
    PrefillEngine,
    Site,
)
from tests.support.layout.oracle import Engine, Model
from tests.support.waiting import until

ELSEWHERE: Blocks = ((10, 1, 7, 4, 11),)  # where the prompt is computed when it has been preempted


@dataclass
class FollowedLegs:
    """A prefill engine that computes a prompt of 70 tokens, and a decode worker that follows it."""

    site: Site
    prefill: PrefillEngine
    prompt: ChunkedPrompt
    worker: DecodeWorker
    client: FollowingClient
    session: PeerSession

    def submit(self, local: Blocks = OURS, **options: Any) -> None:
        self.session.submit(self.prompt.order("r", local, **options))

    def reads(self, number: int) -> None:
        """Wait until the pull is parked after so many reads."""
        until(lambda: self.site.fabric.reads == number and self.prompt.waiting == 1)
        self.session.check_integrity()

    def end(self) -> PullEnd:
        end = self.worker.next_end()
        until(lambda: self.session.idle)
        self.session.check_integrity()
        assert self.worker.ends.empty()
        return end


def legs_of(
    site: Site,
    engines: tuple[Engine, Engine] = (PREFILL, DECODE),
    blocks: Blocks = THEIRS,
    model: Model = MODEL,
    **changes: Any,
) -> FollowedLegs:
    """The legs of a prompt at ``blocks``; ``changes`` are made to the context of pulls."""
    prefill, (worker,) = site.prefill(engines[0], model=model), site.decode(engines[1], model)
    prompt = ChunkedPrompt(prefill, blocks)
    client = follow(worker, prompt)
    return FollowedLegs(site, prefill, prompt, worker, client, site.session(worker, prompt.remote(), **changes))
