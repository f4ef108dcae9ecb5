"""Everything about the model that is known before a byte of weights is loaded, and how to start its engines.

Read in the first process, so that what is wrong with file or settings ends in one sentence, and inherited by the worker.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.demo import DEMO_MODEL
from appliance.desk.config import LANE_NAMES, DeskConfig, LaneConfig
from appliance.errors import SettingsError
from appliance.gguf_file import GgufFile, open_gguf
from appliance.memory.layout import arena_layout
from appliance.memory.plan import Plan, plan_for
from appliance.memory.profile import read_profile
from appliance.models.config import read_config
from appliance.settings import Settings
from appliance.text.chat_template import ChatTemplate
from appliance.text.tokenizer import Tokenizer
from appliance.web.auth import KeyRing
from appliance.web.lane_options import pair_options
from appliance.web.model_info import ModelInfo, SamplingDefaults


@dataclass(frozen=True, slots=True)
class Appliance:
    """Immutable."""

    settings: Settings
    desk: DeskConfig
    gguf: GgufFile
    tokenizer: Tokenizer
    model: ModelInfo


def read_appliance(settings: Settings) -> Appliance:
    """Checks the model's file, plans its memory, builds tokenizer and chat template. TandemError with one sentence."""
    _check_files(settings)
    plan = plan_for(settings)
    gguf = open_gguf(settings.model_path)
    if settings.profile is not None:
        read_profile(settings.profile, arena_layout(gguf, read_config(gguf)), gguf.fingerprint)  # the engines read it again
    ChatTemplate.from_gguf(gguf).close()  # says now what is wrong with it; the worker opens its own
    return Appliance(
        settings=settings,
        desk=desk_config(settings, plan),
        gguf=gguf,
        tokenizer=Tokenizer.from_gguf(gguf, plan.context),
        model=_model_info(settings, gguf, plan),
    )


def _check_files(settings: Settings) -> None:
    """Says now what is wrong with what worker, loader and engines open later. SettingsError."""
    if settings.api_key_file is not None:
        KeyRing.from_file(settings.api_key_file)
    _check_writable("shm_dir", settings.shm_dir, "name a folder in shared memory")
    if settings.state_dir is not None:
        with contextlib.suppress(OSError):  # the check will say why
            settings.state_dir.mkdir(parents=True, exist_ok=True)
        _check_writable("state_dir", settings.state_dir, "name another, or leave it out")


def _check_writable(setting: str, folder: Path, remedy: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(f"no file can be made in {setting} {folder}: {error.strerror}; {remedy}", param=setting) from None


def desk_config(settings: Settings, plan: Plan) -> DeskConfig:
    """The command lines of loader and engines."""
    pair = pair_options(settings, plan, _content_id(settings))
    lanes = [
        LaneConfig(name, card.card, _engine_argv(plan.settings_for_engine(settings, card.card), name, card.card, pair.lanes[index]))
        for index, (name, card) in enumerate(zip(LANE_NAMES, plan.cards, strict=False))
    ]
    loader = (sys.executable, "-m", "appliance.memory.loader", "--model", str(settings.model), "--shm-dir", str(settings.shm_dir))
    return DeskConfig(
        lanes=tuple(lanes), loader_argv=loader, max_queue=settings.max_queue, elastic=pair.elastic, leftovers=pair.shared_files
    )


def _content_id(settings: Settings) -> str:
    return open_gguf(settings.model_path).content_id


def _engine_argv(settings: Settings, lane: str, card: str, more: tuple[str, ...]) -> tuple[str, ...]:
    settings = settings.model_copy(update={"log_format": "json"})  # the desk reads it and logs it again in our own form
    options = ("--settings", settings.model_dump_json(), "--card", card, "--lane", lane)
    return (sys.executable, "-m", "appliance.engine.process", *options, *more)


def _model_info(settings: Settings, gguf: GgufFile, plan: Plan) -> ModelInfo:
    first = gguf.paths[0]
    return ModelInfo(
        name=settings.model_name or _name_of(gguf.metadata, first),
        context=plan.context,
        vocab=plan.config.vocab,
        lanes=len(plan.cards),
        created=int(first.stat().st_mtime),
        architecture=plan.config.arch,
        file_bytes=gguf.total_bytes,
        is_demo=settings.model == DEMO_MODEL,
        sampling=SamplingDefaults.from_metadata(gguf.metadata),
        plan=plan.to_json(),
    )


def _name_of(metadata: Mapping[str, object], path: Path) -> str:
    """The file's own name for the model; without one, the file's name."""
    name = metadata.get("general.name")
    return name.strip() if isinstance(name, str) and name.strip() else path.stem
