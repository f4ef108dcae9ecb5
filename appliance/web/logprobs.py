"""Log-probabilities in the two shapes that OpenAI's APIs have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from appliance.protocol import TokenLogprobs
from appliance.text.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The object of `choices[].logprobs` in chat. `ids` may be longer: the token that ends an answer has no entry."""
    content = [
        _entry(tokenizer, token, one.logprob) | {"top_logprobs": [_entry(tokenizer, other, value) for other, value in one.top]}
        for token, one in zip(ids, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """The object of `choices[].logprobs` in plain completions. `offset` is where the first token begins in the text, in characters."""
    tokens = [_text(tokenizer, token) for token, _ in zip(ids, logprobs, strict=False)]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in logprobs],
        "top_logprobs": [{_text(tokenizer, other): value for other, value in one.top} for one in logprobs],
        "text_offset": offsets,
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {"token": _text(tokenizer, token), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
