"""The server harness: what it says when a server fails, and that it leaves no process behind."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_moe_modular.testing.checkpoints import make_checkpoint
from vllm_moe_modular.testing.process_tree import MARKER, end_all, members, running
from vllm_moe_modular.testing.reference_tokens import default_prompts, reference_tokens
from vllm_moe_modular.testing.serving import HOST, Server, ServerError, cpu_environment, free_port, vllm_version


def has_vllm() -> bool:
    try:
        return bool(vllm_version(sys.executable))
    except ServerError:
        return False


needs_vllm = pytest.mark.skipif(not has_vllm(), reason="no vllm in this environment")


def interpreter(folder: Path, serve: str) -> Path:
    """A stand-in for a python with vLLM: answers the version, and runs the lines of `serve` in place of the server."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo 0.32.0+cpu; exit; fi\n{serve}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def alive(pid: int) -> bool:
    process = running().get(pid)
    return process is not None and not process.zombie  # whoever adopted an orphan may be slow to reap it


def test_the_shell_command_has_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    python = interpreter(tmp_path, 'echo "$VLLM_CPU_KVCACHE_SPACE:$A:$TRITON_INTERPRET:$4"')
    command = Server("my model", python=python, env={"A": "two words"}).shell_command
    assert command.startswith("env -u TRITON_INTERPRET VLLM_CPU_KVCACHE_SPACE=1 ")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "1:two words::my model\n"


def test_early_exit_is_noticed_and_shows_the_log(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo the reason is here; exit 7")
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"status 7(.|\n)*the reason is here"), Server("m", python=python):
        pass
    assert time.monotonic() - began < 5


def test_timeout_ends_the_server_and_shows_the_log(tmp_path: Path) -> None:
    server = Server("m", python=interpreter(tmp_path, "echo loading; sleep 600"), ready_timeout_s=0.5)
    with pytest.raises(ServerError, match=r"not ready after(.|\n)*loading"), server:
        pass
    assert server.processes() == []


def test_interrupt_while_the_server_ends_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in a run side by side: pytest-xdist interrupts its workers again 5 s later."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    python = interpreter(tmp_path, "trap '' TERM; while :; do sleep 0.1; done")
    server = Server("m", python=python, ready_timeout_s=0.5)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    try:
        with pytest.raises(KeyboardInterrupt), server:
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert server.processes() == []


def test_port_that_is_taken_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("vllm_moe_modular.testing.serving.PORTS", range(port, port + 1))
        with pytest.raises(ServerError, match=f"from {port} to {port} is taken"):
            free_port()


def test_progress_shows_the_last_line_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_moe_modular.testing.serving.PROGRESS_EVERY_S", 0.2)
    seen: list[str] = []
    python = interpreter(tmp_path, "echo loading weights; sleep 600")
    with pytest.raises(ServerError), Server("m", python=python, ready_timeout_s=1.5, progress=seen.append):
        pass
    assert any("loading weights" in line for line in seen)


def test_interpreter_without_vllm_is_named() -> None:
    with pytest.raises(ServerError, match=r"/bin/false.*\./dev setup"):
        Server("m", python="/bin/false")


def test_threads_are_not_bound_on_any_release(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "")
    assert cpu_environment(python)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    python.write_text("#!/bin/sh\necho 0.11.0.post2+cpu\n")
    assert cpu_environment(python)["VLLM_CPU_OMP_THREADS_BIND"].startswith("all|all|")


def test_orphan_in_its_own_session_is_ended() -> None:
    """The hard case: the child opened a session, its parent is gone, and only the inherited variable gives it away."""
    code = "import subprocess as s; s.Popen(['sleep', '600'], start_new_session=True)"
    environment = {**os.environ, MARKER: "orphan-test"}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
    parent.wait()
    (orphan,) = members(parent.pid, "orphan-test")
    assert end_all(parent.pid, "orphan-test", known=set(), polite_s=0.2) == set()
    assert members(parent.pid, "orphan-test") == set()
    assert not alive(orphan.pid)


@needs_vllm
@pytest.mark.serve
def test_stock_server_gives_the_reference_tokens_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("qwen2_moe", tmp_path / "checkpoint")
    prompts = default_prompts()
    with Server(checkpoint, "--enforce-eager", log_path=tmp_path / "log") as server:
        pids = server.processes()
        served = server.complete(prompts, 24)
        with pytest.raises(ServerError, match="answered 4"):
            server.complete([[]], 1)
        os.kill(max(pids), signal.SIGSTOP)  # a hung engine must not survive either
    assert len(pids) >= 2
    assert server.processes() == []
    assert not any(alive(pid) for pid in pids)
    assert served == reference_tokens(checkpoint, prompts, 24)
