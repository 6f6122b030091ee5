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
    sides: str = "kv"
    streamed: int = 0  # so many last tokens are appended one by one after the others
    only_streamed: bool = False  # the errors are those of the streamed tokens
    differs: str = ""  # why the errors need not agree; empty = they must


COMPARISONS = [
    Comparison("palu", "palu:reference", veloxquant.cache("palu")),
    Comparison("palu, rank 32, V latents fp16", "palu:reference,rank=32,quantize_values=false",
               veloxquant.cache("palu", palu_rank=32, palu_quantize_values=False)),
    Comparison("palu, last 32 tokens streamed", "palu:reference", veloxquant.cache("palu", streamed=32), streamed=32,
               only_streamed=True,
               differs="the package never quantises a token that comes alone, though it bills 4/2 bits for it"),
    Comparison("kivi", "kivi", veloxquant.cache("kivi")),
    Comparison("kivi, 4 bits", "kivi:bits=4", veloxquant.cache("kivi", bit_width_inlier=4)),
    Comparison("kivi, last 160 tokens streamed", "kivi", veloxquant.cache("kivi", streamed=160), streamed=160),
    Comparison("svdq", "svdq", veloxquant.cache("svdq")),
    Comparison("svdq, rank 48", "svdq:rank=48", veloxquant.cache("svdq", svdq_rank=48)),
    Comparison("svdq, 40 % of the energy", "svdq:energy_threshold=0.4",
               veloxquant.cache("svdq", svdq_energy_threshold=0.4)),
    Comparison("uniform", "uniform", veloxquant.uniform(bits=2)),
    Comparison("rabitq", "rabitq", veloxquant.rabitq(unbiased=False), sides="k",
               differs="the package gives keys the length of least error; ours the one of unbiased inner products"),
    Comparison("rabitq, package's keys unbiased", "rabitq", veloxquant.rabitq(unbiased=True), sides="k"),
    Comparison("rabitq, against kivi's V at 4 bits", "rabitq", veloxquant.per_token(bits=4), sides="v"),
]


def our_reconstruction(program, dump, comparison, tokens, out):
    first = str(tokens - comparison.streamed)
    command = [program, "reconstruct", "--cache", comparison.cache, "--first", first, "--out", out, dump]
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
        return (f"{name:<34} {side}  {ours:8.5f} {peer:8.5f} {self.worst() * 100:9.3f} {np.mean(self.apart):9.5f} "
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
                measured = comparison.streamed if comparison.only_streamed else tokens
                sides[side].add(exact[side].astype(np.float32), np.load(out / layer[side])[0],
                                getattr(peer, side), measured, (numbers[f"rank_{side}"], getattr(peer, f"rank_{side}")))
    return sides


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=pathlib.Path, metavar="DUMP", help="folder that `palu_peers dump` wrote")
    parser.add_argument("--program", type=pathlib.Path, required=True, help="the built palu_peers")
    parser.add_argument("--only", metavar="WORD", default="", help="only the comparisons whose name has this word")
    parser.add_argument("--tolerance", type=float, default=0.02,
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
    print(f"{'method':<34}    {'ours':>8} {'package':>8} {'worst %':>9} {'apart':>9} {'rank =':>7}")
    failed = False
    for comparison in chosen:
        for side, numbers in compare(comparison, args.program, args.dump, manifest["layers"]).items():
            agrees = numbers.worst() <= args.tolerance
            failed |= not agrees and not comparison.differs
            verdict = "agree" if agrees else comparison.differs or "DIFFER, and should not"
            print(numbers.line(comparison.name, side.upper(), verdict), flush=True)
    print("\nours, package: mean over layers of the relative error. worst: largest difference of the two in a layer.\n"
          "apart: distance of the two reconstructions from each other. rank =: layers where both keep as many channels.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
