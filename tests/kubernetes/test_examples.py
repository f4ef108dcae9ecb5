"""The examples under docs/kubernetes: valid, and of one mind with the chart and the server."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from appliance.settings import Settings, load_settings
from tests.kubernetes.chart_rig import KUBERNETES, ROOT, Helm, Manifest, container_of, mebibytes, of_kind, validate, volume

EXAMPLES = ROOT / "docs" / "kubernetes"
METRICS = (ROOT / "appliance" / "web" / "vllm_metrics.py").read_text()


def manifests_of(name: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all((EXAMPLES / name).read_text()) if document]


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_an_example_is_valid(name: str) -> None:
    for manifest in manifests_of(name):
        validate(manifest, KUBERNETES[-1])


def test_the_pool_selects_the_charts_pods_and_their_port(helm4: Helm) -> None:
    manifests = helm4.template({"replicas": 3})
    pod = of_kind(manifests, "Deployment")["spec"]["template"]
    pool = of_kind(manifests_of("inferencepool.yaml"), "InferencePool")["spec"]
    assert pool["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert [port["number"] for port in pool["targetPorts"]] == [port["containerPort"] for port in container_of(manifests)["ports"]]
    route = of_kind(manifests_of("inferencepool.yaml"), "HTTPRoute")
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == "tandem"


def test_keda_scales_the_charts_deployment_by_a_metric_that_there_is(helm4: Helm) -> None:
    scaled = of_kind(manifests_of("scaledobject.yaml"), "ScaledObject")["spec"]
    deployment = of_kind(helm4.template({}), "Deployment")["metadata"]
    assert scaled["scaleTargetRef"]["name"] == deployment["name"]
    names = re.findall(r"vllm:\w+", scaled["triggers"][0]["metadata"]["query"])
    assert names
    assert all(f'"{name}"' in METRICS for name in names)


def test_the_pages_table_of_sizes_is_what_the_chart_computes(helm4: Helm) -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (EXAMPLES / "README.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    head = next(row for row in rows if row[1].endswith("GiB"))
    table = rows[rows.index(head) :]
    written = [[int(cell.split()[0]) for cell in row[1:]] for row in (head, *table[1:4])]
    for column, size in enumerate(written[0]):
        manifests = helm4.template({"model": {"source": "claim", "claim": "c", "sizeGiB": size}})
        probe = container_of(manifests)["startupProbe"]
        assert [row[column] for row in written[1:]] == [
            mebibytes(volume(manifests, "shm")["emptyDir"]["sizeLimit"]),
            mebibytes(container_of(manifests)["resources"]["limits"]["memory"]),
            probe["periodSeconds"] * probe["failureThreshold"],
        ]


def predictor() -> dict[str, Any]:
    return dict(of_kind(manifests_of("inferenceservice.yaml"), "InferenceService")["spec"]["predictor"])


def test_kserves_pod_is_a_valid_pod() -> None:
    own = ("minReplicas", "maxReplicas", "deploymentStrategy")
    pod = {name: value for name, value in predictor().items() if name not in own}
    for version in KUBERNETES:
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}, version, strict=True)


def test_kserves_pod_has_the_charts_sizes(helm4: Helm) -> None:
    chart = helm4.template({"model": {"source": "claim", "claim": "c", "sizeGiB": 17}})
    container = predictor()["containers"][0]
    shm = next(volume for volume in predictor()["volumes"] if volume["name"] == "shm")["emptyDir"]["sizeLimit"]
    assert container["resources"] == container_of(chart)["resources"]
    assert mebibytes(shm) >= 17 * 1024
    grace = of_kind(chart, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert predictor()["terminationGracePeriodSeconds"] == grace
    assert container["startupProbe"]["failureThreshold"] == container_of(chart)["startupProbe"]["failureThreshold"]


def test_kserves_environment_is_accepted_by_the_server() -> None:
    variables = {item["name"]: item["value"] for item in predictor()["containers"][0]["env"]}
    settings = load_settings(environment=variables)
    assert settings.allowed_hosts == ("*",)
    assert settings.port == Settings().port == predictor()["containers"][0]["ports"][0]["containerPort"]
