"""Where settings come from (command line, environment, YAML file), and how each of them spells a setting's name.

All names here are flat, as `appliance.settings.setting_fields` has them: `elastic_hold_s`, also for `elastic: {hold_s: 5}` of a file.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from appliance.complaints import shown
from appliance.errors import SettingsError

ENV_PREFIX = "TANDEM_"
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
BLOCK = "elastic"
"""The settings that begin with this word are one mapping in a file."""


@dataclass(frozen=True, slots=True)
class Source:
    """What one of them gives."""

    values: Mapping[str, Any]
    spelled: Mapping[str, str]
    """Each given name as the user wrote it."""


def from_command_line(options: Mapping[str, Any], names: Collection[str]) -> Source:
    """Options of None count as not given. `names`: all settings that there are. SettingsError for any other."""
    values = {name: value for name, value in options.items() if value is not None}
    for name in values:
        _check_name(name, _option(name), {known: _option(known) for known in names})
    return Source(values, {name: _option(name) for name in values})


def from_environment(environment: Mapping[str, str], names: Collection[str]) -> Source:
    """Empty variables count as not given. SettingsError for a variable with our prefix that is no setting."""
    values, spelled = {}, {}
    for variable, text in environment.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        _check_name(name, f"environment variable {variable}", {known: f"{ENV_PREFIX}{known.upper()}" for known in names})
        if text != "":
            values[name], spelled[name] = text, variable
    return Source(values, spelled)


def from_file(path: Path, names: Collection[str]) -> Source:
    """SettingsError if it cannot be read, is not a mapping of settings, or says something twice."""
    root, content = _read_yaml(path)
    keys = _entries(root)
    _check_once(path, keys)
    block = next((key for key in keys if key.written == BLOCK), None)
    if block is not None:
        inner = [replace(key, name=f"{BLOCK}_{key.name}", written=f"{BLOCK}.{key.name}") for key in _entries(block.value)]
        keys = sorted([key for key in keys if key is not block] + inner, key=lambda key: key.line)
        content |= {f"{BLOCK}_{name}": value for name, value in _block_of(path, content).items()}
    _check_once(path, keys)
    for key in keys:
        _check_name(key.name, f"{path}: {key.written}", {known: known for known in names})
    return Source({key.name: content[key.name] for key in keys}, {key.name: f"{key.written} ({path})" for key in keys})


@dataclass(frozen=True, slots=True)
class _Key:
    """One key of a file."""

    name: str
    written: str
    value: yaml.Node
    line: int


class _Loader(yaml.SafeLoader):
    """Numbers and switches stay text, which is read as that of the environment is: YAML's own 010 is 8, and its 1:30 is 90."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag == "tag:yaml.org,2002:null"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read_yaml(path: Path) -> tuple[yaml.Node | None, dict[str, Any]]:
    """The file as it is written, and what it means."""
    try:
        text = path.read_text(encoding="utf-8")
        loader = _Loader(text)
        root = loader.get_single_node()
        content = None if root is None else loader.construct_document(root)
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"the settings file {path} is no text in UTF-8; save it as that") from None
    except yaml.YAMLError as error:
        raise SettingsError(
            f"{path} is not valid YAML{_place(error)}; look at indentation (spaces, no tabs), brackets and quotes"
        ) from None
    except RecursionError:
        raise SettingsError(f"{path} is nested too deeply; settings are a few levels deep") from None
    if content is not None and not isinstance(content, dict):
        raise SettingsError(f"{path} must hold a mapping of settings, not {shown(content)}")
    return root, content or {}


def _place(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    begin, end = error.context_mark, error.problem_mark
    inside = "" if begin is None else f", in what begins at line {begin.line + 1} column {begin.column + 1}"
    return f" at line {end.line + 1} column {end.column + 1}{inside}"


def _block_of(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    block = content[BLOCK]
    if block is not None and not isinstance(block, dict):
        raise SettingsError(f"{path}: {BLOCK} must hold a mapping of settings such as {{enabled: true}}, not {shown(block)}", param=BLOCK)
    return block or {}


def _entries(node: yaml.Node | None) -> list[_Key]:
    """The keys of a mapping, those that stand twice included."""
    if not isinstance(node, yaml.MappingNode):
        return []
    return [_Key(str(key.value), str(key.value), value, key.start_mark.line + 1) for key, value in node.value]


def _check_once(path: Path, keys: Sequence[_Key]) -> None:
    """YAML's own reader would take the last of two."""
    seen: dict[str, _Key] = {}
    for key in keys:
        first = seen.setdefault(key.name, key)
        if first is not key:
            both = f"{first.written} in line {first.line} and {key.written} in line {key.line} are the same setting"
            again = f"{key.written} stands twice, in lines {first.line} and {key.line}"
            raise SettingsError(f"{path}: {again if first.written == key.written else both}; leave one out", param=key.name)


def _option(name: str) -> str:
    return "argument MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def _check_name(name: str, where: str, spelled: Mapping[str, str]) -> None:
    if name in spelled:
        return
    close = [f"{BLOCK}_enabled"] if name == BLOCK else difflib.get_close_matches(name, spelled, n=1)
    hint = f"; did you mean {spelled[close[0]]}?" if close else "; docs/settings.md lists them all"
    raise SettingsError(f"{where} is not a setting{hint}", param=name)
