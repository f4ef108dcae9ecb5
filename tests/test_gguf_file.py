"""The GGUF index: what it reads, and the sentence with which each damage ends. Oracle: gguf-py."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from appliance.errors import CorruptModelError, ModelError, TandemError, UnsupportedModelError
from appliance.gguf_file import open_gguf
from appliance.gguf_metadata import MetadataReader
from appliance.gguf_types import KNOWN_TYPES, WEIGHT_TYPES
from cuda_ext import _native as native
from tests.gguf_writing import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    STRING,
    TYPES_BY_NAME,
    U8,
    U16,
    U32,
    U64,
    GgufContent,
    Tensor,
    model_content,
    random_rows,
    write_model,
    write_shards,
)

MIXED = {"token_embd.weight": "Q6_K", "ffn_gate_exps": "Q4_K", "ffn_up_exps": "IQ3_S", "ffn_down_exps": "Q8_0", "attn_q": "BF16"}


def small_content(**changes: object) -> GgufContent:
    content = GgufContent(keys={"general.architecture": (STRING, "test")}, tensors=[Tensor("a", (32, 2), 0, bytes(256))])
    for name, value in changes.items():
        setattr(content, name, value)
    return content


def test_type_table_agrees_with_gguf_py() -> None:
    ours = {(kind.type_id, kind.name): (kind.block_values, kind.block_bytes) for kind in KNOWN_TYPES.values()}
    theirs = {(int(kind), kind.name): gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}
    assert theirs.items() <= ours.items()


def test_type_table_of_weights_agrees_with_the_native_module() -> None:
    assert native.quant_types() == {kind.name: (kind.type_id, kind.block_values, kind.block_bytes) for kind in WEIGHT_TYPES.values()}


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_index_agrees_with_gguf_py(tmp_path: Path, shards: int) -> None:
    model = open_gguf(write_model(tmp_path / "m.gguf", types=MIXED, shards=shards))
    found = {}
    for path in model.paths:
        for tensor in gguf.GGUFReader(path).tensors:
            found[tensor.name] = (tuple(tensor.shape), tensor.tensor_type.name, path, tensor.data_offset, tensor.n_bytes)
    assert found == {
        name: (info.shape, info.type_name, model.paths[info.shard], info.offset, info.nbytes) for name, info in model.tensors.items()
    }


def test_weights_read_are_the_bytes_that_gguf_py_reads(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", types=MIXED)
    model = open_gguf(path)
    for tensor in gguf.GGUFReader(path).tensors:
        assert np.array_equal(model.read(tensor.name), np.ascontiguousarray(tensor.data).view(np.uint8).ravel())


def test_weights_read_cannot_be_written_to(tmp_path: Path) -> None:
    assert not open_gguf(write_model(tmp_path / "m.gguf")).read("output_norm.weight").flags.writeable


def resident_kib(path: Path) -> int:
    """Of the maps of this file."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_released_pages_are_not_resident_and_read_the_same_again(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    loaded = open_gguf(path)
    view = loaded.read("output.weight")
    before = view.tobytes()
    assert resident_kib(path) > 0
    loaded.release_pages()
    assert resident_kib(path) == 0
    assert view.tobytes() == before


