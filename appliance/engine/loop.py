"""The engine's main loop: one thread that obeys control lines and computes one request, one step at a time.

Between any two steps (a chunk of a prompt, a window of decode, some slots that are filled before a prompt) every line that has
come in is obeyed, so every line takes effect within one step. `CANCEL` and the end of the input do not even wait for that where
the runner can be interrupted: the step is given up, and done again if it was not its request that was cancelled. Without a
request the loop sleeps until a line comes.

How a request ends: every accepted `GEN` gets exactly one `Finished`. A RequestError costs that request only. Any other
exception ends the request with an error and then the loop, because the card's state can no longer be trusted: a fresh
process is the recovery.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from appliance.engine.commands import (
    AttachPeer,
    Cancel,
    Command,
    DetachPeer,
    EndOfInput,
    FreeMemory,
    HoldThreads,
    Refusal,
    ReportStats,
    ServeLink,
)
from appliance.engine.generation import Generation, Runner, WindowInterruptedError
from appliance.engine.parking import Parking
from appliance.engine.pipes import Inbox, LineWriter
from appliance.engine.session import Session
from appliance.errors import EngineError, MemoryBudgetError, RequestError, TandemError
from appliance.protocol import ControlErrorCode, Event, Finished, FinishReason, Generate, Message, Reply, Stats, Timings, Word, line

FILL_PERIOD_S = 0.002
"""Between two boundaries of an idle engine that fills its slots."""

_END = object()


@runtime_checkable
class Interruptible(Protocol):
    """A runner that does not have to finish a long chunk for which nobody waits any more."""

    def interrupt(self) -> None:
        """Makes the run in progress, or else the next one, raise WindowInterruptedError soon. Thread-safe."""


@runtime_checkable
class ThreadHolder(Protocol):
    """A runner whose host pool can give cores back (`POOL_HOLD`)."""

    def hold_threads(self, num_threads: int) -> int:
        """Lets the last `num_threads` threads sit out. Returns how many do: one always works."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """What `CTL VRAM` reports, in MiB."""

    used_mib: int
    free_mib: int


@runtime_checkable
class CacheResizer(Protocol):
    """A runner whose expert cache can shrink and grow again (`VRAM`)."""

    def free_memory(self, free_mib: int) -> CardMemory:
        """Gives slots back until `free_mib` MiB of the card are free. Raises MemoryBudgetError if no slots can do that."""

    def take_memory(self) -> CardMemory:
        """Takes the planned number of slots again; they are filled while it serves. MemoryBudgetError if the memory is not there."""


@runtime_checkable
class PeerHolder(Protocol):
    """A runner that may use a second card as more expert cache (`PEER_ATTACH`, `PEER_DETACH`)."""

    @property
    def has_peer(self) -> bool:
        """Whether it was started with one."""

    def attaching_peer(self) -> Iterator[None]:
        """Takes the peer card's slots, a part at every step; windows may run between two steps. They are filled while it serves.
        MemoryBudgetError if the memory is not there."""

    def detaching_peer(self) -> Iterator[None]:
        """Gives them back, likewise."""


@runtime_checkable
class LinkServer(Protocol):
    """A runner with a link to another engine (`LINK_SERVE`)."""

    @property
    def has_link(self) -> bool:
        """Whether it was started with one."""

    def serve_link(self, serving: bool) -> None:
        """Offers this card's experts to the other engine, or no longer."""


@runtime_checkable
class Filler(Protocol):
    """A runner that goes on filling slots at boundaries, so that it wants some of them without a request too."""

    @property
    def is_filling(self) -> bool: ...

    def fills_before(self, num_rows: int) -> bool:
        """Whether a run of so many rows should wait until slots are full."""


