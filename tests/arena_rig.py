"""What the tests of arena and loader share: folders in shared memory, models, real loader processes, and an oracle."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from appliance.gguf_file import open_gguf
from appliance.memory.arena import HEADER_BYTES, Arena, ArenaPlace
from appliance.memory.arena_file import ArenaFile, claim_arena
from appliance.memory.layout import ArenaLayout, BlobLayout, BlobPart, LayerBlobs, arena_layout
from appliance.models.config import read_config
from appliance.protocol import Fatal, LoadProgress, Word

DEADLINE_S = 60.0
CONTENT_ID = "0123456789abcdef" * 4
FINGERPRINT = "f1" * 32


@contextmanager
def shm_folder() -> Iterator[Path]:
    """A folder of its own in shared memory, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-test-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def small_layout(*, layers: int = 2, experts: int = 3, rows: int = 5) -> ArenaLayout:
    """Layers of different blob sizes, with padding behind every part."""
    built = []
    offset = 0
    for layer in range(layers):
        nbytes = rows * 34 * (1 + layer)
        parts = tuple(BlobPart(name, 8, rows, 32 * (1 + layer), 512 * index, nbytes) for index, name in enumerate(("gate", "up", "down")))
        blobs = LayerBlobs(layer, experts, BlobLayout(parts, 3 * 512), offset)
        built.append(blobs)
        offset += blobs.nbytes
    return ArenaLayout(tuple(built), offset)


def place_in(folder: Path, layout: ArenaLayout | None = None, content_id: str = CONTENT_ID) -> ArenaPlace:
    return ArenaPlace(folder, content_id, layout or small_layout())


def claimed(place: ArenaPlace) -> ArenaFile:
    """The owner's end of an arena that nobody else has."""
    file = claim_arena(place, refuse_to_wait)
    assert file is not None
    return file


def refuse_to_wait(header: object) -> None:
    raise AssertionError(f"waited for a loader with header {header}")


def sealed(place: ArenaPlace, seed: int = 0) -> bytes:
    """Fills and seals an arena with random bytes, which are returned."""
    content = np.random.default_rng(seed).integers(0, 256, place.layout.total_bytes, dtype=np.uint8).tobytes()
    with claimed(place) as file:
        file.reserve(lambda _: None)
        file.write(0, [content])
        file.seal()
    return content


def model_place(model: Path, folder: Path) -> ArenaPlace:
    gguf = open_gguf(model)
    return ArenaPlace(folder, gguf.content_id, arena_layout(gguf, read_config(gguf)))


def assert_holds_model(arena: Arena, models: Sequence[Path]) -> None:
    """Every matrix of every expert is, byte for byte, what gguf-py finds in the files."""
    expected = expert_matrices(models)
    for blobs in arena.layout.layers:
        for expert in range(blobs.num_experts):
            blob = arena.view(blobs.layer, expert)
            for part in blobs.blob.parts:
                matrix = expected[blobs.layer, part.name][expert]
                np.testing.assert_array_equal(blob[part.offset : part.offset + part.nbytes], matrix)


def expert_matrices(models: Sequence[Path]) -> dict[tuple[int, str], NDArray[np.uint8]]:
    """(layer, gate | up | down) -> [experts, bytes], read by gguf-py. In a fused tensor each expert's gate rows come first."""
    found: dict[tuple[int, str], NDArray[np.uint8]] = {}
    for model in models:
        for tensor in GGUFReader(model).tensors:
            words = tensor.name.split(".")
            if len(words) != 4 or not words[2].endswith("_exps"):
                continue
            layer, kind = int(words[1]), words[2].removeprefix("ffn_").removesuffix("_exps")
            experts = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(int(tensor.shape[-1]), -1)
            if kind == "gate_up":
                found[layer, "gate"], found[layer, "up"] = np.split(experts, 2, axis=1)
            else:
                found[layer, kind] = experts
    return found


@dataclass(frozen=True)
class Ending:
    """How a loader ended, and what it wrote."""

    exit_code: int
    loads: list[LoadProgress]
    fatal: Fatal | None
    log: str


def start_loader(model: Path, folder: Path, *options: str, bytes_per_s: int | None = None) -> subprocess.Popen[str]:
    """A real loader process; with `bytes_per_s` it reads no faster than that."""
    throttle = [] if bytes_per_s is None else ["--bytes-per-s", str(bytes_per_s)]
    module = "appliance.memory.loader" if bytes_per_s is None else "tests.slow_loader"
    argv = [sys.executable, "-m", module, *throttle, "--model", str(model), "--shm-dir", str(folder), *options]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ending_of(process: subprocess.Popen[str]) -> Ending:
    """Waits for the end of a loader and reads all that is left of its output."""
    out, log = process.communicate(timeout=DEADLINE_S)
    loads: list[LoadProgress] = []
    fatal = None
    for text in out.splitlines():
        word, _, rest = text.partition(" ")
        if word == Word.LOAD:
            loads.append(LoadProgress.model_validate_json(rest))
        else:
            assert word == Word.FATAL
            fatal = Fatal.model_validate_json(rest)
    return Ending(process.returncode, loads, fatal, log)


def run_loader(model: Path, folder: Path, *options: str) -> Ending:
    return ending_of(start_loader(model, folder, *options))


def used_bytes(folder: Path) -> int:
    """Memory that the files of a folder take."""
    return sum(path.lstat().st_blocks * 512 for path in folder.iterdir())


def overwrite(place: ArenaPlace, offset: int, data: bytes) -> None:
    """Writes into an arena's file behind everybody's back; `offset` counts from the first blob."""
    with place.path.open("r+b") as file:
        file.seek(HEADER_BYTES + offset)
        file.write(data)
