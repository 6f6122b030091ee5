#!/usr/bin/env python3
"""Checks what the documents and comments say about files.

- Every path of this repository that a tracked text file names exists: src/..., docs/..., and so on; `*` and `{a,b}`
  are expanded.
- Every relative link of a Markdown file leads to a file inside the repository, and its #anchor to a heading.
- No file holds an absolute path of somebody's machine.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = r"(?:src|include|apps|adapters|tests|bench|docs|examples|scripts|cmake|reference|\.ci)"
# A path starts a word; what stands before it would make it part of another path.
PATH = re.compile(rf"(?<![\w/.$}}-])(?:\./)?({FOLDERS}/[\w./*{{}},+-]*)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HOST_PATH = re.compile(r"(?<![\w.}])/(?:work|tmp|root|home)/")
BINARY = {".gguf", ".png", ".bin"}


def tracked_files():
    out = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()
    paths = (ROOT / name for name in out.split("\0") if name)
    return [path for path in paths if path.is_file() and path.suffix not in BINARY and path.name != "LICENSE"]


def expand(pattern):
    """a/{b,c}.h -> a/b.h, a/c.h"""
    if match := re.search(r"\{([^{}]*)\}", pattern):
        for choice in match[1].split(","):
            yield from expand(pattern[: match.start()] + choice + pattern[match.end() :])
    else:
        yield pattern


def exists(path, root=ROOT):
    return any(root.glob(path)) if "*" in path else (root / path).exists()


def anchors(markdown):
    """Headings as GitHub names them."""
    found = set()
    for line in markdown.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"#+\s+(.*)", line):
            words = re.sub(r"[^\w\s-]", "", match[1].strip().lower())
            found.add(words.replace(" ", "-"))
    return found


def check_link(path, target):
    """None when the link is good, else the reason."""
    if re.match(r"[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.is_relative_to(ROOT):
        return "leaves the repository"
    if not file.exists():
        return "does not exist"
    if anchor and file.suffix == ".md" and anchor not in anchors(file):
        return f"has no heading #{anchor}"
    return None


def check(path):
    errors = []

    def error(number, what):
        errors.append(f"{path.relative_to(ROOT)}:{number}: {what}")

    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for match in PATH.finditer(line):
            name = match[1].rstrip(".,-{")
            if "..." in name or re.search(r"\{[^,{}]*(\}|$)", name):  # an ellipsis; a place-holder of a script
                continue
            for one in expand(name):
                # The program's own includes and build file name files as seen from its folder.
                of_program = path.suffix != ".md" and exists(one, ROOT / "apps" / "palu")
                if not exists(one) and not of_program:
                    error(number, f"{one} does not exist")
        if path.suffix == ".md":
            for match in LINK.finditer(line):
                if reason := check_link(path, match[1]):
                    error(number, f"link to {match[1]}: {reason}")
        if match := HOST_PATH.search(line):
            error(number, f"{match[0]}: an absolute path of one machine")
    return errors


def main():
    files = tracked_files()
    errors = [error for path in files for error in check(path)]
    print("\n".join(errors) if errors else f"paths and links: {len(files)} files are right")
    return 1 if errors or not files else 0


if __name__ == "__main__":
    sys.exit(main())
