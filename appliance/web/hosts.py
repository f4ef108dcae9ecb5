"""Who may talk to us from a browser: the Host allow-list, and CORS (off unless configured).

A page on the internet can point its own name at 127.0.0.1 (DNS rebinding) and would then count as our own origin. Its requests
carry that name in `Host`, so only names that we know are answered.
"""

from __future__ import annotations

import ipaddress

from flask import Flask, Response, request

from appliance.errors import HostNotAllowedError
from appliance.settings import Settings

PROBES = frozenset({"ops.livez", "ops.readyz"})
"""Kubernetes probes a pod by its address, which nobody can list beforehand; probes tell nothing worth guarding."""

_EVERYWHERE = frozenset({"0.0.0.0", "::", ""})
_CORS_MAX_AGE_S = 600


def host_name(value: str) -> str:
    """`LocalHost:8080` -> `localhost`, `[::1]:80` and `::1` -> `::1`: a Host header, or a setting, without its port, in lower case."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    name, colon, port = value.rpartition(":")
    return (name if colon and port.isdigit() and ":" not in name else value).rstrip(".")


def allowed_names(settings: Settings) -> frozenset[str] | None:
    """The accepted names; None accepts all."""
    if "*" in settings.allowed_hosts:
        return None
    names = {"localhost", "127.0.0.1", "::1", host_name(settings.host), *map(host_name, settings.allowed_hosts)}
    return frozenset(names - _EVERYWHERE)


def is_allowed(host: str, names: frozenset[str], *, any_address: bool) -> bool:
    """Whether `host`, a Host header, is one of `names`; `any_address` accepts bare IP addresses too.

    A server that listens on every interface is reached by addresses it cannot know; an address in `Host` is never the
    result of rebinding, since that needs a name.
    """
    name = host_name(host)
    if name in names:
        return True
    if not any_address:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def install(app: Flask, settings: Settings) -> None:
    """Checks `Host` before anything else, and answers CORS for the configured origins."""
    names = allowed_names(settings)
    any_address = host_name(settings.host) in _EVERYWHERE

    @app.before_request
    def check_host() -> None:
        if names is None or request.endpoint in PROBES:
            return
        host = request.headers.get("Host", "")
        if not is_allowed(host, names, any_address=any_address):
            raise HostNotAllowedError(f"the host name {host_name(host)!r} is not allowed here; add it to allowed_hosts")

    if settings.cors_origins:
        _install_cors(app, frozenset(settings.cors_origins))


def _install_cors(app: Flask, origins: frozenset[str]) -> None:
    @app.after_request
    def allow_origin(response: Response) -> Response:
        response.vary.add("Origin")
        origin = request.headers.get("Origin")
        if origin is None or not ({"*", origin} & origins):
            return response
        response.headers["Access-Control-Allow-Origin"] = origin
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
            response.headers["Access-Control-Allow-Headers"] = request.headers.get("Access-Control-Request-Headers", "Content-Type")
            response.headers["Access-Control-Max-Age"] = str(_CORS_MAX_AGE_S)
        return response
