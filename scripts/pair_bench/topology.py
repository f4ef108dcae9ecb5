"""How two GPUs are linked: what the driver says, whether writes arrive, and what wires.cu measures.

python -m scripts.pair_bench.topology --build DIR
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from appliance.peer_check import check_peers
from scripts.pair_bench.children import say

SOURCE = Path(__file__).with_name("wires.cu")
NVCC = "/usr/local/cuda/bin/nvcc"
LIMIT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True, help="folder for the program")
    options = parser.parse_args()
    say({"gpus": _smi("--query-gpu=name,driver_version,memory.total,compute_cap,pcie.link.gen.max", "--format=csv,noheader")})
    say({"topology": _smi("topo", "-m")})
    say({"nvlink": _smi("nvlink", "--status", "-i", "0")})
    say({"peer_check": check_peers(0, 1).model_dump()})
    return _measure(options.build)


def _smi(*arguments: str) -> list[str]:
    """Lines of nvidia-smi, or why there are none."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi: {error}"]
    return [line.rstrip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]


def _measure(folder: Path) -> int:
    """Builds the program and runs it; its lines are results. Returns its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "wires"
    architecture = _smi("--query-gpu=compute_cap", "--format=csv,noheader")[0].replace(".", "")
    if not architecture.isdecimal():
        print("not measured: there is no GPU", flush=True)
        return 1
    nvcc = shutil.which("nvcc") or NVCC
    argv = [nvcc, "-O2", "-std=c++17", f"-arch=sm_{architecture}", "-o", str(program), str(SOURCE), "-ldl"]
    try:
        subprocess.run(argv, timeout=LIMIT_S, check=True)
        return subprocess.run([str(program)], timeout=LIMIT_S, check=False).returncode
    except (OSError, subprocess.SubprocessError) as error:
        print(f"not measured: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
