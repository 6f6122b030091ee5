"""A stock llama-server, with the plug-in or without, for the tests beside this file and for bench/plugin."""

import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time

PATIENCE = 300  # seconds for one answer; the machine may be busy with other tests
EXACT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")
# Threads that come and go would leave heaps of their own behind, which looks like growth.
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}


def die_with_parent():
    """Before the server starts: a test that is killed leaves none behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """Runs until stop(), or the end of a with block. cache: PALU_CACHE; None = stock, with the arguments `stock`."""

    def __init__(self, program, model, arguments=(), plugin=None, cache=None, threads=1, stock=EXACT,
                 environment=ONE_HEAP, patience=PATIENCE):
        self.patience = patience
        self.port = free_port()
        self.folder = tempfile.TemporaryDirectory(prefix="palu_server_")
        self.log = open(os.path.join(self.folder.name, "log"), "w+b")
        self.report = os.path.join(self.folder.name, "report")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "GGML_", "PALU_"))}
        if cache:
            env.update(GGML_BACKEND_PATH=plugin, LLAMA_ARG_DEVICE="PALU", PALU_CACHE=cache, PALU_REPORT=self.report)
        env.update(environment)
        command = [program, "-m", model, "-t", str(threads), "--port", str(self.port), "--no-webui", "--fit", "off",
                   "--slot-save-path", self.folder.name, *([] if cache else stock), *arguments]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=self.log,
                                        stderr=subprocess.STDOUT, preexec_fn=die_with_parent)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self):
        end = time.monotonic() + self.patience
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError("the server ended:\n" + self.text()[-3000:])
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError("the server did not start:\n" + self.text()[-3000:])

    def _ask(self, method, path, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read().decode(errors="replace"))
        finally:
            connection.close()

    def get(self, path):
        return self._ask("GET", path, None)

    def post(self, path, body):
        return self._ask("POST", path, json.dumps(body))

    def cancel(self, path, body, pieces):
        """Asks for a stream and hangs up after so many pieces of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
            if pieces == 0:
                return
            reply = connection.getresponse()
            for _ in range(pieces):
                if not reply.readline():
                    return
        finally:
            connection.close()

    def alive(self):
        return self.process.poll() is None

    def resident(self, key="VmRSS"):
        """Bytes of memory that the process holds, or with VmHWM has held at most."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

    def summary(self):
        """The plug-in's lines about the caches in use: what it prints when it gets SIGUSR1."""
        before = len(self.text())
        self.process.send_signal(signal.SIGUSR1)
        for _ in range(100):
            lines = re.findall(r"^(?:palu: )?(\d+ layers, .* in use: .*)$", self.text()[before:], re.MULTILINE)
            if lines:
                return lines
            time.sleep(0.1)
        return []

    def text(self):
        with open(self.log.name, "rb") as log:
            return log.read().decode(errors="replace")

    def stop(self):
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
