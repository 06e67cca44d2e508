"""The probe as one script: modules of the connector's package that are sent to a host and run there from memory."""

from __future__ import annotations

import functools

from pdctl.connector_package import connector_files

PREFIX = b"PDCTL-PROBE-1 "
"""What its answers start with."""

# In an order in which each needs only those before it.
_MODULES = ("probe_content", "probe_evidence", "probe_host", "probe", "probe_sweep", "probe_supervisor")
_PACKAGE = "pdctl_connector"

# The package's own `__init__` is left out: on a host where another version is installed, none of it is used.
_LOADER = f"""\
import sys, types
def load():
    package = types.ModuleType({_PACKAGE!r})
    package.__path__ = []
    sys.modules[{_PACKAGE!r}] = package
    for name, text in TEXTS.items():
        full = {_PACKAGE + "."!r} + name
        module = types.ModuleType(full)
        module.__package__ = {_PACKAGE!r}
        sys.modules[full] = module
        setattr(package, name, module)
        exec(compile(text, "pdctl/" + name + ".py", "exec"), module.__dict__)
    return package
def main(stream):
    load().probe_supervisor.main(stream, SOURCE)
def child(stream):
    load().probe_sweep.child(stream)
"""


@functools.cache
def probe_source() -> bytes:
    """The script for :func:`pdctl.hosts.conversation.talk`.

    Raises:
        PdctlError: the installation lacks the connector's package.
    """
    files = connector_files()
    texts = {name: files[f"{_PACKAGE}/{name}.py"].decode() for name in _MODULES}
    return f"TEXTS = {texts!r}\n{_LOADER}".encode()
