"""The loader's work: what it reads, writes, refuses and says."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from appliance.errors import CorruptModelError, EngineError
from appliance.gguf_file import open_gguf
from appliance.memory.arena import Arena
from appliance.memory.arena_fill import PIECE_BYTES, Piece, read_pieces, tensors_in_file_order
from appliance.memory.loader import Loader
from appliance.progress import ProgressReport
from appliance.protocol import LoadProgress
from tests.arena_rig import assert_holds_model, model_place, overwrite, shm_folder
from tests.gguf_writing import ModelShape, model_content, write_model, write_shards

MIXED = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K", "blk.1.ffn_down_exps.weight": "Q8_0"}


@pytest.fixture
def folder() -> Iterator[Path]:
    with shm_folder() as path:
        yield path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf", types=MIXED)


def load(model: Path, folder: Path, out: io.StringIO | None = None) -> None:
    Loader(open_gguf(model), folder, out or io.StringIO()).fill()


@pytest.mark.parametrize("options", [{}, {"types": MIXED}, {"types": MIXED, "fused": True}, {"types": {"ffn_down_exps": "IQ4_NL"}}])
def test_the_arena_holds_what_gguf_py_reads(tmp_path: Path, folder: Path, options: dict[str, object]) -> None:
    model = write_model(tmp_path / "model.gguf", ModelShape(experts=5, top_k=2), **options)
    load(model, folder)
    with Arena.open(model_place(model, folder)) as arena:
        assert_holds_model(arena, [model])


@pytest.mark.parametrize("shards", [2, 5, 9])
def test_a_layer_spread_over_shards_is_loaded_whole(tmp_path: Path, folder: Path, shards: int) -> None:
    paths = write_shards(tmp_path / "model.gguf", model_content(types=MIXED), shards)
    load(paths[-1], folder)
    with Arena.open(model_place(paths[0], folder)) as arena:
        assert_holds_model(arena, paths)


def test_tensors_in_any_order_of_the_file_are_read_front_to_back(tmp_path: Path) -> None:
    content = model_content(types=MIXED)
    content.tensors.reverse()
    model = content.write(tmp_path / "model.gguf")
    place = model_place(model, tmp_path)
    offsets = [tensor.info.offset for tensor in tensors_in_file_order(open_gguf(model), place.layout)]
    assert offsets == sorted(offsets)


def test_experts_larger_than_a_piece_are_read_one_by_one(tmp_path: Path, folder: Path) -> None:
    shape = ModelShape(layers=1, hidden=1024, width=2304, experts=2, top_k=1)
    model = write_model(tmp_path / "model.gguf", shape)
    assert shape.hidden * shape.width * 4 > PIECE_BYTES
    load(model, folder)
    with Arena.open(model_place(model, folder)) as arena:
        assert_holds_model(arena, [model])


def test_the_padding_of_a_refilled_arena_is_zero(tmp_path: Path, folder: Path) -> None:
    model = write_model(tmp_path / "model.gguf", ModelShape(hidden=100, width=33))
    place = model_place(model, folder)
    place.path.write_bytes(b"\xff" * place.file_bytes)
    place.path.chmod(0o600)
    load(model, folder)
    with Arena.open(place) as arena:
        for blobs in place.layout.layers:
            is_padding = np.ones(blobs.blob.nbytes, np.bool_)
            for part in blobs.blob.parts:
                is_padding[part.offset : part.offset + part.nbytes] = False
            assert is_padding.any()
            assert all(not arena.view(blobs.layer, expert)[is_padding].any() for expert in range(blobs.num_experts))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F32"])
def test_a_scale_that_is_not_finite_names_tensor_and_expert(tmp_path: Path, folder: Path, kind: str) -> None:
    content = model_content(ModelShape(experts=4), types={"ffn_down_exps": kind})
    tensor = content.tensor("blk.1.ffn_down_exps.weight")
    data = bytearray(tensor.data)
    start = 2 * len(data) // 4
    not_a_number = np.array([np.nan], np.float32 if kind == "F32" else np.float16).tobytes()
    data[start : start + len(not_a_number)] = not_a_number
    tensor.data = bytes(data)
    model = content.write(tmp_path / "model.gguf")
    with pytest.raises(CorruptModelError, match=rf"blk\.1\.ffn_down_exps\.weight \({kind}\) has a scale .* in expert 2;"):
        load(model, folder)
    assert not list(folder.iterdir())


def test_a_file_that_shrinks_while_it_is_read_is_refused_and_leaves_no_arena(model: Path, folder: Path) -> None:
    def read_nothing(_descriptor: int, _buffer: memoryview, _offset: int) -> int:
        return 0

    with pytest.raises(CorruptModelError, match=r"the file ends at byte \d+, inside tensor blk\.0\.ffn_gate_exps\.weight"):
        Loader(open_gguf(model), folder, io.StringIO(), read_nothing).fill()
    assert not list(folder.iterdir())


def test_a_disk_error_is_a_sentence_and_leaves_no_arena(model: Path, folder: Path) -> None:
    def fail(_descriptor: int, _buffer: memoryview, _offset: int) -> int:
        raise OSError(5, "Input/output error")

    with pytest.raises(CorruptModelError, match=r"ffn_gate_exps\.weight cannot be read: Input/output error; check the disk"):
        Loader(open_gguf(model), folder, io.StringIO(), fail).fill()
    assert not list(folder.iterdir())


def test_short_reads_are_continued(model: Path, folder: Path) -> None:
    data = model.read_bytes()

    def read_a_little(_descriptor: int, buffer: memoryview, offset: int) -> int:
        count = min(len(buffer), 10_001)
        buffer[:count] = data[offset : offset + count]
        return count

    Loader(open_gguf(model), folder, io.StringIO(), read_a_little).fill()
    with Arena.open(model_place(model, folder)) as arena:
        assert_holds_model(arena, [model])


def test_verify_passes_on_an_arena_just_filled(model: Path, folder: Path) -> None:
    load(model, folder)
    Loader(open_gguf(model), folder, io.StringIO()).verify()


def test_verify_names_the_expert_that_differs(model: Path, folder: Path) -> None:
    load(model, folder)
    place = model_place(model, folder)
    part = place.layout.layers[1].blob.part("up")
    position = place.layout.offset(1, 3) + part.offset + part.nbytes - 1
    with Arena.open(place) as arena:
        byte = arena.view(1, 3)[part.offset + part.nbytes - 1]
    overwrite(place, position, bytes([byte ^ 1]))
    with pytest.raises(EngineError, match="differs from the model in up of layer 1, expert 3"):
        Loader(open_gguf(model), folder, io.StringIO()).verify()


def test_pieces_cover_every_byte_of_every_expert_tensor_once(model: Path) -> None:
    gguf = open_gguf(model)
    tensors = tensors_in_file_order(gguf, model_place(model, Path()).layout)
    read: dict[str, bytes] = {}

    def take(piece: Piece) -> None:
        name = piece.tensor.info.name
        read[name] = read.get(name, b"") + bytes(piece.data)

    for piece in read_pieces(tensors):
        take(piece)
    assert read == {name: gguf.read(name).tobytes() for name in gguf.tensors if "_exps" in name}


def test_progress_is_said_at_most_five_times_a_second_and_at_the_end() -> None:
    out = io.StringIO()
    report = ProgressReport("arena", 10_000, out, None)
    assert [done for done in range(10_001) if report.update(done)] == [0, 10_000]


def test_a_terminal_shows_the_stage_and_the_sizes() -> None:
    terminal = io.StringIO()
    ProgressReport("arena", 3 << 20, io.StringIO(), terminal).update(3 << 20)
    assert terminal.getvalue().startswith("\r\x1b[Karena: 3.00 MiB of 3.00 MiB, ")
    assert terminal.getvalue().endswith("\n")


def test_a_start_that_finds_the_arena_sealed_reads_nothing(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model, folder)
    monkeypatch.setitem(sys.modules, "cuda_ext._native", None)
    out = io.StringIO()

    def read_nothing(_descriptor: int, _buffer: memoryview, _offset: int) -> int:
        raise AssertionError("the model was read again")

    Loader(open_gguf(model), folder, out, read_nothing).fill()
    (only,) = out.getvalue().splitlines()
    progress = LoadProgress.model_validate_json(only.removeprefix("LOAD "))
    assert progress.done_bytes == progress.total_bytes
