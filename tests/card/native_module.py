"""Another build of the native module in place of the installed one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import cuda_ext

NAME = "cuda_ext._native"


def load_native(path: Path) -> None:
    """Makes the file what `import cuda_ext._native` finds. Raises RuntimeError if something has imported that before."""
    if NAME in sys.modules:
        raise RuntimeError(f"{NAME} is loaded already, from {sys.modules[NAME].__file__}")
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise RuntimeError(f"{path} is not a native module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    cuda_ext._native = module
