"""What the cluster file says to the connector: the ``pdctl`` key of ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

logger = logging.getLogger("vllm.pdctl_connector.settings")

KEY: Final = "kv_connector_extra_config.pdctl"


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
        progress_thread: let NIXL run its own progress thread (a core per rank, always busy) beside the writer.
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
        """Read the settings. A key that does not exist is named in the log, and changes nothing.

        Raises:
            ValueError: a value has the wrong type or is out of range; the message names the key.
        """
        given = extra.get("pdctl") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"{KEY} must be a mapping, not {given!r}")
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name in kinds:
                values[name] = _checked(name, value, kinds[name])
            else:
                near = difflib.get_close_matches(str(name), kinds, 1)
                logger.warning("%s.%s does not exist and is ignored%s", KEY, name, f"; {near[0]}?" if near else "")
        settings = cls(**values)
        if not 0 < settings.timeout_s < math.inf:
            raise ValueError(f"{KEY}.timeout_s must be above 0, not {settings.timeout_s}")
        if not 0 < settings.waiting_share <= 1:
            raise ValueError(f"{KEY}.waiting_share must be above 0 and at most 1, not {settings.waiting_share}")
        if not 0 <= settings.telemetry_port <= 65535:
            raise ValueError(f"{KEY}.telemetry_port must be a port, or 0 for none, not {settings.telemetry_port}")
        if not settings.telemetry_host:
            raise ValueError(f"{KEY}.telemetry_host must not be empty; 0.0.0.0 is every address")
        return settings


def _checked(name: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # A bool is an int to Python, and not to a reader.
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{KEY}.{name} must be a {kind.__name__}, not {value!r}")
    return value
