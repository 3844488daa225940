"""Mooncake's wheel for NPUs, between two processes on simulated NPUs: one to be read from, and one that reads.

    python -m tests.support.ascend.mooncake_peer serve [before | after]
    python -m tests.support.ascend.mooncake_peer read PEER [POOL]
    python -m tests.support.ascend.mooncake_peer link PEER ...

Below Mooncake's transport for Ascend is a stand-in for CANN's ADXL (``adxl/adxl.cpp``); ``build_adxl`` compiles it. A
process that serves prints ``PEER`` and how to reach it, and lives until its standard input ends. With ``before`` or
``after``, it shares vllm-ascend's engine with a pool, which registers the same memory before or after it does. One that
reads prints what it found, as JSON, also in the pool whose client has the address POOL, where it has put it; one that
links opens links to all peers at once, and prints why each was refused.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from layout.copies import Copies
from layout.geometry import Identity, Region

SERVED_BYTES = 8 << 20
RUNS, RUN_BYTES = 600, 8192
_SOURCE = Path(__file__).parent / "adxl" / "adxl.cpp"


def build_adxl(directory: Path) -> None:
    """Compile the libraries of CANN that Mooncake's wheel is linked with and the simulated runtime is without."""
    shared = ("g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o")
    subprocess.run([*shared, str(directory / "libllm_datadist.so"), str(_SOURCE)], check=True)
    # Nothing of it is used but the name.
    subprocess.run([*shared, str(directory / "libmetadef.so"), "-x", "c++", "/dev/null"], check=True)


def contents() -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return what the memory that is served holds."""
    return np.asarray(np.arange(SERVED_BYTES) % 251, np.uint8)


def start(pool_registers: str = "") -> tuple[Any, Any]:
    """Return an engine on the first NPU, and device memory of ``SERVED_BYTES`` bytes that it has registered.

    ``pool_registers``: "before" or "after", as in the module's description; "" for an engine of its own.
    """
    import torch  # noqa: PLC0415  in the process that was started for it only

    from pd_connector.worker.device_memory import DeviceIdentityMemory, device_memory  # noqa: PLC0415
    from transfer.engine.mooncake import IDENTITY_BYTES, MooncakeEngine, MooncakeOptions  # noqa: PLC0415

    torch.npu.set_device(0)
    options = MooncakeOptions("127.0.0.1", protocol="ascend")
    memory = device_memory(SERVED_BYTES, torch.device("npu", 0), "take less")
    lend = _lender() if pool_registers else None
    if pool_registers == "before":
        _register_as_the_pool(memory)
    engine = MooncakeEngine(options, DeviceIdentityMemory.on_npu(IDENTITY_BYTES), lend)
    engine.register([Region(memory.data_ptr(), SERVED_BYTES)])
    if pool_registers == "after":
        _register_as_the_pool(memory)
    return engine, memory


def _lender() -> Any:
    """Return what lends vllm-ascend's engine beside its pool."""
    from unittest.mock import patch  # noqa: PLC0415

    from pd_connector.vllm.npu import lent_engine  # noqa: PLC0415

    with patch.object(lent_engine, "has_ascend_store", lambda: True):
        return lent_engine.lent_engine()


def _register_as_the_pool(memory: Any) -> None:
    """What the pool's ``MooncakeBackend.register_buffer`` does."""
    from vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine import global_te  # noqa: PLC0415

    global_te.get_transfer_engine("127.0.0.1", device_name=None)
    global_te.register_buffer([memory.data_ptr()], [SERVED_BYTES])


def serve(pool_registers: str = "") -> None:
    """Let others read ``contents``."""
    import torch  # noqa: PLC0415

    engine, memory = start(pool_registers)
    memory.copy_(torch.from_numpy(contents()))
    torch.npu.synchronize()
    identity = engine.identity
    peer = [engine.address, memory.data_ptr(), identity.address, identity.nonce.hex()]
    print("PEER", json.dumps(peer), flush=True)  # noqa: T201  its result
    sys.stdin.read()
    engine.close()


def _pooled(client: str) -> bool:
    """Put ``contents`` into the connector's own pool; return whether they come from there."""
    from transfer.peers import parse_address  # noqa: PLC0415
    from transfer.store.interface import Piece  # noqa: PLC0415
    from transfer.store.mooncake_store import MooncakeStore  # noqa: PLC0415

    store = MooncakeStore(parse_address(client), SERVED_BYTES)
    held = np.ctypeslib.as_array((ctypes.c_uint8 * SERVED_BYTES).from_address(store.buffer.address))
    held[:] = contents()
    is_kept = store.put([Piece("beside the transport", 0, SERVED_BYTES)]) == [True]
    held[:] = 0
    has_come = store.get([Piece("beside the transport", 0, SERVED_BYTES)]) == [True]
    is_equal = bool((held == contents()).all())
    store.close()
    return is_kept and has_come and is_equal


def read(peer: str, pool: str = "") -> None:
    """Read runs of the peer's memory in another order, prove whom they came from, and say how it went."""
    from transfer.engine.interface import ReadFailed  # noqa: PLC0415

    address, start_of_memory, page, nonce = json.loads(peer)
    engine, memory = start()
    region = Region(start_of_memory, SERVED_BYTES)
    link = engine.open(address, [region], Identity(page, bytes.fromhex(nonce)))
    order = np.random.default_rng(0).permutation(RUNS).astype(np.int64)
    runs = np.arange(RUNS, dtype=np.int64) * RUN_BYTES
    sizes = np.full(RUNS, RUN_BYTES, np.int64)
    pooled = _pooled(pool) if pool else False
    link.read(Copies(memory.data_ptr() + runs, start_of_memory + runs[order], sizes), 10.0)
    link.prove(5.0)
    arrived = memory.cpu().numpy()[: RUNS * RUN_BYTES].reshape(RUNS, -1)
    expected = contents()[: RUNS * RUN_BYTES].reshape(RUNS, -1)[order]
    try:
        engine.open(address, [region], Identity(page, bytes(16))).close()
        impostor = ""
    except ReadFailed as refused:
        impostor = str(refused)
    engine.check_integrity()
    equal = bool((arrived == expected).all())
    found = {"equal": equal, "counts": engine.native.counts, "impostor": impostor, "pooled": pooled}
    engine.close()
    print(json.dumps(found), flush=True)  # noqa: T201  its result


def link(*peers: str) -> None:
    """Open a link to each peer, all at once."""
    from transfer.engine.interface import ReadFailed  # noqa: PLC0415

    engine, _ = start()

    def refusal(peer: str) -> str:
        address, start_of_memory, page, nonce = json.loads(peer)
        try:
            engine.open(address, [Region(start_of_memory, SERVED_BYTES)], Identity(page, bytes.fromhex(nonce))).close()
        except ReadFailed as refused:
            return str(refused)
        return ""

    with ThreadPoolExecutor(len(peers)) as threads:
        refusals = list(threads.map(refusal, peers))
    engine.close()
    print(json.dumps(refusals), flush=True)  # noqa: T201  its result


if __name__ == "__main__":
    does: dict[str, Callable[..., None]] = {"serve": serve, "read": read, "link": link}
    does[sys.argv[1]](*sys.argv[2:])
