"""Types of the tensors of the cases' models, as `write_random_model` takes them; each case adds layers of other types."""

USUAL = {
    "token_embd.weight": "Q8_0",
    "output.weight": "Q6_K",
    "attn_q": "Q4_K",
    "attn_k": "Q5_K",
    "attn_v": "Q6_K",
    "attn_output": "Q8_0",
    "ffn_gate_exps": "Q4_K",
    "ffn_up_exps": "Q4_K",
    "ffn_down_exps": "Q6_K",
}
