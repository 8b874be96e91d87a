"""Memory for large transfers begins with a huge page, and is there to the last byte."""

import mmap

import pytest

from shardctl.base.huge_pages import allocate_pages

HUGE = 2 << 20


@pytest.mark.parametrize(("nbytes", "alignment"), [(1, 4096), (HUGE - 1, 4096), (HUGE, HUGE), (8 * HUGE + 4096, HUGE)])
def test_memory_begins_with_a_page_as_large_as_there_is_room_for(nbytes: int, alignment: int) -> None:
    memory = allocate_pages(nbytes)
    assert memory.shape == (nbytes,)
    assert memory.ctypes.data % alignment == 0
    assert not memory.any()
    memory[:] = 1
    assert memory.sum() == nbytes


def test_a_system_without_huge_pages_has_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert len(allocate_pages(HUGE)) == HUGE


def test_only_whole_huge_pages_of_the_memory_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Watched(mmap.mmap):
        def madvise(self, option: int, _start: int = 0, length: int = 0) -> None:
            asked.append((option, length))
            raise OSError(22, "this kernel has no huge pages")

    monkeypatch.setattr(mmap, "mmap", Watched)
    allocate_pages(3 * HUGE + 5)[:] = 1
    assert asked == [(mmap.MADV_HUGEPAGE, 3 * HUGE)]
