"""What the web process knows of the model: read from the file once, before the desk starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Used where a request names no value: the model's recommendation if its file has one, else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> SamplingDefaults:
        """Reads the keys `general.sampling.*`; a value of the wrong type counts as absent."""
        base = cls()

        def number(key: str, default: float) -> float:
            value = metadata.get(f"general.sampling.{key}")
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

        return cls(
            temperature=number("temp", base.temperature),
            top_p=number("top_p", base.top_p),
            top_k=int(number("top_k", base.top_k)),
            min_p=number("min_p", base.min_p),
            repetition_penalty=number("penalty_repeat", base.repetition_penalty),
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Immutable; shown by `/v1/models` and `/status`."""

    name: str
    """The name that requests may give as `model`."""
    context: int
    """Tokens of prompt and answer together, per lane."""
    vocab: int
    lanes: int
    """Requests that run at once."""
    created: int
    """Seconds since 1970: when the file was written."""
    architecture: str = "unknown"
    file_bytes: int = 0
    is_demo: bool = False
    """The pocket dictionary that comes with the package."""
    sampling: SamplingDefaults = SamplingDefaults()
    plan: Mapping[str, Any] = field(default_factory=dict)
    """What goes where in bytes, as `tandem plan --json` prints it."""
