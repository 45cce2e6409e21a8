"""One served model per case that the table does not hold. Every case has a model that the plugin serves for real."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serving.cells import DEEPSEEK_EAGER, EP, LATENT_ATTENTION, NAMED_LOCAL, SETTINGS_ON
from tests.serving.conftest import MAX_TOKENS, PROMPTS
from vllm_moe_modular.testing.serving import Server, ServerError, free_port

pytestmark = pytest.mark.serve

ON = {"VLLM_MOE_MODULAR": "1"}
EAGER = "--enforce-eager"
DP2 = ("-dp", "2", "--api-server-count", "1", EP, EAGER)
TP2 = ("-tp", "2", EP, EAGER)
DEEPSEEK = (*LATENT_ATTENTION, *DEEPSEEK_EAGER)

Make = Callable[..., Path]
Expect = Callable[[Path], list[list[int]]]


def lines_of_ours(server: Server) -> list[str]:
    return [line for line in server.log().splitlines() if "moe_modular:" in line]


@pytest.fixture(scope="module")
def dp2(checkpoint: Make) -> Server:
    with Server(checkpoint("qwen3_moe"), *DP2, env=SETTINGS_ON) as server:
        yield server


@pytest.mark.parametrize("concurrency", [8, 1, 3])
def test_ragged_load_and_an_idle_rank(concurrency: int, dp2: Server, expected: Expect, checkpoint: Make) -> None:
    """One request at a time leaves a rank idle; three leave the ranks uneven. Prompts have 1 to 200 tokens."""
    assert dp2.complete(PROMPTS, MAX_TOKENS, concurrency=concurrency) == expected(checkpoint("qwen3_moe"))
    (line,) = lines_of_ours(dp2)
    assert "2 MoE layers" in line
    assert "run on torch + torch" in line


def test_a_killed_rank_ends_the_server_and_its_clients_hear_of_it(dp2: Server) -> None:
    """The last test of that server."""
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(dp2.complete, [p[:8]], 400) for p in PROMPTS[:4]]
        time.sleep(1.0)
        assert not any(w.done() for w in waiting), "the requests must outlast the rank"
        os.kill(worker_of_rank(dp2, 1), signal.SIGKILL)
        for request in waiting:
            with pytest.raises(ServerError):
                request.result(timeout=60)
    deadline = time.monotonic() + 60
    while dp2.processes() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not dp2.processes(), "the server goes on although a rank is gone"


def worker_of_rank(server: Server, rank: int) -> int:
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace") for pid in server.processes()}
    (pid,) = [pid for pid, title in titles.items() if f"Worker_DP{rank}" in title]
    return pid


def test_drafter_layers_are_swapped_and_change_no_token(checkpoint: Make, expected: Expect) -> None:
    model = checkpoint("deepseek_v3_mtp")
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": 1, "attention_backend": LATENT_ATTENTION[1]})
    with Server(model, *DP2, *DEEPSEEK, "--speculative-config", speculation, env=SETTINGS_ON) as server:
        served = server.complete(PROMPTS, MAX_TOKENS)
        log = "\n".join(lines_of_ours(server))
    assert served == expected(model)
    layers = json.loads((model / "config.json").read_text())
    moe_layers = layers["num_hidden_layers"] - layers["first_k_dense_replace"]
    assert f"moe_modular: {moe_layers + 1} MoE layers" in log, "the drafter's layer is one more"


def test_reload_of_other_weights_and_back(checkpoint: Make, expected: Expect) -> None:
    one, other = checkpoint("qwen3_moe"), checkpoint("qwen3_moe", seed=1)
    with Server(one, *TP2, env={**SETTINGS_ON, "VLLM_SERVER_DEV_MODE": "1"}) as server:
        served = [server.complete(PROMPTS, MAX_TOKENS)]
        for weights in (other, one):
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
            server.request("/collective_rpc", call)
            server.request("/reset_prefix_cache", {})
            served.append(server.complete(PROMPTS, MAX_TOKENS))
    assert expected(one) != expected(other)
    assert served == [expected(one), expected(other), expected(one)]


def test_auto_on_one_process_leaves_the_layers_to_vllm_and_says_so_once(checkpoint: Make, expected: Expect) -> None:
    """Under --fail-on-environ-validation, which must know our variables."""
    model = checkpoint("qwen3_moe")
    with Server(model, EAGER, "--fail-on-environ-validation", env=ON) as server:
        assert server.complete(PROMPTS, MAX_TOKENS) == expected(model)
        (line,) = lines_of_ours(server)
    assert "2 MoE layers" in line
    assert "left to vLLM's UnquantizedFusedMoEMethod" in line
    assert "vLLM's own CPU kernel is faster" in line


@pytest.mark.full
def test_off_gives_the_tokens_of_hugging_face(checkpoint: Make, expected: Expect) -> None:
    model = checkpoint("qwen3_moe")
    with Server(model, EAGER) as server:
        assert server.complete(PROMPTS, MAX_TOKENS) == expected(model)
        assert not lines_of_ours(server)


@pytest.mark.full
def test_off_is_stock(checkpoint: Make) -> None:
    """The same tokens with the plugin installed and off as with the plugin not loaded at all, in bfloat16 too."""
    model = checkpoint("qwen3_moe")
    served = []
    for env in ({}, {"VLLM_PLUGINS": "none"}):
        with Server(model, EAGER, "--dtype", "bfloat16", env=env) as server:
            served.append(server.complete(PROMPTS, MAX_TOKENS))
    assert served[0] == served[1]


@pytest.mark.full
def test_layers_that_are_skipped_stay_with_vllm_beside_swapped_ones(checkpoint: Make, expected: Expect) -> None:
    model = checkpoint("qwen3_moe")
    env = {**ON, **NAMED_LOCAL, "VLLM_MOE_MODULAR_SKIP_LAYERS": "*.layers.0.*"}
    with Server(model, EAGER, env=env) as server:
        assert server.complete(PROMPTS, MAX_TOKENS) == expected(model)
        log = "\n".join(lines_of_ours(server))
    assert "1 MoE layer (model.layers.0.mlp.experts): left to vLLM" in log
    assert "1 MoE layer (model.layers.1.mlp.experts): run on local + torch" in log


OTHER_METHOD = '''
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
import torch

MADE = []


class OtherMethod(UnquantizedFusedMoEMethod):
    """A method that this package has no modular form for."""

    def apply(self, layer, *args, **kwargs):
        assert layer.quant_method is self and self in MADE, "the layer's own method was replaced"
        return super().apply(layer, *args, **kwargs)


class Other(QuantizationConfig):
    def get_name(self): return "other"
    def get_supported_act_dtypes(self): return [torch.float32]
    @classmethod
    def get_min_capability(cls): return -1
    @staticmethod
    def get_config_filenames(): return []
    @classmethod
    def from_config(cls, config): return cls()
    def get_quant_method(self, layer, prefix):
        if isinstance(layer, RoutedExperts) and ".layers.0." in prefix:
            MADE.append(OtherMethod(layer.moe_config))
            return MADE[-1]
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def register():
    register_quantization_config("other")(Other)
'''


def test_a_method_without_a_modular_form_is_left_alone_in_a_mixed_model(
    tmp_path: Path, checkpoint: Make, expected: Expect
) -> None:
    (tmp_path / "other_method.py").write_text(OTHER_METHOD)
    (tmp_path / "other_method-1.dist-info").mkdir()
    (tmp_path / "other_method-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (tmp_path / "other_method-1.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nother = other_method:register\n"
    )
    model = checkpoint("qwen3_moe")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**ON, **NAMED_LOCAL, "VLLM_MOE_MODULAR_EXPERTS": "the configuration wins", "PYTHONPATH": path}
    config = json.dumps({"moe_modular": {"experts": "torch"}})
    with Server(model, EAGER, "--quantization", "other", "--additional-config", config, env=env) as server:
        assert server.complete(PROMPTS, MAX_TOKENS) == expected(model)
        log = "\n".join(lines_of_ours(server))
    assert "left to vLLM's OtherMethod: vLLM's OtherMethod has no modular form here" in log
    assert "1 MoE layer (model.layers.1.mlp.experts): run on local + torch" in log


@pytest.mark.full
def test_three_experts_on_two_ranks(checkpoint: Make, expected: Expect) -> None:
    model = checkpoint("qwen3_moe", experts=3)
    with Server(model, *TP2, env={**SETTINGS_ON, "VLLM_MOE_MODULAR_ALL2ALL": "torch"}) as server:
        assert server.complete(PROMPTS, MAX_TOKENS) == expected(model)


@pytest.mark.full
def test_round_robin_placement_is_honoured(checkpoint: Make, expected: Expect) -> None:
    model = checkpoint("deepseek_v3")
    args = (*TP2, *DEEPSEEK, "--expert-placement-strategy", "round_robin")
    with Server(model, *args, env={**SETTINGS_ON, "VLLM_MOE_MODULAR_ALL2ALL": "torch"}) as server:
        assert server.complete(PROMPTS, MAX_TOKENS) == expected(model)
        assert "placement strategy: round_robin" in server.log()


def log_of_failed_start(model: Path, *args: str, env: dict[str, str], tmp_path: Path) -> str:
    log = tmp_path / "server.log"
    with pytest.raises(ServerError, match="ended with status"), Server(model, *args, env=env, log_path=log):
        pass
    return log.read_text()


def test_strict_mode_with_auto_declining_stops_with_every_reason(checkpoint: Make, tmp_path: Path) -> None:
    log = log_of_failed_start(checkpoint("qwen3_moe"), EAGER, env=SETTINGS_ON, tmp_path=tmp_path)
    assert "VLLM_MOE_MODULAR_STRICT=1, and these MoE layers would stay with vLLM" in log
    assert "vLLM's own CPU kernel is faster" in log


@pytest.mark.full
def test_a_named_part_that_does_not_fit_stops_with_every_reason(checkpoint: Make, tmp_path: Path) -> None:
    env = {**ON, "VLLM_MOE_MODULAR_ALL2ALL": "allgather"}
    log = log_of_failed_start(checkpoint("qwen3_moe"), EAGER, env=env, tmp_path=tmp_path)
    assert "one rank holds all experts, there is nobody to send tokens to; pass --enable-expert-parallel" in log
    assert "without expert parallelism vLLM's own CPU kernel is faster" in log


def test_an_unknown_variable_stops_before_anything_is_loaded(checkpoint: Make, tmp_path: Path) -> None:
    env = {**ON, "VLLM_MOE_MODULAR_EXPERT": "torch"}
    log = log_of_failed_start(checkpoint("qwen3_moe"), EAGER, env=env, tmp_path=tmp_path)
    assert "VLLM_MOE_MODULAR_EXPERT is not known; did you mean VLLM_MOE_MODULAR_EXPERTS?" in log


def logs_of_two_nodes_that_fail(
    model: Path, folder: Path, *, env: dict[str, str], other_env: dict[str, str]
) -> tuple[str, str]:
    """Two nodes of one data-parallel deployment, on one machine, whose variables differ."""
    rpc, head_log, other_log = str(free_port()), folder / "head.log", folder / "other.log"
    args = ("-dp", "2", "-dpl", "1", "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", rpc, EP, EAGER)
    head = Server(model, *args, env={**ON, "VLLM_MOE_MODULAR_TIMEOUT_S": "60", **env}, log_path=head_log)
    headless = [*head.command, "--headless", "--data-parallel-start-rank", "1"]
    # Not what only the head is given: that is the difference.
    environment = {k: v for k, v in head.environment.items() if k not in env} | other_env
    with other_log.open("wb") as log:
        other = subprocess.Popen(
            headless, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        with pytest.raises(ServerError), head:
            pass
        other.wait(timeout=120)
    finally:
        if other.poll() is None:
            os.killpg(other.pid, signal.SIGKILL)
    return head_log.read_text(), other_log.read_text()


def test_a_rank_configured_differently_stops_both_with_the_field(checkpoint: Make, tmp_path: Path) -> None:
    other_env = {"VLLM_MOE_MODULAR_ALL2ALL": "allgather"}
    for log in logs_of_two_nodes_that_fail(checkpoint("qwen3_moe"), tmp_path, env={}, other_env=other_env):
        assert 'all2all: "auto" on ranks [0], "allgather" on ranks [1]' in log


@pytest.mark.full
def test_a_rank_without_the_package_of_a_named_part_stops_both(
    checkpoint: Make, tmp_path: Path, installed_example: Path
) -> None:
    named = {"VLLM_MOE_MODULAR_ALL2ALL": "example_broadcast"}
    head_env = {**named, "PYTHONPATH": str(installed_example)}
    for log in logs_of_two_nodes_that_fail(checkpoint("qwen3_moe"), tmp_path, env=head_env, other_env=named):
        assert "all-to-all 'example_broadcast' was asked for and is not known on ranks [1]" in log
        assert "install the package that brings it on every rank" in log


def in_a_process(code: str, env: dict[str, str]) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_MOE")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip().splitlines()[-1]


LOADED = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.worker.gpu_worker import Worker
ours = sorted(m for m in sys.modules if m.startswith("vllm_moe_modular"))
print(ours, Worker.load_model.__module__, getattr(Worker.load_model, "_vllm_moe_modular_patch", None))
"""
SETTINGS_ONLY = "['vllm_moe_modular', 'vllm_moe_modular.errors', 'vllm_moe_modular.plugin', 'vllm_moe_modular.settings'"


