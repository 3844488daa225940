"""Huge pages: what the kernel says that it gives, and what it has given to a range of memory."""

import mmap
from pathlib import Path

import pytest

from layout.geometry import Region
from transfer import huge_pages
from transfer.memory import HostMemory, Placement

HUGE = Placement(huge_pages=True)
GIVES = huge_pages.mode() in ("always", "madvise")

#: Two mappings, as the kernel writes them: 4 MiB from 0x7f0000000000 on, and 2 MiB right after them.
SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                4096 kB
AnonHugePages:      2048 kB
VmFlags: rd wr mr mw me dc ac hg
7f0000400000-7f0000600000 rw-p 00000000 00:00 0                          [anon: a name]
Size:               2048 kB
AnonHugePages:      2048 kB
VmFlags: rd wr mr mw me dc ac hg
"""


@pytest.fixture
def system(tmp_path: Path) -> Path:
    settings = tmp_path / "sys/kernel/mm/transparent_hugepage"
    settings.mkdir(parents=True)
    (settings / "enabled").write_text("always [madvise] never\n")
    (settings / "hpage_pmd_size").write_text("536870912\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/smaps").write_text(SMAPS)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "mode"),
    [
        ("[always] madvise never\n", "always"),
        ("always [madvise] never\n", "madvise"),
        ("always madvise [never]", "never"),
    ],
)
def test_the_mode_is_the_word_in_brackets(system: Path, written: str, mode: str) -> None:
    (system / "sys/kernel/mm/transparent_hugepage/enabled").write_text(written)
    assert huge_pages.mode(system) == mode


def test_a_kernel_without_them_has_no_mode_and_the_usual_size(tmp_path: Path) -> None:
    assert huge_pages.mode(tmp_path) == ""
    assert huge_pages.page_bytes(tmp_path) == 2 << 20


def test_a_huge_page_may_be_larger(system: Path) -> None:
    assert huge_pages.page_bytes(system) == 512 << 20


@pytest.mark.parametrize(
    ("first", "size", "given"),
    [
        (0, 4 << 20, 2 << 20),
        (0, 6 << 20, 4 << 20),
        (4 << 20, 2 << 20, 2 << 20),
        (5 << 20, 1 << 20, 1 << 20),  # a part of a mapping: no more than lies in it
        (-(1 << 20), 1 << 20, 0),
        (6 << 20, 1 << 20, 0),
    ],
)
def test_what_is_given_is_counted_in_the_mappings_of_the_range(system: Path, first: int, size: int, given: int) -> None:
    assert huge_pages.given(Region(0x7F0000000000 + first, size), system) == given


def test_a_system_that_does_not_say_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="smaps"):
        huge_pages.given(Region(4096, 4096), tmp_path)


# Of this machine


@pytest.mark.skipif(not GIVES, reason="this machine gives no huge pages to those who ask")
def test_memory_that_asks_for_them_gets_them_and_other_memory_does_not() -> None:
    size = 4 * huge_pages.page_bytes()
    asked, other = HostMemory(size, HUGE), HostMemory(size)
    assert huge_pages.given(asked.region) == 0, "no page is allocated yet"
    asked.allocate()
    other.allocate()
    assert huge_pages.given(asked.region) == size
    assert huge_pages.given(other.region) == 0


@pytest.mark.skipif(not GIVES, reason="this machine gives no huge pages to those who ask")
def test_a_size_that_is_no_whole_huge_page_is_rounded_off_with_small_ones() -> None:
    page = huge_pages.page_bytes()
    memory = HostMemory(page + mmap.PAGESIZE + 5, HUGE)
    assert memory.region.size == page + mmap.PAGESIZE + 5
    assert memory.region.address % page == 0
    memory.allocate()
    assert huge_pages.given(memory.region) >= page
