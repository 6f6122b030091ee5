#!/usr/bin/env python3
"""KL divergence of caches measured by the stock llama-perplexity, with the plug-in and without.

    bench/plugin/quality.py --llama .deps/llama --plugin build/release/lib/libggml-palu.so -m MODEL -f TEXT \\
        [--ctx 2048] [--ubatch 64] [--chunks 2] [--cache palu ...] [--stock f16 q8_0 q8_0/q4_0 q4_0] [--json FILE]

The weights are expanded to f32 first (quantised ones turn any last-bit difference into a KL of 0.003). The base is the
stock program with an f32 cache and without flash attention; the second half of every chunk is scored, as
llama-perplexity always does. Its logits are stored in 16 bits, which is the floor of what can be told apart.
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile


def expand(llama, model, out):
    """An f32 copy of the model, by libllama's own quantiser."""
    sys.path.insert(0, llama)
    import llama_cpp.llama_cpp as api

    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, None)
    params = api.llama_model_quantize_default_params()
    params.ftype = 0  # LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    if api._lib.llama_model_quantize(model.encode(), out.encode(), ctypes.byref(params)) != 0:
        sys.exit(f"{model}: cannot be expanded to f32")


def run(options, model, base, arguments, environment):
    command = [os.path.join(options.llama, "bin", "llama-perplexity"), "-m", model, "-f", options.text,
               "-c", str(options.ctx), "-b", str(options.ctx), "-ub", str(options.ubatch),
               "--chunks", str(options.chunks),
               "-t", str(options.threads), "--kl-divergence-base", base, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, text=True, capture_output=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode != 0:
        sys.exit(" ".join(command) + "\n" + text[-3000:])
    return text


def number(text, label):
    found = re.search(label + r"\s*:\s*(-?[0-9.]+(?:e-?[0-9]+)?)(?:\s*±\s*([0-9.]+))?", text)
    return (float(found[1]), float(found[2] or 0)) if found else (None, None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", required=True, help="prefix of llama.cpp and llama-cpp-python")
    parser.add_argument("--plugin", required=True)
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("-f", dest="text", required=True)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--ubatch", type=int, default=64, help="tokens that see each other exactly")
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", nargs="*", default=["fp16", "palu:quality", "palu", "palu:small"])
    parser.add_argument("--stock", nargs="*", default=["f16", "q8_0", "q8_0/q4_0", "q4_0"])
    parser.add_argument("--json")
    options = parser.parse_args()

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model, base = os.path.join(folder, "f32.gguf"), os.path.join(folder, "base.logits")
        expand(options.llama, os.path.abspath(options.model), model)
        run(options, model, base, ["-fa", "off", "-ctk", "f32", "-ctv", "f32"], {})
        print(f"{'cache':32} {'KL mean':>19} {'99.9 %':>9} {'same top':>9}")
        for name in [*("stock " + s for s in options.stock), *options.cache]:
            if name.startswith("stock "):
                k, _, v = name[6:].partition("/")
                arguments, environment = ["-fa", "on", "-ctk", k, "-ctv", v or k], {}
            else:
                arguments = ["-fa", "on"]
                environment = {"GGML_BACKEND_PATH": os.path.abspath(options.plugin), "LLAMA_ARG_DEVICE": "PALU",
                               "PALU_CACHE": name}
            text = run(options, model, base, ["--kl-divergence", *arguments], environment)
            mean, error = number(text, "Mean +KLD")
            tail, _ = number(text, "99.9% +KLD")
            top, _ = number(text, "Same top p")
            bits = re.search(r"cells: ([0-9.]+) bits per element", text)
            rows.append({"cache": name, "kl_mean": mean, "kl_mean_se": error, "kl_p999": tail, "same_top": top,
                         "bits_when_full": float(bits[1]) if bits else None})
            print(f"{name:32} {mean:10.5f} ± {error:.5f} {tail:9.4f} {top:8.2f}%", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump({"model": os.path.basename(options.model), "ctx": options.ctx, "chunks": options.chunks,
                       "ubatch": options.ubatch,
                       "base": "stock, f32 cache, flash attention off", "results": rows}, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
