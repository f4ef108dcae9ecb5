"""`tandem serve`: gunicorn with one threaded worker, which owns the desk.

    this process                    reads the model's file, binds the port, then only watches the worker
      └─ worker (forked)            desk, engines, all requests; if it dies, a new one starts with new engines

No process outlives the one above it, not even if that is killed.

SIGTERM drains: running answers go on for up to `drain_s`, new requests get 503, then everything ends with exit code 0. Ctrl-C ends
at once. If the model cannot be brought up at all, the process ends with a sentence and exit code 1.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import flask
import structlog
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.glogging import Logger
from gunicorn.workers.gthread import ThreadWorker

from appliance.desk.desk import Desk
from appliance.desk.status import Phase
from appliance.errors import SettingsError
from appliance.lifeline import end_with_parent
from appliance.log import configure_logging
from appliance.memory.gpus import is_built_for_gpus
from appliance.memory.limits import usable_cores, visible_gpus
from appliance.peer_check import PeerReport, check_peers
from appliance.protocol import LoadProgress
from appliance.settings import Settings
from appliance.sources.progress_log import ProgressLog
from appliance.sources.resolve import needs_fetching, resolve_model
from appliance.text.chat_template import ChatTemplate
from appliance.web.app import READERS, create_app
from appliance.web.appliance import Appliance, read_appliance
from appliance.web.start_watch import StartWatch
from appliance.web.waiting_room import WaitingRoom

log = structlog.get_logger()

_BACKLOG = 256
_SPARE_THREADS = READERS + 8
"""For requests on their way in, probes, the page and refusals, beside one thread per request that waits or runs."""
_WORKER_TIMEOUT_S = 120
"""Silence of the worker's main thread after which it is killed; it reports every second, whatever is loading."""
_END_S = 30
"""Beyond `drain_s`: for engines to end and last bytes to be sent."""
_KEEPALIVE_S = 15
"""An idle connection is kept open for so long."""


def run_server(settings: Settings) -> int:
    """Serves until told to stop; returns the exit code. TandemError for what is wrong before anything has started."""
    configure_logging(settings.log_level, settings.log_format)
    say_what_is_odd(settings)
    if needs_fetching(settings):
        return _fetch_and_serve(settings)
    appliance = read_appliance(resolve_model(settings))
    check_pair(appliance)
    if settings.cards == "auto" and not is_built_for_gpus() and (gpus := visible_gpus()):
        log.warning("this build has no CUDA: the model runs on host cards and the GPUs stay idle; build with CUDA=1", gpus=gpus)
    listener = listen(settings.host, settings.port)
    return serve(appliance, listener)


def say_what_is_odd(settings: Settings) -> None:
    """An elastic block that was switched off in so many words, and more threads than can run at once."""
    if not settings.elastic.enabled and (idle := settings.elastic.model_dump(exclude_defaults=True)):
        log.warning("elastic_enabled is false, so other elastic settings have no effect", settings=[f"elastic_{name}" for name in idle])
    cores = usable_cores()
    if settings.pool_threads is not None and settings.pool_threads > cores:
        log.warning(
            "pool_threads is more than the usable cores, which slows the engines down",
            pool_threads=settings.pool_threads,
            usable_cores=cores,
        )


def _fetch_and_serve(settings: Settings) -> int:
    """Binds the port first: whoever asks is told how far the download is."""
    listener = listen(settings.host, settings.port)
    room, progress = WaitingRoom(settings, listener), ProgressLog()

    def on_progress(load: LoadProgress) -> None:
        room.show(load)
        progress.show(load)

    try:
        appliance = read_appliance(resolve_model(settings, on_progress))
        check_pair(appliance)
    finally:
        room.close()
    return serve(appliance, listener)


def check_pair(appliance: Appliance, check: Callable[[int, int], PeerReport] = check_peers) -> None:
    """Whether a pair of GPUs reaches each other, as `peer_check` wants it. SettingsError if it must and does not."""
    cards = [lane.card.partition(":") for lane in appliance.desk.lanes]
    numbers = [int(number) for kind, _, number in cards if kind == "cuda"]
    if appliance.settings.peer_check == "off" or len(numbers) != 2:
        return
    report = check(numbers[0], numbers[1])
    if report.reaches:
        log.info("the cards reach each other", nvlink=report.is_nvlink, gib_per_s=report.gib_per_s)
        return
    sentence = f"cuda:{numbers[0]} and cuda:{numbers[1]} do not reach each other directly: {report.reason}"
    if appliance.settings.peer_check == "require":
        raise SettingsError(f"{sentence}; use two cards that do, or set peer_check to warn", param="peer_check")
    log.warning(f"{sentence}; two requests at once will be slower")


