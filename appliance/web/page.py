"""The page at `/` and its files. It gets its data through the public API like any other client."""

from __future__ import annotations

from pathlib import Path

from flask import Blueprint, Flask, Response, send_from_directory

STATIC_FOLDER = Path(__file__).parent / "static"

_NOT_BUILT = "The page has not been built yet; run `make setup` in the source tree. The API works without it: see /v1/models and /status.\n"

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Nothing but our own files runs, and nothing leaves the origin."""

page = Blueprint("page", __name__)


@page.get("/")
def index() -> Response:
    if not (STATIC_FOLDER / "index.html").is_file():
        return Response(_NOT_BUILT, status=503, mimetype="text/plain")
    return _unaltered("index.html")


@page.get("/static/<path:name>")
def static_file(name: str) -> Response:
    return _unaltered(name)


def install_headers(app: Flask) -> None:
    """Adds the protective headers to every response; they do no harm to the API's."""

    @app.after_request
    def protect(response: Response) -> Response:
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response


def _unaltered(name: str) -> Response:
    """Browsers ask every time and get 304 unless the file has changed: a new version is never mixed with an old one."""
    response = send_from_directory(STATIC_FOLDER, name)
    response.headers["Cache-Control"] = "no-cache"
    return response
