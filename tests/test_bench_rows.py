"""The benchmark of row kernels: its page shows its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench_rows import FOLDER, PAGE, Rates, RowsRun, table


@pytest.mark.parametrize("path", sorted(FOLDER.glob("rows-*.json")), ids=lambda path: path.stem)
def test_the_page_has_the_table_of_every_stored_run(path: Path) -> None:
    assert table(RowsRun.read(path)) in PAGE.read_text()


def test_a_run_reads_as_it_was_written(tmp_path: Path) -> None:
    run = RowsRun("1 May 2026", "a CPU", "avx2", "a ggml", "a command", 0.5, (1, 8), (Rates("Q4_K", (4.0, 2.0), (2.0, 4.0)),))
    run.write(tmp_path / "rows.json")
    assert RowsRun.read(tmp_path / "rows.json") == run
    assert "| Q4_K | 4.00 / 2.00 = **2.00** | 2.00 / 4.00 = **0.50** |" in table(run)
