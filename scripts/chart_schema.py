"""Writes helm/tandem/values.schema.json from the model of the chart's values below and from Tandem's own settings.

    python scripts/chart_schema.py          writes it
    python scripts/chart_schema.py --check  exit code 1 if it is not current

Every name that is not listed is refused, so that a misspelt value is an error and not a surprise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from appliance.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "helm" / "tandem" / "values.schema.json"

Quantity = Annotated[str, Field(pattern=r"^([0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?)?$")]
Cores = Annotated[str, Field(pattern=r"^([0-9]+(\.[0-9]+)?m?)?$")]
Duration = Annotated[str, Field(pattern=r"^[0-9]+(ms|s|m)$")]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
Objects = list[dict[str, Any]]
Words = dict[str, str]


class Values(BaseModel):
    """Base of all: unknown names are errors."""

    model_config = ConfigDict(extra="forbid")


class Image(Values):
    repository: Annotated[str, Field(min_length=1)]
    tag: str
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
    pullPolicy: PullPolicy
    pullSecrets: list[str]


class Dra(Values):
    enabled: bool
    deviceClassName: str
    selectors: list[str]
    matchAttribute: str


class Gpu(Values):
    count: Literal[1, 2]
    resource: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")]
    products: list[str]
    productLabel: str
    peerCheck: Literal["require", "warn", "off"]
    dra: Dra


class Hub(Values):
    reference: Annotated[str, Field(pattern=r"^(hf://[^/]+/.+)?$")]
    download: Literal["init", "job", "serve"]
    token: str
    tokenSecret: str
    tokenKey: str


class ImageVolume(Values):
    reference: str
    pullPolicy: PullPolicy


class Model(Values):
    source: Literal["demo", "hub", "claim", "hostPath", "image"]
    sizeGiB: Annotated[float, Field(gt=0)]
    path: str
    hub: Hub
    claim: str
    hostPath: Annotated[str, Field(pattern=r"^(/.*)?$")]
    image: ImageVolume


class Storage(Values):
    kind: Literal["none", "new", "existing"]
    size: Quantity
    accessModes: Annotated[list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]], Field(min_length=1)]
    storageClassName: str
    existingClaim: str
    keep: bool


class Memory(Values):
    shm: Quantity
    limit: Quantity


class Cpu(Values):
    request: Cores
    limit: Cores


class Probes(Values):
    loadMiBPerSecond: Annotated[float, Field(gt=0)]
    downloadMiBPerSecond: Annotated[float, Field(gt=0)]


class Drain(Values):
    preStopSeconds: Annotated[int, Field(ge=0)]
    graceSeconds: Annotated[int, Field(ge=0)]


class ApiKeys(Values):
    values: list[Annotated[str, Field(min_length=1)]]
    existingSecret: str
    key: Annotated[str, Field(min_length=1)]


class Service(Values):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    port: Annotated[int, Field(ge=1, le=65535)]
    annotations: Words


class Ingress(Values):
    enabled: bool
    className: str
    annotations: Words
    hosts: list[str]
    tlsSecret: str


class HttpRoute(Values):
    enabled: bool
    parentRefs: Objects
    hostnames: list[str]


class VirtualService(Values):
    enabled: bool
    gateways: list[str]
    hosts: list[str]
    prefix: str


class NetworkPolicy(Values):
    enabled: bool
    from_: Objects = Field(alias="from")


class PodDisruptionBudget(Values):
    enabled: bool
    maxUnavailable: int | Annotated[str, Field(pattern=r"^[0-9]+%$")]


class ServiceMonitor(Values):
    enabled: bool
    interval: Duration
    labels: Words


class Dashboard(Values):
    enabled: bool
    labels: Words


class ServiceAccount(Values):
    create: bool
    name: str
    annotations: Words


def _optional_settings() -> type[BaseModel]:
    """Tandem's settings, none of them required and without defaults: what is left out is left to the server."""
    fields: dict[str, Any] = {
        name: (field.annotation, Field(description=field.description, **_bounds(field.metadata)))
        for name, field in Settings.model_fields.items()
    }
    return create_model("Settings", __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)


def _bounds(metadata: list[Any]) -> dict[str, Any]:
    names = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")
    return {name: getattr(item, name) for item in metadata for name in names if getattr(item, name, None) is not None}


class ChartValues(Values):
    """All values of the chart, in the order of values.yaml."""

    image: Image
    replicas: Annotated[int, Field(ge=0)]
    cards: Literal["cuda", "host"]
    gpu: Gpu
    model: Model
    storage: Storage
    memory: Memory
    cpu: Cpu
    settings: _optional_settings()  # type: ignore[valid-type]
    probes: Probes
    drain: Drain
    apiKeys: ApiKeys
    service: Service
    ingress: Ingress
    httpRoute: HttpRoute
    virtualService: VirtualService
    networkPolicy: NetworkPolicy
    podDisruptionBudget: PodDisruptionBudget
    serviceMonitor: ServiceMonitor
    dashboard: Dashboard
    serviceAccount: ServiceAccount
    securityContext: dict[str, Any]
    nameOverride: str
    fullnameOverride: str
    podAnnotations: Words
    podLabels: Words
    runtimeClassName: str
    priorityClassName: str
    nodeSelector: Words
    tolerations: Objects
    affinity: dict[str, Any]
    topologySpreadConstraints: Objects
    extraEnv: Objects
    extraVolumes: Objects
    extraVolumeMounts: Objects
    global_: dict[str, Any] | None = Field(None, alias="global")  # helm's own, when the chart is part of another


def schema_text() -> str:
    """The schema as it is written: draft 7, which helm 3 and 4 both read, without titles."""
    schema = _plain(ChartValues.model_json_schema(by_alias=True))
    for model in [schema, *schema["$defs"].values()]:
        model.pop("description", None) if model is not schema["$defs"].get("Settings") else None
    schema["$defs"]["Settings"].pop("required", None)
    text = json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **schema}, indent=1)
    return text.replace("#/$defs/", "#/definitions/").replace('"$defs"', '"definitions"') + "\n"


def _plain(node: Any) -> Any:
    """Without `title`, `format` and `default`: titles repeat the names, formats are not JSON's, and defaults stand in values.yaml."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    dropped = {name for name in ("title", "format", "default") if not isinstance(node.get(name), dict)}
    return {name: _plain(value) for name, value in node.items() if name not in dropped}


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        if not SCHEMA.is_file() or SCHEMA.read_text(encoding="utf-8") != schema_text():
            print(f"{SCHEMA.relative_to(ROOT)} is not current; run python scripts/chart_schema.py", file=sys.stderr)
            return 1
        return 0
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
