"""A stand-in for vllm-router: prefill leg, then decode leg, of one pair. For tests of the life cycle alone."""

import argparse
import json
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = argparse.Namespace()


def parse_router_args(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--prefill")
    parser.add_argument("--decode")
    return parser.parse_known_args(arguments)[0]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        leg = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = post(options.prefill + self.path, leg)["kv_transfer_params"]
        self.answer(post(options.decode + self.path, {**body, "kv_transfer_params": params}))


def launch_router(arguments):
    vars(options).update(vars(arguments))
    time.sleep(0.1)
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
