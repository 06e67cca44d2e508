"""Small plans for tests: a cluster file as plain values, and what comes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdctl.errors import ClusterFileError
from pdctl.plan import ClusterPlan, InstancePlan, make_plan
from pdctl.spec import parse

DIGEST = "0123456789abcdef" * 4
SECRET = "hf_sesame-open"
ENVIRON = {"TEST_TOKEN": SECRET}

BASE: dict[str, Any] = {
    "cluster": "qwen3",
    "model": "Qwen/Qwen3-32B",
    "accelerator": "cuda",
    "fabric": "tcp",
    "prefill": {"hosts": ["p1"]},
    "decode": {"hosts": ["d1"]},
    "router": {"host": "p1"},
}


def as_yaml(data: dict[str, Any]) -> str:
    """The text of a cluster file (JSON is nearly YAML): a dollar is written twice, and no surrogate pairs."""
    text = json.dumps(data, ensure_ascii=False).replace("$", "$$")
    return "".join(c if " " <= c <= "~" else f"\\U{ord(c):08x}" for c in text)


def planned(data: dict[str, Any], **arguments: Any) -> ClusterPlan:
    """Plan of a cluster file given as values."""
    spec = parse(as_yaml(data), file="cluster.yaml", environ={})
    return make_plan(spec, **{"environ": ENVIRON, "connector_digest": DIGEST, **arguments})


def changed(**sections: Any) -> dict[str, Any]:
    """`BASE` with other values; those of a section are added to it."""
    data: dict[str, Any] = json.loads(json.dumps(BASE))
    for name, value in sections.items():
        data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
    return data


def refused(data: dict[str, Any]) -> dict[str, str]:
    """Problems of a plan that cannot be: message and hint by key."""
    with pytest.raises(ClusterFileError) as caught:
        planned(data)
    return {problem.key: f"{problem.message} | {problem.hint}" for problem in caught.value.problems}


def transfer_config(instance: InstancePlan) -> dict[str, Any]:
    """What an instance gets as ``--kv-transfer-config``."""
    config: dict[str, Any] = json.loads(instance.argv[instance.argv.index("--kv-transfer-config") + 1])
    return config
