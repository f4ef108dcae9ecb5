"""The types of the native module, as type checkers see them, are those of the module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMAND = "python -m nanobind.stubgen -q -m cuda_ext._native -o cuda_ext/_native.pyi"


def test_the_stub_of_the_native_module_is_current(tmp_path: Path) -> None:
    fresh = tmp_path / "_native.pyi"
    subprocess.run([sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "cuda_ext._native", "-o", str(fresh)], check=True, timeout=120)
    committed = Path(__file__).parents[1] / "cuda_ext" / "_native.pyi"
    assert committed.read_text() == fresh.read_text(), f"the stub is stale; run: {COMMAND}"
