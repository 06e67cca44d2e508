"""docs/connector.md says something about every setting, metric, endpoint, stage and outcome."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pdctl_connector import ledger, telemetry, wire, writer
from pdctl_connector.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "connector.md").read_text()
ROWS = {row.split("|")[1].strip(): row for row in PAGE.splitlines() if row.startswith("|")}


def metric_names() -> list[str]:
    source = Path(telemetry.__file__).read_text()
    names = re.findall(r'(Gauge|Counter|Histogram)MetricFamily\(\s*"(pdctl_\w+)"', source)
    names += [("Histogram", name) for name in re.findall(r'\.family\(\s*"(pdctl_\w+)"', source)]
    return sorted(name + ("_total" if kind == "Counter" else "") for kind, name in names)


def test_the_search_finds_every_metric() -> None:
    shown = telemetry.Telemetry(role="", engine_id="", rank=0, settings=Settings()).metrics().decode()
    found = metric_names()
    assert len(found) == len(set(found)) >= 13
    for name in re.findall(r"^# TYPE (\w+)", shown, re.MULTILINE):
        assert name in found


@pytest.mark.parametrize("name", metric_names())
def test_every_metric_has_a_row(name: str) -> None:
    assert [row for row in ROWS if re.fullmatch(rf"`{name}(\{{[a-z,]+\}})?`", row)]


def test_no_metric_is_described_that_is_not_there() -> None:
    assert set(re.findall(r"`(pdctl_(?!connector)\w+)", PAGE)) - set(metric_names()) == set()


@pytest.mark.parametrize("name", Settings.__dataclass_fields__)
def test_every_setting_has_a_row_with_its_default(name: str) -> None:
    default = Settings.__dataclass_fields__[name].default
    cell = ROWS[f"`{name}`"].split("|")[2].strip().strip("`")
    if isinstance(default, bool):
        assert cell == str(default).lower()
    else:
        assert cell == (default if isinstance(default, str) else f"{default:g}")


@pytest.mark.parametrize("path", ["/healthz", "/transfers", "/metrics"])
def test_every_endpoint_has_a_section(path: str) -> None:
    assert re.search(rf"^### `GET {path}", PAGE, re.MULTILINE)


def test_every_stage_outcome_and_state_is_named() -> None:
    words = {name for stages in ledger.STAGES.values() for name in stages}
    words |= {name for outcomes in ledger.OUTCOMES.values() for name in outcomes}
    assert {word for word in words | {"idle", "busy", "stuck", "dead"} if f"`{word}`" not in PAGE} == set()


def test_numbers_are_those_of_the_code() -> None:
    assert f"no beat for {telemetry.STUCK_S:g} s" in PAGE
    assert f"most {telemetry.RECORDS_LIMIT}" in PAGE
    assert f"every {writer.IN_FLIGHT_S * 1000:g} ms while a WRITE" in PAGE
    assert f"every {writer.EXPECTING_S * 1000:g} ms while something" in PAGE
    assert f"every {writer.IDLE_S * 1000:g} ms otherwise" in PAGE
    assert f"push-pdctl-{wire.WIRE_VERSION}" in PAGE
