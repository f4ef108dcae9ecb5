"""The engine process: one card, one sequence, lines on stdin and stdout.

    python -m appliance.engine.process --settings JSON --card host:0 --lane lead --threads N [--share INDEX/COUNT]
        [--peer-device host:1 [--peer-slots N] [--allow-self-peer]] [--peer-hot RATIO]
        [--peer-link FILE --peer-link-role 0|1 [--link-threads N]] [--asleep]
        [--parked FOLDER --parked-mib N]

    --settings  a `Settings` as JSON, `model` given; the sealed arena of that model must exist
    --card      cuda:N or host:N
    --lane      lead or helper; goes into every line of the log
    --threads   threads of this engine's host pool
    --share     which part of the profile this engine's expert cache takes, counted from 0, such as 1/2 for the second of
                two lanes, so that two caches together cover what one of twice the size would; default 0/1, all
    --peer-device     second card as more expert cache of this engine; taken by PEER_ATTACH
    --peer-slots      how many expert slots the second card has; default: as many as the own one
    --peer-hot        what the second of two shares takes of the profile's ranks, hot and cold alike; default 0.5, every second
    --allow-self-peer the second card may be the own one, for tests
    --peer-link       file through which two engines compute each other's rows; served by LINK_SERVE 1
    --peer-link-role  0 for the lead, 1 for the helper
    --link-threads    threads that compute the other engine's rows; default 1
    --asleep          the expert cache has no memory until `VRAM`
    --parked          folder of conversations that were displaced, for both engines; default: they are forgotten
    --parked-mib      how much may lie there

It writes `LOAD` lines while it loads, `READY` when it can take requests, and on a fatal error one `FATAL` line as its last.
The log and whatever libraries print go to stderr. It ends with

    0  the desk closed stdin
    1  it could not start; `FATAL` says why
    2  wrong command line; stderr says why
    3  the card or the engine failed while serving; the running request was ended first, then `FATAL` written
    4  the desk stopped reading or closed stdout first

and with SIGKILL if the thread that started it ends (so the desk starts engines from one long-lived thread).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import structlog
from pydantic import ValidationError

from appliance.engine.generation import Runner
from appliance.engine.link_options import LinkOptions
from appliance.engine.loop import EngineLoop
from appliance.engine.parking import Parking, StateKeeper
from appliance.engine.pipes import Inbox, LineReader, LineWriter
from appliance.errors import SettingsError, TandemError
from appliance.lifeline import end_with_parent
from appliance.log import configure_logging
from appliance.memory.parked import ParkedStore
from appliance.memory.policy import WHOLE, Share
from appliance.protocol import Fatal, LoadProgress, Message, Ready, Word, line
from appliance.settings import MAX_CARDS, Settings
from appliance.units import MIB

EXIT_START_FAILED = 1
EXIT_SERVING_FAILED = 3
EXIT_DESK_GONE = 4
END_GRACE_S = 2.0
"""How long after the end of stdin a step may go on before the process ends in the middle of it."""

Report: TypeAlias = Callable[[LoadProgress], None]
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Lane:
    """What distinguishes one engine of a pair from the other."""

    name: str
    card: str
    num_threads: int
    share: Share
    peer_card: str | None = None
    peer_slots: int | None = None
    link: LinkOptions | None = None
    starts_asleep: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    options = _parse(arguments)
    lane = Lane(
        name=options.lane,
        card=options.card,
        num_threads=options.threads,
        share=replace(options.share, second_ratio=options.peer_hot),
        peer_card=options.peer_device,
        peer_slots=options.peer_slots,
        link=_link_options(options),
        starts_asleep=options.asleep,
    )

    def open_runner(report: Report) -> Runner:
        settings = _read_settings(options.settings)
        configure_logging(settings.log_level, settings.log_format, lane=lane.name)
        return build_runner(settings, lane, report)

    return run_engine(open_runner, lane.card, parked=options.parked, parked_mib=options.parked_mib)


def build_runner(settings: Settings, lane: Lane, report: Report) -> Runner:
    """Opens the model on the lane's card: maps the arena, loads dense weights, fills slots, runs the largest chunk once.

    Raises TandemError with the reason why it cannot be served.
    """
    from appliance.engine.model_runner import ModelRunner

    return ModelRunner.open(settings, lane, report)


def run_engine(open_runner: Callable[[Report], Runner], card: str, *, parked: Path | None = None, parked_mib: int = 0) -> int:
    """Takes over this process's stdin and stdout and serves until the desk closes them. Returns the exit code.

    `open_runner` must return a runner that has allocated and run all that it ever will. `parked`: folder of conversations.
    """
    end_with_parent()
    faulthandler.enable(sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the desk decides when engines end
    writer = LineWriter(_claim_stdout())
    inbox = Inbox()
    LineReader(_STDIN, inbox, on_end=_end_soon).start()
    try:
        runner = _open(open_runner, writer)
        if runner is None:
            return EXIT_START_FAILED
        try:
            writer.write(line(Word.READY, _ready(runner, card)))
            return _serve(EngineLoop(runner, inbox, writer, _open_parking(runner, parked, parked_mib)), writer)
        finally:
            runner.close()
    except BrokenPipeError as error:
        _log.info("the desk is gone", reason=str(error))
        return EXIT_DESK_GONE


def _open(open_runner: Callable[[Report], Runner], writer: LineWriter) -> Runner | None:
    try:
        return open_runner(lambda progress: writer.write(line(Word.LOAD, progress)))
    except BrokenPipeError:
        raise
    except Exception as error:
        _give_up(writer, error)
        return None


def _open_parking(runner: Runner, folder: Path | None, budget_mib: int) -> Parking | None:
    """None, with a line in the log, if there is no folder to be had: conversations are then computed again."""
    if folder is None or not isinstance(runner, StateKeeper):
        return None
    try:
        return Parking(runner, ParkedStore(folder, runner.state_id, budget_mib * MIB))
    except OSError as error:
        _log.warning("conversations are not parked", folder=str(folder), reason=str(error))
        return None


def _serve(loop: EngineLoop, writer: LineWriter) -> int:
    try:
        loop.run()
    except BrokenPipeError:
        raise
    except Exception as error:
        _give_up(writer, error)
        return EXIT_SERVING_FAILED
    return 0


def _give_up(writer: LineWriter, error: Exception) -> None:
    if isinstance(error, TandemError):
        _log.error("engine gives up", code=error.code, reason=error.message, exc_info=error.__cause__)
        fatal = Fatal(code=error.code, text=error.message)
    else:
        _log.error("engine gives up", exc_info=error)
        fatal = Fatal(code=TandemError.code, text=f"unexpected {type(error).__name__}: {error}")
    writer.write(line(Word.FATAL, fatal))
    writer.flush()


def _ready(runner: Runner, card: str) -> Message:
    return Ready(pid=os.getpid(), card=card, context=runner.context, slots=runner.stats()["slots"], plan_bytes=dict(runner.plan_bytes))


def _claim_stdout() -> int:
    """Keeps stdout for protocol lines: returns a descriptor of it and sends what anyone else prints there to stderr."""
    sys.stdout.flush()
    protocol_descriptor = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    sys.stdout = sys.stderr
    return protocol_descriptor


def _end_soon() -> None:
    """The desk closed stdin: end in time even if a step or the start takes longer."""
    timer = threading.Timer(END_GRACE_S, os._exit, args=(0,))
    timer.daemon = True
    timer.start()


def _read_settings(text: str) -> Settings:
    try:
        return Settings.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"--settings: {name}: {first['msg']}", param=name or None) from None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m appliance.engine.process", description="One engine of Tandem; the desk starts it.")
    parser.add_argument("--settings", required=True, metavar="JSON")
    parser.add_argument("--card", required=True)
    parser.add_argument("--lane", required=True, choices=("lead", "helper"))
    parser.add_argument("--threads", required=True, type=int)
    parser.add_argument("--share", default=WHOLE, type=_parse_share, metavar="INDEX/COUNT")
    parser.add_argument("--peer-device")
    parser.add_argument("--peer-slots", type=int, metavar="N")
    parser.add_argument("--peer-hot", default=WHOLE.second_ratio, type=_parse_ratio, metavar="RATIO")
    parser.add_argument("--allow-self-peer", action="store_true")
    parser.add_argument("--peer-link", type=Path, metavar="FILE")
    parser.add_argument("--peer-link-role", type=int, choices=(0, 1))
    parser.add_argument("--link-threads", type=int, default=1)
    parser.add_argument("--asleep", action="store_true")
    parser.add_argument("--parked", type=Path, metavar="FOLDER")
    parser.add_argument("--parked-mib", type=int, default=0)
    options = parser.parse_args(arguments)
    if (options.peer_link is None) != (options.peer_link_role is None):
        parser.error("--peer-link and --peer-link-role go together")
    if options.peer_device == options.card and not options.allow_self_peer:
        parser.error("--peer-device names the engine's own card; name the other one")
    if options.peer_slots is not None and (options.peer_device is None or options.peer_slots < 0):
        parser.error("--peer-slots is a number of slots of --peer-device")
    return options


def _link_options(options: argparse.Namespace) -> LinkOptions | None:
    if options.peer_link is None:
        return None
    return LinkOptions(options.peer_link, options.peer_link_role, options.link_threads)


def _parse_share(text: str) -> Share:
    index, _, count = text.partition("/")
    share = Share(int(index), int(count))
    if not 0 <= share.index < share.count <= MAX_CARDS:
        raise ValueError(f"{text!r} is no share")
    return share


def _parse_ratio(text: str) -> float:
    ratio = float(text)
    if not 0 <= ratio <= 1:
        raise ValueError(f"{text!r} is no ratio")
    return ratio


if __name__ == "__main__":
    sys.exit(main())
