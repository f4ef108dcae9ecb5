"""Logits and greedy tokens of random models against transformers and llama.cpp.

llama.cpp keeps max |difference| 6e-6 to 2e-5 against transformers on float32 files of this kind with float32 caches. On quantised
files both it and we round activations to 8 bits, so logits differ from dequantised weights by up to a few hundredths; there the
divergence of the distributions is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from appliance.memory.workspace import KvType
from tests.arena_rig import shm_folder
from tests.gguf_writing import ModelShape
from tests.random_models import (
    RandomModel,
    greedy,
    kl_divergence,
    llama_answer,
    log_softmax,
    open_runner,
    prefill,
    transformers_logits,
    transformers_model,
    write_random_model,
)

MAX_F32_DIFFERENCE = 2e-5
MAX_KL = 7e-3
MAX_MEAN_DIFFERENCE = 3e-2
NUM_GREEDY = 64
KV_TYPES: tuple[KvType, ...] = ("f32", "f16", "int8")
TOP = 20

USUAL = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=16, top_k=4, width=256, vocab=320, context=256)
ODD = ModelShape(layers=2, hidden=288, heads=6, kv_heads=3, head_dim=40, experts=9, top_k=3, width=160, vocab=259, context=256)
UNEVEN = ModelShape(layers=2, hidden=100, heads=5, kv_heads=1, head_dim=18, experts=5, top_k=5, width=36, vocab=257, context=256)
WIDE = ModelShape(layers=2, hidden=2560, heads=4, kv_heads=4, head_dim=64, experts=6, top_k=2, width=640, vocab=300, context=128)


@pytest.fixture(scope="module")
def shm_dir() -> Iterator[Path]:
    with shm_folder() as folder:
        yield folder


def prompt_of(shape: ModelShape, num_tokens: int = 61) -> list[int]:
    return [int(token) for token in np.random.default_rng(11).integers(0, shape.vocab - 1, num_tokens)]


@pytest.mark.parametrize("shape", [USUAL, ODD, UNEVEN], ids=["usual", "odd", "uneven"])
def test_float32_models_agree_with_transformers(shape: ModelShape, tmp_path: Path, shm_dir: Path) -> None:
    model = write_random_model(tmp_path / "m.gguf", shape)
    prompt = prompt_of(shape)
    built = transformers_model(model)
    with open_runner(model, shm_dir, chunk=24, slots=7, num_threads=2) as runner:
        ours = prefill(runner, prompt, num_logits=24)
        continuation = greedy(runner, prompt, NUM_GREEDY)
    difference = np.abs(ours - transformers_logits(built, prompt))
    assert difference.max() <= MAX_F32_DIFFERENCE
    whole = transformers_logits(built, prompt + continuation)
    assert whole[len(prompt) - 1 : -1].argmax(-1).tolist() == continuation


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_float32_models_agree_with_llama_cpp(kv_type: KvType, tmp_path: Path, shm_dir: Path) -> None:
    model = write_random_model(tmp_path / "m.gguf", USUAL)
    prompt = prompt_of(USUAL)
    answer = llama_answer(model, prompt, NUM_GREEDY, TOP)
    with open_runner(model, shm_dir, kv_type=kv_type) as runner:
        assert greedy(runner, prompt, NUM_GREEDY, banned=USUAL.vocab - 1) == answer.ids
        ours = log_softmax(prefill(runner, prompt, num_logits=1)[-1:])[0]
    worst = max(abs(ours[token] - logprob) for token, logprob in answer.logprobs[0].items())
    assert worst <= (2e-5 if kv_type == "f32" else 5e-3)


def test_int8_keys_and_values_move_logits_by_less_than_a_hundredth(tmp_path: Path, shm_dir: Path) -> None:
    """In the median of a prompt's rows: where rounding turns a router, more moves."""
    model = write_random_model(tmp_path / "m.gguf", USUAL)
    logits = {}
    for kv_type in KV_TYPES:
        with open_runner(model, shm_dir, kv_type=kv_type, chunk=64) as runner:
            logits[kv_type] = prefill(runner, prompt_of(USUAL, 200), num_logits=64)
    spread = logits["f32"].std()
    rows = {kv_type: np.sqrt(((logits[kv_type] - logits["f32"]) ** 2).mean(1)) / spread for kv_type in KV_TYPES}
    assert 0 < np.median(rows["f16"]) < np.median(rows["int8"]) < 0.01


