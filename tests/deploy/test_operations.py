"""Files for operators: alert rules, the unit of systemd, the compose file, the example of Ray Serve."""

import configparser
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.metrics.page import Metrics
from quire.server.options import ServerOptions
from support.doc_blocks import ROOT, blocks_of
from support.http_app import make_app, serving

ALERTS = ROOT / "deploy/alerts.yaml"
REFERENCE = (ROOT / "docs/reference.md").read_text()
UNIT = ROOT / "deploy/quire.service"
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
NAME = re.compile(r"\b(?:vllm|quire):\w+")
SELECTOR = re.compile(r"((?:vllm|quire):\w+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def samples() -> dict[str, list[dict[str, str]]]:
    """Return the labels of the samples of a page by their names, with those that Prometheus adds."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(Metrics("tiny").exposition()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append({**sample.labels, "instance": "host:8000"})
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_alert_asks_for_metrics_and_labels_that_there_are(
    rule: dict[str, Any], samples: dict[str, list[dict[str, str]]]
) -> None:
    selected = SELECTOR.findall(rule["expr"])
    assert selected
    for name, matchers in selected:
        for label, kind, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers):
            values = {labels[label] for labels in samples[name]}
            assert values >= set(value.split("|") if kind == "=~" else [value])
        grouped = [label.strip() for names in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in names.split(",")]
        assert set(grouped) <= samples[name][0].keys()
        told = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert told <= (set(grouped) or samples[name][0].keys())
    texts = str(rule["annotations"])
    for flag in re.findall(r"--([a-z][a-z-]*)", texts):
        assert f"`--{flag}`" in REFERENCE
    assert {name for name in NAME.findall(texts) if name not in samples} == set()


def test_alerts_have_the_form_of_rules() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert re.findall(r"\[([^]]*)\]", rule["expr"]) == re.findall(r"\[(\d+[smh])\]", rule["expr"])
        for one, other in ("()", "{}", "[]"):
            assert rule["expr"].count(one) == rule["expr"].count(other)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
def test_promtool_reads_the_alerts() -> None:
    subprocess.run(["promtool", "check", "rules", ALERTS], check=True, capture_output=True)


def unit() -> dict[str, str]:
    """Return the settings of the service."""
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def test_unit_starts_the_server_and_outlives_its_drain() -> None:
    service = unit()
    _, command, *arguments = service["ExecStart"].split()
    assert command == "serve"
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    fields = {f"--{name.replace('_', '-')}" for name in ServerOptions.__dataclass_fields__} | {"--config"}
    assert given.keys() <= fields
    assert int(service["TimeoutStopSec"]) > int(given["--shutdown-timeout"]) == ServerOptions().shutdown_timeout
    assert service["KillMode"] == "mixed", "engines do not end before the drain"
    assert int(service["LimitNOFILE"]) > 2 * ServerOptions().max_connections


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/quire/bin/quire", sys.executable))  # what it starts must exist
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_file_asks_the_server_for_its_health() -> None:
    service = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["quire"]
    kind, command, *arguments = service["healthcheck"]["test"]
    assert (kind, command) == ("CMD", "python")
    assert service["ports"][0].rpartition(":")[2] == str(ServerOptions().port)
    app = make_app(api_key=("secret",))
    with serving(app) as port:
        asked = [argument.replace(f":{ServerOptions().port}/", f":{port}/") for argument in arguments]
        assert subprocess.run([sys.executable, *asked], check=False).returncode == 0
        app.state.service.is_draining = True
        assert subprocess.run([sys.executable, *asked], check=False, stderr=subprocess.DEVNULL).returncode == 1


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray warns
def test_examples_of_ray_serve_deploy_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.cluster import deployment

    deployed: list[tuple[Any, ...]] = []
    monkeypatch.setattr(deployment, "deploy", lambda *given: deployed.append(given))
    blocks = [block.text for block in blocks_of(ROOT / "docs/scaling.md") if block.language == "python"]
    (block,) = [text for text in blocks if "quire.cluster.deployment" in text]
    exec(compile(block, "scaling.md", "exec"), {})
    ((engine, server, cluster),) = deployed
    assert (engine.model, server.port) == ("MODEL", 8000)
    assert (cluster.min_replicas, cluster.max_replicas) == (1, 8)
