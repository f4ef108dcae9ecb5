"""API keys: a file with one key per line. Without a file nobody is asked for a key."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from flask import Flask, Request, request

from appliance.errors import AuthenticationError, SettingsError

OPEN_ENDPOINTS = frozenset({"ops.livez", "ops.readyz", "page.index", "page.static_file"})
"""What works without a key: the probes, and the page's own files (its data needs the key)."""


class KeyRing:
    """The accepted keys, as digests. Immutable."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._digests = [_digest(key) for key in sorted(keys)]

    @classmethod
    def from_file(cls, path: Path) -> KeyRing:
        """Reads one key per line; empty lines and lines that begin with # do not count. SettingsError if there is none."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise SettingsError(f"api_key_file = {path}: the keys cannot be read: {error.strerror}", param="api_key_file") from None
        except UnicodeDecodeError:
            raise SettingsError(f"api_key_file = {path}: the keys cannot be read: it is no text in UTF-8", param="api_key_file") from None
        keys = frozenset(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        if not keys:
            raise SettingsError(f"{path} holds no API key; write one per line, or leave api_key_file out", param="api_key_file")
        return cls(keys)

    def accepts(self, key: str) -> bool:
        """Compares with every key in constant time, so that the time an answer takes tells nothing."""
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def install(app: Flask, ring: KeyRing) -> None:
    """Asks every request for a key, except those of `OPEN_ENDPOINTS` and browsers' CORS questions."""

    @app.before_request
    def check_key() -> None:
        if request.endpoint in OPEN_ENDPOINTS or request.method == "OPTIONS":
            return
        key = _key_of(request)
        if key is None:
            raise AuthenticationError("this server asks for an API key; send it as Authorization: Bearer KEY or x-api-key: KEY")
        if not ring.accepts(key):
            raise AuthenticationError("this API key is not known here; check it for typing errors")


def _key_of(req: Request) -> str | None:
    scheme, _, token = req.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return req.headers.get("x-api-key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
