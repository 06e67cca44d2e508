"""The model: there, whole, and the same on every host. Its layout and its memory are in modules of their own. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pdctl.doctor.checks.model_known import known_models
from pdctl.doctor.checks.model_layout import LAYOUT_CHECKS
from pdctl.doctor.checks.model_memory import MEMORY_CHECKS
from pdctl.doctor.checks.per_host import hosts_by_value, odd_ones_out
from pdctl.doctor.context import Context
from pdctl.doctor.facts import ModelFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.memory_fit import gib
from pdctl.doctor.role_options import is_on, option, variable
from pdctl.plan import InstancePlan
from pdctl.spec import ROLES

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# Keys of config.json that change nothing of what is computed.
_WITHOUT_MEANING = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "use_cache", "output_attentions"}
)
_ORDINARY_FORMATS = (None, "auto", "hf", "safetensors", "pt", "mistral")


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../"))


def _loads_otherwise(context: Context) -> bool:
    """Whether vLLM gets the model from elsewhere than a folder or the hub, which the hosts did not look into."""
    formats = (option(context.spec, role, "load-format") for role in ROLES)
    return "://" in context.spec.model or any(one not in _ORDINARY_FORMATS for one in formats)


def _offline(context: Context, host: str) -> str:
    """The variable that keeps an instance of a host from the hub; empty if none does."""
    instances = [instance for instance in context.instances_on(host) if instance.role != "router"]
    return next((name for name in _OFFLINE for one in instances if is_on(variable(context, one, name))), "")


# --- MOD001


def _model_there(context: Context) -> Iterator[Result]:
    if "://" in context.spec.model:
        return
    models = known_models(context)
    yield from models.skipped
    for host, model in models.found.items():
        if model.found != "no":
            if model.config:
                yield passed(host, message="the model is on the host", evidence=model.path)
            else:
                yield failed(
                    host,
                    message="the model is on the host, but its config.json cannot be read",
                    evidence=model.error or model.path,
                    fix="look at that file: it may be missing, empty or closed to the login that pdctl uses",
                )
            continue
        yield _not_there(context, host, model)


def _not_there(context: Context, host: str, model: ModelFacts) -> Result:
    evidence = ": ".join(part for part in (model.path, model.error) if part)
    where = f"`model` of {context.spec.file or 'the cluster file'}, line {context.spec.line('model')}"
    if _is_path(context.spec.model):
        return failed(
            host,
            message=f"there is no model in the folder {context.spec.model}",
            evidence=evidence,
            fix=f"copy the model there, or correct the path ({where})",
            severity=Severity.ERROR,
        )
    offline = _offline(context, host)
    if offline:
        return failed(
            host,
            message=f"{context.spec.model} is not in the Hugging Face cache, and {offline} forbids to download it",
            evidence=evidence,
            fix=f"copy it into the cache of the login that pdctl uses, or remove {offline}",
            severity=Severity.ERROR,
        )
    return failed(
        host,
        message=f"{context.spec.model} is not in the Hugging Face cache: it will be downloaded at the start",
        evidence=evidence,
        fix=(
            "download it before, so that the first start takes minutes less and the checks of layout and memory can be "
            f"made{_token_hint(context, host)}"
        ),
        commands=(f"hf download {context.spec.model}",) if _is_hub_name(context.spec.model) else (),
    )


def _is_hub_name(model: str) -> bool:
    return all(character.isalnum() or character in "/._-" for character in model) and not model.startswith("-")


def _token_hint(context: Context, host: str) -> str:
    instances: list[InstancePlan] = [one for one in context.instances_on(host) if one.role != "router"]
    given = all("HF_TOKEN" in one.env or "HF_TOKEN" in one.secret_names for one in instances)
    return "" if given else ". A gated model needs `env: {HF_TOKEN: {from_env: HF_TOKEN}}`"


# --- MOD002


def _model_whole(context: Context) -> Iterator[Result]:
    if _loads_otherwise(context):
        return
    models = known_models(context)
    yield from models.skipped
    for host, model in models.found.items():
        if model.found == "no":
            yield skipped(host, message="not checked: the model is not on the host yet (MOD001)")
        elif model.weights_complete is None:
            yield skipped(
                host, message="not checked: which files belong to the model is not known", evidence=model.error
            )
        elif model.weights_complete:
            size = "" if model.weights_bytes is None else gib(model.weights_bytes)
            yield passed(host, message="the files of the model are complete", evidence=size)
        elif model.found == "cache" and not _offline(context, host):
            yield failed(
                host,
                message="files of the model are missing in the Hugging Face cache: they are downloaded at the start",
                evidence=model.error,
                fix="download them before, as the login that pdctl uses",
                commands=(f"hf download {context.spec.model}",) if _is_hub_name(context.spec.model) else (),
                severity=Severity.WARNING,
            )
        else:
            yield failed(
                host,
                message="files of the model are missing or empty",
                evidence=f"{model.path}: {model.error}",
                fix="copy the model again; compare the sizes of all *.safetensors files with the source",
            )


# --- MOD003


def _same_model(context: Context) -> Iterator[Result]:
    models = known_models(context)
    yield from models.skipped
    known = {host: model for host, model in models.found.items() if model.config}
    for host in models.found:
        if host not in known:
            yield skipped(host, message="not compared: the model's config.json is not known here (MOD001)")
    odd = _odd({host: _config_digest(model.config) for host, model in known.items()})
    if odd:
        reference = next(host for host in known if host not in odd)
        for host in odd:
            yield failed(
                host,
                message=f"config.json of the model is another one than on {reference}",
                evidence=_config_difference(known[reference].config, known[host].config),
                fix="put the same revision of the model on every host of prefill and decode",
            )
        return
    revisions = {host: model.revision for host, model in known.items() if model.revision}
    if odd := _odd(revisions):
        yield failed(
            *odd,
            message="the cached revision of the model is another one here: weights or tokenizer may differ",
            evidence=hosts_by_value(revisions),
            fix="pin one with `vllm_args: {revision: COMMIT}` in both roles, and download it on every host",
            severity=Severity.WARNING,
        )
        return
    sizes = {
        host: model.weights_bytes for host, model in known.items() if model.weights_complete and model.weights_bytes
    }
    if odd := _odd(sizes):
        yield failed(
            *odd,
            message="the weights of the model have another size here, though config.json is the same",
            evidence=hosts_by_value({host: f"{size} bytes" for host, size in sizes.items()}),
            fix="compare the files with those of the other hosts, and copy the model again if they differ",
            severity=Severity.WARNING,
        )
        return
    if known:
        revision = next(iter(revisions.values()), "")
        evidence = f"revision {revision}" if revision else ""
        yield passed(*known, message="config.json of the model is the same wherever it is", evidence=evidence)


def _odd(values: Mapping[str, Any]) -> list[str]:
    found = odd_ones_out(values)
    return list(found[1]) if found is not None else []


def _meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _WITHOUT_MEANING}


def _config_digest(config: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(_meaning(config), sort_keys=True, default=str)
    except (RecursionError, ValueError, TypeError):
        # Nested beyond reason; its keys must do.
        text = " ".join(sorted(_meaning(config)))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _config_difference(reference: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    one, two = _meaning(reference), _meaning(other)
    names = sorted(name for name in {*one, *two} if one.get(name, ...) != two.get(name, ...))
    shown = [f"{name}: {_short(two, name)} here, {_short(one, name)} there" for name in names[:5]]
    return "; ".join(shown) + (f"; and {len(names) - 5} more keys" if len(names) > 5 else "")


def _short(config: Mapping[str, Any], name: str) -> str:
    if name not in config:
        return "not given"
    try:
        text = json.dumps(config[name], default=str)
    except (RecursionError, ValueError, TypeError):
        return "a value nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."


_CHECKS: tuple[Check, ...] = (
    Check(
        id="MOD001",
        title="The model is on the hosts",
        severity=Severity.WARNING,
        what=(
            "`model` is a folder with config.json, or is in the Hugging Face cache of the login. A folder that is not "
            "there is an error, and so is a model that is not cached while HF_HUB_OFFLINE is set; else vLLM downloads "
            "it, which is a warning."
        ),
        why="The instance ends at its start, or downloads for minutes and may find the disk full or the model gated.",
        fix="Copy or download the model as the login that pdctl uses.",
        run=_model_there,
        blocking=True,
    ),
    Check(
        id="MOD002",
        title="The files of the model are complete",
        severity=Severity.ERROR,
        what="Every file that the index of the weights names is there and not empty.",
        why="Loading ends with an error after minutes, once the missing file is reached.",
        fix="Copy or download the model again.",
        run=_model_whole,
        blocking=True,
    ),
    Check(
        id="MOD003",
        title="The same model on every host",
        severity=Severity.ERROR,
        what=(
            "config.json is the same on every host of prefill and decode (keys without meaning, such as "
            "transformers_version, aside); cached revisions and sizes of the weights are compared too, as a warning."
        ),
        why=(
            "The handshake compares the number of layers, KV heads and their size only. With other weights decode goes "
            "on from a KV cache that is not its own: the text is wrong, without any error."
        ),
        fix="Put one revision on every host, and pin it with `vllm_args: {revision: COMMIT}`.",
        run=_same_model,
        blocking=True,
    ),
)

CHECKS: tuple[Check, ...] = tuple(sorted((*_CHECKS, *LAYOUT_CHECKS, *MEMORY_CHECKS), key=lambda check: check.id))
