"""Makes the demo model, step by step; each step reads what the one before wrote into the work folder.

python scripts/train_demo_model.py prepare WORK            corpus from Debian packages, tokenizer, token ids (apt, no GPU)
python scripts/train_demo_model.py train   WORK --minutes 8.5    one GPU; again to go on from the checkpoint
python scripts/train_demo_model.py export  WORK OUT.gguf   F16 and quantised GGUF files (libggml for the quantisers)
python scripts/train_demo_model.py agree   WORK OUT.gguf   greedy tokens beside llama.cpp's and transformers'
python scripts/train_demo_model.py card    WORK OUT.gguf   model card with answers, perplexities and expert use
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["prepare", "train", "export", "agree", "card"])
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=8.5)
    arguments = parser.parse_args()
    if arguments.step == "prepare":
        prepare(arguments.work)
    elif arguments.step == "train":
        train(arguments.work, arguments.minutes)
    elif arguments.out is None:
        parser.error(f"{arguments.step} needs OUT.gguf")
    elif arguments.step == "export":
        export(arguments.work, arguments.out)
    elif arguments.step == "agree":
        agree(arguments.work, arguments.out)
    else:
        card(arguments.work, arguments.out)


def prepare(work: Path) -> None:
    from scripts.demo_model import corpus, tokenizer

    corpus.fetch(work / "packages")
    texts = corpus.build(work / "packages")
    trained = tokenizer.train(texts.train[::3])
    tokenizer.save(trained, work, tokenizer.encode_all(trained, texts.train), tokenizer.encode_all(trained, texts.held_out))


def train(work: Path, minutes: float) -> None:
    import numpy as np
    import torch

    from scripts.demo_model.train import perplexity, train

    model = train(work, work / "checkpoint.pt", minutes=minutes)
    held_out = np.load(work / "held_out.npy")
    print(f"perplexity on held-out text: {perplexity(model, held_out):.3f}")
    torch.save({name: tensor.half() for name, tensor in model.gguf_tensors().items()}, work / "weights.f16.pt")


def export(work: Path, out: Path) -> None:
    from scripts.demo_model.export import export

    export(work, out)


def agree(work: Path, out: Path) -> None:
    from scripts.demo_model.agree import agree

    table = agree(work, out)
    print(table)
    (work / "agree.md").write_text(table, encoding="utf-8")


def card(work: Path, out: Path) -> None:
    from scripts.demo_model.card import write_card

    write_card(work, out)


if __name__ == "__main__":
    main()
