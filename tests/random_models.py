"""Random `qwen3moe` models that mean something (activations of order 1, decisive routing), and what others compute for them.

    model = write_random_model(tmp_path / "m.gguf", ModelShape(...), types={"ffn_down_exps": "Q8_0"})
    runner = open_runner(model, shm_dir, slots=4)
    transformers_logits(model, ids)          the oracle: transformers, eager attention, float32, dequantised weights

The weights come as bytes from `gguf_writing`; only gguf-py dequantises them for the oracle.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from appliance.engine.graph import GraphSizes
from appliance.engine.link_options import LinkOptions
from appliance.engine.model_runner import ModelRunner, OpenModel, RunnerOptions, choose_isa
from appliance.engine.peer import PeerPlan
from appliance.gguf_file import open_gguf
from appliance.memory.arena import Arena, ArenaPlace
from appliance.memory.layout import arena_layout
from appliance.memory.link_file import link_path
from appliance.memory.loader import Loader
from appliance.memory.plan import Machine, PlanRequest, make_plan
from appliance.memory.policy import Policy, Share
from appliance.memory.profile import Profile
from appliance.memory.slots import deal_slots
from appliance.memory.workspace import KvType
from appliance.models.config import read_config
from tests.gguf_writing import (
    TYPES_BY_NAME,
    GgufContent,
    ModelShape,
    model_content,
    plain_tokenizer_keys,
    random_rows,
    write_shards,
)

ROUTER_GAIN = 4.0
ANY_MACHINE = Machine(
    memory_bytes=1 << 50, memory_source="a test", shm_bytes=None, shm_dir="", gpu_bytes={"cuda:0": 1 << 50, "cuda:1": 1 << 50}
)


@dataclass(frozen=True)
class RandomModel:
    path: Path
    shape: ModelShape


def write_random_model(
    path: Path,
    shape: ModelShape,
    *,
    types: Mapping[str, str] | None = None,
    seed: int = 0,
    fused: bool = False,
    tied: bool = False,
    shards: int = 1,
) -> RandomModel:
    """`types` as `model_content` takes them."""
    content = model_content(shape, types=types, seed=seed)
    rng = np.random.default_rng(seed)
    for tensor in content.tensors:
        tensor.data = _weights(tensor.name, tensor.shape, tensor.type_id, rng, tied=tied)
    if fused:
        content = _with_fused_gate_up(content, shape)
    if tied:
        content.tensors = [tensor for tensor in content.tensors if tensor.name != "output.weight"]
    content.keys |= plain_tokenizer_keys(shape.vocab)
    written = content.write(path) if shards == 1 else write_shards(path, content, shards)[0]
    return RandomModel(written, shape)


def _weights(name: str, shape: tuple[int, ...], type_id: int, rng: np.random.Generator, *, tied: bool) -> bytes:
    kind = next(kind for kind in TYPES_BY_NAME.values() if kind.type_id == type_id)
    num_values = int(np.prod(shape))
    if name.endswith("norm.weight"):
        return (1.0 + 0.1 * rng.standard_normal(num_values)).astype(np.float32).tobytes()
    gain = ROUTER_GAIN if "ffn_gate_inp" in name else shape[0] ** 0.5 if name == "token_embd.weight" and not tied else 1.0
    return random_rows(kind, num_values, rng, gain / shape[0] ** 0.5)


def _with_fused_gate_up(content: GgufContent, shape: ModelShape) -> GgufContent:
    for layer in range(shape.layers):
        gate, up = (content.tensor(f"blk.{layer}.ffn_{name}_exps.weight") for name in ("gate", "up"))
        both = np.concatenate([np.frombuffer(part.data, np.uint8).reshape(shape.experts, -1) for part in (gate, up)], axis=1)
        gate.name, gate.shape, gate.data = (
            f"blk.{layer}.ffn_gate_up_exps.weight",
            (shape.hidden, 2 * shape.width, shape.experts),
            both.tobytes(),
        )
        content.tensors.remove(up)
    return content


@contextmanager
def open_arena(model: RandomModel, shm_dir: Path, *, for_gpu: bool = False) -> Iterator[Arena]:
    """The sealed arena of a model, written by the real loader the first time."""
    loaded = open_gguf(model.path)
    place = ArenaPlace(shm_dir, loaded.content_id, arena_layout(loaded, read_config(loaded)))
    if not place.path.exists():
        Loader(loaded, shm_dir, StringIO()).fill()
    with Arena.open(place, for_gpu=for_gpu) as arena:
        yield arena


@contextmanager
def open_runner(
    model: RandomModel,
    shm_dir: Path,
    *,
    slots: int = 0,
    chunk: int = 32,
    max_logits: int | None = None,
    context: int | None = None,
    kv_type: KvType = "f32",
    num_threads: int = 1,
    isa: str = "auto",
    max_swaps: int = 0,
    policy: Policy | None = None,
    share: tuple[int, int] = (0, 1),
    card: str = "host:0",
    peer_slots: int | None = None,
    peer_is_direct: bool = True,
    peer_is_own: bool = False,
    link: LinkOptions | None = None,
    asleep: bool = False,
    streamed_ratio: float | None = 0.4,
) -> Iterator[ModelRunner]:
    """A runner on a card of its own. `max_logits`: rows whose logits one run can give; all of a chunk by default."""
    loaded = open_gguf(model.path)
    config = read_config(loaded)
    request = PlanRequest((card,), context or model.shape.context, chunk, kv_type, slots, None)
    with open_arena(model, shm_dir, for_gpu=card.startswith("cuda:")) as arena:
        plan = make_plan(config, loaded.tensors, arena.layout, request, ANY_MACHINE)
        sizes = GraphSizes(plan.chunk, plan.chunk if max_logits is None else max_logits, plan.context, plan.kv_type)
        peer_card = card if peer_is_own else card.partition(":")[0] + ":1"
        peer = None if peer_slots is None else PeerPlan(peer_card, deal_slots(arena.layout, peer_slots), peer_is_direct)
        options = RunnerOptions(sizes, num_threads, choose_isa(isa), max_swaps, Share(*share), None, peer, link, asleep, streamed_ratio)
        profile = Profile.uniform(arena.layout, loaded.fingerprint)
        runner = ModelRunner(OpenModel(loaded, config, arena), plan.cards[0], options, profile=profile, policy=policy)
        try:
            yield runner
        finally:
            runner.close()
            del runner


@contextmanager
def linked_runners(
    model: RandomModel, shm_dir: Path, cards: tuple[str, str] = ("host:0", "host:0"), **options: object
) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """Two engines of one process, each offering its card to the other."""
    path = link_path(shm_dir, "0" * 64, "pair")
    links = [LinkOptions(path, role, stuck_after_s=20.0) for role in (0, 1)]
    with (
        open_runner(model, shm_dir, share=(0, 2), link=links[0], card=cards[0], **options) as lead,  # type: ignore[arg-type]
        open_runner(model, shm_dir, share=(1, 2), link=links[1], card=cards[1], **options) as helper,  # type: ignore[arg-type]
    ):
        lead.serve_link(True)
        helper.serve_link(True)
        yield lead, helper
        lead.serve_link(False)  # a card that waits for requests would hold up the end of the other engine in this process
        helper.serve_link(False)
    path.unlink()


def fill(runner: ModelRunner) -> None:
    """Boundaries until all slots that were taken again are full."""
    deadline = time.monotonic() + 60
    while runner.is_filling:
        assert time.monotonic() < deadline, "the slots are not filled"
        runner.between_windows()


def dequantised(model: RandomModel) -> dict[str, NDArray[np.float32]]:
    """Every weight as gguf-py reads and dequantises it; [rows, columns], experts first."""
    paths = open_gguf(model.path).paths
    weights: dict[str, NDArray[np.float32]] = {}
    for path in paths:
        for tensor in gguf.GGUFReader(path).tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            weights[tensor.name] = np.ascontiguousarray(values.reshape(tuple(reversed([int(n) for n in tensor.shape]))), dtype=np.float32)
    return weights


def transformers_model(model: RandomModel) -> object:
    """`Qwen3MoeForCausalLM` in float32 with the model's dequantised weights."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape, weights = model.shape, dequantised(model)
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        moe_intermediate_size=shape.width,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        norm_topk_prob=True,
        max_position_embeddings=shape.context,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attn_implementation="eager",
        dtype="float32",
    )
    built = Qwen3MoeForCausalLM(config).eval().float()
    state = {"model.embed_tokens.weight": weights["token_embd.weight"], "model.norm.weight": weights["output_norm.weight"]}
    state["lm_head.weight"] = weights.get("output.weight", weights["token_embd.weight"])
    for layer in range(shape.layers):
        state |= _layer_state(weights, layer)
    built.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()}, strict=True)
    return built


