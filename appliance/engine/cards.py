"""Cards by name: a GPU where the native module was built for some, else the host card that stands in for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from appliance.engine.logits import ArrayRow, Logits, LogitsRow
from appliance.errors import SettingsError
from appliance.models.recording import Recorder, Table
from cuda_ext import _native as native


class Program(Protocol):
    """A recorded forward pass."""

    def interrupt(self) -> None:
        """Ends the run in progress, or else the next one, soon. Thread-safe."""


class GpuProgram(Program, Protocol):
    """What a GPU tells of its last run."""

    def likeliest(self, row: int) -> tuple[int, float, float]:
        """(token, peak, lowest)"""

    @property
    def chosen(self) -> int | None: ...
    def read_logits(self, row: int) -> native.View: ...
    def profile(self, token: int, position: int, repeats: int) -> dict[str, float]: ...
    def prepare_windows(self) -> None: ...


class GpuTable(Table, Protocol):
    """What a GPU's residency table counts beside rows."""

    @property
    def bytes_from_arena(self) -> int: ...
    @property
    def bytes_from_peer(self) -> int: ...


class Card(Protocol):
    """What the engine needs of a card. Tickets of `update` and of `copy` count separately; 0 is always done."""

    def allocate(self, use: str, nbytes: int) -> native.View: ...
    def allocate_slots(self, nbytes: int, present: bool) -> native.View: ...
    def bytes_by_use(self) -> dict[str, int]: ...
    def pin(self, arena: native.View) -> int:
        """Pins the arena as far as the system allows; returns how many bytes are."""

    def unpin(self) -> None:
        """Before the arena's memory goes; nothing may be running."""

    def write(self, to: native.View, data: NDArray[np.uint8]) -> None: ...
    def new_table(self, num_layers: int, num_experts: int, memory: native.View) -> Table: ...
    def new_program(
        self, max_rows: int, max_logits: int, context: int, vocab: int, tokens: native.View, top_k: int, hidden: int
    ) -> Program: ...
    def new_recorder(self, program: Program, ring: native.View | None) -> Recorder: ...
    def run(self, program: Program, tokens: NDArray[np.int32], position: int, num_logits: int) -> None: ...
    def update(self, table: Table, entries: Sequence[tuple[int, int, int]]) -> int: ...
    def wait(self, ticket: int) -> None: ...
    def copy(self, to: native.View, source: native.View, after: int) -> int: ...
    def copied(self, ticket: int) -> bool: ...
    def wait_copied(self, ticket: int) -> None: ...


@runtime_checkable
class GpuCard(Card, Protocol):
    """What a GPU does beside that. Rows lie `pitch` bytes apart on the card; copies block."""

    def run(
        self, program: Program, tokens: NDArray[np.int32], position: int, num_logits: int, chooser: native.Chooser | None = None
    ) -> None: ...
    def read_rows(self, source: native.View, pitch: int, out: NDArray[np.uint8]) -> None: ...
    def write_rows(self, to: native.View, pitch: int, data: NDArray[np.uint8]) -> None: ...


class GpuRow:
    """A row of logits on a GPU, which has found its extremes itself."""

    def __init__(self, program: GpuProgram, row: int) -> None:
        self._program = program
        self._row = row
        self.likeliest, self.peak, self.lowest = program.likeliest(row)
        self.chosen = program.chosen

    def values(self) -> Logits:
        return self._program.read_logits(self._row).bytes().view(np.float32)


def open_card(name: str, pool: native.Pool, isa: str, *, is_own: bool = True) -> Card:
    """`host:N` or `cuda:N`; the calling thread's own card, or a second one.

    Raises SettingsError for a GPU that this build or this machine does not have.
    """
    kind, _, number = name.partition(":")
    if kind == "host":
        return cast(Card, native.HostCard(pool, isa))  # each kind takes tables, programs and recorders of its own only
    gpu = getattr(native, "CudaCard", None)
    if gpu is None:
        raise SettingsError(f"card {name}: this build has no CUDA; build it with CUDA=1 or use host:0", param="cards")
    try:
        card = gpu(int(number), pool, isa)
    except ValueError as error:
        raise SettingsError(f"card {name}: {error}", param="cards") from None
    if is_own:
        card.make_current()
    return cast(Card, card)


def rows_of(program: Program, memory: native.View, num_rows: int, vocab: int) -> list[LogitsRow]:
    """Rows of logits that a run has left; `memory` is where a host card puts them."""
    if isinstance(program, native.Program):
        logits = memory.bytes()[: 4 * num_rows * vocab].view(np.float32).reshape(num_rows, vocab)
        return [ArrayRow(row) for row in logits]
    gpu: GpuProgram = program  # type: ignore[assignment]
    return [GpuRow(gpu, row) for row in range(num_rows)]
