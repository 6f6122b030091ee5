#!/usr/bin/env python3
"""The stock llama-server on the plug-in answers as it does on its own exact cache.

    tests/ggml/server_test.py answers --server llama-server --plugin libggml-palu.so --model MODEL.gguf
    tests/ggml/server_test.py stress  ... [--cache palu] [--requests 10000] [--unified]

answers: four slots at once, prefixes reused, slots saved, erased and restored into others, generation over several
context shifts; with a stream per slot and with --kv-unified. All answers must be those of the same server without the
plug-in, with an f32 cache and flash attention off.

stress: clients with random prompts, prefixes and lengths over four slots, some of whom hang up. The distributions of
the next token in a sample of the answers are checked against an exact server. Memory must not grow after the
first quarter. Prints one JSON line.

Exit codes: 0 = passed, 1 = failed, 77 = skipped, as there is no server.
"""

import argparse
import concurrent.futures
import os
import sys

from llama_server import Server
from server_stress import SLOTS, stress

# How slots share the cells.
MODES = [("streams", ["--no-kv-unified"]), ("unified", ["--kv-unified", "--no-cache-idle-slots"]),
         ("unified, idle slots in the prompt cache", ["--kv-unified", "--cache-idle-slots"])]
GREEDY = {"temperature": 0, "cache_prompt": True, "return_tokens": True, "ignore_eos": True}
TEXTS = [
    "The lighthouse keeper wrote down every ship that passed, its flag and its course, and in the evening",
    "A cache of keys and values grows with each token that a model reads; what it costs is",
    "Seven cities stood along the river. The first of them was known for its bridges, and the last",
    "To bake bread one needs flour, water, salt and time, and of these the last is",
]


def answer(server, prompt, n, **options):
    """The tokens of an answer, and what a client sees of how it was made."""
    status, reply = server.post("/completion", {**GREEDY, "prompt": prompt, "n_predict": n, **options})
    if status != 200:
        return {"status": status, "error": reply["error"]["message"]}
    return {"status": status, "tokens": reply["tokens"], "cached": reply["timings"]["cache_n"],
            "read": reply["tokens_evaluated"], "truncated": reply["truncated"]}


def slot_action(server, slot, action):
    status, reply = server.post(f"/slots/{slot}?action={action}", {"filename": "slot.bin"})
    counts = {k: v for k, v in reply.items() if k in ("n_saved", "n_restored", "n_erased", "n_written", "n_read")}
    counts.pop("n_written", None), counts.pop("n_read", None)  # bytes: f32 rows here, f16 there
    return {"status": status, **counts}


def everything(server, shifts):
    """Each feature once; a list of (what, result)."""
    seen = []
    prompts = [server.post("/tokenize", {"content": 2 * text, "add_special": True})[1]["tokens"] for text in TEXTS]
    with concurrent.futures.ThreadPoolExecutor(SLOTS) as pool:
        def at_once(what, asked):
            jobs = [pool.submit(answer, server, prompt, 40, id_slot=i) for i, prompt in enumerate(asked)]
            results = [job.result() for job in jobs]
            seen.extend((f"{what}, slot {i}", result) for i, result in enumerate(results))
            return results

        first = at_once("prompt", prompts)
        longer = [p + a["tokens"] + p[:20] for p, a in zip(prompts, first)]
        at_once("same prefix", longer)
        at_once("other end", [p[:-7] + p[-30:] for p in longer])
    seen.append(("save", slot_action(server, 1, "save")))
    seen.append(("erase", slot_action(server, 1, "erase")))
    seen.append(("others write", answer(server, prompts[0] + prompts[2], 30, id_slot=1)))
    seen.append(("restore", slot_action(server, 2, "restore")))
    seen.append(("restored", answer(server, longer[1][:-7] + longer[1][-30:] + prompts[3][:60], 40, id_slot=2)))
    for slot in range(SLOTS):
        seen.append(("erase", slot_action(server, slot, "erase")))
    if shifts:
        cells = server.get("/slots")[1][0]["n_ctx"]
        # One shift when all cells are full, one when the freed half of them is.
        result = answer(server, prompts[2], 3 * cells // 2, id_slot=3, n_keep=8)
        seen.append(("over context shifts", result))
        if result.get("truncated") is not True:
            raise RuntimeError(f"no context shift: {result}")
    return seen


def answers(options):
    failed = 0
    for mode, mode_arguments in MODES[: options.modes]:
        arguments = ["-c", str(options.cells), "-np", str(SLOTS), "-ub", str(options.ubatch), *mode_arguments]
        if not options.windows:
            arguments.append("--context-shift")
        elif "--kv-unified" in arguments:
            # With small shared caches the server itself does not give the same answers twice: which tokens of a window
            # are still there hangs on the order in which the slots' requests came.
            arguments.append("--swa-full")
        results = []
        for cache in (None, options.cache):
            with Server(options.server, options.model, arguments, options.plugin, cache, options.threads) as server:
                seen = everything(server, not options.windows)
                if options.windows or "--cache-idle-slots" in arguments:
                    # Idle slots go to the prompt cache, and checkpoints of windows are made, at times of their own.
                    for _, result in seen:
                        result.pop("cached", None)
                results.append(seen)
                if cache:
                    summary = server.summary()
                    print(f"{mode}: {'; '.join(summary)}")
                    with open(server.report, encoding="utf-8") as report:
                        if not summary or "used " not in report.read():
                            print("FAILED: no summary, or the plug-in was not used")
                            failed += 1
        for (what, expected), (_, got) in zip(*results):
            if expected != got:
                print(f"FAILED {mode}, {what}:\n  exact {expected}\n  palu  {got}")
                failed += 1
        equal = sum(e == g for e, g in zip(*results))
        print(f"{mode}: {equal} of {len(results[0])} results are those of the exact cache", flush=True)
    return failed == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test", choices=["answers", "stress"])
    parser.add_argument("--server", required=True)
    parser.add_argument("--plugin", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cache", default="fp32", help="PALU_CACHE; stress: or stock, for comparison")
    parser.add_argument("--cells", type=int, default=2048, help="of all slots")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ubatch", type=int, default=64, help="small, so that caches of windows are")
    parser.add_argument("--modes", type=int, default=len(MODES), help="answers: only the first so many ways to share")
    parser.add_argument("--windows", action="store_true", help="the model has sliding windows, so it cannot shift")
    parser.add_argument("--unified", action="store_true", help="stress: one stream for all slots")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not os.access(options.server, os.X_OK):
        print(f"skipped: there is no program {options.server}")
        sys.exit(77)
    passed = answers(options) if options.test == "answers" else stress(options, GREEDY)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
