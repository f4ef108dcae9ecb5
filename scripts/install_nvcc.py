"""Puts nvcc and the static CUDA run time into a folder from PyPI, if this machine has no nvcc. Argument: the folder.

Compiling needs the compiler's wheels alone: neither a CUDA installation nor a driver.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

CUDA = "13.0"
WHEELS = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-nvvm"]


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    if shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists():
        return 0
    folder = Path(sys.argv[1])
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    wanted = [f"{wheel}=={CUDA}.*" for wheel in WHEELS]
    subprocess.run([environment / "bin/python", "-m", "pip", "install", "--quiet", *wanted], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    toolkit = Path(packages) / "nvidia" / f"cu{CUDA.partition('.')[0]}"
    (toolkit / "lib64").symlink_to("lib")  # where CMake and nvcc look, and the name that they look for
    for library in (toolkit / "lib").glob("libcudart.so.*"):
        (toolkit / "lib" / "libcudart.so").symlink_to(library.name)
    for part in ("bin", "include", "lib", "lib64", "nvvm"):
        (folder / part).symlink_to(toolkit / part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
