#!/usr/bin/env python3
"""What llama-server's process takes as its KV cache fills, and what the plug-in says it holds.

    bench/plugin/server_memory.py --server .deps/llama/bin/llama-server -m MODEL -f TEXT [--cells 32768] [--slots 4] \\
        [--plugin build/release/lib/libggml-palu.so --cache palu]

Without --plugin it measures the stock f16 cache. Prints one JSON line: resident bytes after the start and after every
slot is full, and the bytes of the cache: with the plug-in what its summary (SIGUSR1) says, else what llama.cpp's log
says. rss_other is what a server takes beside its cache: one of 1,024 cells that has read a prompt of 1,000 tokens, less
its own cache, and with the compute buffers of the full one, which grow with the cells of a slot (the mask); all of them
are taken to be in use.
"""

import argparse
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "ggml"))
from llama_server import Server  # noqa: E402


def start(options, cells, slots):
    arguments = ["-c", str(cells), "-np", str(slots), "--no-kv-unified", "--cache-ram", "0", "-fa", "on",
                 "-lv", "4"]
    return Server(options.server, options.model, arguments, options.plugin, options.cache if options.plugin else None,
                  options.threads, stock=(), environment={}, patience=3600)


def fill(server, tokens, slot):
    status, reply = server.post("/completion", {"prompt": tokens, "n_predict": 8, "id_slot": slot,
                                                "cache_prompt": True, "temperature": 0, "ignore_eos": True})
    if status != 200:
        sys.exit(f"slot {slot}: {reply}")
    return reply["tokens_evaluated"] + reply["tokens_predicted"]


def mebibytes(lines):
    return int(sum(float(re.search(r"([0-9.]+) MiB", line)[1]) for line in lines) * 2**20)


def cache_bytes(server, options):
    return mebibytes(server.summary() if options.plugin else re.findall("KV buffer size = .*", server.text()))


def compute_bytes(server):
    last = dict(re.findall(r"(\S+) (compute buffer size = .*)", server.text()))  # of each backend
    return mebibytes(last.values())


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
    text = pathlib.Path(options.text).read_text(encoding="utf-8")[: 8 * options.cells]

    with start(options, 1024, 1) as server:
        tokens = server.post("/tokenize", {"content": text})[1]["tokens"]
        fill(server, tokens[:1000], 0)
        other = server.resident() - cache_bytes(server, options) - compute_bytes(server)

    with start(options, options.cells, options.slots) as server:
        other += compute_bytes(server)
        result = {"cache": options.cache if options.plugin else "stock f16", "cells": options.cells,
                  "rss_other": other, "compute_bytes": compute_bytes(server), "rss_start": server.resident()}
        per_slot = options.cells // options.slots
        result["tokens"] = 0
        for slot in range(options.slots):
            first = slot * per_slot % max(1, len(tokens) - per_slot)
            result["tokens"] += fill(server, tokens[first : first + per_slot - 16], slot)
        result.update(rss_full=server.resident(), rss_peak=server.resident("VmHWM"),
                      cache_bytes=cache_bytes(server, options))
        result["rss_cache_over_reported"] = round((result["rss_full"] - other) / result["cache_bytes"], 3)
        if options.plugin:
            result["summary"] = server.summary()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
