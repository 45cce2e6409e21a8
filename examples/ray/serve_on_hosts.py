"""A `vllm serve` on each of several hosts of a Ray cluster; together they are one data-parallel deployment.

    VLLM_MOE_MODULAR=1 python examples/ray/serve_on_hosts.py --hosts 2 --ranks-per-host 8 --gpus-per-host 8 -- \\
        --config examples/serving/two_hosts.yaml

Ray finds the hosts, starts the servers and ends all of them when one ends. What stands behind `--` goes to each server;
files that it names have to be on each host, in the same folder. Variables of vLLM, NCCL and Hugging Face travel from
here. Without --gpus-per-host the ranks run on CPUs, for which vLLM's own Ray backends refuse to start.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TRAVEL = ("VLLM_", "NCCL_", "NVSHMEM_", "HF_", "OMP_NUM_THREADS")


def serve_words(
    host: int, *, hosts: int, ranks_per_host: int, address: str, port: int, more: Sequence[str]
) -> list[str]:
    """The arguments of `vllm serve` on one host. The first has the HTTP server."""
    words = [*more, "--data-parallel-size", str(hosts * ranks_per_host), "--data-parallel-size-local"]
    words += [str(ranks_per_host), "--data-parallel-address", address, "--data-parallel-rpc-port", str(port)]
    return words if host == 0 else [*words, "--headless", "--data-parallel-start-rank", str(host * ranks_per_host)]


class Host:
    """Lives on one host, as a Ray actor."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def address_and_free_port(self) -> tuple[str, int]:
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def serve(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> int:
        """The status that the server ended with; paths in `words` are relative to `folder`, where a host has it."""
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *words]
        self._server = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            cwd=folder if Path(folder).is_dir() else None,
            start_new_session=True,
        )
        return self._server.wait()

    def stop(self) -> None:
        if self._server is not None and self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGTERM)
            self._server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--ranks-per-host", type=int, required=True)
    parser.add_argument("--gpus-per-host", type=int, default=0)
    parser.add_argument("serve", nargs="+", metavar="-- ARGUMENTS", help="of vllm serve")
    o = parser.parse_args()
    try:
        import ray
    except ImportError:
        raise SystemExit("serve_on_hosts.py: Ray is not installed here; pip install ray, on every host") from None
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Placed

    ray.init(address="auto")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does, not as Ray does
    needs = {"CPU": 1, "GPU": o.gpus_per_host} if o.gpus_per_host else {"CPU": 1}
    group = ray.util.placement_group([needs] * o.hosts, strategy="STRICT_SPREAD")
    if not group.wait(timeout_seconds=60):
        print(f"the cluster has not {o.hosts} hosts with {needs} free: {ray.available_resources()}", file=sys.stderr)
        return 1
    actor = ray.remote(num_cpus=1, num_gpus=o.gpus_per_host, max_concurrency=2)(Host)
    at = [actor.options(scheduling_strategy=Placed(group, placement_group_bundle_index=i)) for i in range(o.hosts)]
    hosts = [place.remote() for place in at]
    address, port = ray.get(hosts[0].address_and_free_port.remote())
    variables = {name: value for name, value in os.environ.items() if name.startswith(TRAVEL)}
    shape = {"hosts": o.hosts, "ranks_per_host": o.ranks_per_host, "address": address, "port": port}
    words = [serve_words(i, **shape, more=o.serve) for i in range(o.hosts)]
    running = [host.serve.remote(w, variables, str(Path.cwd())) for host, w in zip(hosts, words, strict=True)]
    try:
        (first, *_), _ = ray.wait(running)
        print(f"the server on host {running.index(first)} ended with status {ray.get(first)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        ray.get([host.stop.remote() for host in hosts])


if __name__ == "__main__":
    sys.exit(main())
