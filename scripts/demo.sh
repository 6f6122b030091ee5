#!/usr/bin/env bash
# The main job, from nothing: sets up, builds, and answers a question about a text of over 4,000 tokens with
# SmolLM2-135M, once on packed latents (--cache palu) and once on plain fp16, then compares the two.
#   scripts/demo.sh
#   PALU_MODEL=model.gguf scripts/demo.sh     with another model
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TEXT=/usr/share/common-licenses/GPL-2  # every Debian system has it: part of base-files
QUESTION='What does "free software" mean in this license? Answer in one sentence.'
PALU=build/release/apps/palu/palu
OUT=build/demo

if [ -t 1 ]; then bold=$'\e[1m' plain=$'\e[0m'; else bold='' plain=''; fi
title() { printf '\n%s== %s ==%s\n' "$bold" "$*" "$plain"; }

# Streams the answer (standard output), shows progress and the report (standard error).
ask() {  # ask NAME CACHE
  title "$1"
  say "$PALU run -m $(basename "$MODEL") -f $TEXT -p '$QUESTION' --cache $2"
  "$PALU" run -m "$MODEL" -f "$TEXT" -p "$QUESTION" --cache "$2" -n 128 --json "$OUT/$2.json"
}

title "1 of 4: set-up"
scripts/setup.sh --no-tools

title "2 of 4: build"
use_ccache
mkdir -p "$OUT"
say "building the program, 1-3 minutes the first time (log: build/demo/build.log)"
logged "$OUT/build.log" sh -c 'cmake --preset release && cmake --build --preset release --target palu_cli'
[ -r "$TEXT" ] || die "$TEXT: no such file; any other text will do: $PALU run -m $MODEL -f TEXT -p QUESTION"

ask "3 of 4: the KV cache as packed latents" palu
ask "4 of 4: the same on an fp16 cache" fp16

title "side by side"
python3 - "$OUT/palu.json" "$OUT/fp16.json" <<'PY'
import json, statistics, sys

runs = [json.load(open(name, encoding="utf-8")) for name in sys.argv[1:]]

def mib(name):
    return lambda run: f"{run[name] / 2**20:.1f} MiB"

def number(name, digits):
    return lambda run: f"{run[name]:.{digits}f}"

def ranks(name):
    def text(run):
        r = run[name]
        return f"{min(r)} / {statistics.median(r):g} / {max(r)}" if r else "-"
    return text

rows = [
    ("tokens of prompt + answer", lambda run: f"{run['prompt_tokens']} + {run['generated_tokens']}"),
    ("KV as fp16 would be", mib("kv_fp16_bytes")),
    ("KV allocated", mib("kv_bytes")),
    ("stored bits per element", number("stored_bits_per_element", 2)),
    ("advertised bits per element", number("advertised_bits_per_element", 2)),
    ("rank of K, min / median / max", ranks("rank_k")),
    ("rank of V", ranks("rank_v")),
    ("prompt, tokens/s", number("prompt_tok_s", 1)),
    ("generation, tokens/s", number("decode_tok_s", 1)),
    ("peak resident memory", mib("peak_rss_bytes")),
]
print(f"{'':32}{'palu':>16}{'fp16':>16}")
for name, value in rows:
    print(f"{name:32}" + "".join(f"{value(run):>16}" for run in runs))
PY
printf '\n'
say "next: $PALU run -m $MODEL -i     chats; $PALU --help lists the rest"
