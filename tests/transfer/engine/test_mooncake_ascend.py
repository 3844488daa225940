"""Rules of Ascend's transport: what is registered, how much of it, and one engine in a process.

The calls into Mooncake are replaced: its library for Ascend needs CANN.
"""

import os
from collections.abc import Iterator
from unittest.mock import MagicMock, create_autospec

import pytest

from layout.geometry import Region
from tests.support.engine.pairs import mooncake_engines
from tests.support.memory import Memory
from transfer.engine import mooncake
from transfer.engine.interface import EngineStartError
from transfer.engine.mooncake import IDENTITY_BYTES, MooncakeEngine, MooncakeOptions
from transfer.engine.mooncake_native import NativeEngine, NativeOptions

MIB = 1 << 20
OPTIONS = MooncakeOptions("127.0.0.1", protocol="ascend")


class Pages:
    """Memory for identities at an address that nobody has, as device memory is to the host."""

    def __init__(self, address: int = 64 * MIB) -> None:
        self.region = Region(address, -(-IDENTITY_BYTES // (2 * MIB)) * 2 * MIB)
        self.written: dict[int, bytes] = {}

    def write(self, address: int, data: bytes) -> None:
        self.written[address] = data

    def read(self, address: int, size: int) -> bytes:
        return self.written[address][:size]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What stands in for the library's engine, of which there may be several one after the other."""
    engine: MagicMock = create_autospec(NativeEngine, instance=True)
    engine.address = "127.0.0.1:15000"
    monkeypatch.setattr(mooncake, "NativeEngine", lambda options, lend: engine)
    return engine


@pytest.fixture
def engine(native: MagicMock) -> Iterator[MooncakeEngine]:
    engine = MooncakeEngine(OPTIONS, Pages())
    yield engine
    engine.close()


def test_the_engines_number_lies_in_the_memory_that_it_was_given(native: MagicMock) -> None:
    pages = Pages()
    engine = MooncakeEngine(OPTIONS, pages)
    assert pages.written == {pages.region.address: engine.identity.nonce}
    assert engine.identity.address == pages.region.address
    native.register.assert_called_once_with([pages.region])
    assert pages.region.size >= IDENTITY_BYTES
    with engine.scratch.borrow() as address:
        assert address is not None
        assert pages.region.address < address < pages.region.end
    engine.close()


def test_memory_that_is_not_aligned_is_refused_before_anything_is_registered(
    engine: MooncakeEngine, native: MagicMock
) -> None:
    native.register.reset_mock()
    with pytest.raises(EngineStartError) as refused:
        engine.register([Region(2 * MIB, MIB), Region(6 * MIB + 4096, MIB)])
    assert "the region at 0x601000 of 1048576 bytes" in str(refused.value)
    assert "begins 4096 bytes after a multiple of 2097152 bytes" in str(refused.value)
    assert "please report" in str(refused.value)
    native.register.assert_not_called()


def test_identities_in_memory_that_is_not_aligned_are_refused(native: MagicMock) -> None:
    with pytest.raises(EngineStartError, match="begins 8192 bytes after a multiple of 2097152"):
        MooncakeEngine(OPTIONS, Pages(64 * MIB + 8192))
    native.register.assert_not_called()


def regions(count: int) -> list[Region]:
    return [Region((100 + 2 * number) * MIB, MIB) for number in range(count)]


def test_as_many_regions_as_are_possible_can_be_registered_in_all(engine: MooncakeEngine) -> None:
    engine.register(regions(200))
    engine.register(regions(255)[200:])
    with pytest.raises(EngineStartError) as refused:
        engine.register(regions(256)[255:])
    assert "cannot register 257 regions of memory" in str(refused.value)
    assert "at most 256 are possible" in str(refused.value)
    assert "cross_layer_blocks" in str(refused.value)


def test_a_process_has_one_engine_at_a_time(engine: MooncakeEngine) -> None:
    with pytest.raises(EngineStartError, match=r"has a transfer engine with protocol 'ascend' already.*MultiConnector"):
        MooncakeEngine(OPTIONS, Pages())
    engine.close()
    engine.close()
    MooncakeEngine(OPTIONS, Pages()).close()


def test_an_engine_that_did_not_start_leaves_the_process_to_the_next(
    native: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.register.side_effect = EngineStartError("Mooncake refused")
    with pytest.raises(EngineStartError, match="Mooncake refused"):
        MooncakeEngine(OPTIONS, Pages())
    native.delete.assert_called_once()
    native.register.side_effect = None
    MooncakeEngine(OPTIONS, Pages()).close()


@pytest.mark.parametrize(
    ("protocol", "said"),
    [("ascend", "'Register mem ret' above.*50 GB.*lower gpu_memory_utilization"), ("tcp", "invalid argument")],
)
def test_of_what_cann_refuses_its_own_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, protocol: str, said: str
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    library = MagicMock()
    library.get_rpc_port.return_value = 15000
    library.register_memory.side_effect = [0, -1]
    engine = NativeEngine(NativeOptions("127.0.0.1", protocol, "", 10, 10), lambda _: library)
    with pytest.raises(EngineStartError, match=rf"region at 0x6600000 .* \(code -1\): .*{said}"):
        engine.register(regions(2))
    engine.delete()
    library.unregister_memory.assert_called_once_with(100 * MIB)


def test_a_peer_occupies_two_threads_of_the_transport_however_many_reads_there_are_from_it() -> None:
    limits = OPTIONS.limits
    window = limits.window()
    reads = [window.enter() for _ in range(4)]
    assert sum(window.try_acquire(read, limits.per_call // 4, window.call_s) for read in reads * 2) == 2


def test_other_transports_have_none_of_these_rules() -> None:
    engines = mooncake_engines()
    for engine in (next(engines), next(engines)):
        engine.register([Memory(8192).region])
