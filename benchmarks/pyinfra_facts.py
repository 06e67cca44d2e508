"""Facts of many hosts with pyinfra, comparable to those of `pdctl doctor`: the other side of doctor_32_hosts.py.

    python benchmarks/pyinfra_facts.py SSH_CONFIG KNOWN_HOSTS PYTHON HOST...

Runs with any Python that has pyinfra (it needs nothing of pdctl) and prints one line of JSON: the seconds from making
the inventory to having every fact, and how many facts and hosts there were. All hosts are asked at once, each for one
fact after the other, which is the faster way of those that pyinfra has.
"""

from __future__ import annotations

import json
import shlex
import sys
import time

# gevent replaces parts of the standard library, before anything else is loaded.
import pyinfra  # noqa: F401  # isort: skip
import gevent
from pyinfra.api import Config, Inventory, State
from pyinfra.api.connect import connect_all
from pyinfra.api.facts import get_fact
from pyinfra.context import ctx_host, ctx_state
from pyinfra.facts import hardware, pip, server


def wanted(python: str) -> list[tuple[type, dict[str, object]]]:
    """The facts, as near to the doctor's as pyinfra has them; the rest as plain commands."""
    versions = "import importlib.metadata as m; print({d.metadata['Name']: d.version for d in m.distributions()})"
    commands = (
        "cat /proc/self/limits",
        "cat /proc/self/cgroup",
        "df -Pk ~ /tmp /dev/shm",
        "ls /sys/class/infiniband /opt/amazon/efa/bin /dev/infiniband || true",
        "command -v fi_info nvidia-smi neuron-ls || true",
        "ip route get 127.0.0.1",
        "env",
        f"{shlex.quote(python)} -c {shlex.quote(versions)}",
    )
    return [
        (server.Hostname, {}),
        (server.Kernel, {}),
        (server.KernelVersion, {}),
        (server.Arch, {}),
        (server.OsRelease, {}),
        (server.User, {}),
        (server.Date, {}),
        (server.Mounts, {}),
        (server.KernelModules, {}),
        (server.Sysctl, {"keys": ["kernel.sched_autogroup_enabled", "net.ipv4.ip_local_port_range"]}),
        (server.Ports, {}),
        (hardware.Cpus, {}),
        (hardware.Memory, {}),
        (hardware.NetworkDevices, {}),
        (pip.PipPackages, {"pip": f"{python} -m pip"}),
        *((server.Command, {"command": command}) for command in commands),
    ]


def main() -> None:
    config, known_hosts, python, *names = sys.argv[1:]
    began = time.perf_counter()
    data = {
        "ssh_config_file": config,
        "ssh_known_hosts_file": known_hosts,
        "ssh_allow_agent": False,
        "ssh_look_for_keys": False,
    }
    inventory = Inventory((names, {}), override_data=data)
    state = State(inventory, Config(PARALLEL=len(names), CONNECT_TIMEOUT=30))
    with ctx_state.use(state):
        connect_all(state)
        hosts = list(state.inventory.get_active_hosts())
        facts = wanted(python)

        def ask(host) -> int:
            with ctx_state.use(state), ctx_host.use(host):
                return sum(get_fact(state, host, kind, kwargs=arguments) is not None for kind, arguments in facts)

        answered = [job.get() for job in [gevent.spawn(ask, host) for host in hosts]]
    took_s = time.perf_counter() - began
    print(json.dumps({"took_s": took_s, "hosts": len(hosts), "facts": min(answered, default=0)}))


if __name__ == "__main__":
    main()