def _layer_state(weights: Mapping[str, NDArray[np.float32]], layer: int) -> dict[str, NDArray[np.float32]]:
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate": "ffn_gate_inp",
    }
    state = {f"model.layers.{layer}.{theirs}.weight": weights[f"blk.{layer}.{ours}.weight"] for theirs, ours in names.items()}
    fused = weights.get(f"blk.{layer}.ffn_gate_up_exps.weight")
    if fused is None:
        fused = np.concatenate([weights[f"blk.{layer}.ffn_{name}_exps.weight"] for name in ("gate", "up")], axis=1)
    state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = fused
    state[f"model.layers.{layer}.mlp.experts.down_proj"] = weights[f"blk.{layer}.ffn_down_exps.weight"]
    return state


def transformers_logits(built: object, ids: Sequence[int]) -> NDArray[np.float32]:
    """[tokens, vocab] of one pass over all tokens, without a cache: the plainest definition."""
    import torch

    with torch.no_grad():
        logits: NDArray[np.float32] = built(torch.tensor([list(ids)])).logits[0].float().numpy()  # type: ignore[operator]
    return logits


def greedy(runner: ModelRunner, prompt: Sequence[int], num_tokens: int, banned: int | None = None) -> list[int]:
    """What the runner continues with, one row per window; never `banned`."""
    answer = [_likeliest(prefill(runner, prompt, num_logits=1)[-1], banned)]
    for step in range(num_tokens - 1):
        logits = runner.run([answer[-1]], len(prompt) + step, 1)[-1].values()
        answer.append(_likeliest(logits, banned))
        runner.between_windows()
    return answer


