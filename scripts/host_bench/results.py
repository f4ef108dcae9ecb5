"""What a run of the host benchmark found, as dataclasses that go to JSON and back."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.host_bench.contestants import Measured, Task


@dataclass(frozen=True)
class Figure:
    """One task of one type: tokens per second of both, one value per round."""

    task: Task
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @classmethod
    def of(cls, task: Task, ours: Sequence[Measured], theirs: Sequence[Measured]) -> Figure:
        rates = [tuple(task.num_tokens / measured.seconds for measured in side) for side in (ours, theirs)]
        return cls(task, rates[0], rates[1])

    @property
    def rounds(self) -> int:
        return len(self.ours)

    @property
    def our_median(self) -> float:
        return statistics.median(self.ours)

    @property
    def their_median(self) -> float:
        return statistics.median(self.theirs)

    @property
    def ratio(self) -> float:
        return self.our_median / self.their_median


@dataclass(frozen=True)
class TypeResult:
    """All tasks that were measured with experts of one type."""

    expert_type: str
    figures: tuple[Figure, ...]
    our_resident_bytes: int
    their_resident_bytes: int
    bytes_per_token: int
    busy_cores: float
    """Cores that other processes kept busy meanwhile, the median over all measurements."""

    def decode_share(self, bandwidth: float) -> float | None:
        """Share of the memory's bandwidth that decoding takes. None: it was not measured."""
        decoded = next((figure for figure in self.figures if figure.task.name == "decode"), None)
        return decoded and decoded.our_median * self.bytes_per_token / bandwidth


@dataclass(frozen=True)
class HostRun:
    """One machine, one command."""

    date: str
    cpu: str
    isa: str
    num_threads: int
    clock: str
    """"wall" or "processor": what a second is."""
    bandwidth: float
    """Bytes per second that so many threads read together."""
    llama: str
    num_layers: int
    tasks: tuple[Task, ...]
    rounds: int
    """Asked for; fewer were made where time was up."""
    results: tuple[TypeResult, ...]
    left_out: tuple[str, ...]
    """Types for which there was no time."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> HostRun:
        fields = json.loads(path.read_text())
        tasks = tuple(Task(**task) for task in fields.pop("tasks"))
        results = tuple(_result(result) for result in fields.pop("results"))
        return cls(tasks=tasks, results=results, left_out=tuple(fields.pop("left_out")), **fields)


def _result(fields: dict[str, object]) -> TypeResult:
    figures = fields.pop("figures")
    assert isinstance(figures, list)
    read = (Figure(Task(**figure["task"]), tuple(figure["ours"]), tuple(figure["theirs"])) for figure in figures)
    return TypeResult(figures=tuple(read), **fields)  # type: ignore[arg-type]