@pytest.mark.parametrize("value", [None, pytest.param("0", marks=pytest.mark.full)], ids=["unset", "zero"])
def test_off_imports_the_settings_and_patches_nothing(value: str | None) -> None:
    said = in_a_process(LOADED, {} if value is None else {"VLLM_MOE_MODULAR": value})
    assert said.startswith(f"{SETTINGS_ONLY}, 'vllm_moe_modular.version'] ")
    assert said.endswith("vllm.v1.worker.gpu_worker None")


def test_registering_twice_in_one_process_patches_once() -> None:
    code = "from vllm_moe_modular.plugin import register; register(); register()\n" + LOADED
    code += "print(Worker.load_model.__wrapped__.__qualname__, hasattr(Worker.load_model.__wrapped__, '__wrapped__'))"
    assert in_a_process(code, ON) == "Worker.load_model False"


def test_a_compile_cache_made_without_the_plugin_is_not_reused_with_it() -> None:
    """vLLM's cache is keyed by these factors."""
    code = """
import os, vllm.envs
from vllm_moe_modular.plugin import register
def ours():
    register()
    return {k: v for k, v in vllm.envs.compile_factors().items() if "MOE_MODULAR" in k}
without = ours()
os.environ["VLLM_MOE_MODULAR"] = "1"
os.environ["VLLM_MOE_MODULAR_ALL2ALL"] = "torch"
print(without, ours())
"""
    assert in_a_process(code, {}) == "{} {'VLLM_MOE_MODULAR': '1', 'VLLM_MOE_MODULAR_ALL2ALL': 'torch'}"
