"""What the checks of the model share: its config.json per host and per role. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdctl.doctor.checks.collected import Collected, collect
from pdctl.doctor.context import Context
from pdctl.doctor.facts import ModelFacts
from pdctl.doctor.findings import Result, skipped
from pdctl.doctor.model_shape import ModelShape, read_shape
from pdctl.doctor.role_options import config_overrides
from pdctl.spec import Role


@dataclass(frozen=True)
class RoleShape:
    """The model as a role runs it.

    Attributes:
        shape: its layout; None if config.json is known on no host of the role.
        hosts: all hosts of the role.
        unknown: why it is not known, as a *skipped* result.
    """

    shape: ModelShape | None
    hosts: tuple[str, ...]
    unknown: Result


def hosts_of(context: Context, role: Role) -> tuple[str, ...]:
    """Hosts of a role, each once."""
    instances = context.plan.prefill if role == "prefill" else context.plan.decode
    return tuple(dict.fromkeys(instance.host for instance in instances))


def known_models(context: Context) -> Collected[ModelFacts]:
    """What the hosts of prefill and decode reported of the model."""
    return collect(context, context.vllm_hosts, "model", lambda facts: facts.model)


def role_shape(context: Context, role: Role) -> RoleShape:
    """The model's layout for a role, by the first of its hosts (else of the other role) that has config.json.

    That all hosts have the same is a check of its own (MOD003).
    """
    hosts = hosts_of(context, role)
    found = known_models(context).found
    config: Mapping[str, object] = next(
        (found[host].config for host in (*hosts, *context.vllm_hosts) if host in found and found[host].config), {}
    )
    unknown = skipped(*hosts, message="not checked: the model's config.json is known on no host (MOD001)")
    shape = read_shape(config, config_overrides(context.spec, role)) if config else None
    return RoleShape(shape, hosts, unknown)
