"""docs/grafana/quire.json: a dashboard that Grafana can import, and that shows every metric there is and no other."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.metrics.page import OLDER_NAMES, Metrics

DASHBOARD = json.loads((Path(__file__).parents[1] / "docs/grafana/quire.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SELECTOR = re.compile(r"((?:vllm|quire):\w+)(\{[^}]*\})")
GRID_WIDTH = 24


@pytest.fixture(scope="module")
def families() -> dict[str, set[str]]:
    """Return the families of a page but those of the process and under older names, and the samples' names of each."""
    text = Metrics("tiny").exposition()[0].decode()
    return {
        family.name: {sample.name for sample in family.samples}
        for family in text_string_to_metric_families(text)
        if not family.name.startswith("process_") and family.name not in OLDER_NAMES.values()
    }


def test_expressions_name_samples_that_there_are(families: dict[str, set[str]]) -> None:
    shown = {name for expression in EXPRESSIONS for name in re.findall(r"\w+:\w+", expression)}
    assert shown <= set().union(*families.values())


def test_every_metric_is_on_a_panel(families: dict[str, set[str]]) -> None:
    shown = {name for expression in EXPRESSIONS for name, _ in SELECTOR.findall(expression)}
    assert [family for family, samples in families.items() if not samples & shown] == []


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_selector_asks_for_the_chosen_servers(expression: str) -> None:
    selectors = SELECTOR.findall(expression)
    assert selectors
    for name, labels in selectors:
        chosen = 'model_name=~"$model_name",' if name.startswith("vllm:") else ""
        assert labels == f'{{{chosen}instance=~"$instance",engine=~"$engine"}}'


def test_labels_of_legends_and_sums_are_labels_of_the_metrics() -> None:
    text = Metrics("tiny").exposition()[0].decode()
    labels = {
        sample.name: set(sample.labels) | {"instance"}             # added by Prometheus
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for panel in PANELS:
        for target in panel["targets"]:
            legend, expression = target["legendFormat"], target["expr"]
            used = {*re.findall(r"\{\{(\w+)\}\}", legend), *re.findall(r"by \((\w+)\)", expression)}
            for name, _ in SELECTOR.findall(expression):
                assert used <= labels[name], target


def test_every_panel_reads_the_chosen_data_source() -> None:
    sources = [owner["datasource"] for panel in PANELS for owner in (panel, *panel["targets"])]
    sources += [variable["datasource"] for variable in VARIABLES.values() if variable["type"] == "query"]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert (VARIABLES["datasource"]["type"], VARIABLES["datasource"]["query"]) == ("datasource", "prometheus")


def test_variables_used_are_variables_that_there_are() -> None:
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(DASHBOARD)))
    assert used == {*VARIABLES, "__rate_interval"}                  # the last is Grafana's own


def test_rates_go_over_the_interval_that_grafana_chooses() -> None:
    assert set(re.findall(r"\[([^]]*)\]", " ".join(EXPRESSIONS))) == {"$__rate_interval"}


def test_dashboard_has_what_an_import_needs() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["id"] is None                                  # the number is the importing Grafana's to give
    assert DASHBOARD["title"]
    assert DASHBOARD["uid"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)), panel["title"]


def test_panels_fit_and_do_not_overlap() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        place = panel["gridPos"]
        return {(place["x"] + column, place["y"] + row) for column in range(place["w"]) for row in range(place["h"])}

    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= GRID_WIDTH for panel in DASHBOARD["panels"])
    assert all(not cells(one) & cells(other) for one, other in combinations(DASHBOARD["panels"], 2))
