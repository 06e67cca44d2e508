"""What the cluster file says to the connector: the ``pdctl`` key of ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Settings of one instance; every field has a default, so that the connector works without pdctl too.

    Attributes:
        timeout_s: a transfer that shows no progress for so long has failed.
        telemetry_host: where ranks serve their telemetry.
        telemetry_port: port of rank 0 (rank n: plus n); 0 switches it off.
        cluster: name of the cluster, for telemetry.
        instance: name of the instance, for telemetry.
        waiting_share: share of the decode side's KV blocks that requests waiting for a transfer may hold together.
        progress_thread: let NIXL run its own progress thread (a core per rank, always busy) beside the writer's polling.
    """

    timeout_s: float = 30.0
    telemetry_host: str = "127.0.0.1"
    telemetry_port: int = 0
    cluster: str = ""
    instance: str = ""
    waiting_share: float = 0.7
    progress_thread: bool = True

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Settings:
        """Read the settings.

        Raises:
            ValueError: a value has the wrong type or is out of range; the message names the key.
        """
        given = extra.get("pdctl") or {}
        if not isinstance(given, Mapping):
            raise ValueError("kv_connector_extra_config.pdctl must be a mapping")
        known = {name: type(getattr(cls, name)) for name in cls.__dataclass_fields__}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                continue
            kind = known[name]
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise ValueError(f"kv_connector_extra_config.pdctl.{name} must be a {kind.__name__}, not {value!r}")
            values[name] = value
        settings = cls(**values)
        if not settings.timeout_s > 0:
            raise ValueError("kv_connector_extra_config.pdctl.timeout_s must be above 0")
        if not 0 < settings.waiting_share <= 1:
            raise ValueError("kv_connector_extra_config.pdctl.waiting_share must be above 0 and at most 1")
        if not 0 <= settings.telemetry_port <= 65535:
            raise ValueError("kv_connector_extra_config.pdctl.telemetry_port must be a port, or 0 for none")
        return settings
