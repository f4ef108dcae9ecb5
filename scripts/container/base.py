"""A base image without a registry: this machine's own Debian release by debootstrap, imported into the engine.

The certificates that this machine trusts go along, so that builds behind a company's proxy work.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import docker
from docker.errors import ImageNotFound

LOCAL_BASE = "tandem-local-base"
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n", re.DOTALL)


class NoBaseError(Exception):
    """No base can be made; the sentence says what is missing."""


def local_base(client: docker.DockerClient) -> str:
    """The base's tag; makes it first if the engine does not have it. Raises NoBaseError."""
    tag = f"{LOCAL_BASE}:{_release()}"
    try:
        client.images.get(tag)
    except ImageNotFound:
        with tempfile.TemporaryDirectory(prefix="tandem-base-") as folder:
            _import(client, _file_system(Path(folder) / "root"), tag)
    return tag


def missing_for_local_base() -> str | None:
    """What keeps this machine from making a base, as a clause; None if nothing does."""
    if shutil.which("debootstrap") is None:
        return "debootstrap not found (Debian: debootstrap)"
    return None


def _release() -> str:
    lines = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    release = lines.get("VERSION_CODENAME", "").strip('"')
    if lines.get("ID", "").strip('"') != "debian" or not release:
        raise NoBaseError("a local base is made by debootstrap on Debian only; name base images by --base and --build-base")
    return release


def _file_system(root: Path) -> Path:
    if missing := missing_for_local_base():
        raise NoBaseError(f"no base image is named, and none can be made here: {missing}")
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", _release(), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoBaseError(f"debootstrap failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    _trust_what_this_machine_trusts(root)
    for rubbish in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / rubbish)
        (root / rubbish).mkdir()
    return root


def _trust_what_this_machine_trusts(root: Path) -> None:
    """One file per certificate, since that is what update-ca-certificates takes."""
    if not BUNDLE.is_file():
        return
    own = root / "usr/local/share/ca-certificates"
    known = set(_CERTIFICATE.findall((root / BUNDLE.relative_to("/")).read_text()))
    for number, certificate in enumerate(text for text in _CERTIFICATE.findall(BUNDLE.read_text()) if text not in known):
        (own / f"machine-{number}.crt").write_text(certificate)
    subprocess.run(["chroot", str(root), "update-ca-certificates"], check=True, capture_output=True)


def _import(client: docker.DockerClient, root: Path, tag: str) -> None:
    repository, _, version = tag.partition(":")
    with tempfile.TemporaryFile() as archive:
        subprocess.run(["tar", "--create", "--directory", str(root), "."], stdout=archive, check=True)
        archive.seek(0)
        client.api.import_image_from_data(archive, repository=repository, tag=version)
