"""The desk: takes requests, gives them to lanes, keeps the engines alive.

    web threads ── submit(), cancel(), stop() ──┐                     ┌── tickets
                                                ├─> mailbox ──> desk thread ──> child processes
    threads of the children ── lines, endings ──┘      (DeskState)    └── status snapshot

One thread, the desk thread, owns all state: it takes one input after the other from the mailbox, lets `DeskState` decide, and
does what it says. It never waits for a process. It also is the one that starts processes, because it lives as long as they may.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from appliance.desk.actions import Action, Deliver, KillEngine, SendLine, StartEngine, StartLoader, StopEngine, StopLoader
from appliance.desk.child_process import ChildProcess
from appliance.desk.config import DeskConfig
from appliance.desk.desk_state import DeskState
from appliance.desk.inputs import Cancel, Drain, Ending, EngineEnded, EngineSaid, Input, LoaderEnded, LoaderSaid, Submit, Tick
from appliance.desk.lane_state import LaneState
from appliance.desk.lines import parse_line
from appliance.desk.status import DeskStatus, LaneStatus, Phase
from appliance.desk.ticket import Ticket
from appliance.errors import EngineError, NotReadyError, TandemError
from appliance.protocol import Fatal, Finished, FinishReason, Generate, LoadProgress, PromptProgress, Tokens

_LOADER = "loader"
_JOIN_S = 10.0
_ANSWER_S = 30.0
_LOGGED_CHARACTERS = 200
_PROGRESS_PERIOD_S = 0.05
"""Between two snapshots while nothing but tokens comes."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Call:
    """A `submit` that waits for its ticket."""

    request: Generate
    answer: Future[Ticket]


