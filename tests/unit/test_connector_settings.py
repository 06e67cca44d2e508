"""What the connector reads of its configuration."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pdctl_connector.settings import Settings


@pytest.mark.parametrize("extra", [{}, {"pdctl": {}}, {"pdctl": None}, {"backends": ["UCX"]}])
def test_nothing_given_is_the_defaults(extra: dict[str, Any]) -> None:
    settings = Settings.from_extra_config(extra)
    assert settings == Settings()
    assert settings.telemetry_host == "127.0.0.1"
    assert settings.telemetry_port == 0


def test_every_field_is_read() -> None:
    given = {
        "timeout_s": 12,
        "telemetry_host": "0.0.0.0",
        "telemetry_port": 18100,
        "cluster": "qwen",
        "instance": "prefill-0",
        "waiting_share": 1,
        "progress_thread": False,
    }
    assert set(given) == set(Settings.__dataclass_fields__)
    settings = Settings.from_extra_config({"pdctl": given})
    assert settings == Settings(**{**given, "timeout_s": 12.0, "waiting_share": 1.0})
    assert type(settings.timeout_s) is float


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", -1.5),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", "30"),
        ("timeout_s", True),
        ("telemetry_port", -1),
        ("telemetry_port", 65536),
        ("telemetry_port", 1.0),
        ("telemetry_port", True),
        ("telemetry_host", ""),
        ("telemetry_host", 127),
        ("waiting_share", 0),
        ("waiting_share", 1.01),
        ("progress_thread", 1),
        ("progress_thread", "no"),
        ("cluster", None),
    ],
)
def test_a_bad_value_is_refused_by_its_key(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"kv_connector_extra_config\.pdctl\.{name} must"):
        Settings.from_extra_config({"pdctl": {name: value}})


@pytest.mark.parametrize("given", [["timeout_s"], "timeout_s=3", 7])
def test_pdctl_is_a_mapping(given: Any) -> None:
    with pytest.raises(ValueError, match="pdctl must be a mapping"):
        Settings.from_extra_config({"pdctl": given})


def test_an_unknown_key_is_named_with_the_one_that_was_meant(caplog: pytest.LogCaptureFixture) -> None:
    assert Settings.from_extra_config({"pdctl": {"timeout": 3, 4: 5}}) == Settings()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "pdctl.timeout does not exist and is ignored; timeout_s?" in caplog.text
    assert "pdctl.4 does not exist" in caplog.text
