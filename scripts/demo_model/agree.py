"""Greedy tokens of the demo model side by side: transformers, llama.cpp and Tandem on the same weights.

All three get the same token ids, keep float32 caches and stop at an end of text, which is not part of an answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from appliance.gguf_file import open_gguf
from appliance.text.tokenizer import Tokenizer
from scripts.demo_model.model import DemoConfig
from tests.gguf_writing import ModelShape
from tests.random_models import RandomModel, open_runner, prefill

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

TEMPLATE = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
END_IDS = (0, 2)
"""<|endoftext|> and <|im_end|>."""
NUM_TOKENS = 16
QUESTIONS = (
    "What is a harbor?",
    "What is a dog?",
    "What is a cat?",
    "What is a house?",
    "What is a river?",
    "What is a table?",
    "What is a window?",
    "What is a king?",
    "What is a doctor?",
    "What is an apple?",
    "What is a bridge?",
    "What is a star?",
    "Define mountain.",
    "Define quickly.",
    "What does green mean?",
    "What does it mean to run?",
    "What does it mean to write?",
    "What is the meaning of freedom?",
    "What is another word for car?",
    "Hello",
)

Answers = list[list[int]]


def agree(work: Path, out: Path) -> str:
    """A table: how many of the questions get the same tokens, with the F16 file and with `out`."""
    f16 = work / "demo.f16.gguf"
    prompts = prompts_of(f16)
    tandem, llama = tandem_answers(f16, prompts), llama_answers(f16, prompts)
    reference = transformers_answers(work / "weights.f16.pt", prompts)
    lines = [
        "| weights | compared | questions with equal tokens |",
        "|---|---|---|",
        f"| F16 | transformers and llama.cpp | {agreement(reference, llama)} |",
        f"| F16 | transformers and Tandem | {agreement(reference, tandem)} |",
        f"| F16 | llama.cpp and Tandem | {agreement(llama, tandem)} |",
        f"| quantised | llama.cpp and Tandem | {agreement(llama_answers(out, prompts), tandem_answers(out, prompts))} |",
    ]
    return "\n".join(lines) + "\n"


def agreement(ours: Answers, theirs: Answers) -> str:
    return f"{num_equal(ours, theirs)} of {len(ours)}"


def num_equal(ours: Answers, theirs: Answers) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def prompts_of(path: Path, questions: Sequence[str] = QUESTIONS) -> list[list[int]]:
    tokenizer = Tokenizer.from_gguf(open_gguf(path))
    return [tokenizer.encode(TEMPLATE.format(question=question), parse_special=True) for question in questions]


def tandem_answers(path: Path, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> Answers:
    """A quarter of the experts in slots, so that both tiers answer."""
    c = DemoConfig()
    model = RandomModel(path, ModelShape(context=c.context))
    answers = []
    with (
        tempfile.TemporaryDirectory(prefix="tandem-demo-", dir="/dev/shm") as folder,
        open_runner(model, Path(folder), slots=c.layers * c.experts // 4, max_logits=1) as runner,
    ):
        for prompt in prompts:
            answer: list[int] = []
            logits = prefill(runner, prompt, num_logits=1)[-1]
            while (token := int(logits.argmax())) not in END_IDS and len(answer) < num_tokens:
                answer.append(token)
                logits = runner.run([token], len(prompt) + len(answer) - 1, 1)[-1].values()
                runner.between_windows()
            answers.append(answer)
    return answers


LLAMA_SCRIPT = """
import json, sys
import xllamacpp as x
request = json.loads(sys.stdin.read())
p = x.CommonParams()
p.model.path = request["path"]; p.n_ctx = request["context"]; p.n_parallel = 1; p.warmup = False
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
server = x.Server(p)
answers = []
for ids in request["prompts"]:
    answer = server.handle_completions({"prompt": ids, "n_predict": request["num_tokens"], "temperature": 0, "n_probs": 1,
                                        "cache_prompt": False})
    answers.append([step["id"] for step in answer["choices"][0]["logprobs"]["content"]])
print("RESULT " + json.dumps(answers))
sys.stdout.flush()
"""


def llama_answers(path: Path, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> Answers:
    """llama.cpp in a process of its own, with flash attention off; one thread, as two that wait for each other crawl on a busy machine."""
    request = {"path": str(path), "context": DemoConfig().context, "prompts": [list(p) for p in prompts], "num_tokens": num_tokens}
    done = subprocess.run(
        [sys.executable, "-c", LLAMA_SCRIPT], input=json.dumps(request), capture_output=True, text=True, timeout=240, check=True
    )
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).removeprefix("RESULT ")
    return [[token for token in answer if token not in END_IDS] for answer in json.loads(result)]


def transformers_answers(weights: Path, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> Answers:
    """`Qwen3MoeForCausalLM` in float32 on the F16 weights."""
    model = transformers_model({name: tensor.float() for name, tensor in torch.load(weights, weights_only=True).items()})
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=list(END_IDS), pad_token_id=0
        )
        answers.append([token for token in made[0, len(prompt) :].tolist() if token not in END_IDS])
    return answers


def transformers_model(weights: Mapping[str, torch.Tensor]) -> Qwen3MoeForCausalLM:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    c = DemoConfig()
    config = Qwen3MoeConfig(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.width,
        moe_intermediate_size=c.width,
        num_experts=c.experts,
        num_experts_per_tok=c.top_k,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        norm_topk_prob=True,
        max_position_embeddings=c.context,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
        rms_norm_eps=c.rms_eps,
        tie_word_embeddings=True,
        attn_implementation="eager",
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config).eval().float()
    state = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), weights["token_embd.weight"])
    state["model.norm.weight"] = weights["output_norm.weight"]
    for layer in range(c.layers):
        state |= {f"model.layers.{layer}.{name}": value for name, value in layer_state(weights, f"blk.{layer}").items()}
    model.load_state_dict(state, strict=True)
    return model


def layer_state(weights: Mapping[str, torch.Tensor], block: str) -> dict[str, torch.Tensor]:
    """One layer's weights under the names of transformers."""
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
    state = {f"{theirs}.weight": weights[f"{block}.{ours}.weight"] for theirs, ours in names.items()}
    gate_up = [weights[f"{block}.ffn_{name}_exps.weight"] for name in ("gate", "up")]
    return state | {
        "mlp.experts.gate_up_proj": torch.cat(gate_up, dim=1),
        "mlp.experts.down_proj": weights[f"{block}.ffn_down_exps.weight"],
    }


def texts_of(path: Path, answers: Answers) -> list[str]:
    tokenizer = Tokenizer.from_gguf(open_gguf(path))
    return [tokenizer.decode(answer).strip() for answer in answers]
