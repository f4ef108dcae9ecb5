"""An engine as a child process, with deadlines on everything."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.protocol import EVENT, Event, Finished, Generate, Tokens, Word, line

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60.0


class EngineProcess:
    """A child process, a thread that reads its stdout, and deadlines on everything."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors = bytearray()
        self._threads = [threading.Thread(target=self._read_lines), threading.Thread(target=self._read_errors)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, text: str) -> None:
        self._stdin.write(text.encode())
        self._stdin.flush()

    def generate(self, prompt: Sequence[int], max_tokens: int, request_id: str = "a", **fields: object) -> None:
        request = Generate.model_validate({"id": request_id, "prompt": list(prompt), "max_tokens": max_tokens, **fields})
        self.send(line(Word.GEN, request))

    def next_line(self) -> str | None:
        """The next line, or None at the end."""
        return self._lines.get(timeout=DEADLINE_S)

    def wait_for(self, word: Word) -> str:
        """The rest of the next line that begins with `word`."""
        while (text := self.next_line()) is not None:
            if text.startswith(f"{word} "):
                return text.removeprefix(f"{word} ")
        raise AssertionError(f"the engine ended without {word}; its stderr: {self.errors()}")

    def wait_until(self, is_wanted: Callable[[Event], bool]) -> Event:
        while not is_wanted(event := EVENT.validate_json(self.wait_for(Word.EV))):
            pass
        return event

    def answer(self) -> list[int]:
        """Token ids up to the terminal event."""
        tokens: list[int] = []
        while not isinstance(event := EVENT.validate_json(self.wait_for(Word.EV)), Finished):
            tokens += event.ids if isinstance(event, Tokens) else []
        return tokens

    def rest(self) -> list[str]:
        """All lines up to the end."""
        lines = []
        while (text := self.next_line()) is not None:
            lines.append(text)
        return lines

    def close_stdin(self) -> None:
        self._stdin.close()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        return self._process.wait(DEADLINE_S)

    def errors(self) -> str:
        """Everything it wrote to stderr; waits for its end."""
        self._threads[1].join(DEADLINE_S)
        return self._errors.decode()

    def clean_up(self) -> None:
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for stream in (self._stdin, self._stdout, self._stderr):
            try:
                stream.close()
            except BrokenPipeError:  # what a test wrote to a dead engine
                continue

    def _read_lines(self) -> None:
        for raw in self._stdout:
            self._lines.put(raw.decode().rstrip("\n"))
        self._lines.put(None)

    def _read_errors(self) -> None:
        self._errors += self._stderr.read()
