"""Tests of the code for CUDA cards: on a GPU, or on emulated cards.

`pytest tests/card --native FILE` runs them with that build of the native module. Without the option they need an installed module
that was built for CUDA cards; where it was not, they are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.card.native_module import load_native

WITHOUT_CUDA = "the native module was built without CUDA; build one (docs/engine.md) and give --native FILE"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native", metavar="FILE", help="the native module to test, instead of the installed one")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--native", None):
        load_native(Path(path).resolve())


class CardModule(pytest.Module):
    """A test module that may import what only a build for CUDA cards has."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        from cuda_ext import _native

        if not hasattr(_native, "cuda_build"):
            raise pytest.skip.Exception(WITHOUT_CUDA, allow_module_level=True)
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    # The hook of a folder's conftest is asked for that folder only.
    return CardModule.from_parent(parent, path=module_path)
