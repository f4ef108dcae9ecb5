"""Byte-level spelling: each of the 256 bytes as one printable character (introduced with GPT-2's tokenizer).

Bytes that are printable in Latin-1 stand for themselves, the others follow from U+0100 on in order.
"""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)

BYTE_OF: dict[str, int] = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}
"""Character to byte."""


def spelled_bytes(text: str) -> bytes:
    """The bytes that a byte-level spelling stands for; text that is no such spelling, as itself in UTF-8."""
    if text.isascii():
        return text.encode("ascii")
    try:
        return bytes(map(BYTE_OF.__getitem__, text))
    except KeyError:
        return text.encode("utf-8")
