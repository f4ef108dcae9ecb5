"""Profiles: learned, merged, replaced as a whole, and never fatal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from appliance.errors import SettingsError
from appliance.memory.policy import ExpertId, FloatTable
from appliance.memory.profile import HALF_LIFE_ROWS, Profile, learn, load_profile, profile_path, read_profile, write_profile
from tests.arena_rig import DEADLINE_S, FINGERPRINT, small_layout

LAYOUT = small_layout(layers=2, experts=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return profile_path(tmp_path / "state", FINGERPRINT)


def counts(*places: tuple[int, int, float]) -> FloatTable:
    """[layers, experts] with the given (layer, expert, uses)."""
    built = np.zeros((2, 3))
    for layer, expert, uses in places:
        built[layer, expert] = uses
    return built


def test_the_ranking_is_by_use_and_ties_spread_over_layers() -> None:
    profile = Profile(FINGERPRINT, counts((1, 2, 5), (0, 1, 7)))
    expected = [(0, 1), (1, 2), (0, 0), (1, 0), (1, 1), (0, 2)]
    assert profile.ranking(LAYOUT) == [ExpertId(*place) for place in expected]


def test_what_is_written_is_read_again(path: Path) -> None:
    write_profile(path, Profile(FINGERPRINT, counts((0, 0, 1.25), (1, 2, 3e9))))
    np.testing.assert_array_equal(read_profile(path, LAYOUT, FINGERPRINT).uses, counts((0, 0, 1.25), (1, 2, 3e9)))


def test_without_a_file_nothing_is_known_and_nothing_is_logged(path: Path) -> None:
    with capture_logs() as logs:
        profile = load_profile(path, LAYOUT, FINGERPRINT)
    assert not profile.uses.any()
    assert logs == []


def test_what_was_learned_long_ago_counts_half() -> None:
    before = Profile(FINGERPRINT, counts((0, 0, 8)))
    after = before.learned(counts((1, 1, 3)), HALF_LIFE_ROWS)
    np.testing.assert_allclose(after.uses, counts((0, 0, 4), (1, 1, 3)))


def test_learning_twice_adds_up(path: Path) -> None:
    learn(path, LAYOUT, FINGERPRINT, counts((0, 1, 2)), rows=0)
    merged = learn(path, LAYOUT, FINGERPRINT, counts((0, 1, 3), (1, 0, 1)), rows=0)
    np.testing.assert_array_equal(merged.uses, counts((0, 1, 5), (1, 0, 1)))
    np.testing.assert_array_equal(read_profile(path, LAYOUT, FINGERPRINT).uses, merged.uses)


def test_engines_that_learn_at_the_same_time_lose_nothing(path: Path) -> None:
    script = (
        "import sys, pathlib, numpy as np\n"
        "from tests.test_profile import FINGERPRINT, LAYOUT, counts, learn\n"
        "for _ in range(20): learn(pathlib.Path(sys.argv[1]), LAYOUT, FINGERPRINT, counts((0, 0, 1)), 0)\n"
    )
    engines = [subprocess.Popen([sys.executable, "-c", script, str(path)]) for _ in range(2)]
    assert [engine.wait(DEADLINE_S) for engine in engines] == [0, 0]
    assert read_profile(path, LAYOUT, FINGERPRINT).uses[0, 0] == 40


def test_a_writer_that_died_half_way_leaves_the_old_profile_valid(path: Path) -> None:
    write_profile(path, Profile(FINGERPRINT, counts((0, 0, 1))))
    path.with_suffix(".new").write_text('{"version": 1, "finge')
    assert read_profile(path, LAYOUT, FINGERPRINT).uses[0, 0] == 1
    learn(path, LAYOUT, FINGERPRINT, counts((0, 0, 1)), rows=0)
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".json", ".lock"]


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        learn(tmp_path / "file" / "profile.json", LAYOUT, FINGERPRINT, counts(), rows=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "its version is 2 instead of 1"),
        ({"fingerprint": "f" * 64}, "it is of another model"),
        ({"uses": [[1, 2, 3]]}, r"its uses are \[1, 3\], but the model has \[layers, experts\] \[2, 3\]"),
        ({"uses": [[1, 2, 3], [1, 2]]}, "not a table of numbers"),
        ({"uses": [[1, 2, 3], [1, 2, "much"]]}, "not a table of numbers"),
        ({"uses": [[1, 2, 3], [1, 2, -1]]}, "negative or not finite"),
        ({"uses": [[1, 2, 3], [1, 2, float("nan")]]}, "negative or not finite"),
        ({"uses": None}, "its uses are"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_with_the_reason(path: Path, change: dict[str, object], words: str) -> None:
    content = {"version": 1, "fingerprint": FINGERPRINT, "uses": [[0, 0, 0], [0, 0, 0]]}
    path.parent.mkdir()
    path.write_text(json.dumps(content | change))
    with pytest.raises(SettingsError, match=words):
        read_profile(path, LAYOUT, FINGERPRINT)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=50).map(lambda text: json.dumps({"version": 1, "uses": text}).encode())))
def test_a_damaged_profile_costs_one_log_line_and_nothing_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with capture_logs() as logs:
        profile = load_profile(path, LAYOUT, FINGERPRINT)
    assert not profile.uses.any()
    assert [entry["log_level"] for entry in logs] == ["warning"]


def test_a_named_profile_that_is_missing_is_refused(path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file or directory; remove it or name another one"):
        read_profile(path, LAYOUT, FINGERPRINT)
