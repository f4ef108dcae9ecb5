"""Checks everything that is deployed and is no program: Dockerfile, YAML, the chart. `python scripts/check_deployment.py`

A tool that this machine cannot get is skipped loudly; a finding is an error. Findings that are meant stand with their reasons in
`.checkov.yaml` and beside the line in the Dockerfile. The tests validate the rendered chart; this looks for bad habits.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CHECKOV = "checkov==3.3.30"
CHECKOV_HOME = ROOT / ".cache" / "checkov"
VALUES = {
    "defaults": [],
    "a model from a hub": ["--set=model.source=hub,model.hub.reference=hf://owner/repo:Q4_K_M,model.hub.download=job,storage.kind=new"],
    "a model of the node": ["--set=model.source=hostPath,model.hostPath=/srv/models,cards=host,apiKeys.values={one}"],
}


def main() -> int:
    """Returns 1 if anything was found."""
    results = [
        _run("hadolint", [BIN / "hadolint", "Dockerfile"]),
        _run("yamllint", [BIN / "yamllint", "--strict", "."]),
        _run("the chart's schema", [sys.executable, "scripts/chart_schema.py", "--check"]),
        *_checkov(),
    ]
    return 0 if all(results) else 1


def _checkov() -> list[bool]:
    program = _checkov_program()
    if program is None:
        return []
    options = ["--config-file", ".checkov.yaml", "--skip-download", "--compact", "--quiet"]
    results = [_run("checkov, Dockerfile", [program, "--file", "Dockerfile", "--framework", "dockerfile", *options])]
    sys.path.insert(0, str(ROOT))
    from scripts.helm_tools import NoHelmError, helm

    try:
        program_of_helm = helm("4")
    except NoHelmError as error:
        print(f"check: SKIPPED checkov of the chart: {error}", file=sys.stderr)
        return results
    with tempfile.TemporaryDirectory() as folder:
        for name, values in VALUES.items():
            command = [program_of_helm, "template", "tandem", "helm/tandem", "--namespace", "llm", "--kube-version", "1.34.0", *values]
            (Path(folder) / f"{name}.yaml").write_bytes(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
        results.append(_run("checkov, the chart", [program, "--directory", folder, "--framework", "kubernetes", *options]))
    return results


def _checkov_program() -> Path | None:
    """In an environment of its own: it wants older versions of what we use."""
    program = CHECKOV_HOME / "bin" / "checkov"
    if program.is_file():
        return program
    venv.create(CHECKOV_HOME, with_pip=True, clear=True)
    command = [CHECKOV_HOME / "bin" / "python", "-m", "pip", "install", "--quiet", CHECKOV]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and program.is_file():
        return program
    shutil.rmtree(CHECKOV_HOME, ignore_errors=True)
    print(f"check: SKIPPED checkov: pip cannot install it: {done.stderr.strip()[-300:]}", file=sys.stderr)
    return None


def _run(name: str, command: Sequence[str | Path]) -> bool:
    """Whether it found nothing; what it found is shown."""
    if not Path(command[0]).is_file():
        print(f"check: SKIPPED {name}: {command[0]} is not installed", file=sys.stderr)
        return True
    done = subprocess.run(list(command), cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"check: {name}: {'nothing found' if done.returncode == 0 else 'FAILED'}", flush=True)
    if done.returncode:
        print(done.stdout + done.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
