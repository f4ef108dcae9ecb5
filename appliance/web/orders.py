"""From a checked request body to orders for the desk: prompts as token ids, lengths, sampling."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from appliance.errors import ContextLengthError, RequestError
from appliance.protocol import Generate, Sampling, ThinkingLimit
from appliance.text.reply import thinking_tokens
from appliance.web.generation import Order
from appliance.web.message_bodies import MessagesBody, Thinking
from appliance.web.message_prompt import MessagePrompt
from appliance.web.schemas import AnswerBody, ChatBody, ChatMessage, CompletionBody
from appliance.web.service import Service

Number = TypeVar("Number", int, float)

_SEEDS = 2**64


def chat_prompt(
    service: Service, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], variables: Mapping[str, Any], begun: str = ""
) -> list[int]:
    """The conversation as the model's chat template writes it, in token ids. `begun`: the first words of the answer."""
    plain = [message.model_dump(exclude_none=True) for message in messages]
    if begun:
        unthinking = {**variables, "enable_thinking": False}
        return service.template.render_continued(service.tokenizer, plain, tools, begun, **unthinking)
    return service.template.render_to_ids(service.tokenizer, plain, tools=list(tools) or None, **variables)


def chat_orders(service: Service, body: ChatBody, request_id: str) -> list[Order]:
    """One order per choice. Raises RequestError for what the schema alone cannot see."""
    variables = {"add_generation_prompt": body.add_generation_prompt, **body.chat_template_kwargs}
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    tools = [] if body.tool_choice == "none" else body.tools
    prompt = chat_prompt(service, body.messages, tools, variables, body.begun)
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    _check_prompt(service, prompt, "messages")
    return _orders(service, body, [prompt], request_id, top_logprobs, body.max_completion_tokens or body.max_tokens)


def completion_orders(service: Service, body: CompletionBody, request_id: str) -> list[Order]:
    """`n` orders per prompt, prompt by prompt, as OpenAI numbers the choices."""
    prompts = [
        service.tokenizer.encode(prompt, parse_special=True, param="prompt") if isinstance(prompt, str) else list(prompt)
        for prompt in body.prompts()
    ]
    for prompt in prompts:
        _check_prompt(service, prompt, "prompt")
    return _orders(service, body, prompts, request_id, body.logprobs, body.max_tokens)


def message_orders(service: Service, body: MessagesBody, prompt: MessagePrompt, message_id: str) -> list[Order]:
    """The one order of a message."""
    _check_prompt(service, prompt.ids, "messages")
    (order,) = _orders(service, body.answer(), [prompt.ids], message_id, None, body.max_tokens)
    generate = order.generate.model_copy(update={"thinking": _thinking_limit(service, body.thinking, prompt)})
    return [Order(generate, order.stops)]


def _thinking_limit(service: Service, thinking: Thinking, prompt: MessagePrompt) -> ThinkingLimit | None:
    if thinking.budget_tokens is None or thinking.type == "disabled" or (tokens := thinking_tokens(service.tokenizer)) is None:
        return None
    begin, end = tokens
    return ThinkingLimit(max_tokens=thinking.budget_tokens, begin=None if prompt.in_reasoning else begin, end=end)


def _orders(
    service: Service, body: AnswerBody, prompts: Sequence[list[int]], request_id: str, top_logprobs: int | None, max_tokens: int | None
) -> list[Order]:
    if body.n > service.model.lanes:
        raise RequestError(f"n is {body.n}, but this server runs {service.model.lanes} at once; send n <= {service.model.lanes}", param="n")
    sampling = _sampling(service, body)
    stops = tuple(body.stop)
    orders: list[Order] = []
    for prompt in prompts:
        for choice in range(body.n):
            generate = Generate(
                id=f"{request_id}-{len(orders)}",
                prompt=prompt,
                max_tokens=_answer_length(service, len(prompt), max_tokens),
                sampling=sampling.model_copy(update={"seed": (sampling.seed + choice) % _SEEDS}),
                stop_ids=sorted(service.tokenizer.eos_ids),
                ignore_eos=body.ignore_eos,
                top_logprobs=top_logprobs,
                deadline_s=service.settings.request_timeout_s,
            )
            orders.append(Order(generate, stops))
    return orders


def _check_prompt(service: Service, prompt: Sequence[int], field: str) -> None:
    """`field` of the request is where the prompt came from."""
    if not prompt:
        raise RequestError(f"{field}: the prompt is empty; send at least one token", param=field)
    limit = service.model.context
    if len(prompt) >= limit:
        raise ContextLengthError.of_prompt(str(len(prompt)), limit, field)
    largest = max(prompt)
    if largest >= service.model.vocab:
        raise RequestError(f"the prompt has token {largest}, but the model's vocabulary ends at {service.model.vocab - 1}", param=field)


def _answer_length(service: Service, prompt_tokens: int, wanted: int | None) -> int:
    """What was asked for, within the hard cap and what the context has left; the answer then ends with `length`."""
    settings = service.settings
    caps = [settings.default_max_tokens if wanted is None else wanted, service.model.context - prompt_tokens]
    if settings.max_tokens_limit is not None:
        caps.append(settings.max_tokens_limit)
    return min(caps)


def _sampling(service: Service, body: AnswerBody) -> Sampling:
    default = service.model.sampling
    unknown = next((token for token in body.logit_bias if not 0 <= token < service.model.vocab), None)
    if unknown is not None:
        path = f"logit_bias.{unknown}"
        raise RequestError(f"{path}: there is no such token; the vocabulary has 0 to {service.model.vocab - 1}", param=path)
    return Sampling(
        temperature=_given(body.temperature, default.temperature),
        top_k=max(0, _given(body.top_k, default.top_k)),
        top_p=_given(body.top_p, default.top_p),
        min_p=_given(body.min_p, default.min_p),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=_given(body.repetition_penalty, default.repetition_penalty),
        logit_bias=body.logit_bias,
        seed=secrets.randbits(63) if body.seed is None else body.seed % _SEEDS,
    )


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value
