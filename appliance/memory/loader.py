"""The loader process: fills and seals a model's arena, then exits.

    python -m appliance.memory.loader --model FILE --shm-dir DIR [--verify]

    stdout   LOAD {LoadProgress} at most five times a second, stage `reserve` (space is taken) and then `arena` (experts are
             read); the last one is complete. Or, as the last line, FATAL {Fatal}.
    stderr   the log, and progress for people if it is a terminal
    exit     0: the arena is sealed (it may have been before), 1: FATAL says why, 2: wrong arguments

It may be killed at any moment: the next loader finds the arena not sealed and nobody holding its lock, and fills it anew. A
loader that finds another one at work waits for it, showing that one's progress. When nobody reads its stdout it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import structlog

from appliance.errors import TandemError
from appliance.gguf_file import GgufFile, open_gguf
from appliance.lifeline import end_with_parent
from appliance.log import configure_logging
from appliance.memory.arena import Arena, ArenaHeader, ArenaPlace
from appliance.memory.arena_file import ArenaFile, claim_arena
from appliance.memory.arena_fill import (
    ReadAt,
    compare_arena,
    expert_bytes,
    fill_arena,
    read_at,
    read_pieces,
    tensors_in_file_order,
)
from appliance.memory.layout import arena_layout
from appliance.memory.nodes import spread_over_nodes
from appliance.models.config import read_config
from appliance.progress import ProgressReport
from appliance.protocol import Fatal, Word, line
from appliance.units import format_bytes

log = structlog.get_logger()


class Loader:
    """One run of the loader over one model. Confined to the main thread."""

    def __init__(self, gguf: GgufFile, shm_dir: Path, out: TextIO, read: ReadAt = read_at) -> None:
        layout = arena_layout(gguf, read_config(gguf))
        self._place = ArenaPlace(shm_dir, gguf.content_id, layout)
        self._tensors = tensors_in_file_order(gguf, layout)
        self._total_bytes = expert_bytes(self._tensors)
        self._out = out
        self._read = read
        self._waiting: ProgressReport | None = None

    def fill(self) -> None:
        """Leaves a sealed arena; if that fails, none."""
        file = claim_arena(self._place, self._on_wait)
        if file is None:
            log.info("the arena is sealed already", path=str(self._place.path))
            self._report("arena", self._total_bytes).skip()
            return
        with file:
            try:
                self._fill(file)
            except BaseException:
                file.discard()
                raise

    def verify(self) -> None:
        """Compares the sealed arena with the files. Raises EngineError at the first difference."""
        with Arena.open(self._place) as arena:
            compare_arena(arena, read_pieces(self._tensors, self._read), self._report("verify", self._total_bytes).update)

    def _fill(self, file: ArenaFile) -> None:
        from cuda_ext._native import first_bad_block  # only here: a start that finds the arena sealed does without it

        with spread_over_nodes():
            file.reserve(self._report("reserve", self._place.file_bytes).update)
        filling = self._report("arena", self._total_bytes)

        def on_progress(done_bytes: int) -> None:
            if filling.update(done_bytes):
                file.report(done_bytes)

        fill_arena(file, self._place.layout, read_pieces(self._tensors, self._read), first_bad_block, on_progress)
        file.seal()
        log.info("the arena is sealed", path=str(self._place.path), size=format_bytes(self._place.file_bytes))

    def _on_wait(self, header: ArenaHeader | None) -> None:
        if self._waiting is None:
            log.info("another loader fills this arena; waiting for it", path=str(self._place.path), pid=header and header.loader_pid)
            self._waiting = self._report("arena", self._total_bytes)
        self._waiting.update(min(header.filled_bytes, self._total_bytes - 1) if header else 0)

    def _report(self, stage: str, total_bytes: int) -> ProgressReport:
        return ProgressReport(stage, total_bytes, self._out, sys.stderr if sys.stderr.isatty() else None)


def main(arguments: Sequence[str] | None = None, *, read: ReadAt = read_at) -> int:
    """The process. Returns its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # like SIGTERM: nothing needs to be put in order
    options = _parse(arguments)
    configure_logging("info", process="loader")
    try:
        loader = Loader(open_gguf(options.model), options.shm_dir, sys.stdout, read)
        loader.fill()
        if options.verify:
            loader.verify()
    except BrokenPipeError:
        log.warning("nobody reads the progress any more; the loader ends")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails once more
        return 1
    except TandemError as error:
        return _give_up(error.code, error.message)
    except Exception as error:
        log.exception("the loader failed")
        return _give_up(TandemError.code, f"the loader failed with {type(error).__name__}: {error}")
    return 0


def _give_up(code: str, text: str) -> int:
    log.error(text, code=code)
    sys.stdout.write(line(Word.FATAL, Fatal(code=code, text=text)))
    return 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m appliance.memory.loader", description="Fills a model's arena in shared memory.")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file, one of its shards, or their folder")
    parser.add_argument("--shm-dir", type=Path, required=True, help="folder in shared memory")
    parser.add_argument("--verify", action="store_true", help="compare the sealed arena with the file, byte for byte")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
