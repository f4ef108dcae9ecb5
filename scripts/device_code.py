"""Compiles the device code for one architecture, so that it cannot rot where there is no GPU. Argument: the architecture, default 90.

Takes the nvcc on PATH, else that of the wheels, which are installed beside the other packages. Where they cannot be had, it says so
and nothing is compiled.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "device-code"
VERSION = "13.0.*"
WHEELS = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-nvvm"]


def wheel_toolkit() -> Path | None:
    """Where the wheels lie, with the names that CMake looks for. Installs them first if they are missing."""
    toolkit = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
    if not (toolkit / "bin" / "nvcc").exists() or not (toolkit / "nvvm").exists():
        wanted = [f"{name}=={VERSION}" for name in WHEELS]
        installed = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], check=False)
        if installed.returncode != 0:
            return None
    for link, target in [("lib64", "lib"), ("lib/libcudart.so", "libcudart.so.13")]:
        if not (toolkit / link).exists():
            (toolkit / link).symlink_to(target)
    return toolkit


def find_nvcc() -> Path | None:
    if found := shutil.which("nvcc"):
        return Path(found)
    toolkit = wheel_toolkit()
    return toolkit and toolkit / "bin" / "nvcc"


def tool(name: str) -> str:
    """A build tool of this environment."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def main() -> int:
    architecture = sys.argv[1] if len(sys.argv) > 1 else "90"
    nvcc = find_nvcc()
    if nvcc is None:
        print("NOT DONE: there is no nvcc here and its wheels cannot be installed; the device code was not compiled", file=sys.stderr)
        return 0
    nanobind = subprocess.run([sys.executable, "-m", "nanobind", "--cmake_dir"], check=True, capture_output=True, text=True)
    definitions = {
        "TANDEM_CUDA": "ON",
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CUDA_COMPILER": nvcc,
        "CMAKE_CUDA_ARCHITECTURES": f"{architecture}-real",
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.stdout.strip(),
    }
    configure = [tool("cmake"), "-S", ROOT / "cuda_ext", "-B", BUILD, "-G", "Ninja", "--log-level=WARNING"]
    subprocess.run([*configure, *(f"-D{name}={value}" for name, value in definitions.items())], check=True, stdout=subprocess.DEVNULL)
    build = [tool("cmake"), "--build", BUILD, "--target", "tandem_cuda", "--parallel", str(os.cpu_count() or 1)]
    return subprocess.run(build, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
