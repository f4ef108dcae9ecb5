"""Fills a large model's arena by several threads, which the loader of a server does not: the machine is lent by the minute.

The pages are written through a mapping first; then the arena's own code takes the file over and seals it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.gguf_file import open_gguf
from appliance.memory.arena import HEADER_BYTES, ArenaPlace
from appliance.memory.arena_file import claim_arena
from appliance.memory.arena_fill import ExpertTensor, tensors_in_file_order
from appliance.memory.layout import arena_layout
from appliance.memory.limits import shm_space
from appliance.models.config import read_config
from appliance.units import format_bytes

NUM_WRITERS = min(16, os.cpu_count() or 1)


def write_arena(model: Path, shm_dir: Path) -> Path:
    """The sealed arena's file; one that is sealed already is kept. Scales are not checked: the file is one of ours.

    Raises SystemExit if there is no room for it.
    """
    gguf = open_gguf(model)
    layout = arena_layout(gguf, read_config(gguf))
    place = ArenaPlace(shm_dir, gguf.content_id, layout)
    file = claim_arena(place, _refuse_to_wait)
    if file is None:
        return place.path
    with file:
        space = shm_space(shm_dir)
        if place.file_bytes > space.free_bytes:
            raise SystemExit(f"the arena needs {format_bytes(place.file_bytes)}, and {shm_dir} has {format_bytes(space.free_bytes)} free")
        os.truncate(place.path, place.file_bytes)
        arena = np.memmap(place.path, np.uint8, "r+", HEADER_BYTES, layout.total_bytes)
        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            for copied in [pool.submit(_copy, tensor, arena) for tensor in tensors_in_file_order(gguf, layout)]:
                copied.result()
        del arena
        file.reserve(lambda _: None)
        file.seal()
    return place.path


def _copy(tensor: ExpertTensor, arena: NDArray[np.uint8]) -> None:
    """Every expert's matrices of one tensor, to their places."""
    blobs = tensor.blobs
    source = np.memmap(tensor.path, np.uint8, "r", tensor.info.offset, (blobs.num_experts, tensor.expert_bytes))
    target = arena[blobs.offset : blobs.offset + blobs.nbytes].reshape(blobs.num_experts, -1)
    position = 0
    for part in tensor.parts:
        target[:, part.offset : part.offset + part.nbytes] = source[:, position : position + part.nbytes]
        position += part.nbytes


def _refuse_to_wait(_: object) -> None:
    raise SystemExit("another process fills this arena; wait until it has ended")
