"""All settings, in one model: command-line options, environment variables and the YAML file are three ways into it.

Precedence: command line, then `TANDEM_*` environment variables, then the YAML file (`--config FILE` or `TANDEM_CONFIG`), then
the defaults below. A name that no setting has is an error in all three. `docs/settings.md` lists every field; a test
holds it against this module. No other module reads the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from appliance.browser_names import HostName, Origin
from appliance.complaints import shown, wanted
from appliance.errors import SettingsError
from appliance.settings_sources import BLOCK, CONFIG_VARIABLE, from_command_line, from_environment, from_file

MAX_CARDS = 2
LONGEST_S = 1e9
"""30 years; what waits in the system takes no more than 292."""


class Elastic(BaseModel):
    """How two lanes share two cards. Off, both are always awake and know nothing of each other."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = Field(False, description="The helper sleeps while there is one request at a time, and the lead has both cards.")
    peer: bool = Field(True, description="While the helper sleeps, the lead uses the second card as more expert cache.")
    link: bool = Field(True, description="While both are awake, each computes the other's rows for the experts that its card holds.")
    hold_s: float = Field(
        60.0, ge=0, le=LONGEST_S, description="The helper falls asleep when for so long there were no two requests at once."
    )
    wake_limit_s: float = Field(
        30.0, ge=1, le=LONGEST_S, description="A wake that takes longer has failed; the request then waits for the lead."
    )
    bar_s: float = Field(60.0, ge=0, le=LONGEST_S, description="After a failed wake the helper is left alone for so long.")
    hold_threads: int | None = Field(
        None,
        ge=0,
        le=1023,
        description="Threads of the lead's pool that sit out while those of the helper compute. Left out: as many as the helper has.",
    )
    peer_hot_ratio: float = Field(
        0.5,
        ge=0,
        le=1,
        description="What the second card takes of the profile's experts, hot and cold alike; the first fills with the others.",
    )
    peer_reserve_mib: int = Field(0, ge=0, description="Memory of the second GPU that both engines leave to others, in MiB.")
    link_threads: int = Field(1, ge=1, le=64, description="Threads of each engine that compute the other's rows on host cards.")

    @model_validator(mode="after")
    def _together(self) -> Elastic:
        if self.enabled and not self.peer and not self.link:
            raise ValueError(
                "elastic_enabled without elastic_peer and elastic_link would only make the helper sleep; set one of them otherwise"
            )
        if self.enabled and not self.link and self.link_threads != Elastic.model_fields["link_threads"].default:
            raise ValueError(
                f"elastic_link_threads = {self.link_threads} has no effect while elastic_link is off; set that to true or leave this out"
            )
        return self


