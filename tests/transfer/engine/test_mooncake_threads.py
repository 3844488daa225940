"""A process to which the system gives no further thread: no link is opened, and the process lives."""

import gc
import os
import subprocess
import sys
import threading

import pytest

from tests.support.memory import Memory
from tests.support.process import OpenResources
from tests.support.waiting import until
from transfer.engine import mooncake_native
from transfer.engine.interface import EngineStartError, ReadFailed
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.engine.mooncake_native import NativeEngine

#: Has Mooncake refused threads, without a look at them before, and ends as any process. The limit is that of a user
#: other than root, whose own processes it counts; it may look at itself nevertheless (PR_SET_DUMPABLE).
PROGRAM = """
import ctypes, encodings.idna, os, resource
from transfer.engine import mooncake_links
from transfer.engine.interface import ReadFailed
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.memory import HostMemory

mooncake_links.check_link_threads = lambda: None
engine, memory = MooncakeEngine(MooncakeOptions("127.0.0.1")), HostMemory(4096)
engine.register([memory.region])
_, hard = resource.getrlimit(resource.RLIMIT_NPROC)
os.setgid(61234); os.setuid(61234); ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
for spare in (0, 1, 2):
    limit = len(os.listdir("/proc/self/task")) + spare
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
    try:
        engine.open(engine.address, [memory.region], engine.identity)
    except ReadFailed as error:
        print(error, flush=True)
engine.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without processes")
def test_a_process_survives_that_mooncake_is_refused_threads() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("no thread left (Resource temporarily unavailable)") >= 2, ended.stdout


def test_an_engine_that_was_refused_a_thread_is_never_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed = []

    class Refused:
        def initialize(self, *known: str) -> int:
            raise RuntimeError("Resource temporarily unavailable")

        def __del__(self) -> None:
            destroyed.append(self)

    monkeypatch.setattr(mooncake_native, "load", lambda options: Refused)
    before = OpenResources.now()
    with pytest.raises(EngineStartError, match=r"no thread left \(Resource temporarily unavailable\).*podPidsLimit"):
        NativeEngine(MooncakeOptions("127.0.0.1"))
    gc.collect()
    assert not destroyed
    assert before.is_all


@pytest.mark.parametrize(
    ("own", "left", "reason"), [(True, 3, "no thread left .* a link needs 4"), (False, 0, "can't start new thread")]
)
def test_no_link_is_opened_with_the_last_threads_of_the_system(
    monkeypatch: pytest.MonkeyPatch, own: bool, left: int, reason: str
) -> None:
    engine, memory = MooncakeEngine(MooncakeOptions("127.0.0.1", engine_per_link=own)), Memory(4096)
    engine.register([memory.region])
    before, start = OpenResources.now(), threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        nonlocal left
        if left == 0:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_one)
        with pytest.raises(ReadFailed, match=reason) as failure:
            engine.open(engine.address, [memory.region], engine.identity)
    assert failure.value.settled
    assert left == 0
    until(lambda: before.is_all)
    engine.open(engine.address, [memory.region], engine.identity).close()
    engine.close()
