"""From what the setting `model` says to a path that `gguf_file` can open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
from pydantic import ValidationError

from appliance.demo import with_model
from appliance.errors import EngineError, ModelError, SettingsError
from appliance.protocol import Fatal, LoadProgress, Word
from appliance.settings import Settings
from appliance.sources.choice import SourceFile, choose_model
from appliance.sources.fetch import read_token
from appliance.sources.reference import HubReference, parse_folder_choice, parse_hub_reference
from appliance.sources.store import ModelStore

MOUNTED_MODELS = Path("/mnt/models")
"""Where KServe puts a model before it starts the container."""
END_LIMIT_S = 10.0

log = structlog.get_logger()


def needs_fetching(settings: Settings) -> bool:
    """Whether `resolve_model` would have to ask a hub. SettingsError if the reference is written wrongly."""
    reference = _hub_reference(settings)
    return reference is not None and ModelStore(models_dir(settings)).find(reference) is None


def resolve_model(settings: Settings, on_progress: Callable[[LoadProgress], None] | None = None) -> Settings:
    """The settings with the path of a model that is there in full: fetched, chosen, mounted, or the demo model.

    May take as long as a download does; `on_progress` hears of it. Raises ModelError, MemoryBudgetError or SettingsError.
    """
    if settings.model is None:
        if mounted_model_is_there():
            log.info("no model is named: taking the one that is mounted", model=str(MOUNTED_MODELS))
            return settings.model_copy(update={"model": MOUNTED_MODELS})
        return with_model(settings)
    if (reference := _hub_reference(settings)) is not None:
        return settings.model_copy(update={"model": _stored(settings, reference, on_progress)})
    if (choice := parse_folder_choice(settings.model)) is not None:
        return settings.model_copy(update={"model": choose_in_folder(*choice)})
    return settings


def choose_in_folder(folder: Path, quant: str) -> Path:
    """The first file of the model below `folder` whose name has `quant` as a word. ModelError lists what there is."""
    paths = sorted(path for path in folder.rglob("*.gguf") if path.is_file())
    files = [SourceFile(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]
    return folder / choose_model(files, quant, f"the folder {folder}").files[0].path


def mounted_model_is_there() -> bool:
    return MOUNTED_MODELS.is_dir() and any(MOUNTED_MODELS.glob("*.gguf"))


def models_dir(settings: Settings) -> Path:
    return settings.models_dir or Path.home() / ".cache" / "tandem" / "models"


def _hub_reference(settings: Settings) -> HubReference | None:
    return parse_hub_reference(settings.model) if settings.model is not None else None


def _stored(settings: Settings, reference: HubReference, on_progress: Callable[[LoadProgress], None] | None) -> Path:
    store = ModelStore(models_dir(settings))
    if (path := store.find(reference)) is not None:
        return path
    read_token(settings.hub_token_file)  # says now what is wrong with it
    _fetch(settings, reference, on_progress)
    if (path := store.find(reference)) is None:
        raise ModelError(f"{reference} was fetched, but its files in {models_dir(settings)} have changed since; start again")
    return path


def _fetch(settings: Settings, reference: HubReference, on_progress: Callable[[LoadProgress], None] | None) -> None:
    """In a process of its own: it brings threads and libraries that a server which forks must not have."""
    command = [sys.executable, "-m", "appliance.sources.fetch", "--reference", str(reference)]
    command += ["--models-dir", str(models_dir(settings)), "--hub-url", settings.hub_url, "--parent", str(os.getpid())]
    if settings.hub_token_file is not None:
        command += ["--token-file", str(settings.hub_token_file)]
    fatal: Fatal | None = None
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            for message in _messages(process):
                if isinstance(message, Fatal):
                    fatal = message
                elif on_progress is not None:
                    on_progress(message)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _error_of(fatal, process.returncode)


def _messages(process: subprocess.Popen[str]) -> Iterator[LoadProgress | Fatal]:
    for text in process.stdout or ():
        word, _, rest = text.partition(" ")
        try:
            if word == Word.LOAD:
                yield LoadProgress.model_validate_json(rest)
            elif word == Word.FATAL:
                yield Fatal.model_validate_json(rest)
        except ValidationError:
            log.warning("a line of the fetching process cannot be read", line=text.strip()[:200])


def _error_of(fatal: Fatal | None, code: int) -> ModelError | SettingsError | EngineError:
    if fatal is None:
        return EngineError(f"the fetching process ended with code {code} before the model was complete; start again to go on")
    return (SettingsError if fatal.code == SettingsError.code else ModelError)(fatal.text)
