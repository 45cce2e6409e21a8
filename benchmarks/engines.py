"""Engines of vLLM in processes of their own, which answer one line for each line that they are sent.

Each rank is a process; several of them serve one model with data and expert parallelism.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass
class Engine:
    """One variant in a process of its own, which answers one line for each line that it is sent."""

    name: str
    settings: Mapping[str, str]
    arguments: Mapping[str, Any]
    log: Path
    process: "subprocess.Popen[str]" = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engines", json.dumps(self.arguments)],
            env={"VLLM_DEEP_GEMM_WARMUP": "skip"} | os.environ | dict(self.settings) | ONE_PROCESS,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True,
        )  # fmt: skip

    def ask(self, call: str, **arguments: Any) -> Any:
        """The answer; a RuntimeError with the end of the log if the process is gone."""
        self.send(call, **arguments)
        return self.answer()

    def send(self, call: str, **arguments: Any) -> None:
        assert self.process.stdin is not None, "started with a pipe"
        try:
            self.process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says why

    def answer(self) -> Any:
        assert self.process.stdout is not None, "started with a pipe"
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self.log.read_text().splitlines()[-25:])
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}; {self.log} ends with\n{tail}")
        return json.loads(line)

    def lines_with(self, text: str) -> int:
        """Of the log, so far."""
        return sum(text in line for line in self.log.read_text(errors="replace").splitlines())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Ranks:
    """Engines that serve one model together, and answer as one: prompts are dealt out in turns."""

    engines: list[Engine]

    @property
    def name(self) -> str:
        return self.engines[0].name

    def ask(self, call: str, **arguments: Any) -> Any:
        """The answers in the order of what was dealt out; without prompts or texts, that of the first rank."""
        dealt = next((name for name in ("prompts", "texts") if name in arguments), None)
        for rank, engine in enumerate(self.engines):
            share = {dealt: arguments[dealt][rank :: len(self.engines)]} if dealt else {}
            engine.send(call, **arguments | share)
        answers = [engine.answer() for engine in self.engines]
        if call == "seconds":
            return max(answers)
        if dealt is None or call == "profile":
            return answers[0]
        merged: list[Any] = [None] * len(arguments[dealt])
        for rank, answer in enumerate(answers):
            merged[rank :: len(self.engines)] = answer
        return merged

    def lines_with(self, text: str) -> int:
        """Of all logs, so far."""
        return sum(engine.lines_with(text) for engine in self.engines)

    def stop(self) -> None:
        for engine in self.engines:
            engine.stop()


def start(
    name: str, settings: Mapping[str, str], arguments: Mapping[str, Any], log: Path, *, ranks: int = 1
) -> "Engine | Ranks":
    """One engine; or as many as there are ranks, on the GPUs that there are."""
    if ranks == 1:
        return Engine(name, settings, arguments, log)
    import torch

    gpus = max(1, torch.cuda.device_count())  # on a CPU all ranks are the first of their machine
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"VLLM_DP_SIZE": str(ranks), "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    if gpus < ranks:
        group |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    return Ranks([
        Engine(
            name,
            {**settings, **group, "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank % gpus)},
            {**arguments, "enable_expert_parallel": True},
            log.with_name(f"{log.stem}-{rank}.log"),
        )
        for rank in range(ranks)
    ])  # fmt: skip


class Calls:
    """What an engine's process can be asked."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        outputs = self._generate(prompts, max_tokens=new_tokens)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def logprobs(self, texts: list[list[int]]) -> list[list[float]]:
        """Of every token but the first."""
        outputs = self._generate(texts, max_tokens=1, prompt_logprobs=0)
        return [
            [position[token].logprob for position, token in zip(o.prompt_logprobs[1:], text[1:], strict=True)]
            for o, text in zip(outputs, texts, strict=True)
        ]

    def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        start = perf_counter()
        self._generate(prompts, max_tokens=new_tokens)
        return perf_counter() - start

    def methods(self) -> dict[str, int]:
        """How many MoE layers run on which method; nothing where the layers are in another process."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        engine: Any = self.llm.llm_engine
        worker = getattr(engine.model_executor, "driver_worker", None)
        if worker is None:
            return {}
        model = worker.worker.model_runner.get_model()
        names = [type(m.quant_method).__name__ for m in model.modules() if isinstance(m, RoutedExperts)]
        return {name: names.count(name) for name in set(names)}

    def kv_cache_blocks(self) -> int:
        engine: Any = self.llm.llm_engine
        return int(engine.vllm_config.cache_config.num_gpu_blocks)

    def profile(self, prompts: list[list[int]], new_tokens: int) -> list[tuple[str, float, int]]:
        """Name, microseconds and calls of what ran longest on the device; first the time in all."""
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            taken = self.seconds(prompts, new_tokens)
        kernels = sorted(profile.key_averages(), key=lambda k: -k.self_device_time_total)
        rows = [(k.key[:80], k.self_device_time_total, k.count) for k in kernels[:30]]
        return [("in all", taken * 1e6, 1), *rows]

    def _generate(self, prompts: list[list[int]], **sampling: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def run_engine(arguments: Mapping[str, Any]) -> None:
    """Answer on what was stdout; vLLM's own lines go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls = Calls(arguments)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(calls, asked.pop("call"))(**asked)), file=answers, flush=True)


if __name__ == "__main__":
    run_engine(json.loads(sys.argv[1]))
