"""The profile: how often each expert is used. It fills the expert caches at start, and is learned while serving.

A profile is one small JSON file:

    {"version": 1, "fingerprint": "<of the model>", "uses": [[uses of expert 0, expert 1, ...] of layer 0, ...]}

It is replaced as a whole (written beside, then renamed), so a reader sees the old or the new one. Several engines may learn
into one file: `learn` holds a lock file while it merges. A profile is advice: one that is missing or broken costs speed, never
an answer, so `load_profile` goes on without it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from appliance.errors import SettingsError
from appliance.memory.layout import ArenaLayout
from appliance.memory.policy import ExpertId, FloatTable, IntTable, blob_bytes_table, rank_experts

VERSION = 1
MAX_FILE_BYTES = 64 << 20
HALF_LIFE_ROWS = 200_000
"""After so many more rows what was learned before counts half: some dozens of long conversations."""
_DECIMALS = 2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Profile:
    """Uses of the experts of one model, older ones decayed."""

    fingerprint: str
    uses: FloatTable
    """[layers, experts] float64, finite and not negative; 0 where there is no such expert."""

    @classmethod
    def uniform(cls, layout: ArenaLayout, fingerprint: str) -> Profile:
        """What is known before anything is known: no expert was ever used."""
        return cls(fingerprint, np.zeros(blob_bytes_table(layout).shape))

    def ranking(self, layout: ArenaLayout) -> list[ExpertId]:
        """All experts, most used first."""
        num_experts = self.uses.shape[1]
        return [ExpertId(*divmod(flat, num_experts)) for flat in self.ranks(layout).tolist()]

    def ranks(self, layout: ArenaLayout) -> IntTable:
        """The same as flat indices (layer * experts + expert)."""
        return rank_experts(self.uses, blob_bytes_table(layout))

    def learned(self, counts: FloatTable, rows: int) -> Profile:
        """With `counts` more uses, [layers, experts], from `rows` rows of text."""
        return Profile(self.fingerprint, self.uses * 0.5 ** (rows / HALF_LIFE_ROWS) + counts)


def profile_path(state_dir: Path, fingerprint: str) -> Path:
    """Where the learned profile of a model lies."""
    return state_dir / f"profile-{fingerprint[:16]}.json"


def read_profile(path: Path, layout: ArenaLayout, fingerprint: str) -> Profile:
    """Raises SettingsError if the file cannot be read, is no profile, or is of another model."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from None
    if len(raw) > MAX_FILE_BYTES:
        raise _refused(path, f"it is larger than {MAX_FILE_BYTES} bytes")
    try:
        content = json.loads(raw)
        version, found, uses = content["version"], content["fingerprint"], content["uses"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _refused(path, "it is not a profile in JSON") from None
    if version != VERSION:
        raise _refused(path, f"its version is {version!r} instead of {VERSION}")
    if found != fingerprint:
        raise _refused(path, f"it is of another model ({str(found)[:16]} instead of {fingerprint[:16]})")
    return Profile(fingerprint, _table(path, uses, blob_bytes_table(layout).shape))


def load_profile(path: Path, layout: ArenaLayout, fingerprint: str) -> Profile:
    """The learned profile, or the uniform one, with one log line, if there is none that can be used."""
    if not path.exists():
        return Profile.uniform(layout, fingerprint)
    try:
        return read_profile(path, layout, fingerprint)
    except SettingsError as error:
        log.warning("the learned profile is not used", reason=error.message)
        return Profile.uniform(layout, fingerprint)


def learn(path: Path, layout: ArenaLayout, fingerprint: str, counts: FloatTable, rows: int) -> Profile:
    """Merges new counts into the file and returns the result. Other processes may do the same at the same time.

    Raises OSError if the folder cannot be written; the old file is then as it was.
    """
    with _writing(path):
        merged = load_profile(path, layout, fingerprint).learned(counts, rows)
        _replace(path, merged)
    return merged


def write_profile(path: Path, profile: Profile) -> None:
    """Replaces the file. Raises OSError if it cannot be written; the old file is then as it was."""
    with _writing(path):
        _replace(path, profile)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """One writer at a time, across processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, profile: Profile) -> None:
    """The new file has always the same name until it is renamed, so a writer that dies leaves at most one, for the next to use."""
    content = {"version": VERSION, "fingerprint": profile.fingerprint, "uses": np.round(profile.uses, _DECIMALS).tolist()}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
    new.replace(path)


def _table(path: Path, uses: object, shape: tuple[int, ...]) -> FloatTable:
    try:
        table = np.array(uses, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise _refused(path, "its uses are not a table of numbers") from None
    if table.shape != shape:
        raise _refused(path, f"its uses are {list(table.shape)}, but the model has [layers, experts] {list(shape)}")
    if not np.all(np.isfinite(table) & (table >= 0)):
        raise _refused(path, "some of its uses are negative or not finite")
    return table


def _refused(path: Path, why: str) -> SettingsError:
    return SettingsError(f"profile = {path} cannot be used: {why}; remove it or name another one", param="profile")
