"""Files from which benchmarks write their tables: one that is no result is named in a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import bench, bench_host, bench_rows
from scripts.result_file import read_result


@pytest.mark.parametrize("text", ["", "[]", "3", '"text"', "{}", '{"threads": 1, "layers": 2, "results": [{}]}', "\0"])
@pytest.mark.parametrize("read", [bench.read_run, bench_host.HostRun.read, bench_rows.RowsRun.read])
def test_what_is_no_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], read: Callable[[Path], object], text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        read_result(file, read, "scripts.some")
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"{file} is not a result of scripts.some; leave it out\n"


def test_bench_names_the_file_that_is_no_result_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "missing.json"
    for file, sentence in (
        (bench_rows.FOLDER / "rows-avx2.json", "is not a result of scripts.bench;"),
        (missing, "cannot be read: No such"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench", "--table", str(file)])
        with pytest.raises(SystemExit) as caught:
            bench.main()
        assert caught.value.code == 2
        assert capsys.readouterr().err.startswith(f"{file} {sentence}")
