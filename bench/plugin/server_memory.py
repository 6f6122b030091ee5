#!/usr/bin/env python3
"""What llama-server's process takes as its KV cache fills, and what the plug-in says it holds.

    bench/plugin/server_memory.py --server .deps/llama/bin/llama-server -m MODEL -f TEXT \\
        [--cells 32768] [--slots 4] [--plugin build/release/lib/libggml-palu.so --cache palu]

Without --plugin it measures the stock cache. Prints one JSON line: resident bytes after the start, after every slot is
full, and, with the plug-in, what its summary (SIGUSR1) reports. rss_other is what a server takes beside its cache: one of
1,024 cells that has read a prompt of 1,000 tokens, less its own cache (with --plugin the summary's bytes, else f16's).
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, options, cells, slots):
        self.port = free_port()
        self.log = tempfile.TemporaryFile(mode="w+b")
        env = dict(os.environ)
        if options.plugin:
            env.update(GGML_BACKEND_PATH=options.plugin, LLAMA_ARG_DEVICE="PALU", PALU_CACHE=options.cache)
        command = [options.server, "-m", options.model, "-c", str(cells), "-np", str(slots), "-t", str(options.threads),
                   "--no-kv-unified", "--cache-ram", "0", "-fa", "on", "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=env, stdout=self.log, stderr=subprocess.STDOUT)
        self.wait()

    def wait(self):
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit("the server ended:\n" + self.text()[-2000:])
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health") as reply:
                    if reply.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        sys.exit("the server did not start within two minutes")

    def post(self, path, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as reply:
            return json.load(reply)

    def resident(self, key="VmRSS"):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

    def text(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def fill(self, tokens, slot):
        reply = self.post("/completion", {"prompt": tokens, "n_predict": 8, "id_slot": slot, "cache_prompt": True,
                                          "temperature": 0, "ignore_eos": True})
        return reply["tokens_evaluated"] + reply["tokens_predicted"]

    def cache_bytes(self, options):
        """As the plug-in reports them; those of a stock f16 cache from the line that llama.cpp logs."""
        if options.plugin:
            now = re.findall(r"([0-9.]+) MiB now", " ".join(self.summary()))
            return int(sum(map(float, now)) * 2**20)
        sizes = re.findall(r"KV buffer size = +([0-9.]+) MiB", self.text())
        return int(sum(map(float, sizes)) * 2**20)

    def summary(self):
        """The lines that the plug-in prints at SIGUSR1, one per cache."""
        before = len(self.text())
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return re.findall(r"palu: (\d+ layers, .*in use.*)", self.text()[before:])

    def stop(self):
        self.process.terminate()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("-f", dest="text", required=True)
    parser.add_argument("--cells", type=int, default=32768)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plugin")
    parser.add_argument("--cache", default="palu")
    options = parser.parse_args()

    with open(options.text, encoding="utf-8") as file:
        text = file.read()[: 8 * options.cells]
    server = Server(options, 1024, 1)
    tokens = server.post("/tokenize", {"content": text})["tokens"]
    server.fill(tokens[:1000], 0)
    other = server.resident() - server.cache_bytes(options)
    server.stop()

    server = Server(options, options.cells, options.slots)
    start = server.resident()
    per_slot = options.cells // options.slots
    filled = 0
    for slot in range(options.slots):
        first = slot * per_slot % max(1, len(tokens) - per_slot)
        filled += server.fill(tokens[first : first + per_slot - 16], slot)
    result = {"cache": options.cache if options.plugin else "stock f16", "cells": options.cells, "tokens": filled,
              "rss_other": other, "rss_start": start, "rss_full": server.resident(),
              "rss_peak": server.resident("VmHWM"), "cache_bytes": server.cache_bytes(options)}
    result["rss_cache_over_reported"] = round((result["rss_full"] - other) / result["cache_bytes"], 3)
    if options.plugin:
        result["summary"] = server.summary()
    server.stop()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
