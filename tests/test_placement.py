"""Placement does not change the answer: the same logit bits whatever tiers, swaps, threads, windows and instruction sets do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.engine.model_runner import ModelRunner
from appliance.errors import MemoryBudgetError
from appliance.gguf_file import open_gguf
from appliance.memory.layout import arena_layout
from appliance.memory.policy import AlwaysSwap, blob_bytes_table
from appliance.memory.workspace import KvType
from appliance.models.config import read_config
from tests.arena_rig import shm_folder
from tests.gguf_writing import ModelShape
from tests.op_rig import every_isa, same_bits
from tests.random_models import RandomModel, fill, greedy, open_runner, prefill, write_random_model

SHAPE = ModelShape(layers=3, hidden=256, heads=4, kv_heads=2, head_dim=32, experts=10, top_k=3, width=256, vocab=128, context=160)
NUM_EXPERTS = SHAPE.layers * SHAPE.experts
TYPES = {
    "ffn_gate_exps": "Q4_K",
    "ffn_up_exps": "Q8_0",
    "ffn_down_exps": "Q6_K",
    "attn_q": "Q8_0",
    "attn_output": "Q5_1",
    "token_embd.weight": "Q8_0",
    "output.weight": "Q6_K",
    "blk.1.ffn_down_exps.weight": "F16",  # a layer with blobs of another size: a slot class of its own
}
PROMPT = np.random.default_rng(5).integers(0, SHAPE.vocab, 75).tolist()
CONTINUATION = np.random.default_rng(6).integers(0, SHAPE.vocab, 12).tolist()

Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def shm_dir() -> Iterator[Path]:
    with shm_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return write_random_model(tmp_path_factory.mktemp("models") / "placement.gguf", SHAPE, types=TYPES)


def all_logits(runner: ModelRunner, ids: Sequence[int] = (*PROMPT, *CONTINUATION)) -> Logits:
    """A prompt in chunks, then tokens one by one; the logits of every row."""
    prompt = prefill(runner, ids[: len(PROMPT)], num_logits=runner.max_rows)
    steps = [prefill(runner, [token], num_logits=1, position=len(PROMPT) + step) for step, token in enumerate(ids[len(PROMPT) :])]
    return np.concatenate([prompt, *steps])


@pytest.fixture(scope="module")
def plain(model: RandomModel, shm_dir: Path) -> Logits:
    """Nothing in slots, one thread, the portable kernels."""
    with open_runner(model, shm_dir, isa="portable") as runner:
        return all_logits(runner)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_resident_experts_do_not_change_a_bit(share: float, model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with open_runner(model, shm_dir, slots=round(share * NUM_EXPERTS)) as runner:
        assert same_bits(all_logits(runner), plain)
        rows = runner.stats()["rows_by_tier"]
    assert rows["own"] + rows["host"] == (len(PROMPT) + len(CONTINUATION)) * SHAPE.top_k * SHAPE.layers
    assert rows["own"] > 0
    assert (rows["host"] == 0) == (share == 1.0)


def test_swaps_in_every_window_do_not_change_a_bit(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    gguf = open_gguf(model.path)
    policy = AlwaysSwap(blob_bytes_table(arena_layout(gguf, read_config(gguf))))
    with open_runner(model, shm_dir, slots=9, max_swaps=5, policy=policy) as runner:
        assert same_bits(all_logits(runner), plain)
        assert runner.stats()["swaps"] >= len(CONTINUATION)


def test_closing_waits_for_the_swaps_under_way(model: RandomModel, shm_dir: Path) -> None:
    """A copy that outlives the arena's map would end the process, so this test's failure is a crash."""
    gguf = open_gguf(model.path)
    classes = blob_bytes_table(arena_layout(gguf, read_config(gguf)))
    for token in range(20):
        with open_runner(model, shm_dir, slots=NUM_EXPERTS // 2, max_swaps=NUM_EXPERTS // 2, policy=AlwaysSwap(classes)) as runner:
            prefill(runner, [token], num_logits=1)
            runner.between_windows()


def test_lead_and_helper_hold_different_experts_and_give_the_same_bits(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    half = NUM_EXPERTS // 2
    with open_runner(model, shm_dir, slots=half, share=(0, 2)) as lead, open_runner(model, shm_dir, slots=half, share=(1, 2)) as helper:
        assert not (lead.cache.resident & helper.cache.resident).any()
        assert same_bits(all_logits(lead), plain)
        assert same_bits(all_logits(helper), plain)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(num_threads: int, model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with open_runner(model, shm_dir, slots=8, num_threads=num_threads) as runner:
        assert same_bits(all_logits(runner), plain)


def test_held_threads_do_not_change_a_bit(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with open_runner(model, shm_dir, slots=8, num_threads=3) as runner:
        assert runner.hold_threads(2) == 2
        assert same_bits(all_logits(runner), plain)
        assert runner.hold_threads(99) == 2
        assert runner.hold_threads(0) == 0
        assert same_bits(all_logits(runner), plain)


@pytest.mark.parametrize("isa", every_isa())
def test_instruction_sets_do_not_change_a_bit(isa: str, model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with open_runner(model, shm_dir, slots=8, isa=isa) as runner:
        assert same_bits(all_logits(runner), plain)


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 64, 75])
def test_the_size_of_a_chunk_does_not_change_a_bit(chunk: int, model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with open_runner(model, shm_dir, slots=8, chunk=chunk) as runner:
        assert same_bits(all_logits(runner), plain)


def test_a_reused_prefix_does_not_change_a_bit(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    """Another continuation is computed first and then overwritten from the middle of the prompt on."""
    with open_runner(model, shm_dir, slots=8) as runner:
        prefill(runner, [*PROMPT[:40], *CONTINUATION, *PROMPT], num_logits=0)
        rest = prefill(runner, PROMPT[40:], num_logits=runner.max_rows, position=40)
    assert same_bits(rest, plain[40 : len(PROMPT)])


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_a_rounded_cache_does_not_depend_on_chunks_either(model: RandomModel, shm_dir: Path, kv_type: KvType) -> None:
    with open_runner(model, shm_dir, kv_type=kv_type, chunk=64) as runner:
        large = all_logits(runner)
    with open_runner(model, shm_dir, kv_type=kv_type, chunk=3, slots=NUM_EXPERTS, isa="portable") as runner:
        assert same_bits(all_logits(runner), large)


def test_greedy_tokens_are_the_same_with_and_without_a_cache(model: RandomModel, shm_dir: Path) -> None:
    with open_runner(model, shm_dir) as runner:
        expected = greedy(runner, PROMPT, 32)
    with open_runner(model, shm_dir, slots=NUM_EXPERTS // 2, max_swaps=4, num_threads=2) as runner:
        assert greedy(runner, PROMPT, 32) == expected


def test_an_interrupted_chunk_leaves_the_state_before_it(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    from appliance.engine.generation import WindowInterruptedError

    with open_runner(model, shm_dir, chunk=25) as runner:
        prefill(runner, PROMPT[:50], num_logits=0)
        runner.interrupt()
        with pytest.raises(WindowInterruptedError):
            runner.run(PROMPT[50:], 50, 0)
        assert same_bits(prefill(runner, PROMPT[50:], num_logits=25, position=50), plain[50:75])


@pytest.mark.parametrize("kv_type", ["f16", "f32", "int8"])
def test_the_card_holds_what_the_plan_says(model: RandomModel, shm_dir: Path, kv_type: KvType) -> None:
    from appliance.memory.plan import PlanRequest, make_plan
    from appliance.memory.workspace import WINDOW_ROWS
    from tests.random_models import ANY_MACHINE

    gguf = open_gguf(model.path)
    config = read_config(gguf)
    request = PlanRequest(("host:0",), SHAPE.context, 16, kv_type, 7, None)
    plan = make_plan(config, gguf.tensors, arena_layout(gguf, config), request, ANY_MACHINE).cards[0]
    with open_runner(model, shm_dir, chunk=16, max_logits=WINDOW_ROWS, kv_type=kv_type, slots=7) as runner:
        assert dict(runner.plan_bytes) == {name: nbytes for name, nbytes in plan.consumers().items() if nbytes}
        assert runner.stats()["slots"] == runner.stats()["resident_experts"] == 7


def test_giving_memory_back_and_taking_it_again_does_not_change_a_bit(model: RandomModel, shm_dir: Path, plain: Logits) -> None:
    with open_runner(model, shm_dir, slots=NUM_EXPERTS, max_swaps=4) as runner:
        whole = runner.take_memory()
        smaller = runner.free_memory(2)
        assert smaller.free_mib >= 2
        assert smaller.used_mib < whole.used_mib
        assert runner.stats()["resident_experts"] < NUM_EXPERTS
        assert same_bits(all_logits(runner), plain)
        assert runner.take_memory() == whole
        fill(runner)
        assert runner.stats()["resident_experts"] == NUM_EXPERTS
        assert same_bits(all_logits(runner), plain)
        with pytest.raises(MemoryBudgetError, match="999 MiB cannot be freed on card host:0"):
            runner.free_memory(999)
