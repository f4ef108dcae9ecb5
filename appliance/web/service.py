"""What the routes work with, in one place; every blueprint reads it from the running application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from flask import Flask, current_app

from appliance.desk.desk import Desk
from appliance.errors import ModelNotFoundError
from appliance.settings import Settings
from appliance.text.chat_template import ChatTemplate
from appliance.text.tokenizer import Tokenizer
from appliance.web.model_info import ModelInfo

_KEY = "tandem"
_OUR_MODEL = frozenset({None, "", "default"})


@dataclass(frozen=True, slots=True)
class Service:
    """Thread-safe: its parts are immutable or say so themselves."""

    settings: Settings
    desk: Desk
    tokenizer: Tokenizer
    template: ChatTemplate
    model: ModelInfo

    def check_model(self, name: str | None) -> None:
        """ModelNotFoundError unless `name` is our model's, `default` or nothing."""
        if name not in _OUR_MODEL and name != self.model.name:
            raise ModelNotFoundError(f"the model {name!r} is not here; this server has {self.model.name!r}", param="model")


def install(app: Flask, service: Service) -> None:
    app.extensions[_KEY] = service


def service() -> Service:
    """The service of the application that handles the current request."""
    return cast(Service, current_app.extensions[_KEY])
