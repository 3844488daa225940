"""NUMA as the kernel shows it in /proc: a node of this machine, and what memory prefers."""

import errno
import mmap

import pytest

from layout.geometry import Region
from tests.support.memory import Memory
from transfer import numa


def online() -> int:
    """A node of this machine."""
    with open("/sys/devices/system/node/online") as nodes:
        return int(nodes.read().replace("-", ",").split(",")[0])


def policy(region: Region) -> str:
    """What the kernel says of the pages of a mapping, seen from this thread: "default", "prefer:0"."""
    with open("/proc/thread-self/numa_maps") as maps:
        found = [line.split()[1] for line in maps if int(line.split()[0], 16) == region.address]
    return found[0] if found else "default"


def is_allowed() -> bool:
    """Whether this system lets a process choose: containers often do not."""
    memory = Memory(mmap.PAGESIZE)
    try:
        numa.prefer(memory.region, online())
        numa.nodes_of(memory.region)
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.ENOSYS)
    return True


needs_a_choice = pytest.mark.skipif(
    not is_allowed(), reason="this system lets no process choose the node of its memory"
)
