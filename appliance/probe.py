"""Asks the server in this container how it is: `python -m appliance.probe [/livez]`. Exit code 0 if it answers 200.

For the image's HEALTHCHECK, which has no shell and no curl to rely on. The port is that of the settings: give it by `TANDEM_PORT` or
the file of `TANDEM_CONFIG`, since an option of `tandem serve` is not seen here.
"""

from __future__ import annotations

import http.client
import sys
from collections.abc import Sequence

from appliance.errors import SettingsError
from appliance.settings import load_settings

TIMEOUT_S = 4.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 with a sentence on stderr."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    path = words[0] if words else "/livez"
    try:
        status = probe(path)
    except (OSError, http.client.HTTPException, SettingsError) as error:
        print(f"tandem: {path}: {error}", file=sys.stderr)
        return 1
    if status != 200:
        print(f"tandem: {path} answered {status}", file=sys.stderr)
    return 0 if status == 200 else 1


def probe(path: str) -> int:
    """The status code of a GET to the server of these settings."""
    settings = load_settings()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    connection = http.client.HTTPConnection(host, settings.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Host": "localhost"})
        return connection.getresponse().status
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
