"""Another build of the native module for servers and engines as they are everywhere started: by `python -m` from the root of the tree."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def tree_with(native: Path | None) -> Iterator[Path]:
    """The root of a tree whose `cuda_ext` has that module; processes started inside run from there. None: the tree as it is."""
    if native is None:
        with _from_inside(ROOT):
            yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="tandem-tree-") as name:
        folder = Path(name)
        for part in ROOT.iterdir():
            if part.name != "cuda_ext" and not part.name.startswith("."):
                (folder / part.name).symlink_to(part)
        package = folder / "cuda_ext"
        package.mkdir()
        for source in (ROOT / "cuda_ext").glob("*.py"):
            (package / source.name).symlink_to(source)
        (package / native.name).symlink_to(native.resolve())
        with _from_inside(folder):
            yield folder


@contextmanager
def _from_inside(folder: Path) -> Iterator[None]:
    before, path = Path.cwd(), os.environ.get("PYTHONPATH")
    os.chdir(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [path])])
    try:
        yield
    finally:
        os.chdir(before)
        del os.environ["PYTHONPATH"]
        if path is not None:
            os.environ["PYTHONPATH"] = path
