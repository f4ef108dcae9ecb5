"""Renders the chart with the real helm and validates what comes out."""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "tandem"
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)  # it reads 2 MB for every manifest
KUBERNETES = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Helm:
    """One version of the program."""

    program: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as home:
            environment = {"HOME": home, "PATH": "/usr/bin:/bin"}
            return subprocess.run([self.program, *words], capture_output=True, text=True, check=False, env=environment)

    def template(self, values: Manifest, kubernetes: str = "1.34") -> list[Manifest]:
        done = self._template(values, kubernetes)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    def refusal(self, values: Manifest, kubernetes: str = "1.34") -> str:
        """The sentence with which the values are refused."""
        done = self._template(values, kubernetes)
        assert done.returncode != 0, "the values were accepted"
        return done.stderr

    def _template(self, values: Manifest, kubernetes: str) -> subprocess.CompletedProcess[str]:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump(values, file)
            file.flush()
            words = ("template", "tandem", str(CHART), "--namespace", "llm", "--kube-version", f"{kubernetes}.0", "--values", file.name)
            return self.run(*words)


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    found = [manifest for manifest in manifests if manifest["kind"] == kind]
    assert len(found) == 1, f"{len(found)} of {kind}"
    return found[0]


def container_of(manifests: list[Manifest]) -> Manifest:
    return dict(of_kind(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0])


def settings_of(manifests: list[Manifest]) -> Manifest:
    config = next(manifest for manifest in manifests if manifest["kind"] == "ConfigMap" and "settings.yaml" in manifest["data"])
    return dict(yaml.safe_load(config["data"]["settings.yaml"]))


def volume(manifests: list[Manifest], name: str) -> Manifest:
    volumes = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]["volumes"]
    return next(dict(volume) for volume in volumes if volume["name"] == name)


def mebibytes(quantity: str) -> int:
    assert quantity.endswith("Mi")
    return int(quantity.removesuffix("Mi"))


def validate(manifest: Manifest, kubernetes: str) -> None:
    """Against Kubernetes' own schema, or ours of the custom kinds that we write. An unknown kind or field is an error."""
    schema = Path(__file__).parent / "custom_kinds" / f"{manifest['kind'].lower()}.json"
    if schema.is_file():
        content = json.loads(schema.read_text())
        assert content["properties"]["apiVersion"]["const"] == manifest["apiVersion"]
        jsonschema.Draft7Validator(content).validate(manifest)
        return
    _validate_builtin(json.dumps(manifest, sort_keys=True), kubernetes)


@functools.cache
def _validate_builtin(text: str, kubernetes: str) -> None:
    """Most manifests are rendered again and again, the same for every version of helm."""
    kubernetes_validate.validate(json.loads(text), kubernetes, strict=True)
