"""A small server of OpenAI's completions, for tests of what asks one: streams, counts tokens, fails on demand."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Count = Callable[[str], int]


@dataclass
class Completions:
    """What the server does, and what it was asked.

    Attributes:
        count: tokens of a prompt.
        fail: by place of a request among all: "busy" (503), "cut" (a stream without end), "error" (an error in the
            stream), "short" (one token less), "hang" (nothing for a while).
        token_s: time between tokens.
        wrong: places of requests that get another text than their prompt's.
        key: the key that is asked for, if any.
    """

    count: Count
    fail: dict[int, str] = field(default_factory=dict)
    token_s: float = 0.0
    wrong: set[int] = field(default_factory=set)
    key: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    cut_off: int = 0
    running: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


def answer(prompt: str, tokens: int) -> list[str]:
    """The answer to a prompt, by token."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return [f" {digest[number % 60 :][:3]}" for number in range(tokens)]


@contextmanager
def completions(state: Completions) -> Iterator[Completions]:
    """A server of `state` on a free port of 127.0.0.1; sets its ``url``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            self._reply(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                self._reply(404, {"detail": "Not Found"})
                return
            if state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
                self._reply(401, {"error": {"message": "no key", "code": 401}})
                return
            with state.lock:
                place = len(state.asked)
                state.asked.append(body)
                state.running += 1
                state.most_at_once = max(state.most_at_once, state.running)
            try:
                self._complete(body, place)
            except (BrokenPipeError, ConnectionResetError):
                with state.lock:
                    state.cut_off += 1
                self.close_connection = True
            finally:
                with state.lock:
                    state.running -= 1

        def _complete(self, body: dict[str, Any], place: int) -> None:
            fault = state.fail.get(place, "")
            if fault == "busy":
                self._reply(503, {"error": {"message": "no healthy\nprefill instance", "code": 503}})
                return
            if fault == "hang":
                time.sleep(3)
            tokens = body["max_tokens"] - (fault == "short")
            text = answer(body["prompt"] + ("!" if place in state.wrong else ""), tokens)
            usage = {"prompt_tokens": state.count(body["prompt"]), "completion_tokens": tokens}
            if not body.get("stream"):
                time.sleep(state.token_s * tokens)
                self._reply(200, {"choices": [{"text": "".join(text)}], "usage": usage})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            for number, piece in enumerate(text):
                if number == 1 and fault == "error":
                    self._event({"error": {"message": "the KV cache did not come", "code": 500}})
                    break
                if number == 1 and fault == "cut":
                    return
                time.sleep(state.token_s)
                self._event({"choices": [{"text": piece}]})
            if fault != "error":
                self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, value: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
            self.wfile.flush()

        def _reply(self, status: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    with Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join(5)
