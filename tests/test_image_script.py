"""`scripts/image.py` on a machine without an engine says so and skips; it never passes for a success."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import image
from scripts.container import base
from tests.real_server import ROOT


def run(*words: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOCKER_HOST": f"unix://{path}/none.sock", "PATH": str(path)}
    command = [sys.executable, "scripts/image.py", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("verb", ["build", "smoke", "all"])
def test_without_an_engine_it_is_skipped_with_a_reason(verb: str, tmp_path: Path) -> None:
    done = run(verb, path=tmp_path)
    assert done.returncode == 3
    assert "image: SKIPPED: " in done.stderr
    assert "not found" in done.stderr or "needs root" in done.stderr


def test_a_wrong_verb_is_refused(tmp_path: Path) -> None:
    assert run("bild", path=tmp_path).returncode == 2


def test_what_stands_behind_two_dashes_goes_to_the_server() -> None:
    options = image._parse(["run", "--shm", "4g", "--", "/models", "--context", "512"])
    assert (options.verb, options.shm) == ("run", "4g")
    assert options.serve == ["/models", "--context", "512"]


def test_a_machine_that_is_no_debian_makes_no_base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "os-release").write_text('ID=fedora\nVERSION_CODENAME=""\n')
    monkeypatch.setattr(base, "Path", lambda path: tmp_path / "os-release" if path == "/etc/os-release" else Path(path))
    with pytest.raises(base.NoBaseError, match="on Debian only"):
        base._release()
