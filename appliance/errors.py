"""Every error that Tandem raises on purpose.

    TandemError
    ├── SettingsError             a setting is wrong or contradicts another; refused at start
    ├── ModelError                the model file
    │   ├── CorruptModelError     ... is damaged or incomplete
    │   └── UnsupportedModelError ... is well formed, but not something we can run
    ├── MemoryBudgetError         what was asked for does not fit; refused at start
    ├── RequestError              the client can mend it (4xx)
    │   ├── ContextLengthError        prompt and answer do not fit the context
    │   ├── AuthenticationError       missing or wrong API key
    │   ├── HostNotAllowedError       Host header outside the allow-list
    │   ├── ModelNotFoundError        no such model here
    │   ├── RouteNotFoundError        no such route or method
    │   ├── PayloadTooLargeError      body over the limit
    │   └── UnsupportedMediaTypeError body is not JSON
    ├── CapacityError             right, but not now; the client should try again
    │   ├── QueueFullError            the waiting line is full
    │   └── NotReadyError             still loading, draining, or failed
    └── EngineError               an engine could not finish an accepted request
        ├── EngineDiedError           its process ended
        └── EngineTimeoutError        it did not answer in time

The core knows nothing of HTTP: `appliance.web.errors` maps these classes to status codes and to each dialect's shape.
`code` is the stable word that clients may test; `docs/errors.md` lists them all.
"""

from __future__ import annotations

from typing import ClassVar


class TandemError(Exception):
    """Base of all. `message` is one sentence for the user: what happened, the values, what to change."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The setting or request field at fault, if there is one."""


class SettingsError(TandemError):
    code = "bad_setting"


class ModelError(TandemError):
    code = "bad_model"


class CorruptModelError(ModelError):
    code = "corrupt_model"


class UnsupportedModelError(ModelError):
    code = "unsupported_model"


class MemoryBudgetError(TandemError):
    code = "does_not_fit"


class RequestError(TandemError):
    code = "invalid_request"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"

    @classmethod
    def of_prompt(cls, tokens: str, context: int, param: str | None = None) -> ContextLengthError:
        """`tokens`: how many the prompt has. Agents look for the first words or for "maximum context length", and shorten it."""
        return cls(
            f"prompt is too long: {tokens} tokens > {context - 1} maximum; this model's maximum context length is {context} tokens, "
            "and an answer must fit",
            param=param,
        )


class AuthenticationError(RequestError):
    code = "invalid_api_key"


class HostNotAllowedError(RequestError):
    code = "host_not_allowed"


class ModelNotFoundError(RequestError):
    code = "model_not_found"


class RouteNotFoundError(RequestError):
    code = "route_not_found"


class PayloadTooLargeError(RequestError):
    code = "payload_too_large"


class UnsupportedMediaTypeError(RequestError):
    code = "unsupported_media_type"


class CapacityError(TandemError):
    """Base of the errors after which the same request may succeed later."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Whole seconds after which another try makes sense."""


class QueueFullError(CapacityError):
    code = "queue_full"


class NotReadyError(CapacityError):
    code = "not_ready"


class EngineError(TandemError):
    code = "engine_error"


class EngineDiedError(EngineError):
    code = "engine_died"


class EngineTimeoutError(EngineError):
    code = "engine_timeout"
