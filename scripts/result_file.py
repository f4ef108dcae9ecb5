"""A file that a benchmark left, read back for the tables of its page."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def read_result(path: Path, read: Callable[[Path], Result], script: str) -> Result:
    """What `read` makes of it. Raises SystemExit with code 2, after a sentence, if it cannot be read or is no result of that script."""
    try:
        return read(path)
    except OSError as error:
        print(f"{path} cannot be read: {error.strerror}", file=sys.stderr)
    except (ValueError, TypeError, LookupError, AttributeError):
        print(f"{path} is not a result of {script}; leave it out", file=sys.stderr)
    raise SystemExit(2)
