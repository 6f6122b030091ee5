#!/usr/bin/env python3
"""The plug-in inside llama-cpp-python, loaded by the lines that docs/plugin.md shows.

Takes PALU_PLUGIN (the plug-in), PALU_TEST_MODEL (a GGUF file) and PALU_PYTHON_PATH (where the package llama_cpp is);
ends with 77, which ctest reports as skipped, where one of them or a package is missing. Each run of a model is a
process of its own: a plug-in cannot be unloaded.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "plugin.md"
PACKAGES = ("llama_cpp", "numpy", "jinja2", "diskcache", "typing_extensions")
SKIPPED = 77
PROMPT = "Here is a list of the planets of the solar system, from the sun outwards:"
TOKENS = 48
# Logits of the two likeliest tokens this near to each other may change places by the order of sums in fp16.
NEAR_TIE = 0.05


def interpreter():
    """That of the virtual environment which the packages are in, as they may be made for its version only."""
    own = pathlib.Path(os.environ["PALU_PYTHON_PATH"]).resolve().parents[2] / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def shown_lines(plugin):
    """The guide's lines that load the plug-in, with the path of the one under test."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    lines = [block for block in blocks if "ggml_backend_load" in block]
    assert len(lines) == 1, f"{GUIDE.name} shows {len(lines)} blocks that load the plug-in"
    text, count = re.subn(r'b"[^"]*libggml-palu\.so"', lambda _: repr(plugin.encode()), lines[0])
    assert count == 1, "the block names the plug-in once"
    return text


# ---- the child: one model, one process


def greedy(llm, api, count):
    """Tokens, and how far the likeliest was ahead of the next."""
    import numpy

    tokens, leads = [], []
    for _ in range(count):
        logits = numpy.ctypeslib.as_array(api.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),))
        second, first = numpy.argpartition(logits, -2)[-2:]
        tokens.append(int(first))
        leads.append(float(logits[first] - logits[second]))
        llm.eval([int(first)])
    return tokens, leads


def child(lines, options):
    exec(compile(lines, str(GUIDE), "exec"), {})
    import llama_cpp.llama_cpp as api
    from llama_cpp import Llama

    llm = Llama(os.environ["PALU_TEST_MODEL"], n_ctx=512, n_threads=1, n_gpu_layers=-1, verbose=False, **options)
    llm.eval(llm.tokenize(PROMPT.encode()))
    state = llm.save_state()
    tokens, leads = greedy(llm, api, TOKENS)
    text = llm.detokenize(tokens).decode(errors="replace")
    # A state holds the decoded rows in fp16: those of an fp16 cache come back as they were.
    llm.load_state(state)
    llm.eval(llm.tokenize(b"\n", add_bos=False))
    after_load, _ = greedy(llm, api, 4)
    print(json.dumps({"tokens": tokens, "leads": leads, "text": text, "after_load": after_load}))


def run(lines, cache="fp16", options=None):
    """The child's process, and the events that the plug-in told."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report"
        environment = dict(
            os.environ, PYTHONPATH=os.environ["PALU_PYTHON_PATH"], PALU_CACHE=cache, PALU_REPORT=str(report)
        )
        for name in ("GGML_BACKEND_PATH", "LLAMA_ARG_DEVICE"):
            environment.pop(name, None)
        words = [interpreter(), __file__, "--child", lines, json.dumps(options or {"flash_attn": True})]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        told = report.read_text().splitlines() if report.exists() else []
        return done, [line.split(" ", 1) for line in told]


# ---- the tests


class Python(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lines = shown_lines(os.environ["PALU_PLUGIN"])
        done, cls.told_by_stock = run("")
        cls.stock = cls.answer(done)

    @staticmethod
    def answer(done):
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def test_fp16_cache_gives_the_tokens_of_stock(self):
        done, told = run(self.lines)
        ours, stock = self.answer(done), self.stock
        self.assertEqual([event for event, _ in told], ["loaded", "reserved", "cache", "used"])
        self.assertRegex(dict(told)["cache"], "16\\.[0-9]+ bits per element")
        self.assertGreater(len(stock["text"].split()), 10, stock["text"])
        differing = [i for i in range(TOKENS) if ours["tokens"][i] != stock["tokens"][i]]
        if differing:  # then what follows has another past
            self.assertLess(stock["leads"][differing[0]], NEAR_TIE, f"token {differing[0]}: {ours['text']!r}")
        else:
            self.assertEqual(ours["after_load"], stock["after_load"])

    def test_packed_cache_is_used_and_smaller(self):
        done, told = run(self.lines, cache="palu:fit_tokens=32,recent_tokens=16")
        self.assertEqual(len(self.answer(done)["tokens"]), TOKENS)
        told = dict(told)
        self.assertIn("used", told)
        self.assertLess(float(re.search("([0-9.]+) bits per element", told["cache"])[1]), 10)

    def test_without_the_lines_nothing_is_told(self):
        self.assertEqual(self.told_by_stock, [])

    def test_a_wrong_path_stops_the_program(self):
        done, told = run(shown_lines("/no/such/libggml-palu.so"))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("AssertionError: palu was not loaded", done.stderr)
        self.assertEqual(told, [])

    def test_flash_attention_left_off_is_refused_in_one_line(self):
        done, told = run(self.lines, options={"flash_attn": False})
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual([event for event, _ in told], ["loaded", "reserved", "refused"])
        self.assertIn("needs flash attention", told[-1][1])
        self.assertEqual(done.stdout, "")


def missing():
    """What the tests cannot do without and is not there; "" if nothing."""
    for name in ("PALU_PLUGIN", "PALU_TEST_MODEL", "PALU_PYTHON_PATH"):
        if not os.environ.get(name):
            return f"{name} is not set"
    environment = dict(os.environ, PYTHONPATH=os.environ["PALU_PYTHON_PATH"])
    for package in PACKAGES:
        found = subprocess.run([interpreter(), "-c", f"import {package}"], env=environment, capture_output=True)
        if found.returncode != 0:
            return f"the package {package} cannot be imported: {found.stderr.decode().strip().splitlines()[-1]}"
    return ""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], json.loads(sys.argv[3]))
        sys.exit()
    if reason := missing():
        print("skipped:", reason)
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