MIXES = {
    "k-quants": {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K", "attn_q": "Q5_K", "output.weight": "Q6_K"},
    "one type per layer and matrix": {
        "blk.0.ffn_gate_exps.weight": "IQ4_NL",
        "blk.0.ffn_up_exps.weight": "Q8_0",
        "blk.1.ffn_down_exps.weight": "Q5_1",
        "blk.2.ffn_gate_exps.weight": "BF16",
        "blk.3.ffn_down_exps.weight": "F16",
        "attn_k": "Q8_0",
        "attn_v": "Q4_0",
        "token_embd.weight": "Q8_0",
    },
    "small": {
        "ffn_gate_exps": "IQ3_S",
        "ffn_up_exps": "Q2_K",
        "ffn_down_exps": "IQ4_XS",
        "attn_output": "MXFP4",
        "token_embd.weight": "Q3_K",
    },
}


@pytest.mark.parametrize("mix", MIXES)
def test_quantised_models_stay_close_to_dequantised_transformers(mix: str, tmp_path: Path, shm_dir: Path) -> None:
    model = write_random_model(tmp_path / "m.gguf", USUAL, types=MIXES[mix])
    assert_close(model, shm_dir)


@pytest.mark.parametrize(("fused", "tied", "shards"), [(True, False, 1), (False, True, 3), (True, True, 2)])
def test_fused_tied_and_split_files_are_read_right(fused: bool, tied: bool, shards: int, tmp_path: Path, shm_dir: Path) -> None:
    model = write_random_model(tmp_path / "m.gguf", ODD, fused=fused, tied=tied, shards=shards)
    prompt = prompt_of(ODD)
    with open_runner(model, shm_dir, chunk=61) as runner:
        ours = prefill(runner, prompt, num_logits=61)
    assert np.abs(ours - transformers_logits(transformers_model(model), prompt)).max() <= MAX_F32_DIFFERENCE


def test_widths_that_are_no_multiple_of_256_run_in_types_of_32(tmp_path: Path, shm_dir: Path) -> None:
    types = {"ffn_gate_exps": "IQ3_S", "ffn_up_exps": "Q4_K", "ffn_down_exps": "IQ4_NL", "attn_q": "Q8_0"}
    assert_close(write_random_model(tmp_path / "m.gguf", WIDE, types=types), shm_dir)


def assert_close(model: RandomModel, shm_dir: Path) -> None:
    prompt = prompt_of(model.shape)
    with open_runner(model, shm_dir, chunk=61, slots=5, num_threads=2) as runner:
        ours = prefill(runner, prompt, num_logits=61)
    theirs = transformers_logits(transformers_model(model), prompt)
    # A row whose router sits on the fence may choose another expert and jump; a few may, the mass may not.
    assert np.quantile(kl_divergence(ours, theirs), 0.9) <= MAX_KL
    assert np.abs(ours - theirs).mean() <= MAX_MEAN_DIFFERENCE


def test_quantised_models_are_as_close_to_transformers_as_llama_cpp_is(tmp_path: Path, shm_dir: Path) -> None:
    model = write_random_model(tmp_path / "m.gguf", USUAL, types=MIXES["k-quants"])
    prompt = prompt_of(USUAL)
    answer = llama_answer(model, prompt, 1, model.shape.vocab)
    theirs = np.full(model.shape.vocab, -np.inf)
    for token, logprob in answer.logprobs[0].items():
        theirs[token] = logprob
    with open_runner(model, shm_dir) as runner:
        ours = log_softmax(prefill(runner, prompt, num_logits=1)[-1:])[0]
    exact = log_softmax(transformers_logits(transformers_model(model), prompt)[-1:])[0]
    known = np.isfinite(theirs)
    assert known.sum() >= TOP
    assert np.abs(ours - exact)[known].mean() <= 2.0 * np.abs(theirs - exact)[known].mean() + 1e-3


def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path, shm_dir: Path) -> None:
    from appliance.errors import CorruptModelError
    from tests.gguf_writing import model_content

    content = model_content(ODD)
    tensor = content.tensor("blk.1.attn_k.weight")
    tensor.data = tensor.data[:40] + np.float32(np.nan).tobytes() + tensor.data[44:]
    model = RandomModel(content.write(tmp_path / "bad.gguf"), ODD)
    with (
        pytest.raises(CorruptModelError, match=r"bad\.gguf: tensor blk\.1\.attn_k\.weight has a value that is not finite"),
        open_runner(model, shm_dir),
    ):
        pass
