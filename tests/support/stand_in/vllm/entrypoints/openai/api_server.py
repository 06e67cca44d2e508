"""A stand-in for vLLM's API server, for tests of the life cycle alone: boots in a moment, answers what pdctl asks.

Never used to show anything about vLLM itself. Behaves badly on request, by the environment:
STAND_IN_BOOT_S, STAND_IN_FAIL (text to log before exit 1), STAND_IN_RECOMPUTE, STAND_IN_WRONG_TEXT,
STAND_IN_IGNORE_TERM, STAND_IN_SLOW_COMPLETION_S, STAND_IN_WRITER (state of the connector's writer), STAND_IN_NO_LEDGER.
STAND_IN_WRITER_FILE names a file that has the writer's state while it is there; a start removes it, and so heals.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BLOCK_SIZE, BYTES_PER_BLOCK = 16, 4096
counters = {"bytes": 0, "received": 0, "computed": 0}
records = []
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body, kind="application/json"):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health":
            self.answer(200, "")
        elif self.path == "/metrics":
            with lock:
                now = dict(counters)
            source = 'vllm:prompt_tokens_by_source_total{engine="0",source="%s"} %d\n'
            self.answer(
                200,
                f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {now["bytes"]}\n'
                + source % ("external_kv_transfer", now["received"])
                + source % ("local_compute", now["computed"])
                + f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",kv_cache_memory_bytes="{BYTES_PER_BLOCK * 100}",'
                'num_gpu_blocks="100"} 1.0\n'
                'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
                'vllm:kv_cache_usage_perc{engine="0"} 0.25\n',
                "text/plain",
            )
        else:
            self.answer(404, {"error": self.path})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(float(os.environ.get("STAND_IN_SLOW_COMPLETION_S", "0")))
        params = body.get("kv_transfer_params") or {}
        tokens = len(body["prompt"].split())
        text = hashlib.sha256(body["prompt"].encode()).hexdigest()[:12]
        result = {"choices": [{"text": text}], "usage": {"prompt_tokens": tokens}}
        with lock:
            if params.get("do_remote_prefill"):
                if os.environ.get("STAND_IN_WRONG_TEXT"):
                    result["choices"][0]["text"] = "nonsense"
                if os.environ.get("STAND_IN_RECOMPUTE"):
                    counters["computed"] += tokens
                else:
                    counters["received"] += tokens - 1
            else:
                counters["computed"] += tokens
            if params.get("do_remote_decode"):
                if not os.environ.get("STAND_IN_RECOMPUTE"):
                    counters["bytes"] += -(-tokens // BLOCK_SIZE) * BYTES_PER_BLOCK
                result["kv_transfer_params"] = {"transfer_mode": "push", "do_remote_prefill": True}
            key = params.get("key") or hashlib.sha256(body["prompt"].encode()).hexdigest()
            record = {"key": key, "tokens": tokens}
            if params.get("do_remote_decode"):
                stages = dict.fromkeys(("prefilling", "ready", "matched", "posted", "completed"), 0.0)
                records.append({**record, "outcome": "completed", "stages": stages})
            if params.get("do_remote_prefill"):
                records.append({**record, "outcome": "received", "stages": {"registered": 0.0, "received": 0.1}})
        self.answer(200, result)

    def log_message(self, form, *args):
        print(f'INFO:     {self.client_address[0]} - "{form % args}"', flush=True)


class Telemetry(Handler):
    def do_GET(self):
        if self.path == "/healthz":
            state = os.environ.get("STAND_IN_WRITER", "idle")
            file = os.environ.get("STAND_IN_WRITER_FILE")
            if file and Path(file).exists():
                state = Path(file).read_text()
            writer = {"alive": state != "dead", "state": state, "op": None, "heartbeat_age_s": 0.1, "loops": 1}
            self.answer(200, {"writer": writer, "transfers": {"inflight": 0, "oldest_s": 0.0}})
        else:
            with lock:
                self.answer(200, {"transfers": [] if os.environ.get("STAND_IN_NO_LEDGER") else records[::-1]})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    options, _ = parser.parse_known_args()
    if os.environ.get("STAND_IN_IGNORE_TERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("INFO 11-29 16:31:47 [cpu_model_runner.py:68] Starting to load model stand-in...", flush=True)
    time.sleep(float(os.environ.get("STAND_IN_BOOT_S", "0.2")))
    if failure := os.environ.get("STAND_IN_FAIL"):
        print(failure, file=sys.stderr, flush=True)
        sys.exit(1)
    file = os.environ.get("STAND_IN_WRITER_FILE")
    if file:
        Path(file).unlink(missing_ok=True)
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    own = options.kv_transfer_config["kv_connector_extra_config"]["pdctl"]
    telemetry = ThreadingHTTPServer((own["telemetry_host"], own["telemetry_port"]), Telemetry)
    threading.Thread(target=telemetry.serve_forever, daemon=True).start()
    print("INFO:     Application startup complete.", flush=True)
    server.serve_forever()


main()