def test_a_file_that_gguf_py_wrote_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "test")
    writer.add_uint32("a.u32", 7)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_int64("a.i64", -(2**40))
    writer.add_array("a.texts", ["ä", "", "b" * 300])
    writer.add_array("a.numbers", [1, -2, 3])
    values = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("t", gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = open_gguf(path)
    assert model.architecture == "test"
    expected = {"a.u32": 7, "a.f64": 0.1, "a.bool": True, "a.i64": -(2**40), "a.texts": ("ä", "", "b" * 300), "a.numbers": (1, -2, 3)}
    assert {key: model.metadata[key] for key in expected} == expected
    assert model.tensors["t"].shape == (32, 3)
    assert np.allclose(gguf.quants.dequantize(model.read("t").reshape(3, 34), gguf.GGMLQuantizationType.Q8_0), values, atol=0.5)


def test_version_2_files_are_read(tmp_path: Path) -> None:
    assert open_gguf(small_content(version=2).write(tmp_path / "m.gguf")).tensors["a"].shape == (32, 2)


def test_a_vocabulary_of_150_000_tokens_is_read_in_well_under_a_second(tmp_path: Path) -> None:
    content = small_content()
    content.set_key("tokens", ARRAY, (STRING, [f"token{index}" for index in range(150_000)]))
    content.set_key("merges", ARRAY, (STRING, [f"to{index} ken" for index in range(150_000)]))
    content.set_key("types", ARRAY, (I32, [1] * 150_000))
    path = content.write(tmp_path / "m.gguf")
    started = time.process_time()
    model = open_gguf(path)
    assert time.process_time() - started < 1.0
    assert model.metadata["tokens"][149_999] == "token149999"  # type: ignore[index]


@pytest.mark.parametrize("given", ["m-00001-of-00003.gguf", "m-00003-of-00003.gguf", "."])
def test_any_shard_or_the_folder_names_the_whole_model(tmp_path: Path, given: str) -> None:
    content = model_content()
    write_shards(tmp_path / "m.gguf", content, 3)
    model = open_gguf(tmp_path / given)
    assert [path.name for path in model.paths] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert set(model.tensors) == {tensor.name for tensor in content.tensors}
    assert model.architecture == "qwen3moe"


def test_a_relative_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m.gguf", shards=2)
    monkeypatch.chdir(tmp_path)
    assert len(open_gguf(Path("m-00002-of-00002.gguf")).paths) == 2


def test_an_image_encoder_beside_the_model_is_not_the_model(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"other")
    assert open_gguf(tmp_path).paths == (tmp_path / "m.gguf",)


def test_shards_without_tensors_are_allowed(tmp_path: Path) -> None:
    content = small_content()
    write_shards(tmp_path / "m.gguf", content, 3)
    assert list(open_gguf(tmp_path).tensors) == ["a"]


def test_maps_are_released_with_the_last_view(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    view = open_gguf(path).read("output_norm.weight")
    assert str(path) in Path("/proc/self/maps").read_text()
    assert view.view(np.float32)[0] == 1.0
    del view
    assert str(path) not in Path("/proc/self/maps").read_text()


class TestFingerprint:
    def test_is_stable_and_does_not_depend_on_the_place(self, tmp_path: Path) -> None:
        first = write_model(tmp_path / "a.gguf")
        (tmp_path / "other").mkdir()
        second = tmp_path / "other" / "b.gguf"
        second.write_bytes(first.read_bytes())
        assert open_gguf(first).fingerprint == open_gguf(second).fingerprint
        assert len(bytes.fromhex(open_gguf(first).fingerprint)) == 32

    def test_weights_that_were_changed_in_place_are_other_content(self, tmp_path: Path) -> None:
        path = write_model(tmp_path / "a.gguf")
        before = open_gguf(path)
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))
        after = open_gguf(path)
        assert after.fingerprint == before.fingerprint
        assert after.content_id != before.content_id
        assert after.content_id == open_gguf(path).content_id

    def test_differs_for_other_weights_under_the_same_header(self, tmp_path: Path) -> None:
        files = [write_model(tmp_path / f"{seed}.gguf", seed=seed) for seed in (0, 1)]
        assert len({open_gguf(file).fingerprint for file in files}) == 2

    def test_differs_for_other_metadata(self, tmp_path: Path) -> None:
        content = model_content()
        first = open_gguf(content.write(tmp_path / "a.gguf")).fingerprint
        content.set_key("qwen3moe.rope.freq_base", F32, 10_000.0)
        assert open_gguf(content.write(tmp_path / "b.gguf")).fingerprint != first

    @pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 1000])
    def test_changes_with_a_change_in_most_weights_of_any_number_of_tensors(self, tmp_path: Path, count: int) -> None:
        tensors = [Tensor(f"t{index}", (8,), 0, bytes(32)) for index in range(count)]
        first = open_gguf(small_content(tensors=tensors).write(tmp_path / "a.gguf")).fingerprint
        for tensor in tensors:
            tensor.data = b"\1" * 32
        assert open_gguf(small_content(tensors=tensors).write(tmp_path / "b.gguf")).fingerprint != first

    def test_reads_little_of_a_large_file(self, tmp_path: Path) -> None:
        path = small_content(tensors=[Tensor("a", (1 << 30, 8), 0, b"")]).write(tmp_path / "m.gguf")
        os.truncate(path, path.stat().st_size + (1 << 35))
        started = time.process_time()
        assert open_gguf(path).fingerprint
        assert time.process_time() - started < 0.5


