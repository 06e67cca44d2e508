"""Whether two results may be set against each other: the same model, software, flags, hosts and load. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pdctl.bench.results import Environment, InstanceFacts, Results
from pdctl.errors import UsageError
from pdctl.spec_yaml import printable

_NOTHING = "nothing"
_LONGEST = 160
"""Characters of a name or value: a file may hold anything, and this is for a terminal and for CI's logs."""

_MOST = 50
"""Differences of a file that an error names."""


def differences(one: Results, other: Results) -> list[str]:
    """Why two results may not be compared, each in words with both values; empty if they may.

    Modes may differ, and so may the seed (prompts are random anyway) and the answers that were compared. Each is one
    line of bounded length, without anything that a terminal would act on.
    """
    found = [
        *_plain(one.environment, other.environment),
        *_named("transfer setting", "", one.environment.transfer, other.environment.transfer),
        *_instances(one.environment.instances, other.environment.instances),
        *_versions(one.environment.instances, other.environment.instances),
        *_settings(one, other),
    ]
    return [printable(text) for text in found]


def check_comparable(files: Sequence[tuple[str | Path, Results]], *, allow: bool = False) -> list[str]:
    """Compare every file with the first.

    Args:
        files: paths as the user gave them, and what is in them.
        allow: whether to go on although they differ (``--allow-different``).

    Returns:
        the differences that were allowed, with the file's name, to be shown beside the figures.

    Raises:
        UsageError: they differ, and that is not allowed. Names all differences.
    """
    if not files:
        return []
    first, reference = files[0]
    found: list[str] = []
    listed: list[str] = []
    for path, results in files[1:]:
        texts = [f"{printable(str(path))}: {text}" for text in differences(reference, results)]
        found += texts
        listed += texts[:_MOST]
        listed += [f"{printable(str(path))}: and {len(texts) - _MOST} more"] if len(texts) > _MOST else []
    if found and not allow:
        raise UsageError(
            "\n  ".join(
                [f"these results are not comparable (first {printable(str(first))}, then the other file):", *listed]
            ),
            hint="measure both alike, or give --allow-different if you know that this does not matter",
        )
    return found


def _plain(one: Environment, other: Environment) -> list[str]:
    pairs = [
        ("model", one.model, other.model),
        ("accelerator", one.accelerator, other.accelerator),
        ("fabric", one.fabric, other.fabric),
        ("pdctl", one.pdctl, other.pdctl),
        ("load generator", one.generator, other.generator),
        ("host of the load generator", one.generator_host, other.generator_host),
    ]
    return [_differs(name, mine, its) for name, mine, its in pairs if mine != its]


def _instances(one: Sequence[InstanceFacts], other: Sequence[InstanceFacts]) -> list[str]:
    mine, its = {instance.name: instance for instance in one}, {instance.name: instance for instance in other}
    found = []
    for name in dict.fromkeys([*mine, *its]):
        left, right = mine.get(name), its.get(name)
        if left is None or right is None:
            where = "first" if right is None else "other"
            found.append(f"{_cut(name)} is only in the {where} file")
            continue
        if left.host != right.host:
            found.append(_differs(f"host of {name}", left.host, right.host))
        if left.role != right.role:
            found.append(_differs(f"role of {name}", left.role, right.role))
        if left.flags != right.flags:
            found.append(_flags(name, left.flags, right.flags))
        found += _named("environment variable", f" of {name}", left.env, right.env)
    return found


def _named(what: str, whose: str, one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """What differs of values with names. Unset and empty are not the same."""
    return [
        _differs(f"{what} {name}{whose}", _set(one.get(name)), _set(other.get(name)))
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def _set(value: str | None) -> str:
    return "not set" if value is None else value or "empty"


def _flags(name: str, one: Sequence[str], other: Sequence[str]) -> str:
    mine, its = _options(one), _options(other)
    only_mine = [option for option in mine if option not in its]
    only_its = [option for option in its if option not in mine]
    if not only_mine and not only_its:
        return f"flags of {_cut(name)}: the same ones, in another order or number"
    return _differs(f"flags of {name}", " ".join(only_mine), " ".join(only_its))


def _options(flags: Sequence[str]) -> list[str]:
    """Each option with its values: ``--port 8000``."""
    options: list[str] = []
    for flag in flags:
        if flag.startswith("--") or not options:
            options.append(flag)
        else:
            options[-1] += f" {flag}"
    return options


def _versions(one: Sequence[InstanceFacts], other: Sequence[InstanceFacts]) -> list[str]:
    mine, its = _by_package(one), _by_package(other)
    return [
        _differs(f"{package} of {role}", ", ".join(left), ", ".join(right))
        for role, package in dict.fromkeys([*mine, *its])
        if (left := mine.get((role, package), [])) != (right := its.get((role, package), []))
    ]


def _by_package(instances: Sequence[InstanceFacts]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for instance in instances:
        for package, version in instance.versions.items():
            found.setdefault((instance.role, package), set()).add(version)
    return {key: sorted(versions) for key, versions in found.items()}


def _settings(one: Results, other: Results) -> list[str]:
    pairs = [
        ("requests of a cell", one.settings.requests, other.settings.requests),
        ("rounds", one.settings.rounds, other.settings.rounds),
        ("warm-up requests", one.settings.warmup, other.settings.warmup),
    ]
    found = [_differs(name, str(mine), str(its)) for name, mine, its in pairs if mine != its]
    mine_cells, its_cells = ([cell.name for cell in results.settings.cells] for results in (one, other))
    if set(mine_cells) != set(its_cells):
        only_mine = [name for name in mine_cells if name not in its_cells]
        only_its = [name for name in its_cells if name not in mine_cells]
        found.append(_differs("cells", ", ".join(only_mine), ", ".join(only_its), only=True))
    return found


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _differs(name: str, mine: str, its: str, *, only: bool = False) -> str:
    return f"{_cut(name)}: {_cut(mine) or _NOTHING}, other {_cut(its) or _NOTHING}" + (
        " (what only one has)" if only else ""
    )
