"""Entry point of the command `tandem`: until the server handles signals itself, SIGTERM and SIGINT end it cleanly with exit code 0.

Starting takes a second or two in which nothing has been begun that needs finishing; without a handler the first process of a
container would not even notice the signal. So nothing is imported here before the handler is there.
"""

import signal
import sys
from types import FrameType


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def main() -> None:
    """The console script."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    from appliance.cli import main as run

    run()


if __name__ == "__main__":
    main()