BROKEN: dict[str, tuple[Callable[[], GgufContent], str]] = {
    "not a GGUF": (lambda: small_content(magic=b"GGML"), "not a GGUF file"),
    "version 1": (lambda: small_content(version=1), "GGUF version 1 is not supported"),
    "version 4": (lambda: small_content(version=4), "GGUF version 4 is not supported"),
    "big endian": (lambda: small_content(version=0x03000000), "big endian"),
    "too many tensors": (lambda: small_content(num_tensors=1 << 40), "announces 1099511627776 tensors"),
    "too many keys": (lambda: small_content(num_keys=1 << 40), "announces 1099511627776 metadata keys"),
    "more tensors than there are": (lambda: small_content(num_tensors=200), "tensor"),
    "zero dimension": (
        lambda: small_content(tensors=[Tensor("a", (32, 0), 0, b"")]),
        "tensor a has a dimension of zero in its shape [32, 0]",
    ),
    "absurd dimension": (lambda: small_content(tensors=[Tensor("a", (1 << 50, 2), 0, b"")]), "tensor a ends at byte"),
    "overflow": (lambda: small_content(tensors=[Tensor("a", (1 << 40, 1 << 40), 0, b"")]), "more than 64 bits can count"),
    "overflow to zero": (lambda: small_content(tensors=[Tensor("a", (1 << 32, 1 << 32), 0, b"")]), "more than 64 bits can count"),
    "no dimension": (lambda: small_content(tensors=[Tensor("a", (), 0, b"")]), "tensor a has 0 dimensions"),
    "five dimensions": (lambda: small_content(tensors=[Tensor("a", (1, 1, 1, 1, 1), 0, bytes(4))]), "tensor a has 5 dimensions"),
    "unknown type": (
        lambda: small_content(tensors=[Tensor("a", (32,), 4, bytes(128))]),
        "tensor a has the unknown type 4; known types are F32",
    ),
    "half a block": (lambda: small_content(tensors=[Tensor("a", (40,), 8, bytes(64))]), "rows of 40 values, no multiple of the 32"),
    "offset beyond the file": (lambda: small_content(tensors=[Tensor("a", (32,), 0, b"", 1 << 62)]), "tensor a ends at byte"),
    "crooked offset": (lambda: small_content(tensors=[Tensor("a", (4,), 0, bytes(64), 4)]), "tensor a lies at offset 4, no multiple"),
    "overlap": (
        lambda: small_content(tensors=[Tensor("a", (16,), 0, bytes(64)), Tensor("b", (16,), 0, bytes(64), 32)]),
        "tensors a and b overlap",
    ),
    "same tensor twice": (lambda: small_content(tensors=[Tensor("a", (8,), 0, bytes(32))] * 2), "tensor a stands in the index twice"),
    "nameless tensor": (lambda: small_content(tensors=[Tensor("", (8,), 0, bytes(32))]), "the name of a tensor is 0 bytes long"),
    "long name": (lambda: small_content(tensors=[Tensor("n" * 2000, (8,), 0, bytes(32))]), "the name of a tensor is 2000 bytes long"),
    "name with a line end": (lambda: small_content(tensors=[Tensor("a\nb", (8,), 0, bytes(32))]), "not printable"),
    "bad alignment": (lambda: small_content(keys={"general.alignment": (U32, 24)}), "general.alignment is 24"),
    "alignment zero": (lambda: small_content(keys={"general.alignment": (U32, 0)}), "general.alignment is 0"),
    "alignment as text": (lambda: small_content(keys={"general.alignment": (STRING, "32")}), "general.alignment is '32'"),
    "unknown value type": (lambda: small_content(keys={"k": (13, b"")}), "key k has the unknown value type 13"),
    "unknown element type": (
        lambda: small_content(keys={"k": (ARRAY, struct.pack("<IQ", 77, 1))}),
        "key k is an array of the unknown value type 77",
    ),
    "array of arrays": (lambda: small_content(keys={"k": (ARRAY, struct.pack("<IQ", ARRAY, 1))}), "key k is an array of arrays"),
    "endless array": (
        lambda: small_content(keys={"k": (ARRAY, struct.pack("<IQ", U8, 1 << 60))}),
        "key k is an array of 1152921504606846976",
    ),
    "array longer than the file": (
        lambda: small_content(keys={"k": (ARRAY, struct.pack("<IQ", F64, 1 << 20))}),
        "the file ends inside key k",
    ),
    "texts longer than the file": (
        lambda: small_content(keys={"k": (ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 60))}),
        "the file ends inside key k",
    ),
    "many texts in a short file": (
        lambda: small_content(keys={"k": (ARRAY, struct.pack("<IQ", STRING, 1 << 20))}),
        "the file ends inside key k",
    ),
    "text longer than the file": (lambda: small_content(keys={"k": (STRING, struct.pack("<Q", 1 << 63))}), "the file ends inside key k"),
    "text that is not UTF-8": (lambda: small_content(keys={"k": (STRING, struct.pack("<Q", 2) + b"\xff\xfe")}), "key k is not valid UTF-8"),
    "element that is not UTF-8": (
        lambda: small_content(keys={"k": (ARRAY, struct.pack("<IQQ", STRING, 1, 1) + b"\xff")}),
        "key k: element 0 is not valid UTF-8",
    ),
    "truth value 2": (lambda: small_content(keys={"k": (BOOL, b"\x02")}), "key k is a truth value that is neither 0 nor 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damage_ends_in_one_sentence_that_names_file_and_place(tmp_path: Path, name: str) -> None:
    make, expected = BROKEN[name]
    path = make().write(tmp_path / "broken.gguf")
    with pytest.raises((CorruptModelError, UnsupportedModelError)) as caught:
        open_gguf(path)
    assert expected in caught.value.message
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    raw = bytearray(small_content(keys={"k.a": (U32, 1), "k.b": (U32, 2)}).encode())
    raw[raw.index(b"k.b") + 2] = ord("a")
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(CorruptModelError, match=r"metadata key k\.a stands in the file twice"):
        open_gguf(tmp_path / "m.gguf")


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = model_content().encode()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 2400, 7), len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptModelError, match=r"cut\.gguf: "):
            open_gguf(cut)


