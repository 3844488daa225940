"""What every transfer engine must do, over each of them.

Covers: transfer.engine.interface.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from layout.copies import EMPTY, Copies
from layout.geometry import Identity, Region
from tests.support.engine.pairs import MEMORY_BYTES, EnginePair
from tests.support.memory import Memory, copies, even_copies
from transfer.engine.interface import EngineStartError, ReadFailed, TransferEngine
from transfer.errors import TransferError

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # of Triton 3.6's interpreter


def test_a_read_brings_exactly_the_bytes_of_its_descriptors(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    runs = [(0, 4096, 100), (1000, 0, 1), (4096, 65536, 4096), (MEMORY_BYTES - 7, 3, 7)]
    link.read(copies(pair.destination.region, pair.source.region, runs), 10)
    expected = np.zeros(MEMORY_BYTES, np.uint8)
    for destination, source, size in runs:
        expected[destination : destination + size] = pair.source.view[source : source + size]
    assert np.array_equal(pair.destination.view, expected)


def test_a_batch_of_5000_descriptors_lands_whole(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    link.read(even_copies(pair.destination.region, pair.source.region, 5000, 512), 20)
    assert np.array_equal(pair.destination.view[: 5000 * 512], pair.source.view[: 5000 * 512])
    assert not pair.destination.view[5000 * 512 :].any()


def test_one_descriptor_of_all_memory_lands_whole(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    link.read(even_copies(pair.destination.region, pair.source.region, 1, MEMORY_BYTES), 20)
    assert np.array_equal(pair.destination.view, pair.source.view)


def test_an_empty_batch_is_read_at_once(pair: EnginePair) -> None:
    pair.reader.open(pair.peer.address, [pair.source.region]).read(EMPTY, 0)


def test_a_second_read_sees_what_the_peer_wrote_since(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    batch = even_copies(pair.destination.region, pair.source.region, 2, 4096)
    link.read(batch, 10)
    pair.source.view[:8192] = 200
    link.read(batch, 10)
    assert (pair.destination.view[:8192] == 200).all()


def test_links_to_two_peers_read_at_the_same_time(pair: EnginePair, engines: Iterator[TransferEngine]) -> None:
    other, other_source = next(engines), Memory.of_noise(MEMORY_BYTES, seed=2)
    other.register([other_source.region])
    half = MEMORY_BYTES // 2
    batches = [
        (pair.peer.address, pair.source, copies(pair.destination.region, pair.source.region, [(0, 0, half)])),
        (other.address, other_source, copies(pair.destination.region, other_source.region, [(half, half, half)])),
    ]
    failures: list[BaseException] = []

    def read(address: str, source: Memory, batch: Copies) -> None:
        try:
            link = pair.reader.open(address, [source.region])
            for _ in range(5):
                link.read(batch, 20)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=batch) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert np.array_equal(pair.destination.view[:half], pair.source.view[:half])
    assert np.array_equal(pair.destination.view[half:], other_source.view[half:])


@pytest.mark.parametrize(
    ("run", "rule"),
    [
        ((0, 0, 0), "not positive"),
        ((0, 0, -5), "not positive"),
        ((MEMORY_BYTES - 10, 0, 11), "destination is outside"),
        ((-1, 0, 10), "destination is outside"),
        ((0, MEMORY_BYTES - 10, 11), "source is outside"),
        ((0, -1, 10), "source is outside"),
        ((0, 0, 2**63 - 1), "destination is outside"),
    ],
)
def test_a_descriptor_outside_registered_memory_is_refused_and_nothing_is_read(
    pair: EnginePair, run: tuple[int, int, int], rule: str
) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    with pytest.raises(ValueError, match=rule) as refusal:
        link.read(copies(pair.destination.region, pair.source.region, [(0, 0, 64), run, (0, 0, 0)]), 10)
    assert "descriptor 1 of 3" in str(refusal.value)
    assert hex(pair.destination.region.address + run[0]) in str(refusal.value)
    assert not pair.destination.view.any()


def test_a_read_into_memory_that_was_never_registered_is_refused(pair: EnginePair) -> None:
    stranger = Memory(4096)
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    with pytest.raises(ValueError, match="destination is outside the memory registered here"):
        link.read(even_copies(stranger.region, pair.source.region, 1, 64), 10)


def test_memory_may_be_registered_after_a_link_was_opened(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    later = Memory(4096)
    pair.reader.register([later.region])
    link.read(even_copies(later.region, pair.source.region, 1, 4096), 10)
    assert np.array_equal(later.view, pair.source.view[:4096])


def test_a_source_that_the_peer_never_registered_fails_the_read(pair: EnginePair) -> None:
    secret = Memory.of_noise(1 << 20, seed=9)
    link = pair.reader.open(pair.peer.address, [pair.source.region, secret.region])
    with pytest.raises(ReadFailed):
        link.read(even_copies(pair.destination.region, secret.region, 4, 65536), 5)
    pair.reader.close()
    assert not pair.destination.view.any()


def test_an_empty_region_is_refused(engines: Iterator[TransferEngine]) -> None:
    with pytest.raises(EngineStartError, match="is empty"):
        next(engines).register([Region(Memory(4096).region.address, 0)])


@pytest.mark.parametrize("before", [0, 1])
def test_overlapping_regions_are_refused_and_named(engines: Iterator[TransferEngine], before: int) -> None:
    memory, engine = Memory(8192), next(engines)
    start = memory.region.address
    regions = [Region(start, 4097), Region(start + 4096, 4096)]
    engine.register(regions[:before])
    with pytest.raises(EngineStartError, match=f"{start + 4096:#x} of 4096 bytes overlaps region at {start:#x}"):
        engine.register(regions[before:] if before else regions[::-1])


def test_adjacent_regions_are_registered_and_not_read_across(pair: EnginePair) -> None:
    memory = Memory(8192)
    start = memory.region.address
    pair.reader.register([Region(start, 4096), Region(start + 4096, 4096)])
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    link.read(even_copies(memory.region, pair.source.region, 2, 4096), 10)
    with pytest.raises(ValueError, match="destination is outside"):
        link.read(even_copies(memory.region, pair.source.region, 1, 8192), 10)


def test_a_peer_that_is_gone_cannot_be_opened(pair: EnginePair) -> None:
    address = pair.peer.address
    pair.peer.close()
    name = address.partition("/")[0]  # what follows may be a secret
    with pytest.raises(ReadFailed, match=f"cannot reach the transfer engine at {name}") as failure:
        pair.reader.open(address, [pair.source.region])
    assert failure.value.settled


def test_a_link_to_the_right_engine_reads_and_proves_it(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region], pair.peer.identity)
    for _ in range(3):
        link.read(even_copies(pair.destination.region, pair.source.region, 2, 64), 10)
        link.prove(10)
    assert np.array_equal(pair.destination.view[:128], pair.source.view[:128])


def test_no_two_engines_have_one_identity(engines: Iterator[TransferEngine]) -> None:
    assert next(engines).identity.nonce != next(engines).identity.nonce


def test_an_engine_with_another_number_than_was_announced_is_not_opened(pair: EnginePair) -> None:
    announced = replace(pair.peer.identity, nonce=pair.reader.identity.nonce)
    with pytest.raises(ReadFailed, match="another process than the one that was announced answers") as failure:
        pair.reader.open(pair.peer.address, [pair.source.region], announced)
    assert failure.value.settled


@pytest.mark.parametrize(
    ("address", "nonce"),
    [(4096, b"short"), (4096, bytes(1 << 20)), (0, bytes(16)), (-1, bytes(16)), (2**63, bytes(16))],
)
def test_an_identity_that_is_none_is_refused(pair: EnginePair, address: int, nonce: bytes) -> None:
    with pytest.raises(ReadFailed, match=r"announced an identity of .* and must announce 16 bytes") as failure:
        pair.reader.open(pair.peer.address, [pair.source.region], Identity(address, nonce))
    assert failure.value.settled


def test_a_peer_that_ends_is_not_proven(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region], pair.peer.identity)
    link.read(even_copies(pair.destination.region, pair.source.region, 2, 64), 10)
    pair.peer.close()
    with pytest.raises(ReadFailed) as failure:
        link.prove(5)
    assert failure.value.settled
    with pytest.raises(ReadFailed):
        link.prove(5)


def test_a_closed_link_proves_nothing(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region], pair.peer.identity)
    link.close()
    with pytest.raises(ReadFailed, match="closed"):
        link.prove(5)


def test_what_succeeded_or_was_refused_has_settled(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region], pair.peer.identity)
    assert link.settled
    link.read(even_copies(pair.destination.region, pair.source.region, 2, 64), 10)
    with pytest.raises(ValueError, match="not positive"):
        link.read(copies(pair.destination.region, pair.source.region, [(0, 0, 0)]), 10)
    assert link.settled
    link.close()
    assert link.settled


def test_overlapping_regions_of_a_peer_are_refused(pair: EnginePair) -> None:
    region = pair.source.region
    with pytest.raises(ReadFailed, match="overlaps") as failure:
        pair.reader.open(pair.peer.address, [region, Region(region.address + 1, 5)])
    assert failure.value.settled


def test_a_closed_link_refuses_to_read(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    link.close()
    link.close()
    with pytest.raises(ReadFailed, match="closed") as failure:
        link.read(even_copies(pair.destination.region, pair.source.region, 1, 64), 10)
    assert failure.value.settled


def test_a_peer_can_be_opened_again_after_its_link_was_closed(pair: EnginePair) -> None:
    pair.reader.open(pair.peer.address, [pair.source.region]).close()
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    link.read(even_copies(pair.destination.region, pair.source.region, 1, 64), 10)
    assert np.array_equal(pair.destination.view[:64], pair.source.view[:64])


def test_a_closed_engine_closes_its_links_and_refuses_everything(pair: EnginePair) -> None:
    link = pair.reader.open(pair.peer.address, [pair.source.region])
    pair.reader.close()
    pair.reader.close()
    with pytest.raises(ReadFailed, match="closed"):
        link.read(even_copies(pair.destination.region, pair.source.region, 1, 64), 10)
    with pytest.raises(ReadFailed, match="closed"):
        pair.reader.open(pair.peer.address, [pair.source.region])
    with pytest.raises(EngineStartError, match="closed"):
        pair.reader.register([Memory(4096).region])
    assert not pair.destination.view.any()


@pytest.mark.parametrize("error", [EngineStartError, ReadFailed])
def test_what_engines_raise_on_purpose_is_caught_as_one_kind_of_error(error: type[Exception]) -> None:
    assert issubclass(error, TransferError)
