"""Installs what pyproject.toml asks for, at the versions that constraints.txt locks. Argument: runtime or dev.

The project itself is installed by `make native`; keeping the two apart means that a changed source file does not
touch the packages.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_TOOLS = ["cmake", "ninja"]


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if sys.argv[1:] == ["runtime"]:
        wanted = project["build-system"]["requires"] + BUILD_TOOLS + project["project"]["dependencies"]
    elif sys.argv[1:] == ["dev"]:
        wanted = project["project"]["optional-dependencies"]["dev"]
    else:
        print(__doc__, file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    return subprocess.run(command + wanted, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
