"""Launching over several hosts with Ray: what is started, and a run over two nodes of a cluster on one machine."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.examples.serve_command import parsed
from vllm_moe_modular.testing.checkpoints import make_checkpoint
from vllm_moe_modular.testing.reference_tokens import default_prompts, reference_tokens
from vllm_moe_modular.testing.serving import Server, vllm_version

FOLDER = ROOT / "examples" / "ray"
SCRIPT = FOLDER / "serve_on_hosts.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_hosts_make_one_deployment() -> None:
    if vllm_version(sys.executable)[:2] == (0, 11):
        pytest.skip("files and pages are for today's releases")
    config = str(ROOT / "examples" / "serving" / "two_hosts.yaml")
    shape = {"hosts": 2, "ranks_per_host": 8, "address": "10.0.0.1", "port": 13400, "more": ["--config", config]}
    first, second = parsed([script().serve_words(host, **shape) for host in (0, 1)])
    different = {key for key in first if first[key] != second[key]}
    assert different == {"headless", "data_parallel_start_rank"}
    assert second["headless"]
    assert second["data_parallel_start_rank"] == first["data_parallel_size_local"] == 8
    assert first["data_parallel_size"] == 16


TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
CLUSTER: dict[str, Any] = {
    "type": "object",
    "required": ["cluster_name", "provider", "auth"],
    "additionalProperties": False,
    "properties": {
        "cluster_name": {"type": "string"},
        "provider": {
            "type": "object",
            "required": ["type", "head_ip", "worker_ips"],
            "additionalProperties": False,
            "properties": {"type": {"const": "local"}, "head_ip": {"type": "string"}, "worker_ips": TEXTS},
        },
        "auth": {"type": "object", "required": ["ssh_user"], "properties": {"ssh_user": {"type": "string"}}},
        "max_workers": {"type": "integer", "minimum": 0},
        "min_workers": {"type": "integer", "minimum": 0},
        "file_mounts": {"type": "object", "additionalProperties": {"type": "string"}},
        "rsync_exclude": TEXTS,
        "setup_commands": TEXTS,
        "head_start_ray_commands": TEXTS,
        "worker_start_ray_commands": TEXTS,
    },
}
"""What Ray takes in a cluster file for hosts that are there already."""


def test_the_cluster_file_has_the_fields_that_ray_takes() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="vLLM brings it")
    yaml = pytest.importorskip("yaml", reason="vLLM brings it")
    cluster = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
    jsonschema.validate(cluster, CLUSTER)
    assert cluster["min_workers"] == cluster["max_workers"] == len(cluster["provider"]["worker_ips"])


def test_ray_takes_the_cluster_file() -> None:
    pytest.importorskip("ray", reason="needs ray: pip install -r requirements/ray.txt")
    yaml = pytest.importorskip("yaml")
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(yaml.safe_load((FOLDER / "cluster.yaml").read_text())))


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


class ServedByRay(Server):
    """The same server, started by the script on a cluster."""

    def __init__(self, model: Path, *args: str, ray_address: str, log_path: Path) -> None:
        super().__init__(model, *args, env={"VLLM_MOE_MODULAR": "1", "RAY_ADDRESS": ray_address}, log_path=log_path)
        words = self.command[self.command.index("serve") + 1 :]
        self.command = [sys.executable, str(SCRIPT), "--hosts", "2", "--ranks-per-host", "1", "--", *words]


def processes_with(text: str) -> list[str]:
    """The command lines of living processes that hold it."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended between the listing and the reading
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if text in line]


@pytest.mark.full
@pytest.mark.serve
def test_two_nodes_of_a_cluster_serve_the_right_tokens(tmp_path: Path) -> None:
    """A rank on each node, on CPUs; the log says that our parts ran, and ending the script ends both servers."""
    pytest.importorskip("ray", reason="needs ray: pip install -r requirements/ray.txt")
    model = make_checkpoint("qwen3_moe", tmp_path / "model")
    prompts = default_prompts(8, seed=0)
    args = ("--enable-expert-parallel", "--enforce-eager")
    with two_nodes() as address:
        with ServedByRay(model, *args, ray_address=address, log_path=tmp_path / "log") as server:
            served = server.complete(prompts, 24)
            started = [line for line in processes_with(str(model)) if "entrypoints.cli.main serve" in line]
        assert sum("--headless" in line for line in started) == 1
        assert "run on torch + torch" in server.log()
        assert not [line for line in processes_with(str(model)) if "pytest" not in line]
    assert served == reference_tokens(model, prompts, 24)