def _likeliest(logits: NDArray[np.float32], banned: int | None) -> int:
    allowed = logits.copy()
    if banned is not None:
        allowed[banned] = -np.inf
    return int(allowed.argmax())


def prefill(
    runner: ModelRunner, ids: Sequence[int], *, num_logits: int, position: int = 0, chunk: int | None = None
) -> NDArray[np.float32]:
    """Runs all tokens in chunks; logits of the last `num_logits` rows of each chunk, [rows, vocab], copied."""
    step = chunk or runner.max_rows
    parts: list[NDArray[np.float32]] = []
    for first in range(0, len(ids), step):
        rows = list(ids[first : first + step])
        parts += [row.values().copy() for row in runner.run(rows, position + first, min(num_logits, len(rows)))]
        runner.between_windows()
    return np.stack(parts) if parts else np.empty((0, runner.vocab), np.float32)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl_divergence(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(theirs | ours) of each row, in nats."""
    a, b = log_softmax(theirs), log_softmax(ours)
    return (np.exp(a) * (a - b)).sum(-1)


LLAMA_SCRIPT = """
import json, sys
import xllamacpp as x
request = json.loads(sys.stdin.read())
p = x.CommonParams()
p.model.path = request["path"]; p.n_ctx = request["context"]; p.n_parallel = 1; p.warmup = False
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 2
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
server = x.Server(p)
answer = server.handle_completions({"prompt": request["ids"], "n_predict": request["num_tokens"], "temperature": 0,
                                    "n_probs": request["top"], "ignore_eos": True, "cache_prompt": False, "return_tokens": True})
print("RESULT " + json.dumps(answer["choices"][0]["logprobs"]["content"]))
sys.stdout.flush()
"""


@dataclass(frozen=True)
class LlamaAnswer:
    """Greedy ids of llama.cpp and, per step, its log-probabilities of the likeliest tokens."""

    ids: list[int]
    logprobs: list[dict[int, float]]


def llama_answer(model: RandomModel, prompt: Sequence[int], num_tokens: int, top: int = 20) -> LlamaAnswer:
    """llama.cpp in a process of its own, with flash attention off and a float32 cache. It never says the last token, its end of text."""
    import subprocess

    request = {"path": str(model.path), "context": model.shape.context, "ids": list(prompt), "num_tokens": num_tokens, "top": top}
    done = subprocess.run(
        [sys.executable, "-c", LLAMA_SCRIPT], input=json.dumps(request), capture_output=True, text=True, timeout=240, check=True
    )
    steps = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).removeprefix("RESULT "))
    return LlamaAnswer([step["id"] for step in steps], [{p["id"]: p["logprob"] for p in step["top_logprobs"]} for step in steps])
