"""A docker engine for one command: the one that runs already, or one that is started here and leaves nothing behind.

The engine that is started has no bridge and touches neither iptables nor ip_forward: its containers use the host's network.
Its images live in a folder that may be kept, so that the next build finds its layers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException

START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
CALL_LIMIT_S = 1800
"""Of one call to the engine; a build is one call."""


class NoEngineError(Exception):
    """There is no docker engine and none can be started; the sentence says what is missing."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Where an engine listens. `is_own`: it was started here, without a bridge."""

    address: str
    is_own: bool

    def client(self) -> docker.DockerClient:
        return docker.DockerClient(base_url=self.address, timeout=CALL_LIMIT_S)


@contextlib.contextmanager
def running_engine(folder: Path | None = None) -> Iterator[Engine]:
    """The engine of `DOCKER_HOST` or of the usual socket; without one, an own engine that keeps its images in `folder`.

    `folder` None: a temporary folder, so that nothing is left. Raises NoEngineError.
    """
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if _answers(address):
        yield Engine(address, is_own=False)
        return
    missing = missing_for_own_engine()
    if missing:
        raise NoEngineError(f"no docker engine answers at {address}, and none can be started here: {missing}")
    with contextlib.ExitStack() as cleanup:
        data = folder or Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tandem-images-", ignore_cleanup_errors=True)))
        yield cleanup.enter_context(_own_engine(data))


def missing_for_own_engine() -> str | None:
    """What keeps this machine from starting an engine, as a clause; None if nothing does."""
    if os.geteuid() != 0:
        return "that needs root"
    lacking = [name for name in ("dockerd", "containerd", "runc", "iptables") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found (Debian: docker.io, iptables)" if lacking else None


@contextlib.contextmanager
def _own_engine(data: Path) -> Iterator[Engine]:
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tandem-engine-", ignore_cleanup_errors=True) as run:
        address = f"unix://{run}/docker.sock"
        command = ["dockerd", "--data-root", str(data), "--exec-root", f"{run}/exec", "--pidfile", f"{run}/pid", "--host", address]
        command += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
        log = Path(run) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
        try:
            _wait_for(address, process, log)
            yield Engine(address, is_own=True)
        finally:
            _stop(process)
            _unmount_below(Path(run))
            _unmount_below(data)


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not _answers(address):
        if process.poll() is not None or time.monotonic() > deadline:
            raise NoEngineError(f"dockerd did not start: {log.read_text(errors='replace')[-1000:]}")
        time.sleep(0.1)


def _answers(address: str) -> bool:
    try:
        client = docker.DockerClient(base_url=address, timeout=5)
    except DockerException:
        return False
    with contextlib.closing(client):
        try:
            return bool(client.ping())
        except (DockerException, OSError):
            return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM ends dockerd, its containers and its containerd; SIGKILL for the whole session if that takes too long."""
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _unmount_below(folder: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
