"""The node agent's pure parts: parsing, quoting, log reading, membership, digests."""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdctl.node import agent

SOURCE = Path(agent.__file__).read_text()
BOOTSTRAP = (
    'import sys;b=sys.stdin.buffer;s=b.read(int(b.readline()));g={"__name__":"__pdctl_agent__","SOURCE":s};'
    'exec(compile(s,"pdctl-agent","exec"),g);g["main"](b.read())'
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def test_source_is_python_3_8_and_imports_only_the_standard_library() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported <= set(sys.stdlib_module_names)
    # It looks its module up in sys.modules, where the agent, run from text, is not.
    assert "dataclasses" not in imported


def test_docstring_holds_the_bootstrap() -> None:
    assert agent.__doc__ is not None
    assert f"    {BOOTSTRAP}\n" in agent.__doc__


# ------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("name", ["a", "qwen3", "prefill-0", "a" * 63])
def test_names(name: str) -> None:
    assert agent.checked_name(name, "cluster") == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "/a", "A", "0a", "-a", "a.b", "a\n", "a b", "é", "a" * 64, "~", "a\0"]
)
def test_names_that_could_leave_the_folder(name: str) -> None:
    with pytest.raises(agent.AgentError) as caught:
        agent.checked_name(name, "cluster")
    assert caught.value.code == "bad-request"


def test_cluster_cannot_take_the_folder_of_the_connector() -> None:
    with pytest.raises(agent.AgentError):
        agent.checked_name("connector", "cluster")
    assert agent.checked_name("connector", "instance") == "connector"


# --------------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("read", "fields"),
    [
        (lambda r: r.text("x"), {}),
        (lambda r: r.text("x"), {"x": 1}),
        (lambda r: r.text("x"), {"x": "a\0b"}),
        (lambda r: r.text("x"), {"x": "\ud800"}),
        (lambda r: r.flag("x"), {"x": "yes"}),
        (lambda r: r.number("x"), {"x": True}),
        (lambda r: r.number("x"), {"x": -1}),
        (lambda r: r.number("x"), {"x": float("nan")}),
        (lambda r: r.number("x"), {"x": float("inf")}),
        (lambda r: r.number("x", maximum=5), {"x": 6}),
        (lambda r: r.offset("x"), {"x": 1.5}),
        (lambda r: r.texts("x"), {"x": ["a", 1]}),
        (lambda r: r.variables("x"), {"x": {"A-B": "1"}}),
        (lambda r: r.variables("x"), {"x": {"A;rm": "1"}}),
        (lambda r: r.variables("x"), {"x": {"A": 1}}),
        (lambda r: r.items("x"), {"x": {}}),
        (lambda r: r.mapping("x"), {"x": []}),
    ],
)
def test_wrong_fields_are_named(read, fields) -> None:
    with pytest.raises(agent.AgentError) as caught:
        read(agent.Request(fields))
    assert caught.value.code == "bad-request"
    assert "field x" in caught.value.message


def test_wrong_field_never_shows_its_value() -> None:
    with pytest.raises(agent.AgentError) as caught:
        agent.Request({"secret_env": {"TOKEN": ["hunter2"]}}).variables("secret_env")
    assert "hunter2" not in str(caught.value.to_json())


@settings(max_examples=50)
@given(st.binary())
def test_answer_to_noise_is_an_error(noise: bytes) -> None:
    reply = agent.answer(noise)
    assert reply["ok"] is False
    assert reply["error"]["code"] == "bad-request"


def test_bug_is_reported_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(agent.COMMANDS, "status", lambda request: 1 / 0)
    reply = agent.answer(b'{"command": "status"}')
    assert reply["error"]["code"] == "internal"
    assert "ZeroDivisionError" in reply["error"]["message"]


# ---------------------------------------------------------------------------------------------------------- env file


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(TEXT, min_size=1, max_size=8))
def test_env_file_gives_sh_exactly_the_values(tmp_path: Path, values: list[str]) -> None:
    variables = {f"V{index}": value for index, value in enumerate(values)}
    (tmp_path / "env").write_text(agent.format_env_file(variables), encoding="utf-8", newline="")
    done = subprocess.run(
        ["sh", "-c", ". ./env; exec env -0"], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True
    )
    assert done.stderr == b""
    seen = dict(entry.split(b"=", 1) for entry in done.stdout.rstrip(b"\0").split(b"\0"))
    assert {name: seen[name.encode()] for name in variables} == {n: v.encode() for n, v in variables.items()}


# ------------------------------------------------------------------------------------------------------ placeholders


