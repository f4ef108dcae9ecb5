"""The real loader over files that read slowly, so that a test can end it half-way.

python -m tests.slow_loader --bytes-per-s N [options of appliance.memory.loader]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from appliance.memory import loader
from appliance.memory.arena_fill import read_at

READ_BYTES = 64 * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--bytes-per-s", type=int, required=True)
    options, rest = parser.parse_known_args(arguments)

    def read_slowly(descriptor: int, buffer: memoryview, offset: int) -> int:
        part = buffer[:READ_BYTES]
        time.sleep(len(part) / options.bytes_per_s)
        return read_at(descriptor, part, offset)

    return loader.main(rest, read=read_slowly)


if __name__ == "__main__":
    sys.exit(main())
