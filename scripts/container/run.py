"""Runs the image in the foreground; Ctrl-C and SIGTERM end it as they end `tandem serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docker.models.containers import Container
from docker.types import DeviceRequest

from scripts.container.engine import Engine

PORT = 8080
STOP_LIMIT_S = 75
"""What running answers may take, and the end of the engines."""


def run_image(engine: Engine, tag: str, gpus: bool, shm: str, models: Path | None, options: Sequence[str]) -> int:
    """Shows the log until the container ends; returns its exit code."""
    how: dict[str, Any] = {"network_mode": "host"} if engine.is_own else {"ports": {f"{PORT}/tcp": ("127.0.0.1", PORT)}}
    if engine.is_own:
        how["environment"] = {"TANDEM_HOST": "127.0.0.1"}
    if gpus:
        how["device_requests"] = [DeviceRequest(count=-1, capabilities=[["gpu"]])]
    volumes = {"tandem-data": {"bind": "/data", "mode": "rw"}}
    if models is not None:
        volumes[str(models.resolve())] = {"bind": "/models", "mode": "ro"}
    container = engine.client().containers.run(
        tag, ["serve", *options], detach=True, read_only=True, cap_drop=["ALL"], shm_size=shm, volumes=volumes, **how
    )
    try:
        return _follow(container)
    finally:
        container.remove(force=True)


def _follow(container: Container) -> int:
    """Its exit code; an interrupt stops it first."""
    try:
        for text in container.logs(stream=True, follow=True):
            sys.stderr.buffer.write(text)
            sys.stderr.flush()
    except KeyboardInterrupt:
        container.stop(timeout=STOP_LIMIT_S)
    return int(container.wait()["StatusCode"])
