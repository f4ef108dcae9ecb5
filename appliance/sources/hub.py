"""A hub's repositories: what files they hold, and getting one file, resumed where it broke off and checked by its SHA-256.

The protocol is that of the Hugging Face hub, spoken through `huggingface_hub`; its own downloads begin anew after a restart, which
is of no use with files of 50 GB.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import structlog

from appliance.errors import CorruptModelError, ModelError
from appliance.sources.choice import SourceFile
from appliance.sources.reference import HubReference

if TYPE_CHECKING:
    import httpx2

TRIES = 6
"""Without a byte of progress; each waits longer than the last."""
FIRST_WAIT_S = 0.5
TIMEOUT_S = 30.0
PIECE_BYTES = 1 << 20

_PARTIAL, _WHOLE, _BEYOND_END = 206, 200, 416

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Listing:
    """What a repository holds at one commit."""

    commit: str
    files: tuple[SourceFile, ...]


class Hub:
    """One hub, seen with one token or none. Confined to one thread."""

    def __init__(self, url: str, token: str | None, first_wait_s: float = FIRST_WAIT_S) -> None:
        self._url = url
        self._token: str | bool = token or False  # False: no token, not even one that lies about on this machine
        self._first_wait_s = first_wait_s

    def list_files(self, reference: HubReference) -> Listing:
        """Raises ModelError with what to do about it."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._url, token=self._token)
        try:
            info = api.model_info(reference.repo_id, revision=reference.revision, files_metadata=True, timeout=TIMEOUT_S)
        except Exception as error:
            raise self._explain(error, reference) from error
        siblings = info.siblings or []
        files = tuple(SourceFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else None) for file in siblings)
        return Listing(commit=str(info.sha), files=files)

    def get(self, reference: HubReference, commit: str, file: SourceFile, target: Path, on_bytes: Callable[[int], None]) -> None:
        """Leaves the whole, checked file at `target`, or raises ModelError and leaves what it has for the next try.

        `on_bytes` gets the number of bytes of this file that are there, again and again.
        """
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(reference.repo_id, file.path, revision=commit, endpoint=self._url)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = part_path(target)
        with part.open("a+b") as out:
            digest = _digest_of(out, on_bytes)
            self._fill(url, out, digest, file, reference, on_bytes)
            out.flush()
        _check_digest(digest.hexdigest(), file, part)
        part.replace(target)

    def _fill(
        self, url: str, out: BinaryIO, digest: _Digest, file: SourceFile, reference: HubReference, on_bytes: Callable[[int], None]
    ) -> None:
        failures = 0
        while digest.num_bytes < file.size:
            before = digest.num_bytes
            try:
                self._stream(url, out, digest, file.size, on_bytes)
                error: Exception | None = None
            except Exception as problem:
                error = problem
                if not _is_transient(problem):
                    raise self._explain(problem, reference) from problem
            failures = 0 if digest.num_bytes > before else failures + 1
            if failures == TRIES:
                reason = self._explain(error, reference).message if error else f"{reference}: {file.path} ends before its {file.size} bytes"
                raise ModelError(f"{reason}; what is there is kept, start again to go on") from error
            if digest.num_bytes < file.size:
                log.warning("the download broke off and goes on", file=file.path, done_bytes=digest.num_bytes, reason=str(error))
                time.sleep(self._first_wait_s * 2 ** max(0, failures - 1))

    def _stream(self, url: str, out: BinaryIO, digest: _Digest, size: int, on_bytes: Callable[[int], None]) -> None:
        """One answer of the hub, from where `digest` stands; the file begins anew if the hub cannot go on there."""
        from huggingface_hub import get_session
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import hf_raise_for_status

        headers = {**build_hf_headers(token=self._token, library_name="tandem"), "Accept-Encoding": "identity"}
        if digest.num_bytes:
            headers["Range"] = f"bytes={digest.num_bytes}-"
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as response:
            if response.status_code == _BEYOND_END or (digest.num_bytes and response.status_code == _WHOLE):
                digest.restart(out)
                if response.status_code == _BEYOND_END:
                    return
            hf_raise_for_status(response)
            if response.status_code == _PARTIAL and not _begins_at(response, digest.num_bytes):
                digest.restart(out)
                return
            for piece in response.iter_raw():
                digest.write(out, piece[: size - digest.num_bytes])
                on_bytes(digest.num_bytes)

    def _explain(self, error: Exception, reference: HubReference) -> ModelError:
        from huggingface_hub import errors

        name = reference.repo_id
        if isinstance(error, errors.GatedRepoError):
            return ModelError(f"{name} asks for its terms to be accepted: do so at {self._url}/{name} and give a token by hub_token_file")
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelError(f"{name} has no branch, tag or commit {reference.revision!r}")
        if isinstance(error, errors.RepositoryNotFoundError):
            secret = "for this token" if self._token else "without a token; if it is private, give one by hub_token_file"
            return ModelError(f"{self._url} has no repository {name} {secret}")
        if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
            return ModelError(f"{self._url} answered {error.response.status_code} for {name}")
        return ModelError(f"{self._url} cannot be read for {name}: {error or type(error).__name__}")


def part_path(target: Path) -> Path:
    """Where the unfinished file lies; what bears the plain name is whole and checked."""
    return target.with_name(target.name + ".part")


class _Digest:
    """SHA-256 and length of what has been written. Confined to one download."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sha256 = hashlib.sha256()

    def feed(self, piece: bytes) -> None:
        self._sha256.update(piece)
        self.num_bytes += len(piece)

    def write(self, out: BinaryIO, piece: bytes) -> None:
        out.write(piece)
        self.feed(piece)

    def restart(self, out: BinaryIO) -> None:
        out.truncate(0)
        self.num_bytes = 0
        self._sha256 = hashlib.sha256()

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def _digest_of(file: BinaryIO, on_bytes: Callable[[int], None]) -> _Digest:
    digest = _Digest()
    file.seek(0)
    while piece := file.read(PIECE_BYTES):
        digest.feed(piece)
        on_bytes(digest.num_bytes)
    return digest


def _check_digest(found: str, file: SourceFile, part: Path) -> None:
    if file.sha256 is None:
        log.warning("the hub tells no SHA-256 of this file; only its size was checked", file=file.path)
    elif found != file.sha256:
        part.unlink()
        raise CorruptModelError(f"{file.path} came with SHA-256 {found}, but the hub says {file.sha256}; it was removed, start again")


def _begins_at(response: httpx2.Response, offset: int) -> bool:
    return response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")


def _is_transient(error: Exception) -> bool:
    """The network, or the hub having trouble; not what asking again cannot mend."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code in (408, 429, 500, 502, 503, 504)
    return isinstance(error, httpx2.TransportError)
