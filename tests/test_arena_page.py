"""The page of the arena says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.memory import arena_fill, policy, profile
from appliance.memory.arena import ArenaState
from appliance.units import GIB, MIB
from tests.arena_rig import FINGERPRINT, place_in

PAGE = " ".join((Path(__file__).parent.parent / "docs" / "arena.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    "words",
    [
        f"pieces of {arena_fill.PIECE_BYTES // MIB} MiB",
        f"models over {arena_fill.DROP_CACHE_OVER_BYTES // GIB} GiB",
        f"older than {profile.HALF_LIFE_ROWS:,} rows",
        f"more than {policy.MARGIN_RATIO} times the resident's plus {policy.MARGIN_USES} uses",
        *(f"`{state.name}`" for state in ArenaState),
    ],
)
def test_the_page_quotes_the_constants(words: str) -> None:
    assert words in PAGE


def test_the_page_names_the_files_as_they_are_named() -> None:
    place = place_in(Path("<shm_dir>"))
    _, content_id, layout = place.path.name.removesuffix(".arena").split("-")
    assert str(place.path).replace(content_id, "<content>").replace(layout, "<layout>") in PAGE
    learned = profile.profile_path(Path("<state_dir>"), FINGERPRINT)
    assert str(learned).replace(FINGERPRINT[:16], "<fingerprint>") in PAGE


def test_a_half_life_is_one_turn() -> None:
    assert policy.HALF_LIFE_TURNS == 1.0
    assert "half as much after one *turn*" in PAGE
