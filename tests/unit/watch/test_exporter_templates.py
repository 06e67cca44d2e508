"""Templates and docs name metrics, options and codes that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pdctl.cli.main import INTERRUPTED
from pdctl.cli.watch import command
from pdctl.watch.acting_thread import CLOSE_S
from pdctl.watch.exporter import METRICS, exported_names
from pdctl.watch.headless import event_json
from tests.unit.watch.frames import SNAPSHOT, alert, frame

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = ROOT / "templates" / "watch"
METRIC = re.compile(r"\bpdctl_[a-z0-9_]+")
SELECTOR = re.compile(r"(pdctl_[a-z0-9_]+)(?:\{([^}]*)\})?")


def labels_of(name: str) -> set[str]:
    return set(METRICS[name.removesuffix("_total") if name not in METRICS else name][1])


def queries() -> list[tuple[str, str]]:
    dashboard = json.loads((TEMPLATES / "grafana-dashboard.json").read_text())
    found = [(p["title"], target["expr"]) for p in dashboard["panels"] for target in p["targets"]]
    rules = YAML(typ="safe").load((TEMPLATES / "prometheus-rules.yaml").read_text())
    found += [(rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]
    assert len(found) > 30
    return found


@pytest.mark.parametrize(("where", "query"), queries())
def test_queries_name_metrics_and_labels_that_exist(where: str, query: str) -> None:
    selectors = SELECTOR.findall(query)
    assert selectors
    for name, matchers in selectors:
        assert name in exported_names(), name
        used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))
        assert used <= labels_of(name), (name, used)
        for grouped in re.findall(r"\bby \(([^)]*)\)", query):
            if len(selectors) == 1:
                assert {label.strip() for label in grouped.split(",")} <= labels_of(name)
    for opening, closing in ("()", "{}", "[]"):
        assert query.count(opening) == query.count(closing)


def test_counters_are_asked_for_their_rate_or_increase() -> None:
    for _, query in queries():
        for name in METRIC.findall(query):
            if name.endswith("_total") and "restarts" not in name:
                assert re.search(rf"(?:rate|increase)\({name}", query), query


def test_the_rules_are_complete() -> None:
    rules = YAML(typ="safe").load((TEMPLATES / "prometheus-rules.yaml").read_text())
    for group in rules["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert re.fullmatch(r"Pdctl[A-Za-z]+", rule["alert"])
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert set(rule["annotations"]) == {"summary", "description"}
            assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
            # What the text shows of a label must be left by the query.
            shown = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
            kept = re.search(r"\bby \(([^)]*)\)", rule["expr"])
            assert shown <= ({label.strip() for label in kept[1].split(",")} if kept else {"sink", "result"})


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    dashboard = json.loads((TEMPLATES / "grafana-dashboard.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "cluster"]
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel["targets"]:
            assert target["expr"].count('cluster=~"$cluster"') == len(METRIC.findall(target["expr"]))


def test_the_scrape_keeps_the_labels_of_the_watch() -> None:
    (job,) = YAML(typ="safe").load((TEMPLATES / "prometheus-scrape.yaml").read_text())["scrape_configs"]
    assert job["honor_labels"] is True
    assert "instance" in labels_of("pdctl_alert")


def test_the_unit_runs_a_command_that_exists() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((TEMPLATES / "pdctl-watch.service").read_text())
    words = shlex.split(parser["Service"]["ExecStart"])
    assert words[:3] == ["/usr/bin/env", "pdctl", "watch"]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    context = command.make_context("watch", [word.replace("${PDCTL_EXPORTER}", "127.0.0.1:9109") for word in words[3:]])
    assert context.params["exporter"] == ("127.0.0.1", 9109)
    assert parser["Service"]["SuccessExitStatus"] == str(INTERRUPTED)
    # A restart that is under way is waited for; the ssh processes that it needs must not be told to end with it.
    assert parser["Service"]["KillMode"] == "mixed"
    assert float(parser["Service"]["TimeoutStopSec"]) >= CLOSE_S + 30


def test_legends_tell_series_apart() -> None:
    dashboard = json.loads((TEMPLATES / "grafana-dashboard.json").read_text())
    seen = 0
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            if panel["type"] == "table":
                continue
            grouped = {
                label.strip() for by in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for label in by.split(",")
            }
            assert grouped <= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])), panel["title"]
            seen += bool(grouped)
    assert seen > 10


def documented() -> str:
    return (ROOT / "docs" / "watch.md").read_text()


def test_every_metric_is_documented_with_its_labels_and_no_other() -> None:
    table = dict(
        re.findall(r"^\| `(pdctl_[a-z0-9_]+)\{([a-z,_]*)\}` \| (?:gauge|counter) \|", documented(), re.MULTILINE)
    )
    assert set(table) == exported_names()
    for name, labels in table.items():
        assert set(labels.split(",")) == labels_of(name)
    assert set(METRIC.findall(documented())) <= exported_names()


def test_every_option_is_in_the_docs_or_says_all_in_its_help() -> None:
    text = documented()
    missing = [p.opts[-1] for p in command.params if p.opts[-1].startswith("--") and f"`{p.opts[-1]}" not in text]
    assert set(missing) <= {"--file", "--interval", "--headless"}


def test_every_key_of_the_json_lines_is_documented() -> None:
    text = documented()
    shown = event_json(frame(alert()).events[0], SNAPSHOT)
    for key in shown:
        assert f"`{key}`" in text or key == "alert"
    for key in shown["alert"]:
        assert f".{key}`" in text, key


def test_every_template_is_documented() -> None:
    for path in TEMPLATES.iterdir():
        assert f"`{path.name}`" in documented()
