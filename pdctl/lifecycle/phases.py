"""How far an instance has come, read from its log while the log grows.

The lines looked for are those of vLLM 0.32 and 0.33 (and of vllm-router 0.1): ``v1/worker``, ``v1/engine/core.py``,
``model_executor/model_loader/weight_utils.py``, ``entrypoints/launchers``. Nothing here reads a file or a clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pdctl.lifecycle.log_lines import MAX_LINE, strip_ansi


class Phase(str, Enum):
    """A step of the way up, in the order in which an instance goes through them."""

    STARTING = "starting"
    LOADING = "loading"
    PROFILING = "profiling"
    CAPTURING = "capturing"
    WARMING = "warming"
    SERVING = "serving"
    READY = "ready"

    @property
    def position(self) -> int:
        """0 for the first step, growing from step to step."""
        return _ORDER[self]


_ORDER: dict[Phase, int] = {phase: index for index, phase in enumerate(Phase)}

_LINE_END = re.compile(r"[\r\n]")


@dataclass(frozen=True)
class _Rule:
    """A line that shows a phase.

    Attributes:
        needle: a cheap literal that every such line holds.
        pattern: what is looked for in lines with the needle.
        detail: makes the detail from the match.
        progress: True for a progress bar, which may also be read before its line ends (the pattern must then end with
            something that shows that the numbers are complete).
    """

    phase: Phase
    needle: str
    pattern: re.Pattern[str]
    detail: Callable[[re.Match[str]], str]
    progress: bool = False


def _rule(phase: Phase, needle: str, pattern: str = "", detail: str = "", *, progress: bool = False) -> _Rule:
    compiled = re.compile(pattern or re.escape(needle))

    def make(found: re.Match[str]) -> str:
        return detail.format(*found.groups())

    return _Rule(phase, needle, compiled, make, progress)


# "33% Completed | 1/3 [" (vLLM's own bar format) or "34%|###4      | 12/35 [" (the default of tqdm).
_BAR = r"\d{1,3}%[^/\[]{0,120}?(\d{1,9})/(\d{1,9}) \["

_RULES: tuple[_Rule, ...] = (
    _rule(Phase.STARTING, "Resolved architecture: ", r"Resolved architecture: (\w{1,80})", "{0}"),
    _rule(Phase.STARTING, "Initializing a V1 LLM engine", detail="engine process started"),
    _rule(Phase.STARTING, "unique hosts", r"Waiting for (\d+) unique hosts", "waiting for {0} worker hosts"),
    _rule(
        Phase.STARTING,
        "unique hosts",
        r"(\d+) out of (\d+) unique hosts are healthy",
        "{0} of {1} worker hosts healthy",
    ),
    _rule(Phase.LOADING, "Fetching ", r"Fetching \d+ files: {1,4}" + _BAR, "downloading, file {0}/{1}", progress=True),
    _rule(Phase.LOADING, "Starting to load model"),
    _rule(Phase.LOADING, "oading ", r"oading [^:|%]{0,80}: {0,4}" + _BAR, "weights {0}/{1}", progress=True),
    _rule(Phase.LOADING, "Loading weights took", r"Loading weights took ([\d.]{1,12}) s", "weights loaded in {0} s"),
    _rule(Phase.LOADING, "Model loading took", r"Model loading took ([\d.]{1,12}) GiB", "weights loaded, {0} GiB"),
    _rule(Phase.LOADING, "neuronx-cc compile", detail="compiling for Neuron"),
    _rule(Phase.PROFILING, "Starting torch.compile", detail="compiling"),
    _rule(Phase.PROFILING, "Dynamo bytecode transform time", detail="compiling"),
    _rule(Phase.PROFILING, "Compiling a graph for compile range", detail="compiling"),
    _rule(Phase.PROFILING, "Directly load the compiled graph", detail="compiled graphs from the cache"),
    _rule(Phase.PROFILING, "torch.compile took", r"torch\.compile took ([\d.]{1,12}) s", "compiled in {0} s"),
    _rule(Phase.PROFILING, "Memory profiling takes", r"Memory profiling takes ([\d.]{1,12}) s", "profiled in {0} s"),
    _rule(Phase.PROFILING, "Profiling CUDA graph memory"),
    _rule(Phase.PROFILING, "Available KV cache memory", r"KV cache memory: (-?[\d.]{1,12}) GiB", "KV cache {0} GiB"),
    _rule(Phase.PROFILING, "KV cache size: ", r"KV cache size: ([\d,]{1,20}) tokens", "KV cache {0} tokens"),
    _rule(
        Phase.CAPTURING,
        "Capturing CUDA graphs",
        r"Capturing CUDA graphs[^:%]{0,80}: {0,4}" + _BAR,
        "CUDA graphs {0}/{1}",
        progress=True,
    ),
    _rule(Phase.CAPTURING, "Graph capturing finished", detail="CUDA graphs captured"),
    _rule(Phase.WARMING, "Warming up model for the compilation", detail="compiling"),
    _rule(Phase.WARMING, "init engine (", r"init engine \([^)]{0,80}\) took ([\d.]{1,12}) s", "engine up in {0} s"),
    _rule(Phase.SERVING, "Starting vLLM ", r"Starting vLLM (?:API )?server\b(?: \d+)? on (\S{1,80})", "{0}"),
    _rule(Phase.SERVING, "Started server process"),
    _rule(Phase.SERVING, "Router ready | workers"),
    _rule(Phase.READY, "Application startup complete"),
    _rule(Phase.READY, "Uvicorn running on"),
    _rule(Phase.STARTING, "the router waits until", r"pdctl: the router (waits until the instances are warm)", "{}"),
    _rule(Phase.READY, "Starting server on ", r"vllm_router_rs::server.{0,80}Starting server on (\S{1,80})"),
    # When only the end of a long log is at hand, these show that the start is long over.
    _rule(Phase.READY, "Avg prompt throughput: ", r"Engine \d+: Avg prompt throughput: "),
    _rule(
        Phase.READY, " HTTP/1.", r"^(?:\([^)]{1,60}\) )?INFO: {1,8}\S{1,80} - \"[A-Z]{3,8} \S{1,400} HTTP/1\.\d\" \d{3}"
    ),
)

_PROGRESS_RULES = tuple(rule for rule in _RULES if rule.progress)

# The first thing that a server process of vLLM says of itself. Anchored: the words may stand in a logged prompt, too.
_RESTART = re.compile(
    r"^(?:\(\w{1,40}(?: pid=(\d{1,9}))?\) )?INFO [\d:. -]{1,40}\[[\w./]{1,120}:\d{1,6}\] non-default args: "
)


class LogReader:
    """Follows a log that comes in pieces and knows the latest phase.

    The phase never goes back, except when the log shows that another server process began (a restart). Pieces may end
    anywhere, hold terminal escapes, progress bars that end in a carriage return, and bytes that are no text.

    Attributes:
        phase: the furthest phase seen.
        detail: a few words more, such as ``weights 3/17`` or ``KV cache 131,072 tokens``; may be empty.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.detail = ""
        self._rest = ""
        self._server_pid: str | None = None

    def feed(self, text: str) -> Phase:
        """Take the next piece of the log and return the phase after it."""
        lines = _LINE_END.split(text)
        if len(lines) > 1:
            self._read(self._rest + lines[0])
            for line in lines[1:-1]:
                self._read(line)
            self._rest = ""
        # Only the beginning of an endless line is kept: memory stays bounded whatever the instance writes.
        self._rest += lines[-1][: max(0, MAX_LINE - len(self._rest))]
        self._read(self._rest, ended=False)
        return self.phase

    def _read(self, line: str, *, ended: bool = True) -> None:
        if not line:
            return
        line = strip_ansi(line[:MAX_LINE])
        if ended and "non-default args: " in line:
            self._restart(line)
        for rule in _RULES if ended else _PROGRESS_RULES:
            if rule.needle not in line or rule.phase.position < self.phase.position:
                continue
            if found := rule.pattern.search(line):
                detail = rule.detail(found)
                if rule.phase is not self.phase or detail:
                    self.detail = detail
                self.phase = rule.phase

    def _restart(self, line: str) -> None:
        found = _RESTART.match(line)
        if found is None or (found[1] is not None and found[1] == self._server_pid):
            return
        self._server_pid = found[1]
        self.phase, self.detail = Phase.STARTING, ""


def phase(log_text: str) -> tuple[Phase, str]:
    """Return the phase and the detail that a whole log (or its end) shows."""
    reader = LogReader()
    reader.feed(log_text)
    return reader.phase, reader.detail
