"""The command `tandem`. Every option is a field of `Settings`; nothing is defined twice.

Errors that we raise on purpose end in one sentence on stderr and exit code 1.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic.fields import FieldInfo
from rich.console import Console
from typer.core import TyperCommand
from typer.exceptions import TyperException

from appliance.errors import SettingsError, TandemError
from appliance.settings import Settings, load_settings, setting_fields
from appliance.sources.progress_log import ProgressLog
from appliance.sources.resolve import resolve_model

app = typer.Typer(
    name="tandem",
    help="Serves one large Mixture-of-Experts model from a GGUF file on a pair of cards, to two requests at once.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at the settings.")
app.add_typer(config_app, name="config")


def main() -> None:
    """Entry point of the console script."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except TandemError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        sys.exit(1)
    except TyperException as error:  # no such command or option, an option without its value
        sentence = " ".join(error.format_message().rstrip(".").split())
        print(f"tandem: {sentence[0].lower()}{sentence[1:]}; --help lists what there is", file=sys.stderr)
        sys.exit(error.exit_code)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")] = False,
) -> None:
    """Of the command itself."""


class _Command(TyperCommand):
    """Refuses an option that is given twice: one of the two would be lost without a word."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        twice = next((parameter.opts[0] for parameter in given if given.count(parameter) > 1), None)
        if twice is not None:
            raise SettingsError(f"{twice} is given twice; leave one out")
        return super().parse_args(ctx, args)


def _command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a command that has every setting as an option beside its own; its first parameter receives the merged `Settings`."""
    return lambda function: group.command(name, cls=_Command)(_with_settings(function))


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    fields = setting_fields()
    names = [name for name in fields if name != "model"]
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(command, eval_str=True).parameters.values()][1:]
    parameters = [_model_argument(), *own, _config_option(), *(_option(name, fields[name]) for name in names)]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        config = values.pop("config")
        options = {name: values.pop(name) for name in ("model", *names)}
        settings = load_settings(options, config=config)
        try:
            command(settings, **values)
        except TandemError as error:
            error.message = settings.as_written(error.message)
            raise

    del run.__wrapped__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _model_argument() -> inspect.Parameter:
    annotation = Annotated[Path | None, typer.Argument(help=Settings.model_fields["model"].description, show_default=False)]
    return inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _config_option() -> inspect.Parameter:
    annotation = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.", show_default=False)]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    default = field.default
    text = (field.description or "") + (f" [default: {default}]" if default not in (None, "", ()) else "")
    option = typer.Option(f"--{name.replace('_', '-')}", help=text, show_default=False, metavar=_metavar(field))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option])


def _metavar(field: FieldInfo) -> str:
    """Every option travels as text and is checked by the settings model, as variables are, so that all refusals read alike."""
    members = [kind for kind in typing.get_args(field.annotation) if kind is not types.NoneType] or [field.annotation]
    return {int: "INTEGER", float: "FLOAT", Path: "PATH"}.get(members[0], "TEXT") if len(members) == 1 else "TEXT"


@_command(app)
def serve(settings: Settings) -> None:
    """Load a model and serve it over HTTP."""
    from appliance.web.server import run_server

    sys.exit(run_server(settings))


@_command(app)
def fetch(settings: Settings) -> None:
    """Get a model from a hub and check it, without serving it; prints its path. A local file is checked too."""
    from appliance.gguf_file import open_gguf
    from appliance.log import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    model = _resolved(settings).model_path
    open_gguf(model)
    print(model)


@_command(app)
def plan(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    pair: Annotated[bool, typer.Option("--pair", help="Plan an elastic pair, and show both its states.")] = False,
) -> None:
    """Print what goes where in bytes, without loading weights. The quickest check of a model file."""
    from appliance.memory.plan import plan_for
    from appliance.memory.plan_report import render_pair, render_plan

    settings = _resolved(settings)
    if pair and not settings.elastic.enabled:
        print("elastic_enabled is off, so `tandem serve` would not share the cards; this plan is with it switched on", file=sys.stderr)
        settings = settings.model_copy(update={"elastic": settings.elastic.model_copy(update={"enabled": True})})
    result = plan_for(settings)
    print(json.dumps(result.to_json(), indent=2) if as_json else render_plan(result))
    if pair and not as_json:
        print("", render_pair(result), sep="\n")


@_command(app)
def bench(
    settings: Settings,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Runs; the medians are shown.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure prompt and decode speed: one request alone, then two at once."""
    from appliance.bench import measure, render_bench

    result = measure(_resolved(settings), prompt_tokens=prompt, new_tokens=tokens, repeat=repeat)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        Console().print(render_bench(result))


def _resolved(settings: Settings) -> Settings:
    return resolve_model(settings, None if sys.stderr.isatty() else ProgressLog().show)  # the terminal has a line of its own


@_command(config_app, "print")
def config_print(settings: Settings) -> None:
    """Print the merged settings as YAML that `--config` accepts."""
    print(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), end="")


@app.command()
def version() -> None:
    """Print the version."""
    print(f"tandem {package_version('tandem-appliance')}")


if __name__ == "__main__":
    main()