class Settings(BaseModel):
    """Immutable; made once by `load_settings` and passed down."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True, allow_inf_nan=False)

    model: Path | None = Field(
        None,
        description="GGUF file, shard of a split model, folder with one, folder:QUANT, or hf://owner/repo:QUANT. Left out: the demo model.",
    )
    model_name: str | None = Field(None, description="Name in the API. Left out: the file's own name.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8080, ge=1, le=65535, description="TCP port to listen on.")
    url_prefix: str = Field("", description="Path prefix behind a proxy, such as /notebook/me. X-Forwarded-Prefix is obeyed too.")

    cards: str = Field(
        "auto",
        description="auto, or one or two of cuda:N, or of host:N, with a comma between. auto: the first two GPUs, else host:0,host:1.",
    )
    peer_check: Literal["require", "warn", "off"] = Field(
        "warn", description="What to do if two GPUs do not reach each other directly: refuse to start, say so, or do not look."
    )
    context: int | None = Field(
        None, ge=16, description="Tokens of prompt and answer together, per lane. Left out: the model's own, at most 8192."
    )
    chunk: int | None = Field(
        None, ge=8, le=8192, description="Prompt tokens computed in one go. Left out: 2048 on GPUs, 512 on host cards."
    )
    kv_type: Literal["f16", "f32", "int8"] = Field(
        "f16", description="Type of the key/value cache. int8 takes half the memory of f16, and answers may change a little."
    )
    slots: int | None = Field(None, ge=0, description="Expert slots per card. Left out: what the card's memory allows.")
    card_memory_mib: int | None = Field(
        None,
        ge=1,
        description="Memory that a card may use, in MiB. Left out: what is free; for host cards a share of the limit of this container.",
    )
    pool_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads of each engine's host pool. Left out: the usable cores divided by the lanes; a pair's lead has them all.",
    )
    max_swaps: int = Field(4, ge=0, description="Experts that may be swapped between two windows; 0 turns swapping off.")
    profile: Path | None = Field(
        None, description="Profile that fills the expert caches at start. Left out: the one learned here before, if any."
    )
    isa: Literal["auto", "portable", "avx2", "avx512"] = Field(
        "auto", description="Instruction set of the host kernels. All give the same bits."
    )

    elastic: Elastic = Field(
        default_factory=lambda: Elastic.model_validate({}), description="The pair: settings that begin with elastic_, a mapping in YAML."
    )
    parked_mib: int | None = Field(
        None,
        ge=0,
        description="Shared memory for conversations that lanes had to leave, in MiB. Left out: four contexts if elastic_enabled, else 0.",
    )

    max_queue: int = Field(64, ge=0, description="Requests that may wait; more get 429.")
    default_max_tokens: int = Field(4096, ge=1, description="Length of an answer whose request names none.")
    max_tokens_limit: int | None = Field(None, ge=1, description="Hard cap on the length of any answer. Left out: the context.")
    request_timeout_s: float = Field(
        3600.0, gt=0, le=LONGEST_S, description="Wall-clock cap of one answer; over it, it ends with finish_reason length."
    )
    keepalive_s: float = Field(0.8, gt=0, le=30, description="Longest silence on a stream before a comment is sent.")
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1024, description="Largest request body.")
    api_key_file: Path | None = Field(None, description="File with one API key per line. Left out: no key is asked for.")
    allowed_hosts: tuple[HostName, ...] = Field(
        (), description="Accepted Host headers beside localhost and the address listened on; * accepts all."
    )
    cors_origins: tuple[Origin, ...] = Field((), description="Origins that browsers may call the API from. Empty: none but our own.")
    drain_s: float = Field(30.0, ge=0, le=LONGEST_S, description="After SIGTERM, how long running answers may go on.")

    shm_dir: Path = Field(Path("/dev/shm"), description="Where the arena lies.")
    state_dir: Path | None = Field(None, description="Where learned profiles lie. Left out: ~/.local/state/tandem.")
    models_dir: Path | None = Field(None, description="Where models from the hub are kept. Left out: ~/.cache/tandem/models.")
    hub_url: str = Field("https://huggingface.co", description="The hub that hf:// stands for; a mirror's address works too.")
    hub_token_file: Path | None = Field(None, description="File with the access token for the hub. Left out: no token.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe message that is logged.")
    log_format: Literal["auto", "console", "json"] = Field("auto", description="auto: console on a terminal, JSON elsewhere.")

    _spelled: Mapping[str, str] = PrivateAttr(default_factory=dict)
    """Names of those that were given, as the user wrote them."""

    @property
    def model_path(self) -> Path:
        """`model`. Raises SettingsError where none is named."""
        if self.model is None:
            raise SettingsError("no model is named; give a GGUF file", param="model")
        return self.model

    def as_written(self, sentence: str) -> str:
        """The sentence with its settings named as the user wrote them: an option, a variable, or a key of the file."""
        return _spell(sentence, self._spelled)

    @field_validator("url_prefix")
    @classmethod
    def _prefix(cls, value: str) -> str:
        value = value.rstrip("/")
        if value and not value.startswith("/"):
            raise ValueError(f"must begin with a slash, such as /{value}")
        return value

    @field_validator("hub_url")
    @classmethod
    def _address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("must begin with https:// or http://")
        return value.rstrip("/")

    @field_validator("allowed_hosts", "cors_origins", mode="before")
    @classmethod
    def _list(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("cards")
    @classmethod
    def _cards(cls, value: str) -> str:
        if value != "auto":
            parse_cards(value)
        return value

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if self.context is not None and self.chunk is not None and self.chunk > self.context:
            raise ValueError(f"chunk = {self.chunk} is larger than context = {self.context}; lower it")
        self._check_lengths()
        if self.peer_check == "require" and self.cards != "auto" and sum(card.startswith("cuda") for card in parse_cards(self.cards)) < 2:
            raise ValueError(f"peer_check = require needs two GPUs to try, but cards = {self.cards}; name two, or set peer_check to warn")
        self._check_elastic()
        return self

    def _check_lengths(self) -> None:
        """The default may be larger: it stands in every file that `config print` writes."""
        length, limit = self.default_max_tokens, self.max_tokens_limit
        if limit is not None and length > limit and length != Settings.model_fields["default_max_tokens"].default:
            raise ValueError(f"default_max_tokens = {length} is larger than max_tokens_limit = {limit}, which cuts it; lower it")

    def _check_elastic(self) -> None:
        if not self.elastic.enabled:
            return
        if self.cards != "auto" and len(parse_cards(self.cards)) < MAX_CARDS:
            raise ValueError(f"elastic_enabled needs two cards, but cards = {self.cards}; name two, or set elastic_enabled to false")
        if self.slots == 0:
            raise ValueError("elastic_enabled needs expert slots to share, but slots = 0; raise it, or set elastic_enabled to false")
        held = self.elastic.hold_threads
        if held is not None and self.pool_threads is not None and held >= self.pool_threads:
            raise ValueError(f"elastic_hold_threads = {held} leaves the lead none of its pool_threads = {self.pool_threads}; lower it")


def parse_cards(text: str) -> tuple[str, ...]:
    """`cuda:0,cuda:1` -> ("cuda:0", "cuda:1"). ValueError if it is not one or two different cards of one kind."""
    cards = tuple(part.strip() for part in text.split(","))
    for card in cards:
        kind, _, number = card.partition(":")
        if kind not in ("cuda", "host") or not number.isdecimal():
            raise ValueError(f"{card!r} is not a card; write auto, cuda:N or host:N, two of them separated by a comma")
    if len(cards) > MAX_CARDS:
        raise ValueError(f"{len(cards)} cards given; a pair has two")
    cards = tuple(f"{kind}:{int(number)}" for kind, _, number in (card.partition(":") for card in cards))
    if len(set(cards)) != len(cards):
        raise ValueError(f"card {cards[0]} is named twice")
    if len({card.partition(":")[0] for card in cards}) > 1:
        raise ValueError(f"{text!r} mixes GPUs and host cards; use two of one kind")
    return cards


def setting_fields() -> dict[str, FieldInfo]:
    """Every setting by the name it has on the command line and in the environment, with its default and description."""
    fields = {name: field for name, field in Settings.model_fields.items() if name != BLOCK}
    return fields | {f"{BLOCK}_{name}": field for name, field in Elastic.model_fields.items()}


def load_settings(
    options: Mapping[str, Any] | None = None, *, environment: Mapping[str, str] | None = None, config: Path | None = None
) -> Settings:
    """Merges the sources. `options` are the command line's; values of None count as not given.

    Raises SettingsError with one sentence that names the setting, as the user wrote it, and its value.
    """
    environment = os.environ if environment is None else environment
    names = setting_fields().keys()
    path = config or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    sources = [from_file(path, names)] if path else []
    sources += [from_environment(environment, names), from_command_line(options or {}, names)]
    given = {name: value for source in sources for name, value in source.values.items()}
    spelled = {name: text for source in sources for name, text in source.spelled.items()}
    try:
        _check_elastic_is_decided(given)
        settings = Settings(**_with_block(given))
    except ValidationError as error:
        raise _as_written(_explain(error), spelled) from None
    except SettingsError as error:
        raise _as_written(error, spelled) from None
    settings._spelled = spelled
    return settings


def gpu_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """For processes that use GPUs, and for what must count GPUs as they do: in the order of the bus, unless told otherwise."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | dict(os.environ if environment is None else environment)


