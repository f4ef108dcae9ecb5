"""The forward pass of `qwen3moe` (Qwen3-30B-A3B and its kin): attention with normed heads, then routed experts, in every layer."""

from __future__ import annotations

from appliance.models.config import ModelConfig, layer_tensor
from appliance.models.ops import Ops
from appliance.models.rope import rotation


def record(ops: Ops, config: ModelConfig) -> None:
    """Records tokens to logits."""
    ops.angles(rotation(config))
    ops.embed("token_embd.weight")
    for layer in range(config.layers):
        _attention(ops, layer)
        _experts(ops, layer)
    ops.logits("output_norm.weight", "token_embd.weight" if config.tied_embeddings else "output.weight")


def _attention(ops: Ops, layer: int) -> None:
    def name(tensor: str) -> str:
        return layer_tensor(layer, tensor)

    x = ops.norm(name("attn_norm"))
    heads = ops.project_heads(x, name("attn_q"), name("attn_k"), name("attn_v"))
    ops.rotate_and_store(layer, heads, name("attn_q_norm"), name("attn_k_norm"))
    attended = ops.attend(layer, heads)
    ops.project_and_add(attended, name("attn_output"))


def _experts(ops: Ops, layer: int) -> None:
    gamma = layer_tensor(layer, "ffn_norm")
    x = ops.norm(gamma)
    ops.route(layer, x, gamma, layer_tensor(layer, "ffn_gate_inp"), renormalise=True)
    ops.add_experts(layer, x)
