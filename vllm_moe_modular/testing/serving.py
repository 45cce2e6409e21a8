"""A real `vllm serve` for a test: started, waited for, asked, and ended without a trace.

    with Server(checkpoint, "--enforce-eager", "-dp", "2", env={"VLLM_MOE_MODULAR": "1"}) as server:
        tokens = server.complete(prompts, max_tokens=24)

Standard library only, so that one test process can drive the server of another environment (`python=`).
"""

import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm_moe_modular.errors import MoEModularError
from vllm_moe_modular.testing.process_tree import MARKER, Process, end_all, members

HOST = "127.0.0.1"
PORTS = range(20_000, 32_768)  # below those that Linux chooses from by itself, as for the sockets between ranks
LOG_TAIL_LINES = 40
PROGRESS_EVERY_S = 5.0
DEFAULT_ARGS = (
    *("--dtype", "float32", "--max-model-len", "512", "--max-num-batched-tokens", "512", "--max-num-seqs", "16"),
    *("--served-model-name", "model"),
)


class ServerError(MoEModularError, RuntimeError):
    """The server did not start, died, refused a request or left processes behind; holds the tail of its log."""


class Server:
    """Context manager around one server process and all of its children.

    Args:
        model: checkpoint folder.
        args: more arguments of `vllm serve`; they come after `DEFAULT_ARGS` and win.
        env: more environment variables; they win over those of `cpu_environment` and of this process. None removes one.
        python: the interpreter whose vLLM is served.
        log_path: where stdout and stderr go; by default a temporary file that is deleted after a clean end.
        ready_timeout_s: how long it may take until /health answers.
        request_timeout_s: how long one request may take.
        progress: gets a line about every 5 s while the server starts.
    """

    def __init__(
        self,
        model: Path | str,
        *args: str,
        env: Mapping[str, str | None] | None = None,
        python: Path | str = sys.executable,
        log_path: Path | None = None,
        ready_timeout_s: float = 300.0,
        request_timeout_s: float = 180.0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.port = free_port()
        self.log_path = log_path or Path(tempfile.gettempdir()) / f"moe-modular-serve-{uuid.uuid4().hex[:8]}.log"
        self.ready_s = float("nan")  # how long the start took
        self._delete_log = log_path is None
        self._timeouts_s = (ready_timeout_s, request_timeout_s)
        self._progress = progress or (lambda _line: None)
        address = ("--host", HOST, "--port", str(self.port))
        launch = (str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model))
        self.command = [*launch, *DEFAULT_ARGS, *address, *args]
        self._mark = uuid.uuid4().hex
        self._variables = {**cpu_environment(python), **(env or {})}
        wanted = {**os.environ, **self._variables, MARKER: self._mark}
        self.environment = {name: value for name, value in wanted.items() if value is not None}
        self._process: subprocess.Popen[bytes] | None = None
        self._family: set[Process] = set()

    def __enter__(self) -> Self:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._delete_log and error is None:
            self.log_path.unlink(missing_ok=True)

    @property
    def shell_command(self) -> str:
        """The command with the variables that are set for it, as one line for a shell."""
        removed = [f"-u {name}" for name, value in self._variables.items() if value is None and name in os.environ]
        given = [f"{name}={shlex.quote(value)}" for name, value in self._variables.items() if value is not None]
        return " ".join([*(["env", *removed] if removed else []), *given, shlex.join(self.command)])

    @property
    def pid(self) -> int:
        """Process id, and session id, of the server; raises before the start."""
        if self._process is None:
            raise ServerError("the server was not started; use it in a `with` statement")
        return self._process.pid

    def processes(self) -> list[int]:
        """Ids of every living process of this server, in ascending order."""
        self._family |= members(self.pid, self._mark, self._family)
        return sorted(process.pid for process in members(self.pid, self._mark, self._family))

    def stop(self, polite_s: float = 15.0) -> None:
        """Ends the server and all of its children; `ServerError` if one survives. Doing it twice changes nothing."""
        if self._process is None:
            return
        try:
            left = end_all(self.pid, self._mark, known=self._family, polite_s=polite_s)
        except KeyboardInterrupt:  # a second Ctrl-C, or pytest-xdist, which sends one itself 5 s after the first
            end_all(self.pid, self._mark, known=self._family, polite_s=0.0)
            raise
        self._process.poll()
        if left:
            raise ServerError(
                f"processes {sorted(p.pid for p in left)} of the server survived SIGKILL; end them by hand"
            )

    def complete(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int | None = None
    ) -> list[list[int]]:
        """Greedy new token ids of every prompt, in order, exactly `max_tokens` each; all prompts at once by default."""
        with ThreadPoolExecutor(max_workers=max(1, concurrency or len(prompts))) as pool:
            return list(pool.map(lambda prompt: self._complete_one(prompt, max_tokens), prompts))

    def _complete_one(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        body = {"model": "model", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        answer = self.request("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
        (choice,) = answer["choices"]
        return [int(token) for token in choice["token_ids"]]

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET, or POST where there is a body; the decoded JSON answer, or None. Every failure is a `ServerError`."""
        try:
            with self._open(path, body, self._timeouts_s[1]) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise self._error(f"{path} answered {error.code}: {error.read().decode(errors='replace')}") from error
        except OSError as error:
            raise self._error(f"{path} failed: {error}; {self._state()}") from error
        return json.loads(text) if text else None

    def log(self) -> str:
        """What the server has written so far."""
        return self.log_path.read_text(errors="replace")

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        # No proxy stands between this process and its own machine, whatever the environment says.
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s)

    def _wait_until_ready(self) -> None:
        began = time.monotonic()
        told = began
        limit_s = self._timeouts_s[0]
        while not self._healthy():
            now = time.monotonic()
            assert self._process is not None, "the server is started before it is waited for"
            if (status := self._process.poll()) is not None:
                raise self._error(
                    f"the server ended with status {status} after {now - began:.0f} s, before it was ready"
                )
            if now - began > limit_s:
                raise self._error(f"the server was not ready after {limit_s:.0f} s; give it more, or see why it waits")
            if now - told >= PROGRESS_EVERY_S:
                self._family |= members(self.pid, self._mark, self._family)
                self._progress(f"{now - began:3.0f} s  {self._last_line()}")
                told = now
            time.sleep(0.25)
        self.ready_s = time.monotonic() - began
        self._family |= members(self.pid, self._mark, self._family)

    def _healthy(self) -> bool:
        try:
            with self._open("/health", None, 5.0) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _state(self) -> str:
        status = None if self._process is None else self._process.poll()
        return "the server is running" if status is None else f"the server has ended with status {status}"

    def _last_line(self) -> str:
        lines = [line for line in self.log().splitlines() if line.strip()]
        return lines[-1].strip()[:110] if lines else "starting"

    def _error(self, what: str) -> ServerError:
        tail = "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])
        self._delete_log = False
        return ServerError(f"{what}\ncommand: {' '.join(self.command)}\nend of {self.log_path}:\n{tail}")


def free_port() -> int:
    """A TCP port of this machine that nothing listens on now.

    A server takes seconds until it listens, and then vLLM's shares the port with whoever has it (SO_REUSEPORT) instead
    of failing. So this is one that Linux gives to nobody by itself; two calls agree once in 12768.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServerError(f"every port of {HOST} from {PORTS.start} to {PORTS.stop - 1} is taken; end what listens there")


def vllm_version(python: Path | str) -> tuple[int, ...]:
    """Release numbers of the vLLM of that interpreter, such as (0, 32, 0); `ServerError` if it has none."""
    code = "from importlib.metadata import version; print(version('vllm'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerError(f"{python} has no distribution named vllm; set it up with ./dev setup\n{done.stderr[-500:]}")
    release = done.stdout.strip().split("+")[0].split(".")
    return tuple(int(part) for part in release if part.isdigit())


def cpu_environment(python: Path | str) -> dict[str, str | None]:
    """Variables under which several ranks share one small machine without a network. They change nothing on a GPU."""
    # "nobind" is newer than 0.11, where a list with "all" for every rank means the same.
    bind = "nobind" if vllm_version(python) >= (0, 12) else "|".join(["all"] * 16)
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        "TRITON_INTERPRET": None,  # of the tests of kernels, not of the server's
    }
