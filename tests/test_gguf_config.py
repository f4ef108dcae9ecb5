"""The configuration that a qwen3moe file gives, and the sentences of files that contradict themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import CorruptModelError, ModelError, UnsupportedModelError
from appliance.gguf_file import open_gguf
from appliance.models.config import ModelConfig, RopeScaling, read_config
from tests.gguf_writing import ARRAY, BOOL, F32, STRING, U32, GgufContent, ModelShape, Tensor, model_content, write_model

SHAPE = ModelShape()


def config_of(content: GgufContent, folder: Path) -> ModelConfig:
    return read_config(open_gguf(content.write(folder / "m.gguf")))


def test_every_size_is_read(tmp_path: Path) -> None:
    config = read_config(open_gguf(write_model(tmp_path / "m.gguf")))
    assert config == ModelConfig(
        arch="qwen3moe",
        name="a small test model",
        layers=2,
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        experts=4,
        top_k=2,
        expert_width=256,
        vocab=32,
        context=64,
        rms_eps=pytest.approx(1e-6),
        rope_base=1e6,
        rope_scaling=None,
        tied_embeddings=False,
    )
    assert (config.q_width, config.kv_width) == (256, 128)


def test_without_an_output_matrix_the_embeddings_are_tied(tmp_path: Path) -> None:
    content = model_content()
    content.tensors.remove(content.tensor("output.weight"))
    assert config_of(content, tmp_path).tied_embeddings


def test_gate_and_up_in_one_tensor_are_accepted(tmp_path: Path) -> None:
    assert config_of(model_content(fused=True), tmp_path).expert_width == SHAPE.width


def test_a_missing_name_is_the_files(tmp_path: Path) -> None:
    content = model_content()
    del content.keys["general.name"]
    assert config_of(content, tmp_path).name == "m"


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    content = model_content()
    content.set_key("general.name", STRING, "bad\x1b[2J\nname" + "x" * 1000)
    name = config_of(content, tmp_path).name
    assert name.startswith("bad [2J name")
    assert len(name) <= 200


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": (STRING, "none")}, None),
        ({"type": (STRING, "linear"), "factor": (F32, 4.0)}, RopeScaling("linear", 4.0, 64)),
        (
            {"type": (STRING, "yarn"), "factor": (F32, 2.0), "original_context_length": (U32, 32), "yarn_beta_fast": (F32, 16.0)},
            RopeScaling("yarn", 2.0, 32, beta_fast=16.0),
        ),
    ],
)
def test_rope_scaling_is_read(tmp_path: Path, keys: dict[str, tuple[int, object]], expected: RopeScaling | None) -> None:
    content = model_content()
    for key, (value_type, value) in keys.items():
        content.set_key(f"qwen3moe.rope.scaling.{key}", value_type, value)
    assert config_of(content, tmp_path).rope_scaling == expected


def test_a_tokenizer_of_the_right_size_is_accepted(tmp_path: Path) -> None:
    content = model_content()
    content.set_key("tokenizer.ggml.tokens", ARRAY, (STRING, ["t"] * SHAPE.vocab))
    assert config_of(content, tmp_path).vocab == SHAPE.vocab


NEEDED = [
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
]


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    content = model_content()
    del content.keys[f"qwen3moe.{key}"]
    with pytest.raises(CorruptModelError, match=f"key qwen3moe.{key} is missing"):
        config_of(content, tmp_path)


@pytest.mark.parametrize("key", [key for key in NEEDED if key != "attention.layer_norm_rms_epsilon"])
@pytest.mark.parametrize(("value_type", "value"), [(U32, 0), (STRING, "8"), (ARRAY, (U32, [8, 8])), (BOOL, True)])
def test_a_size_of_zero_or_of_another_type_is_refused(tmp_path: Path, key: str, value_type: int, value: object) -> None:
    content = model_content()
    content.set_key(f"qwen3moe.{key}", value_type, value)
    with pytest.raises(CorruptModelError, match=f"key qwen3moe.{key} is .*; it must be a whole number from 1 to"):
        config_of(content, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attention.head_count", (U32, 3), "3 query heads cannot share 2 key/value heads evenly"),
        ("attention.key_length", (U32, 63), "key_length is 63; rotary positions need an even head length"),
        ("attention.key_length", (U32, 32), "attention.value_length is 64, but qwen3moe.attention.key_length is 32"),
        ("rope.dimension_count", (U32, 32), "rope.dimension_count is 32, but qwen3moe.attention.key_length is 64"),
        ("expert_used_count", (U32, 5), "expert_used_count is 5, more than the 4 of qwen3moe.expert_count"),
        ("expert_gating_func", (U32, 2), "expert_gating_func is not 1"),
        ("vocab_size", (U32, 33), "vocab_size is 33, but token_embd.weight has 32 rows"),
        ("attention.layer_norm_rms_epsilon", (F32, 0.0), "a number above 0 and at most 1"),
        ("attention.layer_norm_rms_epsilon", (F32, float("nan")), "is nan; it must be a number"),
        ("rope.freq_base", (F32, float("inf")), "is inf; it must be a number"),
        ("rope.scaling.type", (STRING, "longrope"), "'longrope'; none, linear and yarn are supported"),
        ("rope.scaling.type", (STRING, "yarn"), "key qwen3moe.rope.scaling.factor is missing"),
        ("embedding_length", (U32, 128), "has the shape [256, 32], but by the metadata it must be [128, 32]"),
        ("expert_count", (U32, 8), "tensor blk.0.ffn_gate_inp.weight has the shape [256, 4], but by the metadata it must be [256, 8]"),
        ("block_count", (U32, 3), "tensor blk.2.attn_norm.weight is missing"),
        ("block_count", (U32, 1), "tensor blk.1.attn_norm.weight is unknown to architecture qwen3moe with 1 layers"),
    ],
)
def test_contradictions_name_both_sides(tmp_path: Path, key: str, value: tuple[int, object], expected: str) -> None:
    content = model_content()
    content.set_key(f"qwen3moe.{key}", *value)
    with pytest.raises(ModelError) as caught:
        config_of(content, tmp_path)
    assert expected in caught.value.message
    assert "m.gguf: " in caught.value.message


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    content = model_content()
    content.set_key("tokenizer.ggml.tokens", ARRAY, (STRING, ["t"] * 31))
    with pytest.raises(CorruptModelError, match=r"tokenizer\.ggml\.tokens has 31 tokens, but token_embd\.weight has 32 rows"):
        config_of(content, tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen3next", "x" * 5000])
def test_unknown_architectures_list_the_known_ones(tmp_path: Path, name: str) -> None:
    content = model_content()
    content.set_key("general.architecture", STRING, name)
    with pytest.raises(UnsupportedModelError, match=f"architecture '{name[:20]}.* is not supported; supported are qwen3moe"):
        config_of(content, tmp_path)


@pytest.mark.parametrize("name", list(SHAPE.layer_tensors()))
def test_a_missing_tensor_of_a_layer_is_named(tmp_path: Path, name: str) -> None:
    content = model_content()
    content.tensors.remove(content.tensor(f"blk.1.{name}.weight"))
    with pytest.raises(CorruptModelError, match=rf"tensor blk\.1\.{name}\.weight is missing"):
        config_of(content, tmp_path)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.ffn_gate_shexp.weight", "rope_freqs.weight", "blk.0.ffn_gate_up_exps.scale"])
def test_an_unknown_tensor_is_refused(tmp_path: Path, name: str) -> None:
    content = model_content()
    content.tensors.append(Tensor(name, (8,), 0, bytes(32)))
    with pytest.raises(UnsupportedModelError, match=f"tensor {name} is unknown to architecture qwen3moe"):
        config_of(content, tmp_path)


def test_gate_both_alone_and_with_up_is_refused(tmp_path: Path) -> None:
    content = model_content(fused=True)
    content.tensors.append(Tensor("blk.0.ffn_gate_exps.weight", (256, 256, 4), 0, bytes(4 * 256 * 256 * 4)))
    with pytest.raises(UnsupportedModelError, match=r"tensor blk\.0\.ffn_gate_exps\.weight is unknown"):
        config_of(content, tmp_path)


@pytest.mark.parametrize(("name", "type_name"), [("ffn_gate_inp", "Q8_0"), ("attn_norm", "Q4_0")])
def test_norms_and_routers_must_be_floats(tmp_path: Path, name: str, type_name: str) -> None:
    content = model_content()
    tensor = content.tensor(f"blk.0.{name}.weight")
    tensor.type_id = {"Q8_0": 8, "Q4_0": 2}[type_name]
    with pytest.raises(
        UnsupportedModelError, match=rf"tensor blk\.0\.{name}\.weight has the type {type_name}, .*supported are F32, F16, BF16"
    ):
        config_of(content, tmp_path)


def test_weights_of_a_type_that_is_no_weight_type_are_refused(tmp_path: Path) -> None:
    content = model_content()
    content.tensor("token_embd.weight").type_id = 26
    with pytest.raises(UnsupportedModelError, match=r"tensor token_embd\.weight has the type I32"):
        config_of(content, tmp_path)


@pytest.mark.parametrize("name", ["ffn_gate_inp", "attn_norm"])
def test_norms_and_routers_may_be_half_floats(tmp_path: Path, name: str) -> None:
    assert config_of(model_content(types={name: "BF16"}), tmp_path).layers == 2
