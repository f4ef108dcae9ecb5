"""docs/models.md is held against the code where it lists things."""

from __future__ import annotations

import re
from pathlib import Path

from appliance.gguf_types import WEIGHT_TYPES
from appliance.models.config import supported_architectures
from appliance.settings import Settings

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text()


def row(name: str) -> str:
    found = re.search(rf"^\| {name} \| (.*) \|$", PAGE, re.MULTILINE)
    assert found, f"docs/models.md has no row {name}"
    return found[1]


def test_every_weight_type_is_listed_and_no_other() -> None:
    listed = row("types of weights").partition(",")[0].split()
    assert sorted(listed) == sorted(kind.name for kind in WEIGHT_TYPES.values())


def test_every_architecture_is_listed_and_no_other() -> None:
    assert re.findall(r"`(\w+)`", row("architectures")) == list(supported_architectures())


def test_every_setting_of_the_page_exists() -> None:
    table = PAGE[PAGE.index("| consumer |") : PAGE.index("Host cards lie")]
    named = set(re.findall(r"`(\w+)`", table))
    assert named
    assert named <= set(Settings.model_fields)