class TestWrongPaths:
    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="there is no such file"):
            open_gguf(tmp_path / "nothing.gguf")

    def test_folder_without_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="there is no GGUF file in the folder"):
            open_gguf(tmp_path)

    def test_folder_with_two_models_lists_them(self, tmp_path: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            small_content().write(tmp_path / name)
        with pytest.raises(ModelError, match=r"holds 2 models \(a\.gguf, b\.gguf\)"):
            open_gguf(tmp_path)

    def test_a_pipe_is_refused_and_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(ModelError, match="neither a file nor a folder"):
            open_gguf(tmp_path / "pipe.gguf")

    def test_a_name_that_is_too_long(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="cannot be looked at"):
            open_gguf(tmp_path / ("x" * 300))


class TestBrokenSplits:
    @pytest.fixture
    def shards(self, tmp_path: Path) -> list[Path]:
        return write_shards(tmp_path / "m.gguf", model_content(), 3)

    def test_a_missing_shard_is_named(self, shards: list[Path]) -> None:
        shards[1].unlink()
        with pytest.raises(CorruptModelError, match=r"m-00002-of-00003\.gguf of 3 is missing"):
            open_gguf(shards[0])

    def test_shards_in_each_others_place(self, shards: list[Path], tmp_path: Path) -> None:
        shards[1].rename(tmp_path / "x")
        shards[2].rename(shards[1])
        (tmp_path / "x").rename(shards[2])
        with pytest.raises(CorruptModelError, match=r"00002-of-00003\.gguf: key split\.no is 2, but by its name it must be 1"):
            open_gguf(shards[0])

    def test_a_shard_of_another_split(self, shards: list[Path]) -> None:
        content = GgufContent(keys={"split.no": (U16, 1), "split.count": (U16, 4)})
        content.write(shards[1])
        with pytest.raises(CorruptModelError, match=r"key split\.count is 4, but by its name it must be 3"):
            open_gguf(shards[2])

    def test_a_shard_with_fewer_tensors_than_the_split_has(self, shards: list[Path]) -> None:
        GgufContent(keys={"split.no": (U16, 1), "split.count": (U16, 3)}).write(shards[1])
        with pytest.raises(CorruptModelError, match=r"key split\.tensors\.count is \d+, but the 3 shards hold \d+ tensors"):
            open_gguf(shards[0])

    def test_one_tensor_in_two_shards(self, shards: list[Path]) -> None:
        content = GgufContent(
            keys={"split.no": (U16, 2), "split.count": (U16, 3)}, tensors=[Tensor("token_embd.weight", (8,), 0, bytes(32))]
        )
        content.write(shards[2])
        with pytest.raises(CorruptModelError, match=r"tensor token_embd\.weight is in shard m-00001-of-00003\.gguf too"):
            open_gguf(shards[0])

    def test_a_renamed_shard(self, shards: list[Path], tmp_path: Path) -> None:
        shards[0].rename(tmp_path / "model.gguf")
        with pytest.raises(CorruptModelError, match=r"the file is one of 3 shards, so its name must end in -00001-of-00003\.gguf"):
            open_gguf(tmp_path / "model.gguf")

    def test_a_whole_file_under_a_shards_name(self, tmp_path: Path) -> None:
        path = small_content().write(tmp_path / "m-00001-of-00002.gguf")
        with pytest.raises(CorruptModelError, match=r"key split\.count is missing"):
            open_gguf(path)

    @pytest.mark.parametrize(("value_type", "value"), [(STRING, "3"), (F32, 3.0), (BOOL, True), (ARRAY, (U64, [3]))])
    def test_a_count_of_the_wrong_type(self, tmp_path: Path, value_type: int, value: object) -> None:
        path = small_content(keys={"split.count": (value_type, value)}).write(tmp_path / "m-00001-of-00003.gguf")
        with pytest.raises(CorruptModelError, match=r"key split\.count is .*; it must be one whole number"):
            open_gguf(path)

    @pytest.mark.parametrize("count", [0, 60_000])
    def test_an_absurd_count(self, tmp_path: Path, count: int) -> None:
        path = small_content(keys={"split.count": (U16, count)}).write(tmp_path / "m.gguf")
        with pytest.raises(CorruptModelError, match=rf"key split\.count is {count}"):
            open_gguf(path)


class TestMetadataReader:
    @pytest.fixture
    def reader(self, tmp_path: Path) -> MetadataReader:
        content = small_content(
            keys={
                "n": (U32, 5),
                "big": (U64, 1 << 63),
                "x": (F32, 0.5),
                "nan": (F32, float("nan")),
                "text": (STRING, "t" * 1000),
                "yes": (BOOL, True),
                "texts": (ARRAY, (STRING, ["a", "b"])),
                "numbers": (ARRAY, (I32, [1, 2])),
                "flags": (ARRAY, (BOOL, [True])),
            }
        )
        return MetadataReader(open_gguf(content.write(tmp_path / "m.gguf")))

    def test_values_of_the_right_type(self, reader: MetadataReader) -> None:
        assert reader.integer("n", 0, 5) == 5
        assert reader.number("x", above=0, at_most=1) == 0.5
        assert reader.number("n", above=0, at_most=10) == 5.0
        assert reader.flag("yes")
        assert reader.strings("texts") == ("a", "b")
        assert reader.integers("numbers") == (1, 2)
        assert reader.integer("none", 0, 9, default=3) == 3

    @pytest.mark.parametrize(
        ("read", "expected"),
        [
            (lambda r: r.integer("none", 0, 1), "key none is missing"),
            (lambda r: r.integer("n", 0, 4), "key n is 5; it must be a whole number from 0 to 4"),
            (lambda r: r.integer("big", 0, 4), "key big is 9223372036854775808; it must"),
            (lambda r: r.integer("yes", 0, 4), "key yes is True; it must be a whole number"),
            (lambda r: r.integer("x", 0, 4), "key x is 0.5; it must be a whole number"),
            (lambda r: r.integer("numbers", 0, 4), "key numbers is an array of 2 elements; it must be a whole number"),
            (lambda r: r.number("nan", above=0, at_most=1), "key nan is nan; it must be a number above 0 and at most 1"),
            (lambda r: r.text("n"), "key n is 5; it must be text"),
            (lambda r: r.flag("n"), "key n is 5; it must be true or false"),
            (lambda r: r.strings("numbers"), "key numbers is an array of 2 elements; it must be an array of texts"),
            (lambda r: r.integers("texts"), "it must be an array of whole numbers"),
            (lambda r: r.integers("flags"), "it must be an array of whole numbers"),
            (lambda r: r.integer("text", 0, 1), "key text is 'ttt"),
        ],
    )
    def test_wrong_values_end_in_a_sentence(self, reader: MetadataReader, read: Callable[[MetadataReader], object], expected: str) -> None:
        with pytest.raises(CorruptModelError) as caught:
            read(reader)
        assert expected in caught.value.message
        assert len(caught.value.message) < 400


def test_architecture_must_be_a_text(tmp_path: Path) -> None:
    with pytest.raises(TandemError, match=r"general\.architecture is missing"):
        _ = open_gguf(small_content(keys={}).write(tmp_path / "a.gguf")).architecture
    with pytest.raises(TandemError, match=r"general\.architecture is 3"):
        _ = open_gguf(small_content(keys={"general.architecture": (U32, 3)}).write(tmp_path / "b.gguf")).architecture


@pytest.mark.parametrize("name", [kind.name for kind in WEIGHT_TYPES.values() if kind.name not in ("Q1_0", "Q2_0")])
def test_random_rows_of_the_test_writer_are_finite_and_of_the_wanted_size(name: str) -> None:
    kind = TYPES_BY_NAME[name]
    raw = np.frombuffer(random_rows(kind, 256 * 64, np.random.default_rng(0), 0.02), np.uint8)
    values = gguf.quants.dequantize(raw.reshape(64, -1), gguf.GGMLQuantizationType[name]).astype(np.float64)
    assert 0.01 < np.sqrt(np.mean(values**2)) < 0.05
