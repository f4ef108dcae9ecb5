"""The demo model in torch: qwen3moe (Qwen3MoeForCausalLM of transformers), small enough to train in minutes.

Weights carry GGUF's names; rows of a matrix are outputs, as in GGUF.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class DemoConfig:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 32
    top_k: int = 4
    width: int = 256
    context: int = 1024
    rope_base: float = 10_000.0
    rms_eps: float = 1e-6

    def to_json(self) -> dict[str, float]:
        return asdict(self)


class DemoModel(nn.Module):
    """`forward(ids)` -> (logits [batch, tokens, vocab], balance loss, share of routed rows dropped for capacity)."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Parameter(torch.randn(config.vocab, config.hidden) * 0.02)
        self.blk = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.output_norm = nn.Parameter(torch.ones(config.hidden))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.embedding(ids, self.token_embd)
        rope = rotary(ids.shape[1], self.config, ids.device)
        balance, dropped = x.new_zeros(()), x.new_zeros(())
        for block in self.blk:
            x, block_balance, block_dropped = block(x, rope)
            balance, dropped = balance + block_balance, dropped + block_dropped
        x = rms_norm(x, self.output_norm, self.config.rms_eps)
        return F.linear(x, self.token_embd), balance / len(self.blk), dropped / len(self.blk)

    def gguf_tensors(self) -> dict[str, Tensor]:
        """Every weight under its GGUF name, float32 on the CPU."""
        return {f"{name}.weight": tensor.detach().float().cpu() for name, tensor in self.named_parameters()}


class Block(nn.Module):
    def __init__(self, c: DemoConfig) -> None:
        super().__init__()
        self.config = c

        def matrix(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * (0.5 / shape[-1] ** 0.5))

        self.attn_norm = nn.Parameter(torch.ones(c.hidden))
        self.attn_q = matrix(c.heads * c.head_dim, c.hidden)
        self.attn_k = matrix(c.kv_heads * c.head_dim, c.hidden)
        self.attn_v = matrix(c.kv_heads * c.head_dim, c.hidden)
        self.attn_output = matrix(c.hidden, c.heads * c.head_dim)
        self.attn_q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.attn_k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.ffn_norm = nn.Parameter(torch.ones(c.hidden))
        self.ffn_gate_inp = matrix(c.experts, c.hidden)
        self.ffn_gate_exps = matrix(c.experts, c.width, c.hidden)
        self.ffn_up_exps = matrix(c.experts, c.width, c.hidden)
        self.ffn_down_exps = matrix(c.experts, c.hidden, c.width)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(rms_norm(x, self.attn_norm, self.config.rms_eps), rope)
        y, balance, dropped = self.experts(rms_norm(x, self.ffn_norm, self.config.rms_eps))
        return x + y, balance, dropped

    def attention(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        c, (batch, tokens, _) = self.config, x.shape

        def heads(weight: Tensor, count: int) -> Tensor:
            return F.linear(x, weight).view(batch, tokens, count, c.head_dim).transpose(1, 2)

        q = rotate(rms_norm(heads(self.attn_q, c.heads), self.attn_q_norm, c.rms_eps), rope)
        k = rotate(rms_norm(heads(self.attn_k, c.kv_heads), self.attn_k_norm, c.rms_eps), rope)
        v = heads(self.attn_v, c.kv_heads)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).reshape(batch, tokens, -1), self.attn_output)

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In training each expert takes its rows up to a capacity of 2.5 times the even share, and rows over it are dropped."""
        c, (batch, tokens, hidden) = self.config, x.shape
        rows = x.reshape(-1, hidden)
        probabilities = torch.softmax(F.linear(rows.float(), self.ffn_gate_inp.float()), -1)
        weights, chosen = torch.topk(probabilities, c.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        expert = flat[order]
        counts = torch.zeros(c.experts, dtype=torch.long, device=x.device).scatter_add(0, flat, torch.ones_like(flat))
        place = torch.arange(flat.numel(), device=x.device) - (counts.cumsum(0) - counts)[expert]
        capacity = max(16, int(2.5 * flat.numel() / c.experts)) if self.training else int(counts.max())
        kept = place < capacity
        slot = torch.where(kept, expert * capacity + place, c.experts * capacity)
        token = order // c.top_k
        packed = rows.new_zeros(c.experts * capacity + 1, hidden).index_copy(0, slot, rows[token])
        grouped = packed[:-1].view(c.experts, capacity, hidden)
        gate = torch.bmm(grouped, self.ffn_gate_exps.to(rows.dtype).transpose(1, 2))
        up = torch.bmm(grouped, self.ffn_up_exps.to(rows.dtype).transpose(1, 2))
        down = torch.bmm(F.silu(gate) * up, self.ffn_down_exps.to(rows.dtype).transpose(1, 2))
        out = torch.cat([down.view(-1, hidden), down.new_zeros(1, hidden)])[slot]
        out = out * weights.flatten()[order].to(out.dtype)[:, None]
        summed = torch.zeros_like(rows).index_add(0, token, out.to(rows.dtype))
        share = counts.float() / flat.numel()
        balance = c.experts * (share * probabilities.mean(0)).sum()
        return summed.view(batch, tokens, hidden), balance, 1 - kept.float().mean()


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * gamma.float()).to(x.dtype)


def rotary(tokens: int, config: DemoConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    inverse = config.rope_base ** (-torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim)
    angle = torch.outer(torch.arange(tokens, device=device).float(), inverse)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding, NeoX pairing (i, i + half)."""
    a, b = x.float().chunk(2, -1)
    return x.float() * rope[0] + torch.cat([-b, a], -1) * rope[1]
