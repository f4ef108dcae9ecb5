"""What the setting `model` may say beside a plain path. Pure.

/models/qwen                    a folder with one model (or a file): left to `gguf_file`
/models/qwen:Q4_K_M             a folder with several models, of which the name has Q4_K_M
hf://owner/repo                 a repository of the hub that holds one model
hf://owner/repo:Q4_K_M          ... one of several
hf://owner/repo@main:Q4_K_M     ... of a branch, tag or commit
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import SettingsError

HUB = "hf://"
DEFAULT_REVISION = "main"

_HUB_AS_PATH = "hf:"
"""What a `Path` makes of `hf://`: the setting is a path everywhere else."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REFERENCE = re.compile(rf"(?P<owner>{_NAME})/(?P<repo>{_NAME})(@(?P<revision>[A-Za-z0-9._/-]+))?(:(?P<quant>[A-Za-z0-9._-]+))?")
_FOLDER = re.compile(r"(?P<folder>.+):(?P<quant>[A-Za-z0-9][A-Za-z0-9._-]*)")


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model in a repository. `quant` None: the only one that it holds."""

    owner: str
    repo: str
    revision: str
    quant: str | None

    @property
    def repo_id(self) -> str:
        return f"{self.owner}/{self.repo}"

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{HUB}{self.repo_id}{revision}{f':{self.quant}' if self.quant else ''}"


def parse_hub_reference(model: Path) -> HubReference | None:
    """None if the setting names no hub. Raises SettingsError if it does but is not written as above."""
    text = str(model)
    scheme, _, rest = text.partition("/")
    if scheme != _HUB_AS_PATH:
        return None
    match = _REFERENCE.fullmatch(rest)
    if match is None or ".." in text:
        raise SettingsError(f"model = {HUB}{rest} is not a model of a hub; write {HUB}owner/repo or {HUB}owner/repo:Q4_K_M", param="model")
    return HubReference(match["owner"], match["repo"], match["revision"] or DEFAULT_REVISION, match["quant"])


def parse_folder_choice(model: Path) -> tuple[Path, str] | None:
    """`FOLDER:QUANT` -> (folder, quant); None for anything else, such as a path that exists as it is written."""
    match = _FOLDER.fullmatch(str(model))
    if match is None or model.exists():
        return None
    folder = Path(match["folder"])
    return (folder, match["quant"]) if folder.is_dir() else None
