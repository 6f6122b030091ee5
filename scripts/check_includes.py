#!/usr/bin/env python3
"""Checks that includes point one way: base <- fit, codec <- kernels <- methods <- cache <- io <- apps, adapters.

A folder may include itself, the folders named for it below, and the public headers. Adapters and the program see
nothing of src/; public headers see only each other, and no type of a library that users would then need.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Folder of src/ -> other folders of src/ that it may include.
SRC = {
    "base": set(),
    "fit": {"base"},
    "codec": {"base"},
    "kernels": {"base", "codec"},
    "methods": {"base", "fit", "codec", "kernels"},
    "cache": {"base", "fit", "codec", "kernels", "methods"},
    "io": {"base", "fit", "codec", "kernels", "methods", "cache"},
}
# Libraries that only one folder of src/ may use.
ONLY_IN = {"hwy": "kernels", "Eigen": "fit"}
SOURCES = {".h", ".cc", ".inc"}
QUOTED = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
ANGLE = re.compile(r"^\s*#\s*include\s+<([^>]+)>")
# Libraries that stay out of the public headers.
PRIVATE = re.compile(r"^(hwy|Eigen|fmt|spdlog|nlohmann|CLI|ggml|gguf|llama|cuda|omp|immintrin|arm_neon|Python)\b")


def allowed(path, include):
    """None when `path` may include `include` (as written in quotes), else the reason."""
    parts = path.relative_to(ROOT).parts
    first = include.split("/")[0]
    if parts[0] == "include":
        return None if first == "palu" else "public headers include public headers only"
    if first == "palu":
        return None if (ROOT / "include" / include).exists() else "no such public header"
    if parts[0] == "src":
        if len(parts) < 3 or parts[1] not in SRC:
            return f"src/{parts[1]} has no place in the order; add it to scripts/check_includes.py"
        own = parts[1]
        if first in ONLY_IN:
            return None if ONLY_IN[first] == own else f"{first} is used in src/{ONLY_IN[first]} only"
        if first == own or first in SRC[own]:
            return None if (ROOT / "src" / include).exists() else "no such file in src/"
        return f"src/{own} may include: {', '.join(sorted(SRC[own] | {own}))}, palu"
    # Adapters and apps: a neighbour, a header of the same program, or a header of an adapter.
    roots = [path.parent, ROOT / "adapters"]
    if parts[0] == "apps":
        roots.append(ROOT / "apps" / parts[1])
    if any((root / include).exists() for root in roots):
        return None
    return f"{parts[0]}/ may include palu/..., adapters and its own folder"


def check(path):
    errors = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        reason = include = None
        if match := QUOTED.match(line):
            include = match[1]
            reason = allowed(path, include)
        elif match := ANGLE.match(line):
            include = match[1]
            if path.is_relative_to(ROOT / "include"):
                reason = "public headers include no such library" if PRIVATE.match(include) else None
            elif path.is_relative_to(ROOT / "src") and include.split("/")[0] in ONLY_IN:
                reason = allowed(path, include)
        if reason:
            errors.append(f"{path.relative_to(ROOT)}:{number}: includes {include}: {reason}")
    return errors


def main():
    files = [
        path
        for folder in ("include", "src", "adapters", "apps")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SOURCES
    ]
    errors = [error for path in files for error in check(path)]
    print("\n".join(errors) if errors else f"include direction: {len(files)} files are right")
    return 1 if errors or not files else 0


if __name__ == "__main__":
    sys.exit(main())
