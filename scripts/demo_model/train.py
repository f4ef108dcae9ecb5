"""Trains the demo model on one GPU; a run stops by the clock and the next one goes on from its checkpoint."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from scripts.demo_model.model import DemoConfig, DemoModel

SEQUENCE = 384
BATCH = 160
BALANCE_WEIGHT = 0.003
PEAK_RATE = 2e-3
WARMUP_STEPS = 300


def train(data: Path, checkpoint: Path, *, minutes: float, total_minutes: float | None = None) -> DemoModel:
    """Trains for `minutes`; the learning rate follows the clock of all runs together (`total_minutes`)."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = DemoConfig()
    model = DemoModel(config).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    spent, step = 0.0, 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        spent, step = state["minutes"], state["step"]
    rows = pack(np.load(data / "train.npy")).to(device)
    torch._dynamo.config.suppress_errors = True
    forward = torch.compile(model)
    total = total_minutes or spent + minutes
    generator = torch.Generator(device="cuda").manual_seed(step + 1)
    start = time.monotonic()
    order = torch.randperm(len(rows), generator=generator, device=device)
    cursor = 0
    while (elapsed := (time.monotonic() - start) / 60) < minutes:
        if cursor + BATCH > len(order):
            order, cursor = torch.randperm(len(rows), generator=generator, device=device), 0
        batch = rows[order[cursor : cursor + BATCH]].long()
        cursor += BATCH
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * schedule(step, (spent + elapsed) / total)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits, balance, dropped = forward(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        (loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 500 == 0:
            print(
                f"step {step} loss {loss.item():.4f} balance {balance.item():.3f} dropped {dropped.item():.4f} "
                f"{(spent + elapsed):.2f} min, {step * BATCH * SEQUENCE / 1e6:.0f} M tokens",
                flush=True,
            )
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "minutes": spent + minutes, "step": step}
    torch.save(state, checkpoint)
    return model


def parameter_groups(model: DemoModel) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]


def schedule(step: int, progress: float) -> float:
    """Linear warm-up, then a cosine down to 2 % at the end of the last run."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def pack(ids: np.ndarray) -> torch.Tensor:
    """Rows of SEQUENCE + 1 tokens that each begin with a document: int16-safe [rows, SEQUENCE + 1].

    Token 0 ends a document. A document longer than a row is cut; the tail of a row is the head of the next document.
    """
    ends = np.flatnonzero(ids == 0) + 1
    starts, rows, at = np.concatenate([[0], ends[:-1]]), [], 0
    for start in starts:
        if start >= at and start + SEQUENCE + 1 <= len(ids):
            rows.append(ids[start : start + SEQUENCE + 1])
            at = start + SEQUENCE // 2
    return torch.from_numpy(np.stack(rows).astype(np.int32))


@torch.no_grad()
def perplexity(model: DemoModel, ids: np.ndarray) -> float:
    """Of held-out text in windows of SEQUENCE tokens."""
    device = next(model.parameters()).device
    count = (len(ids) - 1) // SEQUENCE
    total = 0.0
    for start in range(0, count, 64):
        rows = [ids[i * SEQUENCE : (i + 1) * SEQUENCE + 1] for i in range(start, min(count, start + 64))]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)
        logits = model(batch[:, :-1])[0]
        total += F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (count * SEQUENCE))
