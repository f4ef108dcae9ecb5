"""One running container of the image, hardened the way a cluster would run it."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from docker.models.containers import Container

from scripts.container.engine import Engine

READY_LIMIT_S = 240.0
PORT = 8080
UID = "12345:0"
"""Somebody whom the image does not know, in group 0: what OpenShift does."""


@dataclass(frozen=True, slots=True)
class Hardened:
    """How a container is started. Sizes in docker's form."""

    shm: str = "256m"
    memory: str = "3g"
    command: tuple[str, ...] = ("serve",)
    environment: tuple[tuple[str, str], ...] = ()


class Server:
    """A container and the address of its server."""

    def __init__(self, container: Container, url: str) -> None:
        self.container = container
        self.url = url

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status code and JSON of an answer; (0, {}) while nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, {}
        except (OSError, ValueError):
            return 0, {}

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = READY_LIMIT_S) -> float:
        """Seconds until it holds. TimeoutError with the end of the container's log otherwise, or when the container has ended."""
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            if condition():
                return time.monotonic() - began
            self.container.reload()
            if self.container.status == "exited":
                raise TimeoutError(f"the container ended before this was so: {what}; {self.last_words()}")
            time.sleep(0.1)
        raise TimeoutError(f"not within {limit_s:.0f} s: {what}; {self.last_words()}")

    def wait_until_both_idle(self) -> float:
        return self.wait_for(
            lambda: [lane["state"] for lane in self.get("/status")[1].get("lanes", [])] == ["idle", "idle"], "both lanes idle"
        )

    def last_words(self, lines: int = 15) -> str:
        return self.container.logs(tail=lines).decode(errors="replace")

    def run(self, *command: str) -> str:
        """The output of a command inside it."""
        done = self.container.exec_run(list(command))
        return done.output.decode(errors="replace")


@contextlib.contextmanager
def hardened(engine: Engine, tag: str, how: Hardened) -> Iterator[Server]:
    """Read-only, without capabilities, with limits, as an unknown user; removed afterwards, with its volume."""
    port = _free_port()
    environment = {"TANDEM_PORT": str(port if engine.is_own else PORT), **dict(how.environment)}
    # An engine of our own has no bridge: its containers are on the host's network, and listen on loopback only.
    network: dict[str, Any] = {"network_mode": "host"} if engine.is_own else {"ports": {f"{PORT}/tcp": ("127.0.0.1", port)}}
    if engine.is_own:
        environment["TANDEM_HOST"] = "127.0.0.1"
    container = engine.client().containers.run(
        tag,
        list(how.command),
        detach=True,
        user=UID,
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        mem_limit=how.memory,
        memswap_limit=how.memory,
        shm_size=how.shm,
        pids_limit=512,
        environment=environment,
        **network,
    )
    try:
        yield Server(container, f"http://127.0.0.1:{port}")
    finally:
        container.remove(force=True, v=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
