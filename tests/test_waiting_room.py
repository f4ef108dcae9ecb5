"""What a server answers while its model is still being fetched, and how that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest

from appliance.demo import DEMO_MODEL
from appliance.protocol import LoadProgress
from appliance.settings import Settings
from appliance.web.server import listen
from appliance.web.waiting_room import WaitingRoom
from tests.fake_hub import FakeHub, fake_hub
from tests.real_server import ROOT, free_port

LIMIT_S = 120.0


@contextmanager
def waiting_room(settings: Settings) -> Iterator[tuple[WaitingRoom, str]]:
    listener = listen("127.0.0.1", 0)
    room = WaitingRoom(settings, listener)
    try:
        yield room, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        room.close()
        listener.close()


def test_it_is_alive_not_ready_and_says_how_far_it_is() -> None:
    with waiting_room(Settings()) as (room, url):
        room.show(LoadProgress(stage="download", done_bytes=3, total_bytes=10, bytes_per_s=1))
        assert httpx2.get(f"{url}/livez").status_code == 200
        ready = httpx2.get(f"{url}/readyz")
        assert ready.status_code == 503
        assert ready.json()["load"]["done_bytes"] == 3
        assert ready.json()["reason"] == "the model is being fetched"
        status = httpx2.get(f"{url}/status").json()
        assert status["phase"] == "loading"
        assert status["load"]["stage"] == "download"
        assert status["lanes"] == []


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("POST", "/nowhere")]
)
def test_everything_else_is_told_to_come_again(method: str, path: str) -> None:
    with waiting_room(Settings()) as (_, url):
        answer = httpx2.request(method, url + path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_ready"
        assert int(answer.headers["Retry-After"]) > 0


def test_messages_are_told_so_in_anthropics_shape() -> None:
    with waiting_room(Settings()) as (_, url):
        answer = httpx2.post(f"{url}/v1/messages", json={})
        assert answer.status_code == 503
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "overloaded_error"


def test_keys_and_host_names_are_asked_for_as_ever(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    with waiting_room(Settings(api_key_file=tmp_path / "keys")) as (_, url):
        assert httpx2.get(f"{url}/readyz").status_code == 503
        assert httpx2.get(f"{url}/status").status_code == 401
        assert httpx2.get(f"{url}/status", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert httpx2.get(f"{url}/status", headers={"Authorization": "Bearer secret", "Host": "evil.example"}).status_code == 403


def test_a_prefix_is_taken_away_as_ever() -> None:
    with waiting_room(Settings(url_prefix="/me")) as (_, url):
        assert httpx2.get(f"{url}/me/status").json()["phase"] == "loading"


def test_the_socket_is_left_to_the_server_that_follows() -> None:
    listener = listen("127.0.0.1", 0)
    WaitingRoom(Settings(), listener).close()
    answered = threading.Event()

    def ask() -> None:
        try:
            httpx2.get(f"http://127.0.0.1:{listener.getsockname()[1]}/livez", timeout=30)
        finally:
            answered.set()

    asking = threading.Thread(target=ask)
    asking.start()
    connection, _ = listener.accept()  # it waited in the queue
    connection.recv(100)
    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
    connection.close()
    asking.join()
    listener.close()
    assert answered.is_set()


# The real command


class Serving:
    """`tandem serve hf://owner/repo:Q4_K_M` in a process of its own."""

    def __init__(self, hub_url: str, folder: Path, shm: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        options = {
            "--port": self.url.rpartition(":")[2],
            "--models-dir": str(folder / "models"),
            "--state-dir": str(folder / "state"),
            "--shm-dir": shm,
            "--hub-url": hub_url,
        }
        command = [
            sys.executable,
            "-m",
            "appliance.start",
            "serve",
            "hf://owner/repo:Q4_K_M",
            *(word for pair in options.items() for word in pair),
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        self.log = folder / "log"
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"it ended: {self.log.read_text()[-2000:]}"
            try:
                if condition():
                    return
            except httpx2.HTTPError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not in time: {what}; {self.log.read_text()[-2000:]}")

    def is_ready(self) -> bool:
        return httpx2.get(f"{self.url}/readyz").status_code == 200

    def is_downloading(self) -> bool:
        load = httpx2.get(f"{self.url}/status").json()["load"]
        return load is not None and load["stage"] == "download" and 0 < load["done_bytes"] < load["total_bytes"]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)


@contextmanager
def serving(hub_url: str, folder: Path, shm: str) -> Iterator[Serving]:
    server = Serving(hub_url, folder, shm)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture
def shm() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tandem-test-", dir="/dev/shm") as folder:
        yield folder


@contextmanager
def demo_hub() -> Iterator[FakeHub]:
    """Holds the demo model, and stops in its middle until told to go on."""
    with fake_hub({"demo-Q4_K_M.gguf": DEMO_MODEL.read_bytes()}, hold=threading.Event()) as hub:
        yield hub


def test_a_model_of_a_hub_is_served_and_the_hub_is_not_needed_again(tmp_path: Path, shm: str) -> None:
    with demo_hub() as hub, serving(hub.url, tmp_path, shm) as server:
        server.wait_for(server.is_downloading, "progress over HTTP")
        assert httpx2.get(f"{server.url}/v1/models").status_code == 503
        assert hub.hold is not None
        hub.hold.set()
        server.wait_for(server.is_ready, "ready")
        assert httpx2.get(f"{server.url}/v1/models").status_code == 200
        assert server.end() == 0
    with serving(hub.url, tmp_path, shm) as server:
        server.wait_for(server.is_ready, "ready without the hub")
        assert server.end() == 0


def test_sigterm_in_mid_download_ends_everything_well_and_the_next_start_goes_on(tmp_path: Path, shm: str) -> None:
    with demo_hub() as hub:
        with serving(hub.url, tmp_path, shm) as server:
            server.wait_for(server.is_downloading, "progress over HTTP")
            children = psutil.Process(server.process.pid).children(recursive=True)
            assert children
            assert server.end() == 0
            assert not psutil.wait_procs(children, timeout=10)[1]
        parts = list((tmp_path / "models").rglob("*.part"))
        assert [part.stat().st_size > 0 for part in parts] == [True]
        assert hub.hold is not None
        hub.hold.set()
        with serving(hub.url, tmp_path, shm) as server:
            server.wait_for(server.is_ready, "ready")
            assert server.end() == 0
        assert str(hub.served_ranges("demo-Q4_K_M.gguf")[-1]).startswith("bytes=")


def test_nothing_outlives_a_server_that_is_killed_in_mid_download(tmp_path: Path, shm: str) -> None:
    with demo_hub() as hub, serving(hub.url, tmp_path, shm) as server:
        server.wait_for(server.is_downloading, "progress over HTTP")
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        server.process.kill()
        assert not psutil.wait_procs(children, timeout=5)[1]


def test_a_wish_that_the_hub_cannot_fulfil_ends_in_one_sentence(tmp_path: Path, shm: str) -> None:
    with fake_hub({"other-Q8_0.gguf": b"x"}) as hub, serving(hub.url, tmp_path, shm) as server:
        assert server.process.wait(LIMIT_S) == 1
        assert "tandem: hf://owner/repo:Q4_K_M holds no model whose name has Q4_K_M" in server.log.read_text()
    assert list(Path(shm).iterdir()) == []