class EngineLoop:
    """Serves one sequence. Confined to the thread that calls `run`; commands come through the inbox."""

    def __init__(self, runner: Runner, inbox: Inbox, writer: LineWriter, parking: Parking | None = None) -> None:
        """`parking`: where displaced conversations go; None: they are forgotten."""
        self._runner = runner
        self._filler = runner if isinstance(runner, Filler) else None  # asked in every step, and `isinstance` takes a while
        self._inbox = inbox
        self._writer = writer
        self._parking = parking
        self._session = Session()
        self._generation: Generation | None = None
        self._peer_switch: tuple[Word, Iterator[None]] | None = None
        """The second card's memory on its way, in or out; the end is answered."""
        self._last_finished_id: str | None = None
        self._num_windows = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        if isinstance(runner, Interruptible):
            inbox.on_urgent(runner.interrupt)

    def run(self) -> None:
        """Serves until the desk closes the pipe.

        Raises EngineError when the card failed, BrokenPipeError when the desk has gone without closing it.
        """
        try:
            while not isinstance(command := self._next_command(), EndOfInput):
                if command is not None:
                    self._obey(command)
                elif self._generation is not None:
                    self._step(self._generation)
        except BrokenPipeError:  # nobody is left to be told
            raise
        except EngineError as error:
            self._finish_running(error)
            raise
        except Exception as error:
            failure = _as_engine_error(error)
            self._finish_running(failure)
            raise failure from error
        if self._generation is not None:
            self._finish(FinishReason.CANCELLED)
        self._writer.flush()

    def _next_command(self) -> Command | None:
        """The next command; None if there is none and a request is running."""
        if self._generation is None:
            self._move_peer_parts()
        if (command := self._inbox.take()) is not None:
            return command
        if self._generation is None:
            self._writer.flush()
        while self._fills_slots():
            self._runner.between_windows()
            command = self._inbox.wait(FILL_PERIOD_S) if self._generation is None else self._inbox.take()
            if command is not None:
                return command
        return self._inbox.wait() if self._generation is None else None

    def _fills_slots(self) -> bool:
        """Whether there is nothing better to do, or the running request waits for it."""
        if self._filler is None:
            return False
        return self._filler.is_filling if self._generation is None else self._filler.fills_before(self._generation.next_rows)

    def _obey(self, command: Command) -> None:
        match command:
            case Generate():
                self._begin(command)
            case Cancel():
                self._cancel(command)
            case HoldThreads():
                self._hold_threads(command.num_threads)
            case FreeMemory():
                self._resize_cache(command.free_mib)
            case AttachPeer():
                self._switch_peer(Word.PEER_ATTACH)
            case DetachPeer():
                self._switch_peer(Word.PEER_DETACH)
            case ServeLink():
                self._serve_link(command.serving)
            case ReportStats():
                self._reply(Reply.STATS, self._stats())
            case Refusal():
                self._refuse(command.code, command.text)

    def _begin(self, request: Generate) -> None:
        if self._generation is not None:
            is_same = self._generation.request_id == request.id
            code = ControlErrorCode.DUPLICATE if is_same else ControlErrorCode.BUSY
            self._refuse(code, f"{request.id}: request {self._generation.request_id} is running")
            return
        try:
            if self._parking is not None:
                self._parking.prepare(self._session, request.prompt)
            self._generation = Generation(request, self._runner, self._session, self._emit)
        except BrokenPipeError:
            raise
        except Exception as error:
            failure = error if isinstance(error, RequestError) else _as_engine_error(error)
            self._emit_finished(request.id, FinishReason.ERROR, Timings(prompt_tokens=len(request.prompt)), failure)
            if not isinstance(error, RequestError):
                raise

    def _cancel(self, command: Cancel) -> None:
        if self._generation is not None and self._generation.request_id == command.request_id:
            self._finish(FinishReason.CANCELLED)
        elif command.request_id != self._last_finished_id:  # of the last one the terminal event crossed this line
            self._refuse(ControlErrorCode.MALFORMED, f"{Word.CANCEL}: request {command.request_id} is not running")

    def _step(self, generation: Generation) -> None:
        try:
            self._move_peer_parts()
            self._runner.between_windows()
            reason = generation.advance()
        except WindowInterruptedError:  # a line is waiting; if the request survives it, the step is done again
            return
        except RequestError as error:
            self._finish(FinishReason.ERROR, error)
        else:
            self._num_windows += 1
            if reason is not None:
                self._finish(reason)

    def _finish_running(self, error: EngineError) -> None:
        if self._generation is not None:
            self._finish(FinishReason.ERROR, error)

    def _finish(self, reason: FinishReason, error: TandemError | None = None) -> None:
        """Ends the running request; no other place does."""
        generation = self._generation
        if generation is None:
            raise EngineError("a request was ended twice")
        self._generation = None
        self._num_prompt_tokens += generation.num_computed_prompt_tokens
        self._num_generated_tokens += generation.num_generated_tokens
        self._emit_finished(generation.request_id, reason, generation.timings(), error)

    def _emit_finished(self, request_id: str, reason: FinishReason, timings: Timings, error: TandemError | None) -> None:
        self._last_finished_id = request_id
        code, text = (None, None) if error is None else (error.code, error.message)
        self._emit(Finished(id=request_id, reason=reason, error_code=code, error_text=text, timings=timings))

    def _hold_threads(self, num_threads: int) -> None:
        if not isinstance(self._runner, ThreadHolder):
            self._refuse(ControlErrorCode.UNSUPPORTED, f"{Word.POOL_HOLD}: this engine has no host pool")
            return
        self._reply(Reply.HOLD, str(self._runner.hold_threads(num_threads)))

    def _resize_cache(self, free_mib: int | None) -> None:
        if not isinstance(self._runner, CacheResizer):
            self._refuse(ControlErrorCode.UNSUPPORTED, f"{Word.VRAM}: the expert cache of this engine has a fixed size")
            return
        if free_mib is not None and self._parking is not None and self._generation is None:
            self._parking.park(self._session)  # the lane may be about to sleep; the other one may go on with it
        try:
            memory = self._runner.take_memory() if free_mib is None else self._runner.free_memory(free_mib)
        except MemoryBudgetError as error:
            self._refuse(ControlErrorCode.FAILED, f"{Word.VRAM}: {error.message}")
        else:
            self._reply(Reply.VRAM, str(memory.used_mib), str(memory.free_mib))

    def _switch_peer(self, word: Word) -> None:
        if not (isinstance(self._runner, PeerHolder) and self._runner.has_peer):
            self._refuse(ControlErrorCode.UNSUPPORTED, f"{word}: this engine was started without a peer card")
            return
        self._move_peer_parts(at_once=True)
        steps = self._runner.attaching_peer() if word is Word.PEER_ATTACH else self._runner.detaching_peer()
        self._peer_switch = (word, steps)
        self._move_peer_parts()

    def _move_peer_parts(self, *, at_once: bool = False) -> None:
        """One part of the second card's memory between two windows; all `at_once`, or where no window waits, or a chunk of a prompt."""
        while self._peer_switch is not None:
            word, steps = self._peer_switch
            try:
                is_over = next(steps, _END) is _END
            except MemoryBudgetError as error:
                self._peer_switch = None
                self._refuse(ControlErrorCode.FAILED, f"{word}: {error.message}")
                return
            if is_over:
                self._peer_switch = None
                self._reply(Reply.PEER, "ON" if word is Word.PEER_ATTACH else "OFF")
            if not at_once and self._generation is not None and self._generation.next_rows == 1:
                return

    def _serve_link(self, serving: bool) -> None:
        if not (isinstance(self._runner, LinkServer) and self._runner.has_link):
            self._refuse(ControlErrorCode.UNSUPPORTED, f"{Word.LINK_SERVE}: this engine was started without a link")
            return
        self._runner.serve_link(serving)
        self._reply(Reply.LINK, str(int(serving)))

    def _stats(self) -> Stats:
        running = self._generation
        return Stats(
            **self._runner.stats(),
            windows=self._num_windows,
            prompt_tokens=self._num_prompt_tokens + (running.num_computed_prompt_tokens if running else 0),
            generated_tokens=self._num_generated_tokens + (running.num_generated_tokens if running else 0),
            context_used=len(self._session),
            busy=running is not None,
            parked_conversations=self._parking.num_parked if self._parking else 0,
            resumed_conversations=self._parking.num_resumed if self._parking else 0,
            stored_conversations=self._parking.num_stored if self._parking else 0,
            stored_bytes=self._parking.stored_bytes if self._parking else 0,
        )

    def _emit(self, event: Event) -> None:
        self._writer.write(line(Word.EV, event))

    def _reply(self, reply: Reply, *parts: str | Message) -> None:
        self._writer.write(line(Word.CTL, reply.value, *parts))

    def _refuse(self, code: ControlErrorCode, text: str) -> None:
        self._writer.write(line(Word.CTL, Reply.ERR.value, code.value, " ".join(text.split())))


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    return EngineError(f"the engine failed: {type(error).__name__}: {error}")
