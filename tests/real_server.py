"""`tandem serve` as its users start it: a real process with real engines and the demo model, on a free port of loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

ROOT = Path(__file__).parents[1]
START_LIMIT_S = 120.0
END_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class RealServer:
    url: str
    process: subprocess.Popen[bytes]
    shm_dir: Path
    log: Path

    def status(self) -> dict[str, Any]:
        return dict(httpx2.get(f"{self.url}/status", timeout=10).json())

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], what: str, limit_s: float = START_LIMIT_S) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-3000:]}"
            try:
                status = self.status()
            except httpx2.HTTPError:
                status = {}
            if status and condition(status):
                return status
            time.sleep(0.05)
        raise AssertionError(f"not within {limit_s} s: {what}; status {status}; log {self.log.read_text()[-3000:]}")

    def wait_until_both_idle(self) -> dict[str, Any]:
        return self.wait_until_idle(2)

    def wait_until_idle(self, lanes: int) -> dict[str, Any]:
        return self.wait_for(lambda s: [lane["state"] for lane in s["lanes"]] == ["idle"] * lanes, "all lanes idle")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def real_server(*options: str, lanes: int = 2, root: Path = ROOT) -> Iterator[RealServer]:
    """Starts the server, waits until its lanes take requests, and at the end checks that SIGTERM ends it well and leaves nothing."""
    with tempfile.TemporaryDirectory(prefix="tandem-test-", dir="/dev/shm") as shm, tempfile.TemporaryDirectory() as state:
        log = Path(state) / "log"
        port = free_port()
        command = [sys.executable, "-m", "appliance.cli", "serve", "--port", str(port), "--shm-dir", shm, "--state-dir", state, *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        with log.open("wb") as sink:
            process = subprocess.Popen(command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        server = RealServer(f"http://127.0.0.1:{port}", process, Path(shm), log)
        try:
            server.wait_until_idle(lanes)
            yield server
            children = server.descendants()
            process.send_signal(signal.SIGTERM)
            code = process.wait(END_LIMIT_S)
            assert code == 0, f"exit code {code}: {log.read_text()[-3000:]}"
            _, alive = psutil.wait_procs(children, timeout=10)
            assert not alive, f"left behind: {alive}"
            arenas = [path.name for path in Path(shm).iterdir()]
            assert len(arenas) <= 1, f"more than the arena in shared memory: {arenas}"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
