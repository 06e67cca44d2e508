"""A stand-in for vllm-router: prefill leg, then decode leg, of one pair. For tests of the life cycle alone.

Its health checks have the options, defaults and answers of vllm-router 0.1.17.
"""

import argparse
import json
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = argparse.Namespace()
unwell = set()


def parse_router_args(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--prefill")
    parser.add_argument("--decode")
    parser.add_argument("--health-check-interval-secs", type=int, default=60)
    parser.add_argument("--health-failure-threshold", type=int, default=3)
    parser.add_argument("--health-success-threshold", type=int, default=2)
    return parser.parse_known_args(arguments)[0]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def watch(name, url):
    good = bad = 0
    while True:
        try:
            urllib.request.urlopen(url + "/health", timeout=5).close()
            good, bad = good + 1, 0
        except OSError:
            good, bad = 0, bad + 1
        if bad >= options.health_failure_threshold:
            unwell.add(f"{name}: {url}")
        elif good >= options.health_success_threshold:
            unwell.discard(f"{name}: {url}")
        time.sleep(options.health_check_interval_secs)


class Handler(BaseHTTPRequestHandler):
    def answer(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/health" and unwell:
            self.answer(f"Unhealthy servers: {sorted(unwell)}", 503)
        elif self.path == "/workers":
            urls = ((options.prefill, "prefill"), (options.decode, "decode"))
            self.answer({"workers": [{"url": url, "worker_type": kind} for url, kind in urls]})
        else:
            self.answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        leg = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = post(options.prefill + self.path, leg)["kv_transfer_params"]
        self.answer(post(options.decode + self.path, {**body, "kv_transfer_params": params}))


def launch_router(arguments):
    vars(options).update(vars(arguments))
    time.sleep(0.1)
    for name, url in (("Prefill", options.prefill), ("Decode", options.decode)):
        threading.Thread(target=watch, args=(name, url), daemon=True).start()
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