class Desk:
    """Thread-safe. `start` it once, in the process that serves; `stop` ends every process and thread it has started."""

    def __init__(self, config: DeskConfig) -> None:
        self._config = config
        self._argv = {lane.name: lane.argv for lane in config.lanes}
        self._state = DeskState([(lane.name, lane.card) for lane in config.lanes], config.max_queue, config.limits, config.elastic)
        self._status = self._state.status({})
        self._published_s = 0.0
        self._mailbox: queue.SimpleQueue[Input | _Call] = queue.SimpleQueue()
        self._post_lock = threading.Lock()
        self._is_open = False
        """Posts are taken; guarded by the lock."""
        self._tickets: dict[str, Ticket] = {}
        self._children: dict[str, ChildProcess] = {}
        self._complained: set[str] = set()
        """Children that have logged themselves why they ended last."""
        self._thread = threading.Thread(target=self._serve, name="desk", daemon=True)

    def start(self) -> Desk:
        """Starts loading and returns at once; `status` tells how it goes."""
        self._is_open = True
        self._thread.start()
        return self

    def submit(self, request: Generate) -> Ticket:
        """Accepts a request; its events come through the ticket.

        Raises QueueFullError, NotReadyError (loading, draining or failed) or RequestError (id in use, prompt over the context).
        """
        answer: Future[Ticket] = Future()
        if not self._post(_Call(request, answer)):
            raise _closed_error()
        try:
            return answer.result(timeout=_ANSWER_S)
        except TimeoutError:
            self._post_cancel(request.id)
            raise NotReadyError(f"the desk did not answer within {_ANSWER_S:g} s; send the request again") from None

    def status(self) -> DeskStatus:
        """The desk's memory, at most a moment old. Never waits for, wakes or delays an engine."""
        return self._status

    def stop(self, drain_s: float) -> None:
        """Refuses new requests, gives running ones `drain_s` seconds, then ends them and every process. Blocks until then.

        May be called again, from another thread too, to shorten the wait.
        """
        if not self._post(Drain(drain_s)):
            return
        limits = self._config.limits
        self._thread.join(drain_s + limits.kill_after_s + _JOIN_S)
        if self._thread.is_alive():
            _log.error("a process does not end although it was killed", children={name: c.pid for name, c in self._children.items()})

    def _post(self, item: Input | _Call) -> bool:
        with self._post_lock:
            if self._is_open:
                self._mailbox.put(item)
            return self._is_open

    # The desk thread

    def _serve(self) -> None:
        try:
            self._do(self._state.begin())
            while not self._state.has_ended:
                self._handle(self._next())
        except Exception:
            _log.exception("the desk failed; every request ends and the engines are killed")
        finally:
            self._close()

    def _next(self) -> Input | _Call:
        due = self._state.next_timer_s
        try:
            return self._mailbox.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        except queue.Empty:
            return Tick()

    def _handle(self, item: Input | _Call) -> None:
        match item:
            case _Call():
                self._accept(item)
            case EngineEnded():
                self._forget_child(item.lane, item.ending)
                self._do(self._state.handle(item, time.monotonic()))
            case LoaderEnded():
                self._forget_child(_LOADER, item.ending)
                self._do(self._state.handle(item, time.monotonic()))
            case _:
                self._do(self._state.handle(item, time.monotonic()))

    def _accept(self, call: _Call) -> None:
        try:
            actions = self._state.handle(Submit(call.request), time.monotonic())
        except TandemError as error:
            self._publish()
            call.answer.set_exception(error)
            return
        ticket = Ticket(call.request.id, self._post_cancel)
        self._tickets[call.request.id] = ticket
        self._do(actions)
        call.answer.set_result(ticket)

    def _post_cancel(self, request_id: str, is_complete: bool = False) -> None:
        self._post(Cancel(request_id, is_complete))

    def _do(self, actions: Sequence[Action]) -> None:
        """Events go out last, so that whoever has read one finds the status up to date (but for the counts of tokens)."""
        for action in actions:
            if not isinstance(action, Deliver):
                self._act(action)
        if not _is_only_progress(actions) or time.monotonic() - self._published_s > _PROGRESS_PERIOD_S:
            self._publish()
        for action in actions:
            if isinstance(action, Deliver):
                self._deliver(action)

    def _act(self, action: Action) -> None:
        match action:
            case StartLoader():
                self._start_child(_LOADER, self._config.loader_argv)
            case StartEngine():
                self._start_child(action.lane, self._argv[action.lane])
            case SendLine() if action.lane in self._children:
                self._children[action.lane].send(action.text)
            case StopEngine() if action.lane in self._children:
                limits = self._config.limits
                self._children[action.lane].stop(limits.term_after_s, limits.kill_after_s)
            case KillEngine() if action.lane in self._children:
                self._children[action.lane].kill()
            case StopLoader() if _LOADER in self._children:
                self._children[_LOADER].kill()
            case _:
                pass  # to a child that could not be started; its ending lies in the mailbox

    def _deliver(self, action: Deliver) -> None:
        event = action.event
        ticket = self._tickets.pop(event.id) if isinstance(event, Finished) else self._tickets[event.id]
        ticket.deliver(event)

    def _publish(self) -> None:
        before = {lane.name: lane.state for lane in self._status.lanes}
        self._status = self._state.status({name: child.pid for name, child in self._children.items()})
        for lane in self._status.lanes:
            if lane.state is LaneState.FAILED and before[lane.name] is not LaneState.FAILED:
                self._log_failed(lane)
        self._published_s = time.monotonic()

    def _log_failed(self, lane: LaneStatus) -> None:
        """The reason is said once: here, unless the process that could not start has."""
        event = "a lane is out of service until the server is restarted"
        if lane.restarts == 0 and self._complained & {lane.name, _LOADER}:
            _log.info(event, lane=lane.name)
        else:
            _log.error(event, lane=lane.name, reason=lane.reason)

    # Child processes

    def _start_child(self, name: str, argv: Sequence[str]) -> None:
        try:
            self._children[name] = ChildProcess(name, argv, self._on_line, self._on_end)
        except (OSError, RuntimeError) as error:  # no such program, no memory, no more processes or threads
            self._post(_ended(name, Ending(last_words=f"{argv[0]}: {error}")))

    def _on_line(self, child: ChildProcess, text: str) -> None:
        """In the child's thread."""
        try:
            said = parse_line(text)
        except EngineError as error:
            said = Fatal(code=error.code, text=error.message)
            child.kill()
        if said is None:
            _log.warning("a line that is not of the protocol", lane=child.name, text=text[:_LOGGED_CHARACTERS])
        elif child.name != _LOADER:
            self._post(EngineSaid(child.name, said))
        elif isinstance(said, LoadProgress | Fatal):
            self._post(LoaderSaid(said))

    def _on_end(self, child: ChildProcess, ending: Ending) -> None:
        """In the child's thread; the last thing it does."""
        self._post(_ended(child.name, ending))

    def _forget_child(self, name: str, ending: Ending) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.join(_JOIN_S)
        self._complained.discard(name)
        if ending.exit_code == 0 or self._state.phase is Phase.DRAINING:
            _log.info("a process ended as it should", lane=name)
        elif ending.is_logged:
            self._complained.add(name)
            _log.info("a process ended", lane=name, how=replace(ending, last_words=None).sentence(name))
        else:
            _log.warning("a process ended", lane=name, how=ending.sentence(name))

    def _close(self) -> None:
        """Whatever happened: no request without its end, no process, nobody who waits for an answer."""
        with self._post_lock:
            self._is_open = False
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.join(_JOIN_S)
        _remove(self._config.leftovers)
        while True:
            try:
                item = self._mailbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, _Call):
                item.answer.set_exception(_closed_error())
        if not self._state.has_ended:
            reason = "the desk failed; the log says where"
            self._status = replace(self._status, phase=Phase.FAILED, reason=reason, unready_reason=reason, load=None)
        for request_id, ticket in self._tickets.items():
            text = "the desk failed on another matter; send the request again"
            ticket.deliver(Finished(id=request_id, reason=FinishReason.ERROR, error_code=TandemError.code, error_text=text))
        self._tickets.clear()


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_only_progress(actions: Sequence[Action]) -> bool:
    return len(actions) > 0 and all(isinstance(a, Deliver) and isinstance(a.event, Tokens | PromptProgress) for a in actions)


def _ended(name: str, ending: Ending) -> Input:
    return LoaderEnded(ending) if name == _LOADER else EngineEnded(name, ending)


def _closed_error() -> NotReadyError:
    return NotReadyError("the server has shut down; send the request again when it is back", retry_after_s=10)
