"""Typed reading of a model's metadata: every wrong or missing key ends in a sentence that names it."""

from __future__ import annotations

from appliance.errors import CorruptModelError
from appliance.gguf_file import GgufFile
from appliance.gguf_header import describe


class MetadataReader:
    """Reads keys of one file. A key without a default must be there.

    All methods raise CorruptModelError naming file, key, value and what was expected.
    """

    def __init__(self, gguf: GgufFile) -> None:
        self._metadata = gguf.metadata
        self._path = gguf.paths[0]

    def has(self, key: str) -> bool:
        return key in self._metadata

    def integer(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(key, value, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, *, above: float, at_most: float, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= at_most:
            raise self._wrong(key, value, f"a number above {above:g} and at most {at_most:g}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        value = self._get(key, None)
        if not isinstance(value, tuple) or not all(isinstance(element, str) for element in value):
            raise self._wrong(key, value, "an array of texts")
        return tuple(str(element) for element in value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._get(key, None)
        if not isinstance(value, tuple) or not all(type(element) is int for element in value):
            raise self._wrong(key, value, "an array of whole numbers")
        return tuple(int(element) for element in value)

    def error(self, message: str) -> CorruptModelError:
        """An error about a relation between keys; as `sentence`."""
        return CorruptModelError(self.sentence(message))

    def sentence(self, message: str) -> str:
        """`message` behind the file's name."""
        return f"{self._path}: {message}"

    def _get(self, key: str, default: object) -> object:
        if key in self._metadata:
            return self._metadata[key]
        if default is None:
            raise self.error(f"key {key} is missing")
        return default

    def _wrong(self, key: str, value: object, expected: str) -> CorruptModelError:
        return self.error(f"key {key} is {describe(value)}; it must be {expected}")
