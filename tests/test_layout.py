"""The arena's layout: every byte of every expert has one place, and the file's bytes are found again there."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest

from appliance.gguf_file import GgufFile, open_gguf
from appliance.memory.layout import ALIGNMENT, ArenaLayout, BlobLayout, arena_layout, is_expert_tensor, part_sources
from appliance.models.config import read_config
from tests.gguf_writing import ModelShape, write_model

MIXED = {
    "ffn_gate_exps": "IQ3_XXS",
    "ffn_up_exps": "IQ3_XXS",
    "ffn_down_exps": "Q5_1",
    "blk.1.ffn_down_exps.weight": "Q6_K",
    "blk.2.ffn_gate_exps.weight": "F16",
}
ODD = ModelShape(layers=3, hidden=256, width=160, experts=5)


def layout_of(path: Path) -> tuple[GgufFile, ArenaLayout]:
    model = open_gguf(path)
    return model, arena_layout(model, read_config(model))


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[GgufFile, ArenaLayout]:
    return layout_of(write_model(tmp_path / "m.gguf", ModelShape(layers=3, experts=5), types=MIXED, shards=4))


def test_blobs_and_parts_are_aligned_and_do_not_overlap(mixed: tuple[GgufFile, ArenaLayout]) -> None:
    _, layout = mixed
    places = []
    for blobs in layout.layers:
        for expert in range(blobs.num_experts):
            start = layout.offset(blobs.layer, expert)
            assert start % ALIGNMENT == 0
            for part in blobs.blob.parts:
                assert part.offset % ALIGNMENT == 0
                places.append((start + part.offset, start + part.offset + part.nbytes))
    places.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert places[-1][1] <= layout.total_bytes


def test_padding_is_less_than_the_alignment_per_part(mixed: tuple[GgufFile, ArenaLayout]) -> None:
    model, layout = mixed
    experts_bytes = sum(info.nbytes for info in model.tensors.values() if is_expert_tensor(info.name))
    assert experts_bytes <= layout.total_bytes < experts_bytes + 3 * layout.num_experts * ALIGNMENT


def test_row_sizes_are_those_of_gguf_py(mixed: tuple[GgufFile, ArenaLayout]) -> None:
    for blobs in mixed[1].layers:
        for part in blobs.blob.parts:
            block_values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(part.type_id)]
            assert part.nbytes == part.rows * part.columns // block_values * block_bytes


def test_layers_may_have_different_types(mixed: tuple[GgufFile, ArenaLayout]) -> None:
    names = [gguf.GGMLQuantizationType(blobs.blob.part("down").type_id).name for blobs in mixed[1].layers]
    assert names == ["Q5_1", "Q6_K", "Q5_1"]
    assert len({blobs.blob.nbytes for blobs in mixed[1].layers}) == 3


def test_a_width_that_is_no_multiple_of_256_works(tmp_path: Path) -> None:
    model, layout = layout_of(write_model(tmp_path / "m.gguf", ODD, types={"ffn_gate_exps": "Q4_K", "ffn_down_exps": "Q8_0"}))
    down = layout.layers[0].blob.part("down")
    assert (down.rows, down.columns) == (256, 160)
    assert {source.tensor for source in part_sources(model, layout)} == {name for name in model.tensors if is_expert_tensor(name)}


@pytest.mark.parametrize("shards", [1, 7])
def test_separate_and_fused_files_give_the_same_blobs(tmp_path: Path, shards: int) -> None:
    types = {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q4_0", "ffn_down_exps": "Q8_0"}
    arenas = []
    for fused in (False, True):
        model, layout = layout_of(write_model(tmp_path / f"{fused}.gguf", ODD, types=types, fused=fused, shards=shards))
        arenas.append(fill(model, layout))
    assert np.array_equal(arenas[0], arenas[1])


def fill(model: GgufFile, layout: ArenaLayout) -> np.ndarray:
    """What a loader does, plainly."""
    arena = np.zeros(layout.total_bytes, np.uint8)
    for source in part_sources(model, layout):
        tensor = model.read(source.tensor)
        for expert in range(layout.layers[source.layer].num_experts):
            target = layout.offset(source.layer, expert) + source.part.offset
            start = source.first + expert * source.stride
            arena[target : target + source.part.nbytes] = tensor[start : start + source.part.nbytes]
    return arena


def test_a_part_found_in_the_arena_has_the_experts_values(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", ODD, types={"ffn_up_exps": "Q8_0"})
    model, layout = layout_of(path)
    arena = fill(model, layout)
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_up_exps.weight")
    expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)[3]
    part = layout.layers[1].blob.part("up")
    start = layout.offset(1, 3) + part.offset
    raw = arena[start : start + part.nbytes].reshape(part.rows, -1)
    assert np.array_equal(gguf.quants.dequantize(raw, tensor.tensor_type), expected)


@pytest.mark.parametrize(("layer", "expert"), [(3, 0), (0, 5), (0, -1), (-1, 0)])
def test_there_is_no_place_for_experts_that_do_not_exist(mixed: tuple[GgufFile, ArenaLayout], layer: int, expert: int) -> None:
    with pytest.raises(IndexError):
        mixed[1].offset(layer, expert)


def test_digest_changes_with_anything_in_the_layout(mixed: tuple[GgufFile, ArenaLayout]) -> None:
    layout = mixed[1]
    first = layout.layers[0]
    part = first.blob.parts[0]
    variants = [replace(part, **{name: getattr(part, name) + 1}) for name in ("type_id", "rows", "columns", "offset", "nbytes")]
    blobs = [BlobLayout((variant, *first.blob.parts[1:]), first.blob.nbytes) for variant in (*variants, replace(part, name="up"))]
    blobs.append(replace(first.blob, nbytes=first.blob.nbytes + ALIGNMENT))
    layers = [replace(first, blob=blob) for blob in blobs]
    layers += [replace(first, layer=9), replace(first, num_experts=6), replace(first, offset=ALIGNMENT)]
    changed = [replace(layout, layers=(layer, *layout.layers[1:])) for layer in layers]
    changed += [replace(layout, layers=layout.layers[:-1]), replace(layout, total_bytes=layout.total_bytes + 1)]
    digests = {variant.digest() for variant in changed}
    assert len(digests) == len(changed)
    assert layout.digest() not in digests


def test_digest_of_the_same_model_is_the_same(tmp_path: Path) -> None:
    digests = {layout_of(write_model(tmp_path / f"{seed}.gguf", seed=seed))[1].digest() for seed in (0, 1)}
    assert len(digests) == 1
