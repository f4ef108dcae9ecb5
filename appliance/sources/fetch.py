"""The fetching process: gets one model from a hub, then exits.

    python -m appliance.sources.fetch --reference hf://owner/repo:QUANT --models-dir DIR --hub-url URL [--token-file FILE]

    stdout   LOAD {LoadProgress} at most five times a second, stage `download`. Or, as the last line, FATAL {Fatal}.
    stderr   the log, and progress for people if it is a terminal
    exit     0: the model is complete, 1: FATAL says why, 2: wrong arguments

It may be killed at any moment: the next one goes on where this one was. When nobody reads its stdout it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from appliance.errors import ModelError, SettingsError, TandemError
from appliance.lifeline import end_with_parent
from appliance.log import configure_logging
from appliance.progress import ProgressReport
from appliance.protocol import Fatal, Word, line
from appliance.sources.hub import Hub
from appliance.sources.reference import HubReference, parse_hub_reference
from appliance.sources.store import ModelStore

log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> int:
    """The process. Returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # nothing needs to be put in order
    options = _parse(arguments)
    configure_logging("info", process="fetch")
    if options.parent is not None:
        end_with_parent(options.parent)
    try:
        hub = Hub(options.hub_url, read_token(options.token_file))
        _fetch(_reference(options.reference), ModelStore(options.models_dir), hub)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails once more
        return 1
    except TandemError as error:
        return _give_up(error.code, error.message)
    except OSError as error:
        return _give_up(ModelError.code, f"the model cannot be written to {options.models_dir}: {error.strerror or error}")
    return 0


def read_token(path: Path | None) -> str | None:
    """The first line of a file. SettingsError if it cannot be read or is empty."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingsError(f"hub_token_file = {path}: the token cannot be read: {reason}", param="hub_token_file") from None
    if not token or len(token.split()) != 1:
        raise SettingsError(f"{path} must hold one access token of the hub and nothing else", param="hub_token_file")
    return token


def _fetch(reference: HubReference, store: ModelStore, hub: Hub) -> None:
    report: ProgressReport | None = None

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal report
        if report is None:
            report = ProgressReport("download", total_bytes, sys.stdout, sys.stderr if sys.stderr.isatty() else None)
        report.update(done_bytes)

    store.fetch(reference, hub, on_progress)


def _give_up(code: str, text: str) -> int:
    log.error(text, code=code)
    sys.stdout.write(line(Word.FATAL, Fatal(code=code, text=text)))
    return 1


def _reference(text: str) -> HubReference:
    reference = parse_hub_reference(Path(text))
    if reference is None:
        raise SettingsError(f"{text!r} names no model of a hub; write hf://owner/repo:QUANT", param="model")
    return reference


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m appliance.sources.fetch", description="Gets one model from a hub.")
    parser.add_argument("--reference", required=True)
    parser.add_argument("--models-dir", type=Path, required=True)
    parser.add_argument("--hub-url", required=True)
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--parent", type=int, help="process that this one ends with")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
