"""Builds the image from the work tree."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import APIError, BuildError

from scripts.container.base import local_base

LAST_LINES = 40


class BuildFailedError(Exception):
    """The build failed; the text is the end of its output."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What to build. None leaves the Dockerfile's default."""

    root: Path
    tag: str
    cuda: str
    architectures: str | None
    base: str | None
    build_base: str | None
    jobs: int | None
    with_local_base: bool


def build_image(client: docker.DockerClient, options: BuildOptions, say: Callable[[str], None]) -> int:
    """Returns the image's size in bytes. `say` gets the steps. Raises BuildFailedError or NoBaseError.

    The build uses the host's network, since an engine of one's own has no other.
    """
    base = local_base(client) if options.with_local_base else None
    arguments = {
        "TANDEM_CUDA": options.cuda,
        "CUDA_ARCHITECTURES": options.architectures,
        "BUILD_JOBS": None if options.jobs is None else str(options.jobs),
        "BASE_IMAGE": options.base or base,
        "BUILD_BASE_IMAGE": options.build_base or base,
        "VERSION": tomllib.loads((options.root / "pyproject.toml").read_text())["project"]["version"],
        "REVISION": _revision(options.root),
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        lines = client.api.build(
            path=str(options.root), tag=options.tag, buildargs=given, network_mode="host", rm=True, forcerm=True, decode=True
        )
        _follow(lines, say)
    except (APIError, BuildError) as error:
        raise BuildFailedError(str(error)) from None
    return int(client.images.get(options.tag).attrs["Size"])


def _follow(lines: object, say: Callable[[str], None]) -> None:
    kept: list[str] = []
    for line in lines:  # type: ignore[attr-defined]
        text = str(line.get("stream", "")).rstrip()
        if text.startswith("Step "):
            say(text)
        kept = [*kept, text][-LAST_LINES:] if text else kept
        if "error" in line:
            raise BuildFailedError("\n".join([*kept, str(line["error"])]))


def _revision(root: Path) -> str | None:
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
