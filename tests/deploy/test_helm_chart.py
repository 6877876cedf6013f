"""The Helm chart and the compose file: what they render agrees with the server that they start."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.server.options import ServerOptions
from support.doc_blocks import ROOT
from support.helm_templates import HelmError, render_chart

CHART = ROOT / "deploy/helm/quire"
KEY = {"apiKey": "secret"}
EVERYTHING = {
    **KEY,
    "modelURL": "/models/m",
    "extraArgs": ["--max-model-len", "4096"],
    "env": [{"name": "HF_TOKEN", "value": "x"}],
    "envFromSecret": "more",
    "imagePullSecret": "pull",
    "limitCPU": 4,
    "requestGPU": 1,
    "runtimeClassName": "nvidia",
    "pvcEnabled": True,
    "storageClass": "fast",
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "podAnnotations": {"a": "b"},
}


def container(**values: object) -> dict[str, Any]:
    (found,) = render_chart(CHART, "r", **values)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_little_is_rendered_by_default_and_everything_that_is_asked_for() -> None:
    assert render_chart(CHART, "r", **KEY).keys() == {"Deployment", "Service", "Secret"}
    assert render_chart(CHART, "r", **EVERYTHING).keys() == {
        "Deployment", "Service", "Secret", "PersistentVolumeClaim", "HorizontalPodAutoscaler", "ServiceMonitor",
        "NetworkPolicy",
    }  # fmt: skip


@pytest.mark.parametrize("values", [KEY, EVERYTHING], ids=["defaults", "everything"])
def test_parts_name_each_other(values: dict[str, Any]) -> None:
    found = render_chart(CHART, "r", **values)
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        found["Deployment"]["spec"]["selector"]["matchLabels"], found["Service"]["spec"]["selector"],
        *[found[kind]["spec"][name]["matchLabels"] for kind, name in
          [("ServiceMonitor", "selector"), ("NetworkPolicy", "podSelector")] if kind in found],
    ]  # fmt: skip
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert {manifest["metadata"]["name"] for manifest in found.values()} == {"r-quire"}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert ("models" in mounted) == ("PersistentVolumeClaim" in found)
    assert found["Deployment"]["spec"].keys() >= {"template"}
    assert ("replicas" in found["Deployment"]["spec"]) != ("HorizontalPodAutoscaler" in found)


def test_flags_are_the_servers() -> None:
    arguments = container(**EVERYTHING)["args"]
    assert arguments[0] == "/models/m"
    assert arguments[-2:] == ["--max-model-len", "4096"]
    fields = {f"--{name.replace('_', '-')}" for name in ServerOptions.__dataclass_fields__}
    assert {argument.partition("=")[0] for argument in arguments[1:-2]} <= fields
    assert "/models/m" not in container(**KEY)["args"]


def test_pod_outlives_the_drain() -> None:
    for seconds in (0, 30, 600):
        pod = render_chart(CHART, "r", **KEY, shutdownTimeout=seconds)["Deployment"]["spec"]["template"]["spec"]
        assert f"--shutdown-timeout={seconds}" in pod["containers"][0]["args"]
        assert pod["terminationGracePeriodSeconds"] > seconds
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["quire"]
    assert int(compose["stop_grace_period"].rstrip("s")) > ServerOptions().shutdown_timeout


def test_keys_come_from_a_secret_and_there_is_always_one() -> None:
    with pytest.raises(HelmError, match="apiKey or existingSecret"):
        render_chart(CHART, "r")
    assert render_chart(CHART, "r", **KEY)["Secret"]["stringData"] == {"api-key": "secret"}
    own = render_chart(CHART, "r", existingSecret="ours", serviceMonitor={"enabled": True})
    assert "Secret" not in own
    (variable,) = [each for each in container(existingSecret="ours")["env"] if each["name"] == "QUIRE_API_KEY"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "ours", "key": "api-key"}
    assert own["ServiceMonitor"]["spec"]["endpoints"][0]["authorization"]["credentials"]["name"] == "ours"


def test_probes_ask_for_what_the_server_answers_without_a_key() -> None:
    found = container(**KEY)
    assert found["livenessProbe"]["httpGet"]["path"] == found["startupProbe"]["httpGet"]["path"] == "/health"
    assert found["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert found["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"cpu": "2", "memory": "4Gi"},
    }  # fmt: skip
    assert container(**EVERYTHING)["resources"]["limits"] == {"cpu": "4", "memory": "4Gi", "nvidia.com/gpu": 1}


def test_autoscaler_goes_by_a_metric_that_is_served() -> None:
    (metric,) = render_chart(CHART, "r", **EVERYTHING)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"].replace("_", ":", 1)
    assert f"| `{name}` | gauge |" in (ROOT / "docs/metrics.md").read_text()


def test_image_has_no_shell_between_the_server_and_its_signals() -> None:
    lines = (ROOT / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["quire", "serve"]' in lines
    (port,) = re.findall(r"EXPOSE (\d+)", lines)
    assert int(port) == ServerOptions().port


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not here")
def test_helm_renders_the_same(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(EVERYTHING))
    command = ["helm", "template", "r", CHART, "--values", values]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]
    assert {manifest["kind"]: manifest for manifest in found} == render_chart(CHART, "r", **EVERYTHING)
