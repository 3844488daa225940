"""Who has read a prompt is known when the conversation goes on."""

from typing import Any

import pytest

from pd_connector.config import ConfigError
from pd_connector.orders import Orders, PullOrder
from pd_connector.scheduler.decode.peer_prefixes import PeerPrefixes
from pd_connector.scheduler.readers import Readers
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World
from transfer.peers import Address

BLOCK, OUTPUTS = 16, 200
FIRST = list(range(200))
READER = Address("10.0.0.5", 8999)


def hashes(*blocks: int) -> list[bytes]:
    return [bytes([each]) * 32 for each in blocks]


def test_the_reader_of_the_longest_beginning_is_named() -> None:
    readers = Readers()
    for lease_id, blocks, reader in (("a", (1, 2), "10.0.0.5:8999"), ("b", (1, 2, 3, 4, 5), "[fd00::1]:7")):
        readers.leased(lease_id, hashes(*blocks))
        readers.read(lease_id, reader)
    assert readers.reader_of(hashes(1, 2, 9, 9)) == READER
    assert readers.reader_of(hashes(1, 2, 3, 4, 5, 9)) == Address("fd00::1", 7)
    assert readers.reader_of(hashes(8, 9)) is None
    assert readers.reader_of([]) is None


def test_the_last_one_that_has_read_a_prompt_is_named() -> None:
    readers = Readers()
    for lease_id, reader in (("a", "10.0.0.4:1"), ("b", str(READER))):
        readers.leased(lease_id, hashes(1, 2))
        readers.read(lease_id, reader)
    assert readers.reader_of(hashes(1, 2)) == READER


def test_a_conversation_is_known_again_without_what_a_template_has_put_at_its_end() -> None:
    readers = Readers()
    readers.leased("a", hashes(1, 2, 3, 4, 5))
    readers.read("a", str(READER))
    assert readers.reader_of(hashes(1, 2, 3, 9)) == READER
    assert readers.reader_of(hashes(1, 2, 9)) is None


@pytest.mark.parametrize(
    ("lease_id", "prefixes_at"), [("b", str(READER)), ("a", ""), ("a", "0.0.0.0:1"), ("a", "here"), ("a", "::1:2")]
)
def test_what_is_no_address_or_of_another_lease_is_ignored(lease_id: str, prefixes_at: str) -> None:
    readers = Readers()
    readers.leased("a", hashes(1, 2))
    readers.read(lease_id, prefixes_at)
    assert readers.reader_of(hashes(1, 2)) is None


def test_prompts_without_a_whole_block_are_not_remembered() -> None:
    readers = Readers()
    readers.leased("a", [])
    readers.read("a", str(READER))
    assert readers.reader_of(hashes(1)) is None


def test_the_last_prompts_are_remembered() -> None:
    readers = Readers(max_prompts=2)
    for number in range(3):
        readers.leased(f"unread {number}", hashes(100 + number))
    for number in range(3):
        readers.read(f"unread {number}", str(READER))
    assert [readers.reader_of(hashes(100 + number)) for number in range(3)] == [None, READER, READER]
    for number in range(8):
        readers.leased(f"read {number}", hashes(number))
        readers.read(f"read {number}", str(READER))
    assert readers.reader_of(hashes(101)) is None
    assert readers.reader_of(hashes(7)) == READER


def test_a_prompt_that_is_read_again_is_remembered_anew() -> None:
    readers = Readers(max_prompts=1)  # and three hashes
    for number, block in enumerate((1, 2, 3, 1, 4)):
        readers.leased(f"lease {number}", hashes(block))
        readers.read(f"lease {number}", str(READER))
    assert [block for block in range(1, 5) if readers.reader_of(hashes(block))] == [1, 3, 4]


def take_turn(world: World, prefill: EngineSim, decode: EngineSim, tokens: list[int]) -> tuple[int, list[int]]:
    """Both legs of a request; how many tokens P computes of it, and all tokens of prompt and answer."""
    name = f"turn {len(prefill.computed_of)}"
    prefill.ask(ClientRequest(name, tokens, OUTPUTS, decode))
    while f"{name}-d" not in decode.requests:
        world.step()
    _, known = decode.requests[f"{name}-d"]
    world.run(20.0)
    return prefill.computed_of[f"{name}-p"], list(known.all_token_ids)


def test_an_engine_asks_who_has_read_the_beginning_of_a_conversation(world: World) -> None:
    readers = [EngineSim(world, "kv_consumer", 60, serve_prefixes=True) for _ in range(2)]
    prefill = EngineSim(world, "kv_producer", 60, peers=["readers"])
    for number, decode in enumerate(readers):
        computed, conversation = take_turn(world, prefill, decode, [tokens + number for tokens in FIRST])
        assert computed == len(FIRST)
        assert not prefill.counts["prefixes: asked"], "nobody has read it before"
        computed, conversation = take_turn(world, prefill, decode, [*conversation, *range(500, 520)])
        assert computed == len(FIRST) + OUTPUTS + 20 - (len(FIRST) + OUTPUTS - 1) // BLOCK * BLOCK
        other = readers[1 - number]
        assert other.counts["prefixes_served: found"] == number
        prefill.counts.clear()
    world.run(1.0)
    assert not any(each.leases or each.blocks_in_use for each in (prefill, *readers))


def test_one_that_serves_no_prefixes_is_not_asked(world: World) -> None:
    prefill, decode = EngineSim(world, "kv_producer", 60, peers=["readers"]), EngineSim(world, "kv_both", 60)
    _, conversation = take_turn(world, prefill, decode, FIRST)
    take_turn(world, prefill, decode, [*conversation, *range(500, 520)])
    assert not prefill.counts["prefixes: asked"]


def test_a_reader_is_looked_for_once_a_request(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = EngineSim(world, "kv_producer", 60, peers=["readers"])
    looked: list[int] = []
    monkeypatch.setattr(Readers, "reader_of", lambda _, of_prompt: looked.append(len(of_prompt)))
    request = ClientRequest("r", FIRST, 1)
    prefill.ask(request)
    _, waiting = prefill.requests["r-d"]
    peers = prefill.role_of(PeerPrefixes)
    assert not any(peers.must_wait(waiting, 0) for _ in range(3))
    world.run(1.0)
    assert request.ended == "finished"
    assert looked == [len(FIRST) // BLOCK]


def test_an_engine_that_nobody_reads_has_no_readers_to_ask(world: World) -> None:
    with pytest.raises(ConfigError, match="only an engine that prefills for others"):
        EngineSim(world, "kv_consumer", 60, peers=["readers"])


@pytest.mark.parametrize("kind", ["pulls", "landings", "canaries"])
def test_whatever_reads_a_prompt_tells_where_its_engine_serves_prefixes(kind: str) -> None:
    remote: Any = None
    ordered: dict[str, Any] = {kind: (PullOrder("r", remote, ((1,),), 0, 15, "pull"),)}
    orders = Orders(**ordered).served_at(str(READER))
    assert [order.prefixes_at for order in getattr(orders, kind)] == [str(READER)]
