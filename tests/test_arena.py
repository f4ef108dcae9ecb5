"""The arena's file: what is mapped, what is refused, who holds it, and whose files are removed for it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import EngineError, MemoryBudgetError, SettingsError
from appliance.memory.arena import HEADER_BYTES, Arena, ArenaHeader, ArenaPlace, ArenaState, read_header
from appliance.memory.arena_file import claim_arena
from appliance.memory.layout import ArenaLayout
from appliance.memory.limits import MemoryLimit
from tests.arena_rig import CONTENT_ID, claimed, overwrite, place_in, refuse_to_wait, sealed, shm_folder, small_layout

HEADER_FIELDS_BYTES = 180
OTHER = "f" * 64


@pytest.fixture
def folder() -> Iterator[Path]:
    with shm_folder() as path:
        yield path


@pytest.fixture
def place(folder: Path) -> ArenaPlace:
    return place_in(folder)


def test_a_sealed_arena_shows_every_blob_where_the_layout_says(place: ArenaPlace) -> None:
    content = sealed(place)
    with Arena.open(place) as arena:
        for blobs in place.layout.layers:
            for expert in range(blobs.num_experts):
                start = blobs.offset + expert * blobs.blob.nbytes
                assert arena.view(blobs.layer, expert).tobytes() == content[start : start + blobs.blob.nbytes]


def test_the_address_is_that_of_the_first_blob(place: ArenaPlace) -> None:
    content = sealed(place)
    with Arena.open(place) as arena:
        assert ctypes.string_at(arena.address, arena.nbytes) == content


def test_nothing_can_be_written_through_a_view(place: ArenaPlace) -> None:
    sealed(place)
    with Arena.open(place) as arena, pytest.raises(ValueError, match="read-only"):
        arena.view(0, 0)[0] = 1


@pytest.mark.parametrize(("layer", "expert"), [(0, 3), (2, 0), (0, -1), (-1, 0)])
def test_an_expert_that_does_not_exist_is_an_index_error(place: ArenaPlace, layer: int, expert: int) -> None:
    sealed(place)
    with Arena.open(place) as arena, pytest.raises(IndexError):
        arena.view(layer, expert)


def test_the_header_lies_as_its_picture_says(place: ArenaPlace) -> None:
    sealed(place)
    page = place.path.read_bytes()[:HEADER_BYTES]
    assert struct.unpack_from("<8sII", page, 0) == (b"TANDEMAR", 1, 2)
    assert page[16:80].decode() == CONTENT_ID
    assert page[80:144].decode() == place.layout.digest()
    assert struct.unpack_from("<QQQ", page, 144) == (place.layout.total_bytes, place.layout.total_bytes, os.getpid())
    assert struct.unpack_from("<I", page, 176) == (zlib.crc32(page[:176]),)
    assert not any(page[HEADER_FIELDS_BYTES:])


@given(st.integers(0, HEADER_FIELDS_BYTES - 1), st.integers(1, 255))
def test_a_header_with_one_changed_byte_is_none(position: int, change: int) -> None:
    page = bytearray(ArenaHeader(ArenaState.SEALED, CONTENT_ID, OTHER, 1 << 40, 7, 123, 456).encode())
    page[position] ^= change
    descriptor = os.memfd_create("header")
    try:
        os.write(descriptor, page)
        assert read_header(descriptor) is None
    finally:
        os.close(descriptor)


def test_a_missing_arena_is_refused(place: ArenaPlace) -> None:
    with pytest.raises(EngineError, match=r"tandem-0123456789abcdef-[0-9a-f]{8}\.arena is missing"):
        Arena.open(place)


def test_an_arena_that_its_loader_left_half_written_is_refused(place: ArenaPlace) -> None:
    with claimed(place) as file:
        file.reserve(lambda _: None)
    with pytest.raises(EngineError, match="is filling"):
        Arena.open(place)


def test_an_arena_that_is_being_written_names_its_loader(place: ArenaPlace) -> None:
    with claimed(place) as file:
        file.reserve(lambda _: None)
        with pytest.raises(EngineError, match=f"is being written by process {os.getpid()}"):
            Arena.open(place)


def test_an_arena_whose_header_is_damaged_is_refused(place: ArenaPlace) -> None:
    sealed(place)
    overwrite(place, 20 - HEADER_BYTES, b"?")
    with pytest.raises(EngineError, match="has no valid header"):
        Arena.open(place)


def test_another_model_under_the_same_name_is_refused(folder: Path, place: ArenaPlace) -> None:
    twin = place_in(folder, content_id=CONTENT_ID[:16] + "0" * 48)
    sealed(twin)
    assert twin.path == place.path
    with pytest.raises(EngineError, match="another model"):
        Arena.open(place)


def test_a_file_that_was_cut_short_is_refused_and_not_mapped(place: ArenaPlace) -> None:
    sealed(place)
    os.truncate(place.path, place.file_bytes - 1)
    with pytest.raises(EngineError, match=f"has {place.file_bytes - 1} bytes instead of {place.file_bytes}"):
        Arena.open(place)


def test_a_closed_arena_is_used_no_more(place: ArenaPlace) -> None:
    sealed(place)
    arena = Arena.open(place)
    arena.close()
    with pytest.raises(EngineError, match="after it was closed"):
        arena.view(0, 0)


def test_the_lock_is_held_until_the_last_view_is_gone(place: ArenaPlace) -> None:
    sealed(place)
    arena = Arena.open(place)
    view = arena.view(0, 0)
    arena.close()
    assert not can_lock(place.path)
    del view
    assert can_lock(place.path)


def test_many_engines_map_the_same_arena(place: ArenaPlace) -> None:
    sealed(place)
    with Arena.open(place) as first, Arena.open(place) as second:
        assert first.view(1, 2).tobytes() == second.view(1, 2).tobytes()


def test_a_sealed_arena_needs_no_loader(place: ArenaPlace) -> None:
    sealed(place)
    assert claim_arena(place, refuse_to_wait) is None


def test_a_sealed_and_mapped_arena_needs_no_loader(place: ArenaPlace) -> None:
    sealed(place)
    with Arena.open(place):
        assert claim_arena(place, refuse_to_wait) is None


def test_a_second_loader_waits_and_then_finds_the_arena_sealed(place: ArenaPlace) -> None:
    first = claimed(place)
    first.reserve(lambda _: None)
    first.report(42)
    seen: list[int] = []

    def on_wait(header: ArenaHeader | None) -> None:
        assert header is not None
        seen.append(header.filled_bytes)
        first.seal()
        first.close()

    assert claim_arena(place, on_wait) is None
    assert seen == [42]


def test_a_second_loader_takes_over_from_one_that_died(place: ArenaPlace) -> None:
    first = claimed(place)
    second = claim_arena(place, lambda _: first.close())
    assert second is not None
    second.close()


def test_an_arena_that_vanishes_while_a_loader_waits_is_begun_anew(place: ArenaPlace) -> None:
    first = claimed(place)

    def on_wait(_: ArenaHeader | None) -> None:
        first.discard()
        first.close()

    second = claim_arena(place, on_wait)
    assert second is not None
    second.close()
    assert place.path.exists()


def test_a_stale_arena_is_refilled_in_its_own_space(folder: Path, place: ArenaPlace) -> None:
    sealed(place_in(folder, content_id=CONTENT_ID[:16] + "0" * 48), seed=1)
    inode = place.path.stat().st_ino
    content = sealed(place, seed=2)
    assert place.path.stat().st_ino == inode
    with Arena.open(place) as arena:
        assert ctypes.string_at(arena.address, arena.nbytes) == content


def test_a_longer_stale_file_is_cut_to_size(place: ArenaPlace) -> None:
    place.path.touch(mode=0o600)
    os.truncate(place.path, 10 * place.file_bytes)
    sealed(place)
    assert place.path.stat().st_size == place.file_bytes


def test_too_small_a_file_system_names_both_sizes_and_takes_nothing(folder: Path) -> None:
    place = place_in(folder, layout=ArenaLayout(small_layout().layers, 1 << 50))
    with (
        claimed(place) as file,
        pytest.raises(MemoryBudgetError, match=r"needs 1024 TiB and /dev/shm/\S+ has \S+ \SiB free of .*--shm-size"),
    ):
        file.reserve(lambda _: None)
    assert place.path.stat().st_blocks == 0


def test_too_low_a_memory_limit_names_both_sizes_and_takes_nothing(place: ArenaPlace) -> None:
    limit = MemoryLimit(8 << 20, 4096, "the container's memory limit")
    with (
        claimed(place) as file,
        pytest.raises(MemoryBudgetError, match=r"KiB of memory and 4\.00 KiB of 8\.00 MiB are free \(the container"),
    ):
        file.reserve(lambda _: None, lambda: limit)
    assert place.path.stat().st_blocks == 0


def test_space_that_a_dead_loader_left_counts_as_free(place: ArenaPlace) -> None:
    with claimed(place) as file:
        file.reserve(lambda _: None)
    with claimed(place) as file:
        file.reserve(lambda _: None, lambda: MemoryLimit(8 << 20, 0, "the container's memory limit"))


def test_an_unused_arena_of_another_model_makes_room(folder: Path, place: ArenaPlace) -> None:
    other = place_in(folder, content_id=OTHER)
    sealed(other)
    with claimed(place) as file:
        file.reserve(lambda _: None, memory_without(other.path))
    assert not other.path.exists()


def test_an_arena_that_an_engine_has_mapped_is_never_removed(folder: Path, place: ArenaPlace) -> None:
    other = place_in(folder, content_id=OTHER)
    sealed(other)
    with Arena.open(other), claimed(place) as file, pytest.raises(MemoryBudgetError):
        file.reserve(lambda _: None, memory_without(other.path))
    assert other.path.exists()


def test_an_arena_that_a_loader_fills_is_never_removed(folder: Path, place: ArenaPlace) -> None:
    other = place_in(folder, content_id=OTHER)
    with claimed(other) as busy, claimed(place) as file:
        busy.reserve(lambda _: None)
        with pytest.raises(MemoryBudgetError):
            file.reserve(lambda _: None, memory_without(other.path))
    assert other.path.exists()


def test_no_arena_is_removed_while_there_is_room(folder: Path, place: ArenaPlace) -> None:
    other = place_in(folder, content_id=OTHER)
    sealed(other)
    sealed(place)
    assert other.path.exists()


def test_the_oldest_arena_goes_first_and_no_more_than_needed(folder: Path, place: ArenaPlace) -> None:
    old, new = place_in(folder, content_id="a" * 64), place_in(folder, content_id="b" * 64)
    for age_s, other in ((200, old), (100, new)):
        sealed(other)
        os.utime(other.path, (1_000_000 - age_s, 1_000_000 - age_s))
    with claimed(place) as file:
        file.reserve(lambda _: None, memory_without(old.path))
    assert (old.path.exists(), new.path.exists()) == (False, True)


def test_files_that_are_not_our_arenas_are_never_removed(folder: Path, place: ArenaPlace) -> None:
    target = folder / "somebody's file"
    target.write_bytes(b"TANDEMAR" + bytes(10_000))
    foreign = [folder / "tandem-0-0.arena.bak", folder / "other-0-0.arena", folder / "tandem-link", folder / "tandem-cc-dd.arena"]
    for path in foreign:
        path.write_bytes(bytes(10_000))
    (folder / "tandem-aa-bb.arena").symlink_to(target)
    (folder / "tandem-ee-ff.arena").mkdir()
    before = set(folder.iterdir())
    with claimed(place) as file, pytest.raises(MemoryBudgetError):
        file.reserve(lambda _: None, lambda: MemoryLimit(1, 0, "a limit"))
    assert set(folder.iterdir()) == before | {place.path}


def test_a_link_under_the_arenas_name_is_refused(folder: Path, place: ArenaPlace) -> None:
    target = folder / "target"
    target.write_bytes(b"precious")
    place.path.symlink_to(target)
    with pytest.raises(SettingsError, match="cannot open or create"):
        claim_arena(place, refuse_to_wait)
    assert target.read_bytes() == b"precious"


def test_a_file_that_others_may_write_is_refused(place: ArenaPlace) -> None:
    sealed(place)
    place.path.chmod(0o666)
    with pytest.raises(SettingsError, match="not a plain file of this user alone"):
        claim_arena(place, refuse_to_wait)


def test_an_arena_is_readable_by_its_user_alone(place: ArenaPlace) -> None:
    sealed(place)
    assert place.path.stat().st_mode & 0o777 == 0o600


def can_lock(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def memory_without(path: Path) -> Callable[[], MemoryLimit]:
    """A limit that leaves nothing as long as this file is there."""
    return lambda: MemoryLimit(1 << 30, 0 if path.exists() else 1 << 30, "a limit")


def test_a_sealed_arena_that_was_cut_short_is_filled_again(place: ArenaPlace) -> None:
    sealed(place)
    os.truncate(place.path, HEADER_BYTES + 1)
    content = sealed(place, seed=2)
    with Arena.open(place) as arena:
        assert bytes(arena.view(0, 0)) == content[: len(arena.view(0, 0))]
