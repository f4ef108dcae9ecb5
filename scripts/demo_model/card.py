"""Measures the exported demo model and writes its card: answers as they are, perplexities, expert use, cache hit ratios."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch

from scripts.demo_model.agree import NUM_TOKENS, QUESTIONS, prompts_of, tandem_answers, texts_of
from scripts.demo_model.model import DemoConfig, DemoModel
from scripts.demo_model.train import perplexity

# fmt: off
NOUNS = (
    "harbor", "dog", "cat", "house", "tree", "river", "mountain", "ocean", "book", "table", "chair", "window", "door", "city", "king",
    "queen", "doctor", "teacher", "child", "mother", "father", "bread", "water", "milk", "apple", "egg", "fish", "bird", "horse",
    "cow", "ship", "car", "train", "road", "bridge", "knife", "clock", "lamp", "bed", "shirt", "shoe", "hat", "ring", "money",
    "school", "church", "garden", "farm", "forest", "island",
)
# fmt: on
NONSENSE = ("egg",)
"""Judged by reading: the answer defines no sense of the word."""
SLIPS = ("queen", "milk", "apple", "bird", "horse", "train", "shoe", "hat", "forest")
"""True of a sense of the word, but with an article missing or too many, or a plural for one thing."""
CACHE_RATIOS = (0.10, 0.25, 0.50)
ROUTED_TOKENS = 6_000
LONGEST = 96
PARTS = Path(__file__).parent / "card_parts"


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts chosen for text: int64 [layers, tokens, top_k]."""

    chosen: np.ndarray

    def use(self, experts: int) -> np.ndarray:
        """Share of each expert per layer, most used first: [layers, experts]."""
        counts = np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in self.chosen])
        return -np.sort(-counts / counts.sum(1, keepdims=True), axis=1)


def write_card(work: Path, out: Path) -> None:
    train = np.load(work / "train.npy")
    held_out = unseen_documents(np.load(work / "held_out.npy"), train)
    trained, quantised = load(work / "demo.f16.gguf"), load(out)
    seen = route(quantised, train[:ROUTED_TOKENS])
    unseen = route(quantised, held_out[:ROUTED_TOKENS])
    text = (PARTS / "head.md").read_text(encoding="utf-8")
    text += measures(out, len(held_out), perplexity(trained, held_out), perplexity(quantised, held_out))
    text += expert_use(unseen, quantised.config.experts) + hit_ratios(seen, unseen, quantised.config)
    text += agreement(work / "agree.md") + answers(out) + (PARTS / "licences.md").read_text(encoding="utf-8")
    (out.parent / "MODEL_CARD.md").write_text(text, encoding="utf-8")


def unseen_documents(held_out: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Without the documents that the training text holds too: prose is in the packages twice."""
    everything = train.tobytes()
    documents = np.split(held_out, np.flatnonzero(held_out == 0) + 1)
    return np.concatenate([document for document in documents if document.tobytes() not in everything])


def load(path: Path) -> DemoModel:
    """The file's weights, dequantised, in torch."""
    model = DemoModel(DemoConfig()).eval()
    tensors = {
        tensor.name.removesuffix(".weight"): torch.from_numpy(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist()))).astype(np.float32)
        )
        for tensor in gguf.GGUFReader(path).tensors
    }
    model.load_state_dict(tensors)
    return model


@torch.no_grad()
def route(model: DemoModel, ids: np.ndarray, window: int = 256) -> Routing:
    """Runs text through the model and notes the routers' choices."""
    chosen: list[list[np.ndarray]] = [[] for _ in model.blk]
    hooks = []
    for layer, block in enumerate(model.blk):

        def note(inputs: torch.Tensor, layer: int = layer) -> None:
            logits = inputs.reshape(-1, inputs.shape[-1]) @ model.blk[layer].ffn_gate_inp.T
            chosen[layer].append(torch.topk(logits, model.config.top_k).indices.numpy())

        original = block.experts
        block.experts = lambda x, note=note, original=original: (note(x), original(x))[1]
        hooks.append((block, original))
    for start in range(0, len(ids) - window, window):
        model(torch.from_numpy(ids[start : start + window].astype(np.int64))[None])
    for block, original in hooks:
        block.experts = original
    return Routing(np.stack([np.concatenate(layer) for layer in chosen]))