def listen(host: str, port: int) -> socket.socket:
    """Binds the address; port 0 is any free one. SettingsError if it is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --host and --port"
        raise SettingsError(message, param="port") from None


def serve(appliance: Appliance, listener: socket.socket) -> int:
    """Serves an appliance on a bound socket, which it takes over; returns the exit code."""
    server = _Server(appliance, listener)
    watcher = os.getpid()
    try:
        _OneWorkerArbiter(server).run()
    except SystemExit as end:
        if os.getpid() != watcher:
            raise  # the worker's own end, whose code the watcher looks at
        if end.code not in (None, 0):
            return 1
    return 1 if server.failed_to_start else 0


class _Server(BaseApplication):  # type: ignore[misc]
    """gunicorn's view of us. The worker's copy has the desk."""

    def __init__(self, appliance: Appliance, listener: socket.socket) -> None:
        self._appliance = appliance
        self._listener = listener
        self._url = _url_of(listener, appliance.settings.url_prefix)
        self._failed = mmap.mmap(-1, 1)  # shared with the worker
        self._desk: Desk | None = None
        self._template: ChatTemplate | None = None
        self._watch: StartWatch | None = None
        super().__init__()

    @property
    def failed_to_start(self) -> bool:
        """The worker has said that the model cannot be brought up."""
        return self._failed[0] != 0

    def load_config(self) -> None:
        settings = self._appliance.settings
        options: dict[str, Any] = {
            "bind": f"fd://{self._listener.detach()}",
            "worker_class": _DrainingWorker,
            "workers": 1,
            "threads": settings.max_queue + _SPARE_THREADS,
            "timeout": _WORKER_TIMEOUT_S,
            "graceful_timeout": int(settings.drain_s) + _END_S,
            "keepalive": _KEEPALIVE_S,
            "worker_tmp_dir": "/dev/shm",
            "control_socket_disable": True,
            "logger_class": _GunicornLog,
            "worker_exit": lambda _arbiter, _worker: self.close(),
        }
        for name, value in options.items():
            self.cfg.set(name, value)

    def load(self) -> flask.Flask:
        """In the worker: makes the application and starts the desk, in this order, since a key file may be gone by now."""
        appliance = self._appliance
        self._template = ChatTemplate.from_gguf(appliance.gguf)
        desk = Desk(appliance.desk)
        app = create_app(appliance.settings, desk, appliance.tokenizer, self._template, appliance.model)
        self._desk = desk.start()
        self._watch = StartWatch(self._desk, self._url, self._on_start_failure)
        self._watch.start()
        log.info("listening", url=self._url, model=appliance.model.name)
        return app

    def drain(self) -> None:
        """In the worker: refuses new requests, lets running ones go on for `drain_s`, ends the engines. Blocks until then."""
        drain_s, begin = self._appliance.settings.drain_s, time.monotonic()
        if self._desk is None or (status := self._desk.status()).phase in (Phase.DRAINING, Phase.FAILED):
            self._stop(drain_s)
            return
        running = sum(lane.request is not None for lane in status.lanes)
        log.info("draining: running requests may go on, new ones are refused", running=running, drain_s=drain_s)
        self._stop(drain_s)
        log.info("drained: every request and every engine has ended", took_s=round(time.monotonic() - begin, 2))

    def close(self) -> None:
        """In the worker: ends every answer and every engine at once. Blocks until then; may be called again."""
        self._stop(0.0)

    def _stop(self, drain_s: float) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._desk is not None:
            self._desk.stop(drain_s)
        if self._template is not None:
            self._template.close()

    def _on_start_failure(self, sentence: str) -> None:
        print(f"tandem: {self._appliance.settings.as_written(sentence)}", file=sys.stderr, flush=True)
        self._failed[0] = 1
        os.kill(os.getppid(), signal.SIGTERM)


class _DrainingWorker(ThreadWorker):  # type: ignore[misc]
    """Goes on answering until the desk has stopped, so that new requests get 503 instead of silence.

    gunicorn's own handlers raise out of whatever the main thread is doing, which can be inside a lock that the way out needs.
    """

    def init_process(self) -> None:
        end_with_parent(self.ppid)  # gunicorn's own look at its parent waits for running answers
        super().init_process()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM: running answers may go on."""
        self._leave(self.app.drain, sig, frame)

    def handle_quit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT or SIGQUIT: at once."""
        self._leave(self.app.close, sig, frame)

    def _leave(self, stop_desk: Callable[[], None], sig: int, frame: FrameType | None) -> None:
        leave = super().handle_exit

        def stop_then_leave() -> None:
            try:
                stop_desk()
            finally:
                leave(sig, frame)

        threading.Thread(target=stop_then_leave, name="leave", daemon=True).start()


class _OneWorkerArbiter(Arbiter):  # type: ignore[misc]
    """Without gunicorn's reload, re-exec and scaling signals: a second worker would be a second pair of engines."""

    def handle_hup(self) -> None:
        log.warning("SIGHUP is ignored; restart the server to change its settings")

    def _ignore(self) -> None:
        """No second worker."""

    handle_ttin = handle_ttou = handle_usr2 = handle_winch = _ignore


class _GunicornLog(Logger):  # type: ignore[misc]
    """gunicorn's warnings and errors through our log; its notices and its access log are left out."""

    def setup(self, cfg: Any) -> None:
        self.cfg = cfg
        self._access_log_enabled = False
        self.loglevel = self.LOG_LEVELS["warning"]
        self.error_log.setLevel(self.loglevel)
        self.error_log.propagate = True


def _url_of(listener: socket.socket, prefix: str) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}{prefix}/"
