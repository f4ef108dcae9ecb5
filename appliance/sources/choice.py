"""Which files make up the wanted model, out of all that a repository or folder holds. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from appliance.errors import ModelError
from appliance.units import format_bytes

MAX_SHOWN = 12

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_NO_MODEL = re.compile(r"(^|[-_.])(mmproj|imatrix)", re.IGNORECASE)
"""Image encoders and importance matrices lie beside models in the same form."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source. `sha256` is None where the source does not tell."""

    path: str
    """Relative to the source, with slashes."""
    size: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model: a file, or all shards of a split one in order. `name` has no shard number and no suffix."""

    name: str
    files: tuple[SourceFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def choose_model(files: Iterable[SourceFile], quant: str | None, source: str) -> ModelFiles:
    """The model whose name has `quant` as a word, or the only one. Raises ModelError that lists what there is."""
    models = group_models(files, source)
    if not models:
        raise ModelError(f"{source} holds no GGUF model")
    matching = [model for model in models if quant is None or _has_word(model.name, quant)]
    if len(matching) > 1 and quant is not None:
        matching = _nearest(matching, quant)
    if len(matching) == 1:
        return matching[0]
    found = "holds no model" if not matching else f"holds {len(matching)} models"
    which = f" whose name has {quant}" if quant else ""
    raise ModelError(f"{source} {found}{which}; name one by :QUANT: {_list(matching or models)}", param="model")


def group_models(files: Iterable[SourceFile], source: str) -> list[ModelFiles]:
    """All models by name; shards belong together. Raises ModelError if a shard is missing."""
    groups: dict[str, dict[int, SourceFile]] = {}
    counts: dict[str, int] = {}
    for file in files:
        path = PurePosixPath(file.path)
        if path.suffix.lower() != ".gguf" or _NO_MODEL.search(path.name):
            continue
        _check_inside(file.path, source)
        stem = file.path[: -len(path.suffix)]
        match = _SHARD.fullmatch(stem)
        name = match["stem"] if match else stem
        counts[name] = int(match["count"]) if match else 1
        groups.setdefault(name, {})[int(match["number"]) if match else 1] = file
    return [_whole(name, numbered, counts[name], source) for name, numbered in sorted(groups.items())]


def _check_inside(path: str, source: str) -> None:
    """Names come from outside, and files are written under them."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise ModelError(f"{source}: the file name {path!r} leads out of its folder")


def _whole(name: str, numbered: dict[int, SourceFile], count: int, source: str) -> ModelFiles:
    missing = [number for number in range(1, count + 1) if number not in numbered]
    if missing or len(numbered) != count:
        raise ModelError(f"{source}: of the {count} shards of {name}, number {missing[0] if missing else count + 1} is missing or too many")
    return ModelFiles(name, tuple(numbered[number] for number in sorted(numbered)))


def _has_word(name: str, word: str) -> bool:
    """Whole words only: Q4_K is not in Q4_K_M, and Q4_XS is not in IQ4_XS."""
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


def _nearest(models: list[ModelFiles], quant: str) -> list[ModelFiles]:
    """`UD-Q4_K_XL` has the word `Q4_K_XL` too: the plain one is meant where there is one."""
    plain = [model for model in models if not re.search(rf"UD-{re.escape(quant)}(?![A-Za-z0-9_])", model.name, re.IGNORECASE)]
    return plain if len(plain) == 1 else models


def _list(models: list[ModelFiles]) -> str:
    shown = ", ".join(f"{model.name} ({format_bytes(model.size)})" for model in models[:MAX_SHOWN])
    return shown + (f" and {len(models) - MAX_SHOWN} more" if len(models) > MAX_SHOWN else "")
