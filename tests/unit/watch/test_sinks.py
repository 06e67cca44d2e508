"""Sinks with real commands and a real HTTP server: what is slow, dead or wrong at the other end stays there."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from pdctl.errors import UsageError
from pdctl.watch.hook import OUTPUT_LIMIT, CommandHook, parse_command
from pdctl.watch.sinks import QueuedSink, Sinks
from pdctl.watch.webhook import (
    ATTEMPTS,
    DELIVERY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    Webhook,
    check_url,
    sign,
)
from tests.unit.watch.frames import alert, frame

EVENT = {"kind": "alert", "alert": {"message": "$(touch pwned); `id`"}}


class Notes(list):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def until(condition, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


# --- the queue


class Gate:
    """A delivery that waits until it is let go on."""

    name = "gate"

    def __init__(self) -> None:
        self.open = threading.Event()
        self.got: list[object] = []

    def deliver(self, event, stop) -> str:
        self.open.wait(20)
        self.got.append(event["number"])
        if event["number"] == 3:
            raise ZeroDivisionError("a bug")
        return "delivered"

    def kill(self) -> None:
        self.open.set()


def test_a_full_queue_drops_the_oldest_counts_them_and_says_so_once() -> None:
    gate, notes = Gate(), Notes()
    sink = QueuedSink(gate, note=notes, limit=4)
    sink.offer({"number": 0})
    until(lambda: not sink._waiting)
    begin = time.monotonic()
    for number in range(1, 100):
        sink.offer({"number": number})
    assert time.monotonic() - begin < 5, "offering never waits for the delivery"
    assert sink.counts["dropped"] == 95
    assert len(notes) == 1
    gate.open.set()
    sink.close(10)
    assert gate.got == [0, 96, 97, 98, 99]
    assert sink.counts == {"delivered": 5, "failed": 0, "dropped": 95}


def test_a_bug_in_a_delivery_does_not_end_the_sink() -> None:
    gate, notes = Gate(), Notes()
    gate.open.set()
    sink = QueuedSink(gate, note=notes)
    for number in range(6):
        sink.offer({"number": number})
    sink.close(10)
    assert gate.got == [0, 1, 2, 3, 4, 5]
    assert sink.counts == {"delivered": 5, "failed": 1, "dropped": 0}
    assert "ZeroDivisionError" in notes[0]


def test_closing_gives_up_what_is_not_delivered_in_time() -> None:
    gate, notes = Gate(), Notes()
    sink = QueuedSink(gate, note=notes)
    for number in (0, 1, 2):
        sink.offer({"number": number})
    until(lambda: len(sink._waiting) == 2)
    sink.close(0.05)
    assert gate.got == [0]
    assert sink.counts["dropped"] == 2
    assert "2 alerts were not delivered" in notes[-1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gate")]
    sink.offer({"number": 9})
    assert not sink._waiting


def test_every_event_of_a_frame_goes_to_every_sink() -> None:
    gates = [Gate(), Gate()]
    for gate in gates:
        gate.deliver = lambda event, stop, gate=gate: gate.got.append(event) or "delivered"  # type: ignore[method-assign]
    sinks = Sinks([QueuedSink(gate, note=Notes()) for gate in gates])
    sinks(frame(alert(), alert()))
    sinks.close(10)
    for gate in gates:
        assert [event["alert"]["code"] for event in gate.got] == ["T002", "T002"]
        assert gate.got[0]["event"] == "opened"
    assert sinks.counts() == {"gate": {"delivered": 2, "failed": 0, "dropped": 0}}


# --- the command


def run_hook(code: str, *, timeout_s: float = 20.0, stop: threading.Event | None = None, **more) -> tuple[str, Notes]:
    notes = Notes()
    hook = CommandHook([sys.executable, "-c", code], note=notes, timeout_s=timeout_s, **more)
    return hook.deliver(EVENT, stop or threading.Event()), notes


def test_a_command_gets_the_alert_on_its_standard_input_and_nothing_in_its_arguments(tmp_path) -> None:
    out = tmp_path / "out"
    code = f"import sys, json; json.dump([json.load(sys.stdin), sys.argv], open({str(out)!r}, 'w'))"
    result, notes = run_hook(code)
    assert (result, notes) == ("delivered", [])
    assert json.loads(out.read_text()) == [EVENT, ["-c"]]


def test_secrets_are_not_handed_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", "s3cret")
    monkeypatch.setenv("HOOK_OTHER", "visible")
    _, notes = run_hook(
        "import os; print(os.environ.get('HOOK_SECRET'), os.environ['HOOK_OTHER'])", hide=["HOOK_SECRET"]
    )
    assert notes[0].endswith("exit code 0: None visible")


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path) -> None:
    out = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '600']); open({str(out)!r}, 'w').write(str(child.pid))\n"
        "print('waiting', flush=True); time.sleep(600)"
    )
    begin = time.monotonic()
    result, notes = run_hook(code, timeout_s=2.0)
    assert result == "failed"
    assert "killed, it ran longer than 2 s: waiting" in notes[0]
    assert time.monotonic() - begin < 60
    until(lambda: _gone(int(out.read_text())))


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_command_that_prints_for_ever_costs_no_memory_and_is_killed() -> None:
    result, notes = run_hook("import os\nwhile True: os.write(1, b'x' * 65536)", timeout_s=1.0)
    assert result == "failed"
    assert len(notes[0]) < OUTPUT_LIMIT + 200
    assert "bytes more)" in notes[0]


def test_output_is_cut_and_made_safe() -> None:
    result, notes = run_hook("import sys; print('\\x1b[2J' + 'x' * 9000); sys.exit(3)")
    assert result == "failed"
    assert "exit code 3" in notes[0]
    assert "bytes more)" in notes[0]
    assert notes[0].isprintable()


def test_a_child_that_keeps_the_output_open_does_not_keep_us() -> None:
    begin = time.monotonic()
    result, _ = run_hook("import subprocess; subprocess.Popen(['sleep', '600'])")
    assert result == "delivered"
    assert time.monotonic() - begin < 15


def test_a_command_that_does_not_read_is_fine_with_a_large_alert() -> None:
    notes = Notes()
    hook = CommandHook(["true"], note=notes)
    assert hook.deliver({"message": "x" * 1_000_000}, threading.Event()) == "delivered"


@pytest.mark.parametrize("argv", [["/nonexistent/program"], ["/etc/passwd"]])
def test_a_command_that_cannot_be_run_is_said(argv: list[str]) -> None:
    notes = Notes()
    assert CommandHook(argv, note=notes).deliver(EVENT, threading.Event()) == "failed"
    assert "cannot be run" in notes[0]


def test_stopping_ends_a_running_command() -> None:
    notes, stop = Notes(), threading.Event()
    hook = CommandHook(["sleep", "600"], note=notes, timeout_s=600)
    thread = threading.Thread(target=hook.deliver, args=(EVENT, stop))
    thread.start()
    until(lambda: hook._running)
    hook.kill()
    thread.join(20)
    assert not thread.is_alive()
    assert "signal 9" in notes[0]


def test_commands_are_split_and_not_interpreted() -> None:
    assert parse_command("page 'two words' $HOME | tee > x") == ["page", "two words", "$HOME", "|", "tee", ">", "x"]
    for text in ("", "   ", "'open"):
        with pytest.raises(UsageError, match="--on-alert"):
            parse_command(text)


# --- the webhook


class Receiver:
    """A server whose answers are scripted: a status, ``slow``, ``drip``, or a status with a Location."""

    def __init__(self) -> None:
        self.script: list[object] = []
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.release = threading.Event()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.path, dict(self.headers.items()), body))
                step = receiver.script.pop(0) if receiver.script else 200
                if step == "slow":
                    receiver.release.wait(20)
                    return
                if step == "drip":
                    # Within every time-out of a socket, and endless.
                    while not receiver.release.wait(0.05):
                        self.wfile.write(b"H")
                    return
                status, headers = step if isinstance(step, tuple) else (step, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *args) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/t0ken?x=1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


def send(url: str, **more) -> tuple[str, Notes]:
    notes = Notes()
    hook = Webhook(url, note=notes, **{"first_pause_s": 0.01, **more})
    return hook.deliver(EVENT, threading.Event()), notes


def test_an_alert_is_posted_signed_and_dated(receiver: Receiver) -> None:
    result, notes = send(receiver.url, secret=b"s3cret", clock=lambda: 1_795_000_000.9)
    assert (result, notes) == ("delivered", [])
    ((path, headers, body),) = receiver.got
    assert path == "/hook/t0ken?x=1"
    assert json.loads(body) == EVENT
    assert headers["Content-Type"] == "application/json"
    assert headers[TIMESTAMP_HEADER] == "1795000000"
    assert headers[SIGNATURE_HEADER] == sign(b"s3cret", "1795000000", body)
    # printf 1.body | openssl dgst -sha256 -hmac key
    assert sign(b"key", "1", b"body") == "sha256=91b5374b153842ad05b2c4eab9349b8321b14703165bd3fb8b034dfb8be98ae5"


def test_without_a_secret_there_is_no_signature(receiver: Receiver) -> None:
    send(receiver.url)
    assert SIGNATURE_HEADER not in receiver.got[0][1]


def test_a_server_in_trouble_is_tried_again_with_the_same_delivery_id(receiver: Receiver) -> None:
    receiver.script = [500, 503, (429, {"Retry-After": "0"}), 202]
    result, notes = send(receiver.url)
    assert (result, notes) == ("delivered", [])
    assert len(receiver.got) == 4
    assert len({headers[DELIVERY_HEADER] for _, headers, _ in receiver.got}) == 1


def test_it_gives_up_after_some_attempts(receiver: Receiver) -> None:
    receiver.script = [500] * 20
    result, notes = send(receiver.url)
    assert result == "failed"
    assert len(receiver.got) == ATTEMPTS
    assert "status 500" in notes[0]


def test_a_refusal_is_not_tried_again_and_the_url_is_not_logged(receiver: Receiver) -> None:
    receiver.script = [403]
    result, notes = send(receiver.url, secret=b"s3cret")
    assert result == "failed"
    assert len(receiver.got) == 1
    assert "status 403" in notes[0]
    assert "t0ken" not in notes[0]
    assert "s3cret" not in notes[0]


@pytest.mark.parametrize("how", ["slow", "drip"])
def test_a_server_that_does_not_answer_is_left_in_time(receiver: Receiver, how: str) -> None:
    receiver.script = [how, 200]
    result, notes = send(receiver.url, attempt_s=0.5)
    assert (result, notes) == ("delivered", [])
    assert len(receiver.got) == 2


def test_a_dead_server_is_a_failure(receiver: Receiver) -> None:
    port = receiver.server.server_port
    receiver.close()
    result, notes = send(f"http://127.0.0.1:{port}/")
    assert result == "failed"
    assert "refused" in notes[0]


def test_redirects_are_followed_on_the_same_host_alone(receiver: Receiver) -> None:
    receiver.script = [(307, {"Location": "/elsewhere"}), 200]
    assert send(receiver.url)[0] == "delivered"
    assert [path for path, _, _ in receiver.got] == ["/hook/t0ken?x=1", "/elsewhere"]
    assert receiver.got[1][2] == receiver.got[0][2]
    other = Receiver()
    try:
        for target in (other.url, "https://127.0.0.1/", "file:///etc/passwd", "//127.0.0.2/"):
            receiver.script = [(307, {"Location": target})]
            result, notes = send(receiver.url, secret=b"s3cret")
            assert result == "failed"
            assert "another host" in notes[0]
        assert other.got == []
    finally:
        other.close()


@pytest.mark.parametrize("answer", [(302, {"Location": "/x"}), (303, {"Location": "/x"}), 304, (307, {})])
def test_a_redirect_that_would_lose_the_body_is_a_failure(receiver: Receiver, answer) -> None:
    receiver.script = [answer]
    assert send(receiver.url)[0] == "failed"
    assert len(receiver.got) == 1


def test_a_ring_of_redirects_ends(receiver: Receiver) -> None:
    receiver.script = [(308, {"Location": "/again"})] * 50
    result, notes = send(receiver.url)
    assert result == "failed"
    assert "too many redirects" in notes[0]
    assert len(receiver.got) < 10


def test_closing_breaks_an_attempt(receiver: Receiver) -> None:
    receiver.script = ["slow"] * 9
    sink = QueuedSink(Webhook(receiver.url, note=Notes(), attempt_s=600), note=Notes())
    sink.offer(EVENT)
    sink.offer(EVENT)
    until(lambda: receiver.got)
    begin = time.monotonic()
    sink.close(0.05)
    assert time.monotonic() - begin < 15
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("webhook")]
    assert Counter(sink.counts) == Counter(failed=1, dropped=1)


@pytest.mark.parametrize(
    "url",
    [
        "", "hooks.example.com", "ftp://h/", "file:///etc/passwd", "http://", "http://u:p@h/", "http://u@h/",
        "http://h:99999/", "http://h/a b", "http://h/\r\nX: y", "http://h/\u00e4",
    ],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--webhook"):
        check_url(url)