def test_placeholders() -> None:
    placeholders = agent.Placeholders("/home/u", "/home/u/.pdctl", "0123456789ab")
    assert placeholders.fill("id-@START_ID@ @HOME@/x @HOME@/.pdctl/connector/ab $HOME @OTHER@") == (
        "id-0123456789ab /home/u/x /home/u/.pdctl/connector/ab $HOME @OTHER@"
    )


def test_home_placeholder_follows_pdctl_home() -> None:
    placeholders = agent.Placeholders("/home/u", "/scratch/pd", "0123456789ab")
    text = "@HOME@/.pdctl/a:@HOME@/.pdctl-other '@HOME@/.pdctl' @HOME@/.pdctl"
    assert placeholders.fill(text) == "/scratch/pd/a:/home/u/.pdctl-other '/scratch/pd' /scratch/pd"


def test_home_that_needs_quoting_is_refused() -> None:
    placeholders = agent.Placeholders("/home/a b", "/home/a b/.pdctl", "0123456789ab")
    assert placeholders.fill("no placeholder") == "no placeholder"
    with pytest.raises(agent.AgentError):
        placeholders.fill("@HOME@/x")


# --------------------------------------------------------------------------------------------------------- processes


def stat_line(pid: int, name: str, state: str, *, group: int = 7, session: int = 8, threads: int = 1) -> str:
    fields = [state, 2, group, session, 0, -1, 4194560, 1, 0, 0, 0, 30, 12, 0, 0, 20, 0, threads, 0, 5550, 1000, 77, 0]
    return f"{pid} ({name}) " + " ".join(map(str, fields)) + "\n"


@pytest.mark.parametrize("name", ["python3", "a b", ") R 1 (", "VLLM::Worker_TP", "(((", ""])
def test_parse_stat_with_any_name(name: str) -> None:
    process = agent.parse_stat(stat_line(41, name, "S"))
    assert process is not None
    assert (process.pid, process.name, process.state, process.parent) == (41, name, "S", 2)
    assert (process.group, process.session, process.create_time) == (7, 8, 5550)
    assert (process.cpu_ticks, process.rss_pages) == (42, 77)


@given(st.text())
def test_parse_stat_never_raises(text: str) -> None:
    agent.parse_stat(text)


def test_parse_stat_of_this_process() -> None:
    process = agent.read_process(os.getpid())
    assert process is not None
    assert process.session == os.getsid(0)
    assert process.group == os.getpgid(0)
    assert process.alive


def test_zombie_is_dead_but_not_while_threads_run() -> None:
    zombie, running = (agent.parse_stat(stat_line(1, "x", "Z", threads=threads)) for threads in (1, 4))
    assert zombie is not None
    assert running is not None
    assert not zombie.alive
    assert running.alive


def test_parse_environ() -> None:
    data = b"A=1\0X=PDCTL_MARKER=no\0PDCTL_MARKER=c/i/0\0PDCTL_INSTANCE_FOLDER=/h/.pdctl/c/i\0"
    assert agent.parse_environ(data) == ("c/i/0", "/h/.pdctl/c/i")
    assert agent.parse_environ(b"") == ("", "")


def process(pid: int, create_time: int, *, session: int = 1, marker: str = "", state: str = "S") -> agent.Process:
    folder = "/f" if marker else ""
    return agent.Process(pid, 1, session, session, state, 1, create_time, 0, 0, "x", marker, folder)


def select(membership: agent.Membership, *processes: agent.Process) -> list[int]:
    return [member.pid for member in membership.select({entry.pid: entry for entry in processes})]


def test_members_are_the_session_and_the_marked_ones() -> None:
    membership = agent.Membership("c/i/", "/f", (10, 100))
    found = select(
        membership,
        process(10, 100, session=10),
        process(11, 101, session=10),
        process(12, 102, session=12, marker="c/i/abc"),
        process(13, 103, session=13, marker="c/i2/abc"),
        process(14, 104, session=14, marker="c/i/abc")._replace(folder="/other-home"),
        process(15, 105, session=15),
    )
    assert found == [10, 11, 12]


def test_session_of_a_recycled_pid_is_foreign() -> None:
    membership = agent.Membership("c/i/", "/f", (10, 100))
    assert select(membership, process(10, 999, session=10), process(11, 1000, session=10)) == []


