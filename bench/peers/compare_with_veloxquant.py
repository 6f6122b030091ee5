#!/usr/bin/env python3
"""Gives the K and V of a real model to VeloxQuant-MLX and to palu, and compares what both give back.

  python bench/peers/compare_with_veloxquant.py --program build/release/bench/peers/palu_peers DUMP

DUMP is what `palu_peers dump` wrote. Per method, side and layer, the error is |x' - x| / |x - mean|, with the mean over
a head's tokens. Where the two mean the same thing, their errors agree; the exit status is 1 when they do not. Where they
differ on purpose the line says how.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable

import numpy as np

import veloxquant


@dataclasses.dataclass
class Comparison:
    """One line of the table per side: our cache text and what the package does with the same tensors."""

    name: str
    cache: str  # ours
    peer: Callable  # (k, v) as [H, S, D] f16 -> veloxquant.Result
    first: int = 0  # tokens of the first append, the others follow one by one; 0 = all at once. Negative: from the end
    sides: str = "kv"
    differs: str = ""  # why the errors need not agree; empty = they must


COMPARISONS = [
    Comparison("palu", "palu:reference", veloxquant.cache("palu")),
    Comparison("palu, rank 32, V latents fp16", "palu:reference,rank=32,quantize_values=false",
               veloxquant.cache("palu", palu_rank=32, palu_quantize_values=False)),
    Comparison("palu, last 32 tokens one by one", "palu:reference", veloxquant.cache("palu", first=-32), first=-32,
               differs="the package's group of one token is never quantised, though billed at 4/2 bits"),
    Comparison("kivi", "kivi", veloxquant.cache("kivi")),
    Comparison("kivi, last 32 tokens one by one", "kivi", veloxquant.cache("kivi", first=-32), first=-32),
    Comparison("svdq", "svdq", veloxquant.cache("svdq")),
    Comparison("uniform", "uniform", veloxquant.uniform(bits=2)),
    Comparison("rabitq", "rabitq", veloxquant.rabitq(), sides="k",
               differs="the package's decoder shrinks keys to the least error; ours keeps inner products unbiased"),
]


def our_reconstruction(program, dump, comparison, tokens, out):
    first = comparison.first if comparison.first >= 0 else tokens + comparison.first
    command = [program, "reconstruct", "--cache", comparison.cache, "--first", str(first), "--out", out, dump]
    if subprocess.run(command).returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return json.loads((out / "report.json").read_text())


def relative_error(got, exact, tokens):
    """Over the last `tokens` tokens of [H, S, D]; the spread is that of all tokens."""
    spread = np.square(exact - exact.mean(axis=1, keepdims=True)).mean()
    return float(np.sqrt(np.square(got - exact)[:, -tokens:].mean() / spread))


class Side:
    """Errors of K or of V, gathered over layers."""

    def __init__(self):
        self.ours, self.peer, self.apart, self.ranks = [], [], [], []

    def add(self, exact, ours, peer, tokens, ranks):
        self.ours.append(relative_error(ours, exact, tokens))
        self.peer.append(relative_error(peer, exact, tokens))
        self.apart.append(relative_error(ours - peer + exact, exact, tokens))
        self.ranks.append(ranks)

    def worst(self):
        """The largest relative difference of the two errors in any layer."""
        return max(abs(a - b) / max(a, b, 1e-3) for a, b in zip(self.ours, self.peer))

    def line(self, name, side, verdict):
        ours, peer = np.mean(self.ours), np.mean(self.peer)
        same = sum(a == b for a, b in self.ranks)
        ranks = f"{same}/{len(self.ranks)}" if any(b for _, b in self.ranks) else "-"
        return (f"{name:<32} {side}  {ours:8.5f} {peer:8.5f} {self.worst() * 100:9.3f} {np.mean(self.apart):9.5f} "
                f"{ranks:>7}  {verdict}")


def compare(comparison, program, dump, layers):
    """Returns {"k": Side, "v": Side}."""
    sides = {side: Side() for side in comparison.sides}
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        tokens = json.loads((dump / "manifest.json").read_text())["tokens"]
        report = our_reconstruction(program, dump, comparison, tokens, out)
        for layer, numbers in zip(layers, report["layers"]):
            exact = {side: np.load(dump / layer[side])[0] for side in "kv"}
            peer = comparison.peer(exact["k"], exact["v"])
            for side in comparison.sides:
                measured = -comparison.first if comparison.first < 0 else tokens
                sides[side].add(exact[side].astype(np.float32), np.load(out / layer[side])[0],
                                getattr(peer, side), measured, (numbers[f"rank_{side}"], getattr(peer, f"rank_{side}")))
    return sides


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=pathlib.Path, metavar="DUMP", help="folder that `palu_peers dump` wrote")
    parser.add_argument("--program", type=pathlib.Path, required=True, help="the built palu_peers")
    parser.add_argument("--only", metavar="WORD", default="", help="only the comparisons whose name has this word")
    parser.add_argument("--tolerance", type=float, default=0.03,
                        help="largest difference of two errors that agree, as a share (default: %(default)s)")
    args = parser.parse_args()
    chosen = [c for c in COMPARISONS if args.only in c.name]
    if not chosen:
        parser.error(f"--only {args.only}: no such comparison; there are: " + "; ".join(c.name for c in COMPARISONS))
    if not (args.dump / "manifest.json").is_file():
        parser.error(f"{args.dump}: no manifest.json in it; `palu_peers dump -o {args.dump}` writes one")
    if not args.program.is_file():
        parser.error(f"--program {args.program}: no such file; build the target palu_peers")
    return args, chosen


def main():
    args, chosen = arguments()
    manifest = json.loads((args.dump / "manifest.json").read_text())
    print(f"{pathlib.Path(manifest['model']).name}, {manifest['tokens']} tokens, {len(manifest['layers'])} layers; "
          f"{veloxquant.version()}\n")
    print(f"{'method':<32}    {'ours':>8} {'package':>8} {'worst %':>9} {'apart':>9} {'rank =':>7}")
    failed = False
    for comparison in chosen:
        for side, numbers in compare(comparison, args.program, args.dump, manifest["layers"]).items():
            agrees = numbers.worst() <= args.tolerance
            failed |= not agrees and not comparison.differs
            verdict = "agree" if agrees else comparison.differs or "DIFFER, and should not"
            print(numbers.line(comparison.name, side.upper(), verdict), flush=True)
    print("\nours, package: mean over layers of the relative error. worst: largest difference of the two in a layer.\n"
          "apart: distance of the two reconstructions from each other. rank =: layers where both chose the same rank.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