def _check_elastic_is_decided(given: Mapping[str, Any]) -> None:
    """What has no effect must not look as if it had; with `elastic_enabled` off in so many words it may wait there."""
    switch = f"{BLOCK}_enabled"
    idle = [name for name in given if name.startswith(f"{BLOCK}_") and name != switch]
    if idle and switch not in given:
        they, have = " and ".join(idle), "has" if len(idle) == 1 else "have"
        raise SettingsError(
            f"{they} {have} no effect while {switch} is off; set {switch} to true, or to false to keep them for later", param=idle[0]
        )


def _with_block(flat: Mapping[str, Any]) -> dict[str, Any]:
    """From names as `setting_fields` has them to the model's."""
    prefix = f"{BLOCK}_"
    block = {name.removeprefix(prefix): value for name, value in flat.items() if name.startswith(prefix)}
    return {name: value for name, value in flat.items() if not name.startswith(prefix)} | ({BLOCK: block} if block else {})


def _explain(error: ValidationError) -> SettingsError:
    first = error.errors(include_url=False)[0]
    message = str(first["ctx"]["error"]) if first["type"] == "value_error" else f"it must be {wanted(first)}"
    if first["loc"] in ((), (BLOCK,)):
        return SettingsError(message)
    name = "_".join(str(part) for part in first["loc"][:2]) if first["loc"][0] == BLOCK else str(first["loc"][0])
    return SettingsError(f"{name} = {shown(first['input'])}: {message}", param=name)


def _as_written(error: SettingsError, spelled: Mapping[str, str]) -> SettingsError:
    return SettingsError(_spell(error.message, spelled), param=error.param)


def _spell(sentence: str, spelled: Mapping[str, str]) -> str:
    """A name counts where it cannot be a word of the sentence or a part of a path: with an underscore in it, or before a value."""

    def spell(found: re.Match[str]) -> str:
        return spelled.get(found[0], found[0])

    return re.sub(r"(?<![\w/.-])(?:[a-z]+(?:_[a-z]+)+(?![\w/-])|[a-z]+(?= = ))", spell, sentence)
