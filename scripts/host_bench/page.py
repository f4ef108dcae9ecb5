"""The tables of docs/benchmarks/host.md, from the JSON of the runs. Everything else on that page is written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from appliance.units import GIB
from scripts.host_bench.results import Figure, HostRun, TypeResult

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
PAGE = FOLDER / "host.md"
BEGIN, END = "<!-- tables: python -m scripts.bench_host --table -->", "<!-- end of tables -->"


def stored_runs(folder: Path = FOLDER) -> list[Path]:
    """The JSON files whose tables stand on the page."""
    return sorted(folder.glob("host-*.json"))


def write_tables(runs: Sequence[HostRun], page: Path = PAGE) -> None:
    """Puts the tables of some runs between the two marks. Raises SystemExit if the page lacks them."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} lacks the marks between which tables stand: {BEGIN} and {END}")
    page.write_text(before + BEGIN + "\n\n" + "\n\n".join(map(section, runs)) + "\n\n" + END + after)


def section(run: HostRun) -> str:
    """Markdown: what one machine did."""
    about = (
        f"{run.date}, threads: {run.num_threads}, reading {run.bandwidth / 1e9:.1f} GB/s; {run.num_layers} layers; {run.clock} time. "
        f"llama.cpp: {run.llama}. Medians of {_rounds(run)}."
    )
    parts = [f"### {run.cpu} ({run.isa})", about, table(run)]
    missing = [*_unfinished(run), *(f"{name}: everything" for name in run.left_out)]
    if missing:
        parts.append("Not measured, for want of time: " + "; ".join(missing) + ".")
    return "\n\n".join(parts)


def table(run: HostRun) -> str:
    """Tokens per second of both, their ratio, memory and bandwidth, by type."""
    head = ["experts", *(str(task) for task in run.tasks), "resident GiB", "share of bandwidth", "others' cores"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in run.results:
        figures = {figure.task: figure for figure in result.figures}
        cells = [_cell(figures.get(task)) for task in run.tasks]
        share = result.decode_share(run.bandwidth)
        memory = f"{result.our_resident_bytes / GIB:.2f} / {result.their_resident_bytes / GIB:.2f}"
        ends = [memory, "-" if share is None else f"{share:.0%}", f"{result.busy_cores:.1f}"]
        lines.append("| " + " | ".join([result.expert_type, *cells, *ends]) + " |")
    return "\n".join(lines)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    return f"{figure.our_median:.1f} / {figure.their_median:.1f} = **{figure.ratio:.2f}**"


def _rounds(run: HostRun) -> str:
    counts = sorted({figure.rounds for figure in _figures(run.results)})
    made = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1]))) if counts else "no"
    return f"{made} rounds" if counts == [run.rounds] else f"{made} rounds ({run.rounds} were asked for)"


def _figures(results: Iterable[TypeResult]) -> Iterable[Figure]:
    return (figure for result in results for figure in result.figures)


def _unfinished(run: HostRun) -> list[str]:
    """Types of which some task is missing altogether."""
    lines = []
    for result in run.results:
        measured = {figure.task for figure in result.figures}
        missing = [str(task) for task in run.tasks if task not in measured]
        if missing:
            lines.append(f"{result.expert_type}: {', '.join(missing)}")
    return lines
