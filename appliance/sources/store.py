"""Models that were fetched from a hub, and what is known to be whole.

    <models_dir>/<owner>/<repo>/<commit>/...          the files as they lie in the repository; unfinished ones end in .part
    <models_dir>/<owner>/<repo>/<revision>--<quant>.json   written last: this model is complete, these are its files
    <models_dir>/<owner>/<repo>/.lock                 held by whoever fetches

What has no record of that kind is never used. A record makes a start independent of the hub: a newer commit of a branch is not
looked for until the record is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from appliance.errors import MemoryBudgetError, SettingsError
from appliance.sources.choice import ModelFiles, SourceFile, choose_model
from appliance.sources.hub import Hub, part_path
from appliance.sources.reference import HubReference
from appliance.units import format_bytes

VERSION = 1

log = structlog.get_logger()


class ModelStore:
    """The models under one folder. Several processes may share it, also on different machines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, reference: HubReference) -> Path | None:
        """The first file of a complete model; None if it has to be fetched."""
        record = _read_record(self._record_path(reference))
        if record is None:
            return None
        commit, files = record
        paths = [self._repo(reference) / commit / file.path for file in files]
        is_whole = all(path.is_file() and path.stat().st_size == file.size for path, file in zip(paths, files, strict=True))
        return paths[0] if is_whole else None

    def fetch(self, reference: HubReference, hub: Hub, on_progress: Callable[[int, int], None]) -> Path:
        """Gets the model unless it is complete; returns its first file. `on_progress` gets bytes done and in all.

        Raises ModelError, or MemoryBudgetError when there is too little room, before anything is written.
        """
        with self._lock(reference):
            if (found := self.find(reference)) is not None:
                return found
            listing = hub.list_files(reference)
            model = choose_model(listing.files, reference.quant, str(reference))
            folder = self._repo(reference) / listing.commit
            self._check_room(model, folder)
            log.info("fetching the model", model=model.name, size=format_bytes(model.size), files=len(model.files), into=str(folder))
            _get_all(reference, hub, listing.commit, model, folder, on_progress)
            _write_record(self._record_path(reference), listing.commit, model)
            return folder / model.files[0].path

    def _repo(self, reference: HubReference) -> Path:
        return self._folder / reference.owner / reference.repo

    def _record_path(self, reference: HubReference) -> Path:
        return self._repo(reference) / f"{reference.revision.replace('/', '_')}--{reference.quant or 'only'}.json"

    def _check_room(self, model: ModelFiles, folder: Path) -> None:
        there = sum(min(file.size, _size_of(folder / file.path) or _size_of(part_path(folder / file.path))) for file in model.files)
        needed, free = model.size - there, shutil.disk_usage(self._folder).free
        if needed > free:
            raise MemoryBudgetError(
                f"the model {model.name} needs {format_bytes(needed)} more in {self._folder}, but {format_bytes(free)} are free there; "
                "make room or name another folder by models_dir",
                param="models_dir",
            )

    @contextlib.contextmanager
    def _lock(self, reference: HubReference) -> Iterator[None]:
        repo = self._repo(reference)
        try:
            repo.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(repo / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o664)
        except OSError as error:
            raise SettingsError(f"models_dir {self._folder} cannot be written: {error.strerror}", param="models_dir") from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process fetches from this repository; waiting for it", folder=str(repo))
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _get_all(
    reference: HubReference, hub: Hub, commit: str, model: ModelFiles, folder: Path, on_progress: Callable[[int, int], None]
) -> None:
    before = 0
    for file in model.files:
        target, done = folder / file.path, before
        if _size_of(target) != file.size:
            hub.get(reference, commit, file, target, lambda there, done=done: on_progress(done + there, model.size))  # type: ignore[misc]
        before += file.size
        on_progress(before, model.size)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_record(path: Path) -> tuple[str, list[SourceFile]] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["version"] != VERSION or not record["files"]:
            return None
        return str(record["commit"]), [SourceFile(file["path"], file["size"], file["sha256"]) for file in record["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_record(path: Path, commit: str, model: ModelFiles) -> None:
    files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in model.files]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump({"version": VERSION, "commit": commit, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
