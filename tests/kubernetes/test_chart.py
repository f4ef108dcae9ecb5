"""The chart: what it renders is valid for every version of Kubernetes, its sizes add up, and contradictions are refused."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.settings import load_settings
from scripts.chart_schema import SCHEMA, ChartValues, schema_text
from tests.kubernetes.chart_rig import (
    CHART,
    KUBERNETES,
    ROOT,
    Helm,
    Manifest,
    container_of,
    mebibytes,
    of_kind,
    settings_of,
    validate,
    volume,
)

HUB: Manifest = {"model": {"source": "hub", "sizeGiB": 17, "hub": {"reference": "hf://owner/repo:Q4_K_M", "tokenSecret": "hub"}}}
EVERYTHING: Manifest = {
    "replicas": 2,
    "gpu": {"products": ["NVIDIA-H200", "NVIDIA-GeForce-RTX-3090"], "peerCheck": "require"},
    "storage": {"kind": "new", "accessModes": ["ReadWriteMany"], "storageClassName": "fast"},
    "image": {"repository": "registry.example/tandem", "digest": f"sha256:{'0' * 64}", "pullSecrets": ["pull"]},
    "apiKeys": {"values": ["one", "two"]},
    "cpu": {"limit": "8"},
    "settings": {"context": 4096, "drain_s": 12.5, "allowed_hosts": ["a.example", "b.example"]},
    "ingress": {"enabled": True, "hosts": ["t.example"], "tlsSecret": "tls", "className": "nginx", "annotations": {"a": "b"}},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["r.example"]},
    "virtualService": {"enabled": True, "gateways": ["kubeflow/gateway"], "hosts": ["v.example"], "prefix": "/tandem/"},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {"matchLabels": {"name": "gateways"}}}]},
    "podDisruptionBudget": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "serviceAccount": {"annotations": {"x": "y"}},
    "service": {"annotations": {"x": "y"}, "type": "NodePort"},
    "podAnnotations": {"p": "q"},
    "podLabels": {"l": "m"},
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "extraEnv": [{"name": "X", "value": "y"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    **HUB,
}
MATRIX: dict[str, Manifest] = {
    "defaults": {},
    "host": {"cards": "host"},
    "hub-init": HUB,
    "hub-job": {"model": {**HUB["model"], "hub": {**HUB["model"]["hub"], "download": "job"}}, "storage": {"kind": "new"}},
    "claim": {
        "model": {"source": "claim", "claim": "models", "path": "qwen:Q4_K_M", "sizeGiB": 59},
        "storage": {"kind": "existing", "existingClaim": "d"},
    },
    "hostpath": {"model": {"source": "hostPath", "hostPath": "/srv/models", "sizeGiB": 4.5}, "gpu": {"count": 1}},
    "openshift": {"securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}, "apiKeys": {"existingSecret": "keys"}},
    "everything": EVERYTHING,
}
NEWER: dict[str, tuple[str, Manifest]] = {
    "image volume": ("1.33", {"model": {"source": "image", "image": {"reference": "registry.example/model:1"}, "path": "m.gguf"}}),
    "dra": ("1.34", {"gpu": {"dra": {"enabled": True, "selectors": ["true"], "matchAttribute": "resource.kubernetes.io/pcieRoot"}}}),
}


@pytest.mark.parametrize("case", MATRIX)
def test_what_is_rendered_is_valid_for_every_kubernetes(both_helms: Helm, case: str) -> None:
    for version in KUBERNETES:
        manifests = both_helms.template(MATRIX[case], version)
        assert manifests
        for manifest in manifests:
            validate(manifest, version)


@pytest.mark.parametrize("case", NEWER)
def test_what_is_newer_is_valid_from_its_version_on_and_refused_before(both_helms: Helm, case: str) -> None:
    first, values = NEWER[case]
    for version in KUBERNETES:
        if version < first:
            assert f"needs Kubernetes {first}" in both_helms.refusal(values, version)
        else:
            for manifest in both_helms.template(values, version):
                validate(manifest, version)


def test_the_chart_passes_lint_and_can_be_packed(both_helms: Helm, tmp_path: Path) -> None:
    done = both_helms.run("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    done = both_helms.run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [path.suffix for path in tmp_path.iterdir()] == [".tgz"]


def test_both_helms_render_the_same(helm4: Helm) -> None:
    from scripts.helm_tools import helm

    helm3 = Helm(helm("3"))
    assert helm3.template(EVERYTHING) == helm4.template(EVERYTHING)


# Sizes and times


@pytest.mark.parametrize("cards", ["cuda", "host"])
@pytest.mark.parametrize("size", [1, 17, 59.3])
def test_the_memory_limit_covers_shared_memory_and_shared_memory_the_model(helm4: Helm, size: float, cards: str) -> None:
    manifests = helm4.template({"cards": cards, "model": {"source": "claim", "claim": "c", "sizeGiB": size}})
    shm = mebibytes(volume(manifests, "shm")["emptyDir"]["sizeLimit"])
    resources = container_of(manifests)["resources"]
    assert shm >= size * 1024
    assert mebibytes(resources["limits"]["memory"]) >= shm + 1024
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert volume(manifests, "shm")["emptyDir"]["medium"] == "Memory"


def test_parked_conversations_have_their_room(helm4: Helm) -> None:
    sizes = {}
    for settings in ({}, {"parked_mib": 512}, {"elastic": {"enabled": True}}):
        manifests = helm4.template({"settings": settings})
        parked = settings_of(manifests).get("parked_mib", 0)
        sizes[parked] = mebibytes(volume(manifests, "shm")["emptyDir"]["sizeLimit"])
    assert len(sizes) == 3
    assert {size - parked for parked, size in sizes.items()} == {sizes[0]}


def test_the_start_up_probe_waits_as_long_as_reading_takes(helm4: Helm) -> None:
    budget = {}
    for size in (17, 59):
        probe = container_of(helm4.template({"model": {"source": "claim", "claim": "c", "sizeGiB": size}}))["startupProbe"]
        budget[size] = probe["periodSeconds"] * probe["failureThreshold"]
    assert budget[17] >= 17 * 1024 / 200
    assert budget[59] - budget[17] >= (59 - 17) * 1024 / 200 - 5


def test_a_download_by_the_server_has_its_time(helm4: Helm) -> None:
    serve = {"model": {**HUB["model"], "hub": {**HUB["model"]["hub"], "download": "serve"}}}
    probe = container_of(helm4.template(serve))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 17 * 1024 / 20


def test_the_grace_covers_pre_stop_and_drain(helm4: Helm) -> None:
    pod = of_kind(helm4.template({"settings": {"drain_s": 100}, "drain": {"preStopSeconds": 7}}), "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 7 + 100 + 30
    assert pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] == 7


# What the pod is


def test_two_gpus_are_asked_for_on_one_container(helm4: Helm) -> None:
    resources = container_of(helm4.template({}))["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "2"


def test_host_cards_ask_for_no_gpu(helm4: Helm) -> None:
    manifests = helm4.template({"cards": "host"})
    assert "nvidia.com/gpu" not in container_of(manifests)["resources"]["limits"]
    assert settings_of(manifests)["cards"] == "host:0,host:1"


def test_nodes_are_chosen_by_product_beside_what_was_asked_for(helm4: Helm) -> None:
    node = {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]
        }
    }
    pod = of_kind(helm4.template({"gpu": {"products": ["NVIDIA-H200"]}, "affinity": {"nodeAffinity": node}}), "Deployment")["spec"][
        "template"
    ]["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [
        {
            "matchExpressions": [
                {"key": "a", "operator": "Exists"},
                {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H200"]},
            ]
        }
    ]


def test_the_claim_takes_the_place_of_the_device_plugin(helm4: Helm) -> None:
    manifests = helm4.template(NEWER["dra"][1])
    assert "nvidia.com/gpu" not in container_of(manifests)["resources"]["limits"]
    assert container_of(manifests)["resources"]["claims"] == [{"name": "cards"}]
    request = of_kind(manifests, "ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"][0]
    assert request["exactly"]["count"] == 2


def test_the_pod_is_hardened(helm4: Helm) -> None:
    pod = of_kind(helm4.template(EVERYTHING), "Deployment")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in [*pod["containers"], *pod["initContainers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("case", MATRIX)
def test_the_server_accepts_the_settings(helm4: Helm, case: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(settings_of(helm4.template(MATRIX[case]))))
    settings = load_settings(environment={}, config=file)
    assert settings.port == container_of(helm4.template(MATRIX[case]))["ports"][0]["containerPort"]


def test_the_servers_names_are_known_to_it(helm4: Helm) -> None:
    names = settings_of(helm4.template(EVERYTHING))["allowed_hosts"]
    assert {"tandem", "tandem.llm.svc.cluster.local", "t.example", "r.example", "v.example", "a.example", "b.example"} <= set(names)


def test_a_server_for_all_names_may_have_a_route_with_a_wildcard(helm4: Helm) -> None:
    values = {"ingress": {"enabled": True, "hosts": ["*.example"]}, "settings": {"allowed_hosts": ["*"]}}
    assert settings_of(helm4.template(values))["allowed_hosts"] == ["*"]


def test_a_changed_setting_changes_the_pod(helm4: Helm) -> None:
    sums = set()
    for context in (4096, 8192):
        pod = of_kind(helm4.template({"settings": {"context": context}}), "Deployment")["spec"]["template"]
        sums.add(pod["metadata"]["annotations"]["tandem/config-checksum"])
    assert len(sums) == 2


def test_the_prefix_reaches_the_server_and_the_route(helm4: Helm) -> None:
    manifests = helm4.template(EVERYTHING)
    assert settings_of(manifests)["url_prefix"] == "/tandem"
    matches = of_kind(manifests, "VirtualService")["spec"]["http"][0]["match"]
    assert matches == [{"uri": {"prefix": "/tandem/"}}, {"uri": {"exact": "/tandem"}}]


def test_the_model_is_where_the_server_looks(helm4: Helm) -> None:
    assert settings_of(helm4.template(MATRIX["claim"]))["model"] == "/models/qwen:Q4_K_M"
    assert settings_of(helm4.template(MATRIX["hostpath"]))["model"] == "/models"
    assert settings_of(helm4.template(HUB))["model"] == "hf://owner/repo:Q4_K_M"
    assert "model" not in settings_of(helm4.template({}))


def test_secrets_hold_the_keys_and_the_token_and_are_mounted(helm4: Helm) -> None:
    values = {"apiKeys": {"values": ["one", "two"]}, "model": {"source": "hub", "hub": {"reference": "hf://owner/repo", "token": "hf_x"}}}
    manifests = helm4.template(values)
    secrets = {manifest["metadata"]["name"]: manifest["data"] for manifest in manifests if manifest["kind"] == "Secret"}
    decoded = {name: {key: base64.b64decode(text).decode() for key, text in data.items()} for name, data in secrets.items()}
    assert decoded == {"tandem-keys": {"keys": "one\ntwo", "metrics": "one"}, "tandem-hub": {"token": "hf_x"}}
    assert volume(manifests, "keys")["secret"]["secretName"] == "tandem-keys"
    assert volume(manifests, "hub-token")["secret"]["secretName"] == "tandem-hub"
    settings = settings_of(manifests)
    assert (settings["api_key_file"], settings["hub_token_file"]) == ("/etc/tandem/keys/keys", "/etc/tandem/hub/token")
    assert "hf_x" not in str([manifest for manifest in manifests if manifest["kind"] != "Secret"])


def test_ports_have_a_protocol_and_quantities_are_text(helm4: Helm) -> None:
    manifests = helm4.template(EVERYTHING)
    ports = of_kind(manifests, "Service")["spec"]["ports"] + container_of(manifests)["ports"]
    assert all(port["protocol"] == "TCP" for port in ports)
    resources = container_of(manifests)["resources"]
    assert all(isinstance(value, str) for part in ("limits", "requests") for value in resources[part].values())


# Refusals

REFUSED: list[tuple[Manifest, str]] = [
    ({"memory": {"limit": "20Gi"}, "model": {"source": "claim", "claim": "c", "sizeGiB": 17}}, "memory.limit is 20480Mi, but /dev/shm"),
    (
        {"memory": {"shm": "16Gi"}, "model": {"source": "claim", "claim": "c", "sizeGiB": 17}},
        "memory.shm is 16384Mi, but a model of 17408Mi",
    ),
    ({"cards": "host", "gpu": {"dra": {"enabled": True}}}, "cards is host, but gpu.dra.enabled claims GPUs"),
    ({"cards": "host", "gpu": {"products": ["x"]}}, "cards is host, but gpu.products asks for nodes with GPUs"),
    ({"gpu": {"count": 1, "peerCheck": "require"}}, "there is no second card to reach"),
    ({"cards": "host", "gpu": {"peerCheck": "require"}}, "there are no GPUs to try"),
    ({"cpu": {"request": "4", "limit": "3500m"}}, "cpu.limit is 3500m, but cpu.request is 4"),
    ({"gpu": {"count": 1}, "settings": {"elastic": {"enabled": True}}}, "settings.elastic.enabled needs two cards, but gpu.count is 1"),
    ({"settings": {"elastic": {"hold_s": 5}}}, "settings.elastic has no effect without settings.elastic.enabled"),
    ({"settings": {"elastic": {"enabled": True, "peer": False, "link": False}}}, "with neither peer nor link"),
    (
        {"settings": {"elastic": {"enabled": True, "link": False, "link_threads": 4}}},
        "settings.elastic.link_threads has no effect while settings.elastic.link is off",
    ),
    ({"settings": {"default_max_tokens": 200, "max_tokens_limit": 100}}, "settings.default_max_tokens (200) is larger than"),
    ({"ingress": {"enabled": True, "hosts": ["*.example"]}}, "*.example is no name that the server could compare with Host"),
    ({"settings": {"elastic": {"enabled": True}, "slots": 0}}, "needs expert slots to share, but settings.slots is 0"),
    ({"settings": {"context": 4096, "chunk": 8192}}, "settings.chunk (8192) is larger than settings.context (4096)"),
    ({"gpu": {"products": ["x"], "dra": {"enabled": True}}}, "write the product into gpu.dra.selectors"),
    ({"model": {"source": "hub"}}, "model.source is hub, but model.hub.reference is empty"),
    ({"model": {"source": "claim"}}, "model.source is claim, but model.claim is empty"),
    ({"model": {"source": "demo", "claim": "c"}}, "model.source is demo, but model.claim names another source"),
    ({"model": {"path": "m.gguf"}}, "model.source demo has none; leave model.path empty"),
    ({"model": {**HUB["model"], "hub": {**HUB["model"]["hub"], "download": "job"}}}, "job and server would have no folder in common"),
    ({"settings": {"port": 9000}}, "settings.port is set by the chart"),
    ({"settings": {"cards": "cuda:0"}}, "settings.cards is set by cards and gpu.count"),
    (
        {"settings": {"url_prefix": "/x"}, "virtualService": EVERYTHING["virtualService"]},
        "settings.url_prefix is set by virtualService.prefix",
    ),
    ({"storage": {"kind": "existing"}}, "storage.existingClaim is empty"),
    ({"storage": {"existingClaim": "c"}}, "storage.existingClaim is given, but storage.kind is none"),
    ({"storage": {"kind": "new"}, "replicas": 2}, "2 replicas cannot share a volume that one node may mount"),
    ({"storage": {"kind": "new", "size": "10Gi"}, **HUB}, "storage.size is 10Gi, but the model alone has 17 GiB"),
    ({"apiKeys": {"values": ["a"], "existingSecret": "s"}}, "apiKeys.values and apiKeys.existingSecret are both given"),
    (
        {"model": {**HUB["model"], "hub": {**HUB["model"]["hub"], "token": "hf_x"}}},
        "model.hub.token and model.hub.tokenSecret are both given",
    ),
    ({"ingress": {"enabled": True}}, "ingress.enabled needs ingress.hosts"),
    ({"httpRoute": {"enabled": True}}, "httpRoute.enabled needs httpRoute.parentRefs"),
    ({"virtualService": {"enabled": True}}, "virtualService.enabled needs virtualService.gateways"),
    ({"virtualService": {**EVERYTHING["virtualService"], "prefix": "x"}}, "it must begin with a slash"),
    ({"drain": {"graceSeconds": 30}}, "drain.graceSeconds is 30, but preStop (5), settings.drain_s (30)"),
]


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=[sentence[:40] for _, sentence in REFUSED])
def test_a_contradiction_is_refused_with_a_sentence(both_helms: Helm, values: Manifest, sentence: str) -> None:
    assert sentence in both_helms.refusal(values)


def test_every_refusal_of_the_chart_is_tried(helm4: Helm) -> None:
    seen = "".join(helm4.refusal(values) for values, _ in REFUSED)
    seen += "".join(helm4.refusal(values, "1.30") for _, values in NEWER.values())
    sentences = re.findall(r'fail (?:\(printf )?"([^"]+)"', (CHART / "templates" / "_checks.tpl").read_text())
    assert sentences
    for sentence in sentences:
        longest = max(re.split(r"%[a-z]", sentence), key=len)
        assert longest in seen, f"nothing tries: {sentence}"


@pytest.mark.parametrize(
    "values",
    [
        {"gpuu": 2},
        {"gpu": {"count": 3}},
        {"model": {"sizeGiB": 0}},
        {"model": {"sizeGiB": "17"}},
        {"settings": {"prot": 1}},
        {"settings": {"context": "many"}},
        {"settings": {"cors_origins": ["lab.example/"]}},
        {"settings": {"allowed_hosts": ["https://lab.example"]}},
        {"memory": {"limit": "lots"}},
        {"service": {"port": 0}},
        {"model": {"source": "hub", "hub": {"reference": "owner/repo"}}},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_the_schema(both_helms: Helm, values: Manifest) -> None:
    assert "values don't meet the specifications of the schema" in both_helms.refusal(values)


# The schema


def test_the_schema_is_the_one_that_is_generated() -> None:
    assert SCHEMA.read_text() == schema_text(), "run python scripts/chart_schema.py"


def test_the_check_of_the_schema_says_when_it_is_not_current() -> None:
    done = subprocess.run([sys.executable, "scripts/chart_schema.py", "--check"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0


def test_the_default_values_are_all_the_values_there_are() -> None:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    assert list(values) == [field.alias or name for name, field in ChartValues.model_fields.items() if name != "global_"]


def test_the_dashboard_shows_metrics_that_there_are(helm4: Helm) -> None:
    manifests = helm4.template({"dashboard": {"enabled": True}})
    board = next(manifest for manifest in manifests if manifest["metadata"]["name"].endswith("-dashboard"))
    dashboard = json.loads(board["data"]["tandem.json"])
    used = {name for panel in dashboard["panels"] for target in panel["targets"] for name in re.findall(r"tandem_\w+", target["expr"])}
    source = "".join(path.read_text() for path in (ROOT / "appliance" / "web").glob("*metrics.py"))
    known = set(re.findall(r'"(tandem_\w+)"', source))
    assert used
    assert {name.removesuffix("_total") for name in used} <= known
