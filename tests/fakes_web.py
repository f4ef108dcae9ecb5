"""The real web server and the real desk over fake engine processes, for tests that talk HTTP.

As a process (in the root of the tree) it writes `PORT n` to stdout once it listens:

    python -m tests.fakes_web --model VOCAB.gguf [--settings JSON] [--lanes 1|2] [--engine "OPTIONS OF tests.fakes_engine"]

`vocabulary` writes the file: 256 byte tokens, `<|im_start|>`, `<|im_end|>` and a chatml template, no weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import httpx2

from appliance.desk.config import LANE_NAMES, DeskConfig, LaneConfig, Limits
from appliance.gguf_file import open_gguf
from appliance.log import configure_logging
from appliance.settings import Settings
from appliance.text.tokenizer import Tokenizer
from appliance.web.appliance import Appliance
from appliance.web.model_info import ModelInfo
from appliance.web.server import listen, serve
from tests.fakes_engine import fake_engine_argv

ROOT = Path(__file__).parents[1]
MODEL = "fake-model"
VOCAB = 320
CONTEXT = 4096
IM_START, IM_END = 256, 257
THOUGHT, CALL, END_OF_CALL = 259, 260, 261
"""Tokens for engines to answer with: whole pieces of a reply, which no text is read as."""
SPECIAL_REPLIES = (
    "<think>\nwhich word?\n</think>\n\n",
    '<tool_call>\n{"name": "look_up", "arguments": {"word": "tandem"}}\n</tool_call>',
    ' {"word": "bicycle"}}\n</tool_call>',
)
TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes in byte-level vocabularies (GPT-2's table), in the order of the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_vocabulary(path: Path) -> Path:
    """A GGUF file with tokenizer and template only: token id = byte, then the special tokens."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    space, the = "\u0120", "\u0120t"
    symbols = byte_symbols()
    replies = ["".join(symbols[byte] for byte in reply.encode()) for reply in SPECIAL_REPLIES]
    tokens = [*symbols, "<|im_start|>", "<|im_end|>", the, *replies]
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (1 + len(replies))
    kinds += [gguf.TokenType.CONTROL] * (VOCAB - len(tokens))
    tokens += [f"<|unused_{number}|>" for number in range(VOCAB - len(tokens))]
    writer.add_name(MODEL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{space} t"])
    writer.add_eos_token_id(IM_END)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass(frozen=True, slots=True)
class FakeServer:
    """A running server process."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def status(self) -> dict[str, Any]:
        """The answer of `/status`."""
        answer: dict[str, Any] = httpx2.get(f"{self.url}/status").json()
        return answer

    def wait_until_ready(self) -> None:
        """Until every lane takes requests."""
        self.wait_for(lambda status: all(lane["state"] == "idle" for lane in status["lanes"]))

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], limit_s: float = 60.0) -> float:
        """Polls `/status` until it meets the condition; returns the seconds that took. AssertionError at the limit."""
        begin = time.monotonic()
        while not condition(status := self.status()):
            if time.monotonic() - begin > limit_s:
                raise AssertionError(f"not within {limit_s} s: {status}")
            time.sleep(0.02)
        return time.monotonic() - begin


@contextmanager
def running_server(model: Path, *, engine: str = "", lanes: int = 2, log: Path | None = None, **settings: object) -> Iterator[FakeServer]:
    """Starts a server, waits until it listens, and ends it. `log` receives its stderr."""
    options = ["--model", str(model), "--lanes", str(lanes), "--settings", json.dumps(settings), "--engine", engine]
    with open(log or os.devnull, "w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes_web", *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            if not first.startswith("PORT "):
                raise RuntimeError(f"the fake server wrote {first!r}, exit code {process.wait(10)}")
            yield FakeServer(process, int(first.split()[1]))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes_web")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--engine", default="")
    options = parser.parse_args(arguments)
    settings = Settings(**json.loads(options.settings))
    configure_logging(settings.log_level, settings.log_format)
    model = open_gguf(options.model)
    cards = [f"host:{number}" for number in range(options.lanes)]
    engine = ("--context", str(CONTEXT), *shlex.split(options.engine))
    desk = DeskConfig(
        lanes=tuple(
            LaneConfig(name, card, tuple(fake_engine_argv("--card", card, *engine))) for name, card in zip(LANE_NAMES, cards, strict=False)
        ),
        loader_argv=(sys.executable, "-c", ""),
        max_queue=settings.max_queue,
        limits=Limits(restart_delays_s=(0.0, 0.1, 0.2)),
    )
    info = ModelInfo(name=MODEL, context=CONTEXT, vocab=VOCAB, lanes=options.lanes, created=1_700_000_000)
    appliance = Appliance(settings, desk, model, Tokenizer.from_gguf(model, CONTEXT), info)
    listener = listen(settings.host, 0)
    print(f"PORT {listener.getsockname()[1]}", flush=True)
    return serve(appliance, listener)


if __name__ == "__main__":
    sys.exit(main())
