"""The demo model that comes with the package: a pocket dictionary. `MODEL_CARD.md` beside it says how it was made."""

from __future__ import annotations

from pathlib import Path

from appliance.errors import SettingsError
from appliance.settings import Settings

DEMO_MODEL = Path(__file__).parent / "tandem-demo.gguf"


def with_model(settings: Settings) -> Settings:
    """The settings with a model in any case: the demo model where none is named."""
    if settings.model is not None:
        return settings
    if not DEMO_MODEL.is_file():
        raise SettingsError(f"no model is named, and the demo model is not at {DEMO_MODEL}; give a GGUF file", param="model")
    return settings.model_copy(update={"model": DEMO_MODEL})
