"""`docs/desk.md` names what there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from appliance.desk.config import Limits
from appliance.desk.lane_state import LaneState
from appliance.desk.status import Phase

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "desk.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [row.strip("|").split("|") for row in section.splitlines() if row.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names(heading: str) -> list[str]:
    return [name for row in table(heading) for name in re.findall(r"`(.+?)`", row[0])]


def test_every_phase_is_listed() -> None:
    assert names("Phases") == [phase.value for phase in Phase]


def test_every_state_of_a_lane_is_listed() -> None:
    assert names("States of a lane") == [state.value for state in LaneState]


def test_every_file_is_listed() -> None:
    files = {path.name for path in (ROOT / "appliance" / "desk").glob("*.py")} - {"__init__.py"}
    assert set(names("How it is built")) == files


def test_limits_and_their_defaults_are_listed() -> None:
    def shown(value: object) -> str:
        return ", ".join(f"{part:g}" for part in value) if isinstance(value, tuple) else f"{value:g}"

    assert {row[0].strip("`"): row[1] for row in table("Time limits")} == {
        name: shown(value) for name, value in dataclasses.asdict(Limits()).items()
    }
