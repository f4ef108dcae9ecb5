"""SIGTERM at any moment of a start ends `tandem serve` with exit code 0 and leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.real_server import ROOT, free_port

END_LIMIT_S = 60.0


@pytest.mark.parametrize("delay_s", [0.0, 0.15, 0.4, 0.8, 1.2, 1.7, 2.5, 4.0])
def test_sigterm_during_the_start_ends_with_exit_code_0(delay_s: float, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tandem-test-", dir="/dev/shm") as shm, (tmp_path / "log").open("wb") as log:
        options = ["--port", str(free_port()), "--shm-dir", shm, "--state-dir", str(tmp_path)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance.start", "serve", *options], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        try:
            _wait_for_handler(process)
            time.sleep(delay_s)  # the moment is the test
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_LIMIT_S) == 0, (tmp_path / "log").read_text()[-2000:]
            assert not psutil.wait_procs(children, timeout=10)[1]
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_for_handler(process: subprocess.Popen[bytes]) -> None:
    """Until the process catches SIGTERM: before that Python itself is starting."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.002)
    raise AssertionError("SIGTERM was never caught")