def measures(out: Path, num_tokens: int, before: float, after: float) -> str:
    return (
        "## Measures\n\n| what | value |\n|---|---|\n"
        f"| file | {out.stat().st_size / 1e6:.2f} MB |\n"
        f"| perplexity on {num_tokens:,} tokens of held-out text, F16 | {before:.2f} |\n| the same, quantised | {after:.2f} |\n\n"
        "The training text was seen some 33 times: the model knows the dictionary by heart and generalises little. The held-out text "
        "here is questions and answers on words with fewer than five questions; no document of it is in the training text, "
        "but a synonym with the same gloss may be. Words with more questions are all in the training text.\n\n"
        "The training script's own figure is not comparable. It includes held-out prose that the training text turned out to hold too, and "
        "it leaves out rows for experts over their capacity, as training does; no engine leaves any out.\n\n"
    )


def expert_use(routing: Routing, experts: int) -> str:
    lines = ["## Expert use on text it has not seen\n", "| layer | busiest expert | busiest 8 | idlest 8 |", "|---|---|---|---|"]
    for layer, use in enumerate(routing.use(experts)):
        lines.append(f"| {layer} | {use[0]:.1%} | {use[:8].sum():.1%} | {use[-8:].sum():.1%} |")
    return "\n".join(lines) + f"\n\nAn even share would be {1 / experts:.1%}, and {8 / experts:.0%} for eight.\n\n"


def hit_ratios(seen: Routing, unseen: Routing, config: DemoConfig) -> str:
    """Of a cache of so many experts per layer, read by unseen text."""
    lines = [
        "## What a cache hits on text it has not seen\n",
        "| experts cached | static, by use on other text | least recently used |",
        "|---|---|---|",
    ]
    for ratio in CACHE_RATIOS:
        slots = max(config.top_k, round(ratio * config.experts))
        static = np.mean([static_hits(a, b, slots, config.experts) for a, b in zip(seen.chosen, unseen.chosen, strict=True)])
        recent = np.mean([recent_hits(layer, slots) for layer in unseen.chosen])
        lines.append(f"| {slots} of {config.experts} per layer ({slots / config.experts:.0%}) | {static:.1%} | {recent:.1%} |")
    return "\n".join(lines) + "\n\n"


def static_hits(seen: np.ndarray, unseen: np.ndarray, slots: int, experts: int) -> float:
    kept = np.argsort(-np.bincount(seen.ravel(), minlength=experts), kind="stable")[:slots]
    return float(np.isin(unseen, kept).mean())


def recent_hits(unseen: np.ndarray, slots: int) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in unseen.ravel().tolist():
        if expert in cache:
            hits += 1
            cache.move_to_end(expert)
        else:
            cache[expert] = None
            if len(cache) > slots:
                cache.popitem(last=False)
    return hits / unseen.size


def agreement(table: Path) -> str:
    """What the step `agree` measured."""
    return (
        "## Agreement with other engines\n\n"
        f"{len(QUESTIONS)} questions, greedy, the first {NUM_TOKENS} tokens or the whole answer where it is shorter; float32 caches, "
        "on a CPU. The command is `python scripts/train_demo_model.py agree WORK OUT.gguf`.\n\n" + table.read_text(encoding="utf-8") + "\n"
    )


def answers(path: Path) -> str:
    questions = [f"What is {'an' if noun[0] in 'aeiou' else 'a'} {noun}?" for noun in NOUNS]
    texts = texts_of(path, tandem_answers(path, prompts_of(path, questions), LONGEST))
    good = len(NOUNS) - len(NONSENSE) - len(SLIPS)
    lines = [
        f"## {len(NOUNS)} common nouns, greedy, as they are\n",
        f"Tandem's answers with this file. Judged by reading: {good} of {len(NOUNS)} are sensible, that is, grammatical and true of some "
        f"sense of the word. {len(SLIPS)} more are true but slip in an article or a plural ({', '.join(SLIPS)}); "
        f"{len(NONSENSE)} is nonsense ({', '.join(NONSENSE)}). All these words are in the training text.\n",
        "| question | answer |",
        "|---|---|",
    ]
    lines += [f"| {question} | {text.replace('|', '/')} |" for question, text in zip(questions, texts, strict=True)]
    return "\n".join(lines) + "\n\n"
