"""The command line: every setting is an option of every command, and errors are one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from appliance.demo import DEMO_MODEL
from appliance.settings import setting_fields
from tests.arena_rig import shm_folder

ROOT = Path(__file__).parents[1]


def tandem(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")} | variables | {"COLUMNS": "200"}
    command = [sys.executable, "-m", "appliance.cli", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("command", [("serve",), ("plan",), ("bench",), ("config", "print")])
def test_every_setting_is_an_option(command: tuple[str, ...]) -> None:
    text = tandem(*command, "--help").stdout
    for name in setting_fields():
        if name != "model":
            assert f"--{name.replace('_', '-')} " in text, name
    assert "None" not in text


def test_config_print_writes_what_config_reads(tmp_path: Path) -> None:
    first = tandem("config", "print", "some.gguf", "--port", "9000", "--allowed-hosts", "a.example,b.example").stdout
    file = tmp_path / "tandem.yaml"
    file.write_text(first)
    assert tandem("config", "print", "--config", str(file)).stdout == first
    assert yaml.safe_load(first)["port"] == 9000


def test_the_demo_model_is_planned_when_none_is_named() -> None:
    plan = json.loads(tandem("plan", "--json").stdout)
    assert plan["model"]["architecture"] == "qwen3moe"
    assert [card["card"] for card in plan["cards"]] == ["host:0", "host:1"]
    assert str(DEMO_MODEL).endswith(".gguf")


def test_a_plan_of_a_pair_says_when_the_settings_have_none() -> None:
    off, on = tandem("plan", "--pair"), tandem("plan", "--pair", "--elastic-enabled", "true")
    assert "two at a time" in off.stdout
    assert "elastic_enabled is off" in off.stderr
    assert "elastic_enabled is off" not in on.stderr


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (("plan", "missing.gguf"), {}, "argument MODEL = missing.gguf: there is no such file"),
        (("plan",), {"TANDEM_MODEL": "missing.gguf"}, "TANDEM_MODEL = missing.gguf: there is no such file"),
        (("plan", "--cards", "cuda:0"), {}, "cuda:0"),
        (("plan", "--context", "999999999"), {}, "999999999"),
        (("plan", "--slots", "193"), {}, "--slots = 193 is more than the 192 experts of Tandem pocket dictionary; lower it"),
        (("plan", "--card-memory-mib", "1"), {}, "card-memory-mib"),
        (("config", "print"), {"TANDEM_PROT": "1"}, "TANDEM_PORT"),
        (("config", "print", "--port", "0"), {}, "--port = '0'"),
        (("config", "print", "--port", "abc"), {}, "--port = 'abc': it must be a whole number"),
        (("plan",), {"TANDEM_CARD_MEMORY_MIB": "1"}, "raise TANDEM_CARD_MEMORY_MIB to"),
        (("config", "print", "--port", "1", "--port", "2"), {}, "--port is given twice; leave one out"),
        (("plan", "--config", "a", "--config", "b"), {}, "--config is given twice; leave one out"),
        (("bench", "--tokens", "4", "--tokens", "4"), {}, "--tokens is given twice; leave one out"),
        (("config", "print", "--prot", "1"), {}, "no such option: --prot (Possible options: --host, --port"),
        (("config", "print", "--port"), {}, "'--port' requires an argument"),
        (("confic",), {}, "no such command 'confic'"),
    ],
)
def test_a_mistake_ends_in_one_sentence(words: tuple[str, ...], variables: dict[str, str], expected: str) -> None:
    result = tandem(*words, **variables)
    assert result.returncode == (2 if "--help lists" in result.stderr else 1)
    assert result.stdout == ""
    assert result.stderr.startswith("tandem: ")
    assert result.stderr.count("\n") == 1
    assert expected.replace("-", "_") in result.stderr.replace("-", "_")


def test_a_cut_file_is_named_without_loading_anything(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(DEMO_MODEL.read_bytes()[:1_000_000])
    result = tandem("plan", str(cut))
    assert (result.returncode, result.stdout) == (1, "")
    assert "cut.gguf" in result.stderr


def test_fetch_checks_a_local_file_too(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(DEMO_MODEL.read_bytes())
    assert tandem("fetch", str(whole)).stdout == f"{whole}\n"
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:5000])
    for wrong in (cut, tmp_path / "nowhere.gguf"):
        done = tandem("fetch", str(wrong))
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("tandem: ")
        assert done.stderr.count("\n") == 1


def test_the_version_is_printed() -> None:
    assert tandem("version").stdout.startswith("tandem ")


def test_a_short_benchmark_measures_one_and_two_requests(tmp_path: Path) -> None:
    with shm_folder() as shm:
        places = ("--shm-dir", str(shm), "--state-dir", str(tmp_path))
        result = tandem("bench", "--prompt", "16", "--tokens", "8", "--repeat", "1", "--json", *places)
    assert result.returncode == 0, result.stderr[-2000:]
    measured = json.loads(result.stdout)
    assert measured["alone"]["decode"] > 0
    assert measured["two_at_once"]["together"] > 0
