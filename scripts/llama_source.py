"""llama.cpp to measure against: packs what its benchmarks need of its source, and builds them.

    python -m scripts.llama_source pack                     where there is a package registry: .llama/llama.tar.gz, some 4 MB
    python -m scripts.llama_source build DIR --cuda 90      anywhere: DIR/bin/llama-bench and llama-batched-bench for that architecture;
                                                            without --cuda for the CPU

The source is that of the sdist of llama-cpp-python; the folder .llama is ignored by git. With CUDA the build takes four minutes on
16 cores.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / ".llama" / "llama.tar.gz"
SDIST = "llama-cpp-python==0.3.36"
VENDORED = "vendor/llama.cpp/"
KEPT = (
    "LICENSE",
    "CMakeLists.txt",
    "cmake/",
    "common/",
    "ggml/CMakeLists.txt",
    "ggml/cmake/",
    "ggml/include/",
    "ggml/src/",
    "include/",
    "src/",
    "tools/batched-bench/",
    "tools/llama-bench/",
    "vendor/cpp-httplib/",
    "vendor/hash/",
    "vendor/nlohmann/",
    "vendor/sheredom/",
)
TOOLS = ("llama-bench", "llama-batched-bench")
KEPT_BACKENDS = ("ggml-cpu", "ggml-cuda")
REDUCED = {
    "tools/CMakeLists.txt": "find_package(Threads REQUIRED)\nllama_add_compile_flags()\n"
    "add_subdirectory(batched-bench)\nadd_subdirectory(llama-bench)\n",
    "vendor/CMakeLists.txt": "".join(f"add_subdirectory({name})\n" for name in ("hash", "nlohmann", "sheredom", "cpp-httplib")),
}
"""Files that list folders which are left out."""
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "GGML_CUDA_NCCL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_UI": "OFF",
}


def pack(sdist: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = sdist or _download(Path(folder))
        PACKED.parent.mkdir(exist_ok=True)
        with tarfile.open(source) as whole, tarfile.open(PACKED, "w:gz", compresslevel=9) as packed:
            for name, member in _kept(whole):
                packed.addfile(_entry(name, member.size), whole.extractfile(member))
            for name, text in REDUCED.items():
                packed.addfile(_entry(name, len(text)), io.BytesIO(text.encode()))
    print(f"{PACKED.relative_to(ROOT)}: {PACKED.stat().st_size / 1e6:.1f} MB")


def _download(folder: Path) -> Path:
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "-d", str(folder), SDIST]
    subprocess.run(argv, check=True)
    return next(folder.glob("*.tar.gz"))


def _entry(name: str, nbytes: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)  # a new one: the extended headers of the sdist's would bring its long path back
    entry.size = nbytes
    return entry


def _kept(whole: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """(name within llama.cpp, file) of the files that are packed."""
    for member in whole:
        _, found, name = member.name.partition(VENDORED)
        if not found or not member.isfile() or name in REDUCED or not name.startswith(KEPT):
            continue
        parts = name.split("/")
        if parts[:2] == ["ggml", "src"] and len(parts) > 3 and parts[2] not in KEPT_BACKENDS:
            continue
        yield name, member


def build(folder: Path, architecture: str | None, tools: Sequence[str]) -> None:
    if not PACKED.exists():
        raise SystemExit(f"{PACKED.relative_to(ROOT)} is not there; make it with `pack` where there is a package registry")
    source, binary = folder / "source", folder / "build"
    with tarfile.open(PACKED) as packed:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4
            packed.extraction_filter = tarfile.data_filter
        packed.extractall(source)
    options = OPTIONS | {"GGML_CUDA": "OFF" if architecture is None else "ON"}
    if architecture is not None:
        options["CMAKE_CUDA_ARCHITECTURES"] = f"{architecture}-real"
    defined = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["cmake", "-S", str(source), "-B", str(binary), "-G", "Ninja", "--log-level=WARNING", *defined], check=True)
    subprocess.run(["cmake", "--build", str(binary), "--target", *tools, "--", "--quiet"], check=True)
    link = folder / "bin"
    link.unlink(missing_ok=True)
    link.symlink_to("build/bin")
    print("\n".join(str(link / tool) for tool in tools))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("--sdist", type=Path, help=f"the file of {SDIST}, where it was already downloaded")
    building = commands.add_parser("build")
    building.add_argument("folder", type=Path)
    building.add_argument("--cuda", metavar="ARCH", help="compute capability, such as 90; default: a build for the CPU")
    building.add_argument("--tool", action="append", choices=TOOLS, help="only this one")
    options = parser.parse_args()
    if options.command == "pack":
        pack(options.sdist)
    else:
        build(options.folder.resolve(), options.cuda, options.tool or TOOLS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
