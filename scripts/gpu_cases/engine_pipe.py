"""A real engine process, and lines written to it and read from it as a desk does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from appliance.desk.config import LaneConfig
from appliance.protocol import Generate, Ready, Reply, Stats, Word, line
from appliance.settings import Settings, gpu_environment
from appliance.web.appliance import read_appliance


class EngineEndedError(Exception):
    """The engine ended, with its last words."""


class EnginePipe:
    """Confined to one thread."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.ready = Ready.model_validate_json(self._next(f"{Word.READY} "))

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, word: Word, *arguments: str) -> str:
        """What stands behind CTL in the answer."""
        self._write(line(word, *arguments))
        return self._next(f"{Word.CTL} ")

    def stats(self) -> Stats:
        return Stats.model_validate_json(self.ask(Word.STATS).removeprefix(f"{Reply.STATS} "))

    def answer(self, request: Generate) -> list[str]:
        """The lines that bring its tokens."""
        self._write(line(Word.GEN, request))
        events = [self._next(f"{Word.EV} ")]
        while '"event":"finished"' not in events[-1]:
            events.append(self._next(f"{Word.EV} "))
        return [event for event in events if '"event":"tokens"' in event]

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def _next(self, beginning: str) -> str:
        assert self._process.stdout is not None
        last = ""
        for text in self._process.stdout:
            if text.startswith(beginning):
                return text.removeprefix(beginning).rstrip("\n")
            last = text
        raise EngineEndedError(f"the engine ended with code {self._process.wait()}; its last line: {last.strip()}")


@contextmanager
def engine_of(settings: Settings) -> Iterator[EnginePipe]:
    """The first engine of a server with these settings; its arena is written first. Raises TandemError, EngineEndedError."""
    config = read_appliance(settings).desk
    subprocess.run(config.loader_argv, check=True, stdout=subprocess.DEVNULL)
    lane: LaneConfig = config.lanes[0]
    process = subprocess.Popen(lane.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=gpu_environment())
    try:
        yield EnginePipe(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