def test_session_without_its_main_process_counts_only_while_watched() -> None:
    worker, late = process(11, 101, session=10), process(12, 200, session=10)
    # Never seen together with the main process: the number may have been given to others.
    assert select(agent.Membership("c/i/", "/f", (10, 100)), worker) == []
    membership = agent.Membership("c/i/", "/f", (10, 100))
    assert select(membership, process(10, 100, session=10), worker) == [10, 11]
    assert select(membership, worker) == [11]
    assert select(membership, worker, late) == [11, 12]
    assert select(membership, late) == [12]
    assert select(membership) == []
    assert select(membership, late) == []


def test_zombie_main_still_vouches_for_its_session() -> None:
    membership = agent.Membership("c/i/", "/f", (10, 100))
    assert select(membership, process(10, 100, session=10, state="Z"), process(11, 101, session=10)) == [10, 11]


def test_signal_is_not_sent_to_a_recycled_pid() -> None:
    child = subprocess.Popen(["sleep", "30"])
    try:
        real = agent.read_process(child.pid)
        assert real is not None
        agent.send_signal(real._replace(create_time=real.create_time - 1), 9)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        agent.send_signal(real, 9)
        assert child.wait(10) == -9
        agent.send_signal(real, 9)
    finally:
        child.kill()
        child.wait()


# ------------------------------------------------------------------------------------------------------------- ports


def test_parse_sockets() -> None:
    text = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4242 1 0 100 0\n"
        "   1: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 01 0:0 00:0 0 0 0 7 1\n"
        "garbage\n"
    )
    assert agent.parse_sockets(text) == [agent.Socket(8080, True, 1000, 4242), agent.Socket(80, False, 0, 7)]


def test_holder_in_words() -> None:
    assert "an unknown process" in agent.describe_holder({"pid": None, "argv": [], "user": None, "instance": None})
    assert "user alice" in agent.describe_holder({"pid": None, "argv": [], "user": "alice", "instance": None})
    text = agent.describe_holder({"pid": 7, "argv": ["python", "a b"], "user": "u", "instance": "qwen/decode-0"})
    assert text == "pdctl instance qwen/decode-0, pid 7: python 'a b'"


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_free_port(address: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent.check_ports([agent.PortRequest(port, "http", address)])


def test_taken_port_on_another_address_is_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        agent.check_ports([agent.PortRequest(port, "http", "127.0.0.2")])
        with pytest.raises(agent.AgentError) as caught:
            agent.check_ports([agent.PortRequest(port, "http", "0.0.0.0"), agent.PortRequest(port, "x", "127.0.0.1")])
    assert caught.value.code == "port-in-use"
    assert [holder["pid"] for holder in caught.value.details["holders"]] == [os.getpid()] * 2


def test_address_of_another_machine() -> None:
    address = "192.0.2.7"  # RFC 5737: nobody's
    with pytest.raises(agent.AgentError) as caught:
        agent.check_ports([agent.PortRequest(45678, "side channel", address)])
    assert caught.value.code == "address-not-local"
    assert address in caught.value.message


@pytest.mark.parametrize("port", [0, 65536, 1.5, "80", None, True])
def test_no_port(port) -> None:
    with pytest.raises(agent.AgentError) as caught:
        agent.parse_ports(agent.Request({"ports": [{"port": port, "purpose": "http", "address": "127.0.0.1"}]}))
    assert caught.value.code == "bad-request"


# -------------------------------------------------------------------------------------------------------------- logs


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT, cuts=st.lists(st.integers(0, 400), max_size=6), limit=st.integers(16, 64))
def test_following_a_log_loses_nothing_at_any_cut(tmp_path: Path, text: str, cuts: list[int], limit: int) -> None:
    data = text.encode()
    path = tmp_path / "log"
    path.write_bytes(b"")
    offset, inode, seen = 0, 0, ""
    for end in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        with path.open("ab") as file:
            file.write(data[path.stat().st_size : end])
        while True:
            piece = agent.read_log(str(path), offset, limit=limit, inode=inode)
            assert piece.skipped == 0
            assert not piece.rotated
            if piece.offset == offset:
                break
            seen, offset, inode = seen + piece.text, piece.offset, piece.inode
    assert seen == text


def test_newest_skips_to_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %05d\n" % number for number in range(1000)))
    piece = agent.read_log(str(path), 11, limit=100, newest=True)
    assert piece.text.startswith("line 009")
    assert piece.text.endswith("line 00999\n")
    assert piece.skipped == 11000 - 11 - len(piece.text)
    assert piece.offset == piece.size == 11000


