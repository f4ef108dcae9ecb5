"""A hub on loopback with real behaviour: repositories at commits, redirects to a file store, ranges, tokens, and faults on demand.

It answers what `huggingface_hub` asks: the model's description and its files. Every request is written down.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "c0ffee" + "0" * 34
OWNER_REPO = "owner/repo"


@dataclass
class FakeHub:
    """What it holds and how it misbehaves. Fields may be changed while it serves."""

    files: dict[str, bytes]
    url: str = ""
    token: str | None = None
    """None: nobody is asked for one."""
    gated: bool = False
    break_after: int | None = None
    """Bytes of an answer after which the connection is cut."""
    breaks_left: int = 0
    ignores_ranges: bool = False
    wrong_range: bool = False
    status: int | None = None
    """Answers every request for a file with this."""
    corrupt: bool = False
    hold: threading.Event | None = None
    """Answers stop at their middle until it is set."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range header)."""

    def served_ranges(self, name: str) -> list[str | None]:
        return [given for method, path, given in self.requests if method == "GET" and path == f"/store/{name}"]


@contextmanager
def fake_hub(files: Mapping[str, bytes], **behaviour: object) -> Iterator[FakeHub]:
    hub = FakeHub(files=dict(files), **behaviour)  # type: ignore[arg-type]
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = False
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="fake-hub")
    thread.start()
    try:
        yield hub
    finally:
        if hub.hold is not None:
            hub.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    timeout = 5

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/api/models/"):
            self._describe(path)
        elif path.startswith("/store/"):
            self._store(path.removeprefix("/store/"))
        else:
            self._resolve(path)

    def _describe(self, path: str) -> None:
        match = re.fullmatch(rf"/api/models/{OWNER_REPO}(/revision/(?P<revision>.+))?", path)
        if self._is_refused():
            return
        if match is None:
            self._error(404, "RepoNotFound")
        elif match["revision"] not in (None, "main", COMMIT):
            self._error(404, "RevisionNotFound")
        else:
            siblings = [
                {
                    "rfilename": name,
                    "size": len(content),
                    "blobId": "0" * 40,
                    "lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130},
                }
                for name, content in self.hub.files.items()
            ]
            self._send(json.dumps({"id": OWNER_REPO, "sha": COMMIT, "siblings": siblings}).encode(), "application/json")

    def _is_refused(self) -> bool:
        given = self.headers.get("Authorization")
        if self.hub.token is None or given == f"Bearer {self.hub.token}":
            return False
        self._error(*((403, "GatedRepo") if self.hub.gated else (401, "RepoNotFound")))
        return True

    def _resolve(self, path: str) -> None:
        """The hub itself sends on to a store, which needs no token."""
        name = path.removeprefix(f"/{OWNER_REPO}/resolve/{COMMIT}/")
        if self._is_refused():
            return
        if self.hub.status is not None:
            self._error(self.hub.status, None)
        elif name not in self.hub.files:
            self._error(404, "EntryNotFound")
        else:
            self.send_response(302)
            self.send_header("Location", f"/store/{name}")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _store(self, name: str) -> None:
        content = self.hub.files[name]
        if self.hub.corrupt:
            content = bytes([content[0] ^ 1]) + content[1:]
        given = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if given is None or self.hub.ignores_ranges:
            self._body(200, content, {})
            return
        start = int(given[1])
        if start >= len(content):
            self._error(416, None)
            return
        begin = start + 1 if self.hub.wrong_range else start
        self._body(206, content[begin:], {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"})

    def _body(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.hub.breaks_left > 0 and self.hub.break_after is not None and self.hub.break_after < len(content):
            self.hub.breaks_left -= 1
            self.wfile.write(content[: self.hub.break_after])
            self.close_connection = True
            return
        middle = len(content) // 2
        self.wfile.write(content[:middle])
        if self.hub.hold is not None:
            self.wfile.flush()
            self.hub.hold.wait(60)
        self.wfile.write(content[middle:])

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _error(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
