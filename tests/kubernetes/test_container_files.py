"""Compose file, quadlet and Dockerfile are of one mind with the settings and with each other."""

from __future__ import annotations

import configparser
import re
from typing import Any

import yaml

from appliance.settings import Settings, load_settings
from scripts.container.run import STOP_LIMIT_S
from tests.kubernetes.chart_rig import CHART, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
END_S = Settings().drain_s + 35
"""Running answers, then the engines, and a little."""


def services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


def quadlet() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "deploy" / "tandem.container")
    return parser


def test_everybody_waits_for_the_drain() -> None:
    for service in services().values():
        assert int(service["stop_grace_period"].removesuffix("s")) >= END_S
    assert int(quadlet()["Container"]["StopTimeout"]) >= END_S
    assert int(quadlet()["Service"]["TimeoutStopSec"]) > int(quadlet()["Container"]["StopTimeout"])
    assert STOP_LIMIT_S >= END_S


def test_everything_runs_hardened_and_on_loopback() -> None:
    for service in services().values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    container = quadlet()["Container"]
    assert (container["ReadOnly"], container["DropCapability"], container["NoNewPrivileges"]) == ("true", "all", "true")
    assert container["PublishPort"].startswith("127.0.0.1:")


def test_only_the_service_with_gpus_needs_a_profile() -> None:
    assert "profiles" not in services()["tandem"]
    assert services()["tandem-gpu"]["profiles"] == ["gpu"]
    devices = services()["tandem-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}]


def test_the_images_environment_is_accepted_by_the_server() -> None:
    block = re.search(r"^ENV PATH=.*?(?=^RUN)", DOCKERFILE, re.DOTALL | re.MULTILINE)
    assert block
    variables = dict(re.findall(r"(\w+)=(\S+)", block[0]))
    settings = load_settings(environment=variables)
    assert settings.host == "0.0.0.0"
    assert str(settings.models_dir).startswith("/data/")
    assert str(settings.state_dir).startswith("/data/")


def test_the_port_is_one_everywhere() -> None:
    assert f"EXPOSE {Settings().port}\n" in DOCKERFILE
    assert all(port.endswith(f":{Settings().port}") for service in services().values() for port in service["ports"])
    assert quadlet()["Container"]["PublishPort"].endswith(f":{Settings().port}")


def test_chart_and_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project
    assert chart["appVersion"] == project[1]


def test_what_the_image_is_made_of_is_in_its_context() -> None:
    """Every path that the Dockerfile copies from outside is let in by .dockerignore."""
    allowed = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [word for line in re.findall(r"^COPY (?!--)(.+)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    assert copied
    for path in copied:
        assert (ROOT / path).exists()
        assert any(path == entry or path.startswith(f"{entry}/") for entry in allowed), path


def test_the_image_is_built_for_the_architectures_of_the_native_module() -> None:
    listed = re.search(r"^ARG CUDA_ARCHITECTURES=(\S+)$", DOCKERFILE, re.MULTILINE)
    default = re.search(r"set\(CMAKE_CUDA_ARCHITECTURES (.+?)\)", (ROOT / "cuda_ext" / "CMakeLists.txt").read_text())
    assert listed
    assert default
    assert listed[1].split(";") == default[1].split()


def test_the_image_asks_for_the_parts_of_the_driver_but_for_no_gpu() -> None:
    """A container that asks for none, on a node whose engine has NVIDIA's run time, is given none."""
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in DOCKERFILE
    assert "NVIDIA_VISIBLE_DEVICES" not in DOCKERFILE


def test_the_pages_commands_are_what_the_server_takes() -> None:
    page = (ROOT / "docs" / "container.md").read_text().replace("\\\n", " ")
    served = [line.partition("#")[0].split(" tandem:dev ", 1)[1].split() for line in page.splitlines() if " tandem:dev serve" in line]
    assert len(served) == 2
    for verb, model, *options in served:
        names = [option.removeprefix("--").replace("-", "_") for option in options[::2]]
        settings = load_settings({"model": model, **dict(zip(names, options[1::2], strict=True))}, environment={})
        assert (verb, str(settings.model)) == ("serve", "/models")