def test_newest_does_not_begin_inside_a_character(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes("é".encode() * 1000)
    piece = agent.read_log(str(path), 0, limit=101, newest=True)
    assert piece.text == "é" * 50
    assert piece.skipped == 1900


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\xff\xfeb\n")
    assert agent.read_log(str(path), 0, limit=100).text == "a\ufffd\ufffdb\n"


def test_rotation_by_inode_and_by_size(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old text\n")
    first = agent.read_log(str(path), 0, limit=100)
    path.rename(tmp_path / "log.1")
    path.write_bytes(b"new, and longer than the old one\n")
    piece = agent.read_log(str(path), first.offset, limit=100, inode=first.inode)
    assert (piece.text, piece.rotated) == ("new, and longer than the old one\n", True)
    path.write_bytes(b"short\n")
    piece = agent.read_log(str(path), piece.offset, limit=100)
    assert (piece.text, piece.rotated) == ("short\n", True)


def test_missing_log(tmp_path: Path) -> None:
    assert agent.read_log(str(tmp_path / "no"), 5, limit=100) == agent.LogPiece("", 0, 0, 0, 0, False)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("", 3, ""),
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\nc\n", 9, "a\nb\nc\n"),
        ("a\nb\n", 0, ""),
        ("\n\n\n", 2, "\n\n"),
        ("10%\r20%\r30%\nend\n", 2, "10%\r20%\r30%\nend\n"),
        ("a\n", 1, "a\n"),
        ("\n", 1, "\n"),
    ],
)
def test_last_lines(text: str, count: int, expected: str) -> None:
    assert agent.last_lines(text, count) == expected


def test_rotation_keeps_three(tmp_path: Path) -> None:
    for number in range(6):
        agent.rotate_logs(str(tmp_path))
        (tmp_path / "vllm.log").write_text(f"start {number}")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {
        "vllm.log": "start 5",
        "vllm.log.1": "start 4",
        "vllm.log.2": "start 3",
        "vllm.log.3": "start 2",
    }


def test_empty_log_is_not_rotated(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text("")
    (tmp_path / "vllm.log.1").write_text("kept")
    agent.rotate_logs(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vllm.log", "vllm.log.1"]


# ------------------------------------------------------------------------------------------------------------- files


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(agent.os, "write", full)
    with pytest.raises(agent.AgentError) as caught:
        agent.write_file(str(path), b"new", 0o600)
    assert caught.value.code == "disk-full"
    assert str(path) in caught.value.message
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
    assert path.read_text() == "old"


def test_mode_is_exact_whatever_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        agent.write_file(str(tmp_path / "env"), b"x", 0o600)
        agent.write_file(str(tmp_path / "launch.sh"), b"x", 0o700)
    finally:
        os.umask(previous)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("env", "launch.sh")] == [0o600, 0o700]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"pid": "1"}', '{"pid": -1, "create_time": 1, "supervisor_pid": 1}', "\xff"],
)
def test_damaged_state_is_no_state(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_bytes(content.encode("latin-1"))
    assert agent.read_state(str(tmp_path)) is None


# -------------------------------------------------------------------------------------------------------------- ship


def test_digest_is_the_documented_one() -> None:
    expected = hashlib.sha256(b"a/b.py\0" + b"3\0" + b"xyz" + b"c\0" + b"0\0").hexdigest()
    assert agent.content_digest({"c": b"", "a/b.py": b"xyz"}) == expected


@given(st.dictionaries(st.one_of(TEXT, st.text("a./\\", max_size=8)), st.binary(max_size=20), min_size=1, max_size=4))
def test_only_paths_that_stay_inside_are_accepted(files: dict[str, bytes]) -> None:
    encoded = {path: base64.b64encode(content).decode() for path, content in files.items()}
    inside = all(re.fullmatch(r"[^/\\]+(/[^/\\]+)*", path) for path in files)
    dots = any(part in (".", "..") for path in files for part in path.split("/"))
    caches = any(path.endswith(".pyc") for path in files)
    if inside and not dots and not caches:
        assert agent.checked_files(encoded) == files
        return
    with pytest.raises(agent.AgentError) as caught:
        agent.checked_files(encoded)
    assert caught.value.code == "bad-request"


@pytest.mark.parametrize(
    "path", ["", "/etc/x", "../x", "a/../x", "a//b", "./a", "a/", "a\\b", "a\0", "__pycache__/a", "a.pyc", "\ud800"]
)
def test_unsafe_paths(path: str) -> None:
    with pytest.raises(agent.AgentError) as caught:
        agent.checked_files({path: ""})
    assert caught.value.code == "bad-request"


@pytest.mark.parametrize("content", ["!", "YQ", None, 5, ["YQ=="]])
def test_content_that_is_no_base64(content) -> None:
    with pytest.raises(agent.AgentError):
        agent.checked_files({"a": content})
