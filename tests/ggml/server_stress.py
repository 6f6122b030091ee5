"""Many clients over few slots: what server_test.py stress does."""

import json
import math
import random
import statistics
import threading
import time

from llama_server import Server

SLOTS = 4
SAMPLE = 20  # every so many answers one is checked
# Largest divergence of the next token's distribution from the exact one, nats: twice what was measured. Noise has 1.
LIMITS = {"stock": 1e-5, "fp32": 1e-5, "fp16": 1e-4, "palu": 0.1}
# Growth of memory from the second quarter of the run to the last, bytes. Nearly all of it is the server's own warming up, which takes some
# hundred requests; without the plug-in it is as large.
GROWTH = 16 << 20
PROMPT_CACHE = 4  # MiB, small, so that it is full soon and its states come and go


# Tokens of the model of write_text_model.cc that are no character by themselves: the server would hold them back, and
# their probabilities with them.
UNWANTED = [[token, False] for token in (0, 1, 2, *range(3, 3 + 32), *range(3 + 127, 3 + 256))]


class Clients:
    """Asks until so many requests are done, on several threads."""

    def __init__(self, server, options, greedy):
        self.server, self.options, self.greedy = server, options, greedy
        self.lock = threading.Lock()
        self.started = self.done = self.cancelled = self.tokens = 0
        self.errors, self.samples, self.memory = [], [], []
        self.shared = random.Random(options.seed)
        self.context = server.get("/slots")[1][0]["n_ctx"]
        if options.unified:
            self.context //= SLOTS  # of the clients' own making: four slots share the cells
        # Prompts of clients begin alike: with one of these, or a part of it.
        self.prefixes = [self.text(self.shared, self.context // 2) for _ in range(12)]

    @staticmethod
    def text(rng, n):
        return [rng.randrange(3, 259) for _ in range(n)]

    def request(self, rng):
        prefix = rng.choice(self.prefixes)
        end = self.text(rng, rng.randrange(1, self.context // 4))
        prompt = [1] + prefix[: rng.randrange(1, len(prefix))] + end
        most = self.context - len(prompt) - 2
        return {**self.greedy, "prompt": prompt, "n_predict": rng.randrange(1, min(most, 48)),
                "cache_prompt": rng.random() < 0.9}

    def one(self, rng, number):
        body = self.request(rng)
        if rng.random() < 0.2:
            self.server.cancel("/completion", body, rng.randrange(0, 12))
            with self.lock:
                self.cancelled += 1
            return
        sampled = number % SAMPLE == 0
        if sampled:
            body["n_probs"] = 320  # all of them
        status, reply = self.server.post("/completion", body)
        with self.lock:
            if status != 200 or len(reply["tokens"]) != body["n_predict"]:
                self.errors.append(json.dumps(reply)[:300])
                return
            self.tokens += reply["tokens_evaluated"] + reply["tokens_predicted"]
            if sampled:
                self.samples.append((body["prompt"], reply["tokens"], last_distribution(reply)))

    def work(self, client):
        rng = random.Random(self.options.seed * 1000 + client)
        while True:
            with self.lock:
                if self.started == self.options.requests or len(self.errors) > 20:
                    return
                self.started += 1
                number = self.started
            try:
                self.one(rng, number)
            except (OSError, ValueError, KeyError) as error:
                with self.lock:
                    self.errors.append(repr(error))
                if not self.server.alive():
                    return
            with self.lock:
                self.done += 1
                if self.done % max(1, self.options.requests // 40) == 0 and self.server.alive():
                    self.memory.append(self.server.resident())

    def run(self):
        threads = [threading.Thread(target=self.work, args=(i,)) for i in range(self.options.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def last_distribution(reply):
    if len(reply["completion_probabilities"]) != len(reply["tokens"]):
        raise ValueError("not every token has its probabilities")
    return {x["id"]: x["logprob"] for x in reply["completion_probabilities"][-1]["top_logprobs"]}


def divergence(exact, got):
    """Of two sets of log probabilities; tokens that one of them leaves out are rare ones."""
    return sum(math.exp(p) * (p - got[token]) for token, p in exact.items() if token in got)


def check(options, samples, greedy):
    """How far the last token of each sampled answer was from its exact distribution; and how many answers differ."""
    divergences, differing = [], 0
    with Server(options.server, options.model, ["-c", "4096", "-np", "1", "--cache-ram", "0"]) as exact:
        for prompt, tokens, probabilities in samples:
            body = {**greedy, "cache_prompt": False, "n_probs": 320}
            _, reply = exact.post("/completion", {**body, "prompt": prompt + tokens[:-1], "n_predict": 1})
            divergences.append(divergence(last_distribution(reply), probabilities))
            if options.cache in ("stock", "fp32"):
                _, whole = exact.post("/completion", {**body, "prompt": prompt, "n_predict": len(tokens)})
                differing += whole["tokens"] != tokens
    return divergences, differing


def stress(options, greedy):
    arguments = ["-c", str(options.cells), "-np", str(SLOTS), "--cache-ram", str(PROMPT_CACHE),
                 "--kv-unified" if options.unified else "--no-kv-unified"]
    greedy = {**greedy, "logit_bias": UNWANTED}
    start = time.monotonic()
    with Server(options.server, options.model, arguments, options.plugin,
                None if options.cache == "stock" else options.cache, options.threads) as server:
        clients = Clients(server, options, greedy)
        clients.run()
        seconds = time.monotonic() - start
        alive = server.alive()
        summary = [] if options.cache == "stock" else server.summary() if alive else [server.text()[-2000:]]
    divergences, differing = check(options, clients.samples, greedy)
    memory = clients.memory or [0]
    quarter = len(memory) // 4
    growth = statistics.median(memory[-max(1, quarter):]) - statistics.median(memory[quarter : 2 * quarter + 1])
    result = {"cache": options.cache, "unified": options.unified, "requests": clients.done,
              "cancelled": clients.cancelled, "tokens": clients.tokens, "seconds": round(seconds),
              "errors": len(clients.errors), "checked": len(divergences), "differing": differing,
              "divergence_max": max(divergences, default=0),
              "divergence_mean": sum(divergences) / max(1, len(divergences)), "alive": alive,
              "growth_mib": round(growth / 2**20, 1), "memory_mib": [round(m / 2**20, 1) for m in memory], "summary": summary}
    print(json.dumps(result), flush=True)
    for error in clients.errors[:5]:
        print("FAILED:", error)
    limit = LIMITS[options.cache.split(":")[0].split(",")[0]]
    return (alive and not clients.errors and differing == 0 and len(divergences) > 0 and max(divergences) <= limit
            and growth <= GROWTH)
