"""The NUMA node of memory, as the kernel itself shows it in /proc: asked for, kept, given back, and refused.

A machine with one node shows what was asked for as well as one with many.
"""

import ctypes
import errno
import mmap
import os
import platform
import threading
from types import SimpleNamespace

import pytest

from layout.geometry import Region
from tests.support.memory import Memory
from tests.support.numa import needs_a_choice, online, policy
from transfer import numa

pytestmark = needs_a_choice


def test_the_kernel_knows_which_node_memory_prefers() -> None:
    chosen, other = Memory(10 * mmap.PAGESIZE), Memory(10 * mmap.PAGESIZE)
    numa.prefer(chosen.region, online())
    assert policy(chosen.region) == f"prefer:{online()}"
    assert policy(other.region) == "default"


def test_a_size_that_is_no_whole_page_is_placed_to_its_last_byte() -> None:
    memory = Memory(3 * mmap.PAGESIZE + 5)
    numa.prefer(memory.region, online())
    memory.view[:] = 1
    assert policy(memory.region) == f"prefer:{online()}"
    assert numa.nodes_of(memory.region) == {online(): 4}


def test_only_pages_that_are_allocated_lie_somewhere() -> None:
    memory = Memory(8 * mmap.PAGESIZE)
    assert not numa.nodes_of(memory.region)
    memory.view[2 * mmap.PAGESIZE] = memory.view[7 * mmap.PAGESIZE] = 1
    assert numa.nodes_of(memory.region) == {online(): 2}


def test_of_much_memory_a_few_pages_are_looked_at_from_the_first_to_the_last() -> None:
    memory = Memory(1000 * mmap.PAGESIZE)
    memory.view[0] = memory.view[-1] = 1
    assert numa.nodes_of(memory.region, samples=10) == {online(): 2}
    memory.view[:: mmap.PAGESIZE] = 1
    assert numa.nodes_of(memory.region, samples=10) == {online(): 10}


def test_a_thread_prefers_a_node_for_a_while_and_no_other_thread_does() -> None:
    memory, seen = Memory(mmap.PAGESIZE), []
    with numa.preferring(online()):
        assert policy(memory.region) == f"prefer:{online()}"
        other = threading.Thread(target=lambda: seen.append(policy(memory.region)))
        with numa.preferring(online()):
            pass
        assert policy(memory.region) == f"prefer:{online()}", "what was before is not given back"
    assert policy(memory.region) == "default"
    other.start()
    other.join()
    assert seen == ["default"]


def test_what_was_preferred_is_given_back_after_a_failure() -> None:
    memory = Memory(mmap.PAGESIZE)
    with pytest.raises(RuntimeError, match="of the caller"), numa.preferring(online()):
        raise RuntimeError("of the caller")
    assert policy(memory.region) == "default"


@pytest.mark.parametrize("node", [1023, 1024, 1 << 20, -1])
def test_a_node_that_is_not_there_is_refused(node: int) -> None:
    memory = Memory(mmap.PAGESIZE)
    with pytest.raises(OSError, match=r"no such node|no NUMA node") as refused:
        numa.prefer(memory.region, node)
    assert refused.value.errno == errno.EINVAL
    with pytest.raises(OSError, match=r"no such node|no NUMA node"), numa.preferring(node):
        pass


def test_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(OSError, match="mbind: Bad address"):
        numa.prefer(Region(1 << 40, mmap.PAGESIZE), online())


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_container_that_forbids_it_is_named(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Of the system, only its answer is played: a filter of system calls cannot be taken off again."""

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=_Refusing(code)))
    with pytest.raises(OSError, match=f"mbind: {os.strerror(code)}.*container") as refused:
        numa.prefer(Memory(mmap.PAGESIZE).region, online())
    assert refused.value.errno == code


class _Refusing:
    """A call of the system that refuses."""

    def __init__(self, code: int) -> None:
        self.code, self.restype = code, None

    def __call__(self, *_: object) -> int:
        ctypes.set_errno(self.code)
        return -1


def test_a_machine_of_another_kind_is_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "sparc64")
    with pytest.raises(OSError, match=r"mbind is not known on .* sparc64"):
        numa.prefer(Memory(mmap.PAGESIZE).region, online())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls_have_the_numbers_of_the_systems_header(machine: str) -> None:
    """Where this system has its headers, for its own kind of machine."""
    names = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
    try:
        with open(names[machine]) as header:
            defined = dict(line.split()[1:3] for line in header if line.startswith("#define __NR_"))
    except OSError:
        pytest.skip(f"{names[machine]} is not installed")
    calls = numa._CALLS[machine]
    for name in ("mbind", "get_mempolicy", "set_mempolicy", "move_pages"):
        assert int(defined[f"__NR_{name}"]) == getattr(calls, name), name
