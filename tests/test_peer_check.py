"""Two GPUs that reach each other, and the ways in which they do not, with a driver in host memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from appliance.desk.config import DeskConfig, LaneConfig
from appliance.errors import SettingsError
from appliance.peer_check import PeerReport, check_peers
from appliance.settings import Settings
from appliance.web.server import check_pair


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("driver") / "libfakecuda.so"
    source = Path(__file__).with_name("fake_driver.cpp")
    subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def test_cards_that_reach_each_other_are_said_to_and_how_fast(driver: str) -> None:
    report = check_peers(0, 1, driver=driver)
    assert report.reaches
    assert report.is_nvlink
    assert report.reason is None
    assert report.gib_per_s is not None
    assert report.gib_per_s > 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("denied", "the driver allows GPU 0 no access to GPU 1"),
        ("dropped", "what GPU 0 writes to GPU 1 does not arrive"),
        ("broken", "cuInit failed with code 999"),
    ],
)
def test_a_fault_is_named(driver: str, fault: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DRIVER", fault)
    assert check_peers(0, 1, driver=driver) == PeerReport(reaches=False, reason=reason)


def test_a_copy_that_never_ends_is_given_up(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DRIVER", "hanging")
    assert check_peers(0, 1, driver=driver, limit_s=4).reason == "a copy between them did not end within 4 s"


def test_a_machine_without_a_driver_has_no_peers() -> None:
    assert check_peers(0, 1, driver="libnosuchdriver.so").reason == "there is no driver (libnosuchdriver.so)"


def test_a_card_that_is_not_there_is_named(driver: str) -> None:
    assert check_peers(0, 5, driver=driver).reason == "cuDeviceGet failed with code 101"


class Pair:
    """What `check_pair` reads of an appliance."""

    def __init__(self, peer_check: str, *cards: str) -> None:
        self.settings = Settings.model_validate({"peer_check": peer_check})
        self.desk = DeskConfig(lanes=tuple(LaneConfig(f"lane{n}", card, ("true",)) for n, card in enumerate(cards)), loader_argv=("true",))


def missing(_first: int, _second: int) -> PeerReport:
    return PeerReport(reaches=False, reason="why")


def test_a_pair_that_must_reach_each_other_and_does_not_is_refused() -> None:
    with pytest.raises(SettingsError, match="cuda:0 and cuda:3 do not reach each other directly: why"):
        check_pair(Pair("require", "cuda:0", "cuda:3"), missing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peer_check", "cards"),
    [("warn", ("cuda:0", "cuda:1")), ("off", ("cuda:0", "cuda:1")), ("require", ("cuda:0",)), ("require", ("host:0", "host:1"))],
)
def test_otherwise_it_is_only_said(peer_check: str, cards: tuple[str, ...]) -> None:
    check_pair(Pair(peer_check, *cards), missing)  # type: ignore[arg-type]
