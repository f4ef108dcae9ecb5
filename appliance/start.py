"""Entry point of the command `tandem`: until the server handles signals itself, SIGTERM and SIGINT end it cleanly with exit code 0.

Starting takes a second or two in which nothing has been begun that needs finishing; without a handler the first process of a
container would not even notice the signal. So nothing is imported here before the handler is there.
"""

import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    """While modules are imported: an exception may come out of that as another one, or be swallowed."""
    os._exit(0)


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def main() -> None:
    """The console script."""
    for number in SIGNALS:
        signal.signal(number, _end_at_once)
    from appliance.cli import main as run

    for number in SIGNALS:
        signal.signal(number, _end)
    run()


if __name__ == "__main__":
    main()
