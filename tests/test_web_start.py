"""What can be known before anything is started ends `tandem serve` in one sentence, and nothing was started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from appliance.demo import DEMO_MODEL
from appliance.errors import SettingsError
from appliance.memory.limits import usable_cores
from appliance.memory.profile import VERSION
from appliance.settings import Settings
from appliance.web.appliance import read_appliance
from appliance.web.server import say_what_is_odd

ROOT = Path(__file__).parents[1]


def refused(**settings: Any) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        read_appliance(Settings.model_validate({"model": DEMO_MODEL, **settings}))
    return caught.value


def test_a_key_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    error = refused(api_key_file=tmp_path / "nofile")
    assert error.param == "api_key_file"
    assert f"api_key_file = {tmp_path / 'nofile'}: the keys cannot be read: No such file or directory" in error.message


def test_a_key_file_without_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    assert refused(api_key_file=tmp_path / "keys").param == "api_key_file"


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    error = refused(profile=tmp_path / "nofile")
    assert error.param == "profile"
    assert str(tmp_path / "nofile") in error.message


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text(json.dumps({"version": VERSION, "fingerprint": "another", "uses": []}))
    assert "of another model" in refused(profile=tmp_path / "profile").message


def test_a_folder_for_the_arena_in_which_no_file_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (Path("/proc"), tmp_path / "file", tmp_path / "nowhere"):
        error = refused(shm_dir=folder)
        assert error.param == "shm_dir"
        assert str(folder) in error.message


def test_a_folder_for_profiles_is_made_and_refused_if_that_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (Path("/proc/tandem"), tmp_path / "file"):
        error = refused(state_dir=folder)
        assert error.param == "state_dir"
        assert str(folder) in error.message
    read_appliance(Settings.model_validate({"model": DEMO_MODEL, "state_dir": tmp_path / "a" / "b"}))
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_serve_says_one_sentence_and_starts_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    words = ["serve", "--api-key-file", str(tmp_path / "nofile"), "--shm-dir", str(tmp_path)]
    command = [sys.executable, "-m", "appliance.cli", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"tandem: --api-key-file = {tmp_path / 'nofile'}: the keys cannot be read")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_elastic_settings_that_wait_for_their_switch_are_logged() -> None:
    with capture_logs() as logs:
        say_what_is_odd(Settings.model_validate({"elastic": {"enabled": False, "hold_s": 3, "link": True}}))
        say_what_is_odd(Settings.model_validate({"elastic": {"enabled": True, "hold_s": 3}}))
    assert [log["settings"] for log in logs] == [["elastic_hold_s"]]


def test_more_threads_than_usable_cores_are_logged() -> None:
    cores = usable_cores()
    with capture_logs() as logs:
        say_what_is_odd(Settings(pool_threads=cores))
        say_what_is_odd(Settings(pool_threads=cores + 1))
    assert [(log["log_level"], log["pool_threads"], log["usable_cores"]) for log in logs] == [("warning", cores + 1, cores)]
