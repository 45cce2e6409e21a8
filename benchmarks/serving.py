"""vLLM with the plugin against vLLM without it, on one GPU: the same tokens, and tokens per second.

    python -m benchmarks.serving tokens --out serving.jsonl [--models qwen3_moe qwen3_moe:fp8_block ...] [--experts ...]
    python -m benchmarks.serving speed --out serving.jsonl [--quantization fp8_block] [--experts ...] [--profile]

Each variant is an engine of its own in its own process, all of them on the one device at the same time; what is timed
runs in turns, while the others are idle. `tokens` serves tiny checkpoints with compilation and CUDA graphs: in float32
it counts greedy tokens that agree with stock vLLM and with Hugging Face, in bfloat16 it compares the error of the
log-probabilities of a given text with that of stock. `speed` serves a dummy of Qwen3-30B-A3B's shape with 24 layers.
`--engine` takes what else vLLM is given, with and without the plugin: '{"moe_backend": "marlin"}'.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

PROMPTS, NEW_TOKENS = 8, 24
MODELS_AT_A_TIME = 3  # four or more engines each, with some gigabytes of CUDA graphs
ON = {"VLLM_MOE_MODULAR": "1", "VLLM_MOE_MODULAR_ALL2ALL": "local", "VLLM_MOE_MODULAR_EXPERTS": "triton"}
OFF = {"VLLM_MOE_MODULAR": "0"}
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
MODELS = ("qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "deepseek_v3")
LATENT_ATTENTION = ("deepseek_v3",)  # whose attention backends take no float32
GPU_HEADS = {"qk_nope_head_dim": 128, "v_head_dim": 128}  # the only ones that vLLM's prefill takes on a GPU
SPEED_MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
    "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip


SPEED_QUANTIZATION = {
    "fp8_block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


@dataclass(frozen=True)
class Load:
    """Prompts that are sent at once, and what is counted of them."""

    name: str
    prompts: int
    tokens_in: int
    tokens_out: int

    @property
    def counted(self) -> int:
        """New tokens; of a prefill, the tokens read."""
        return self.prompts * (self.tokens_out if self.tokens_out > 1 else self.tokens_in)


LOADS = (
    Load("1 sequence", 1, 32, 128),
    Load("8 sequences", 8, 32, 128),
    Load("256 sequences", 256, 32, 64),
    Load("prefill 8 x 1024", 8, 1024, 1),
)


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
            [sys.executable, "-m", "benchmarks.serving", "engine", json.dumps(self.arguments)],
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

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


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
        """How many MoE layers run on which method."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        engine: Any = self.llm.llm_engine
        model = engine.model_executor.driver_worker.worker.model_runner.get_model()
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


def variants(experts: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Without the plugin, and with each experts: names and settings."""
    yield "off", OFF
    for name in experts:
        yield name, ON | {"VLLM_MOE_MODULAR_EXPERTS": name}


def check_tokens(
    models: Sequence[str], experts: Sequence[str], folder: Path, extra: Mapping[str, Any]
) -> Iterator[dict[str, object]]:
    """Serve each model, "family" or "family:quantization", in each dtype without the plugin and with each experts."""
    for first in range(0, len(models), MODELS_AT_A_TIME):
        yield from check_together(models[first : first + MODELS_AT_A_TIME], experts, folder, extra)


def check_together(
    models: Sequence[str], experts: Sequence[str], folder: Path, extra: Mapping[str, Any]
) -> Iterator[dict[str, object]]:
    from vllm_moe_modular.testing.checkpoints import dequantise, make_checkpoint
    from vllm_moe_modular.testing.reference_tokens import default_prompts

    prompts = default_prompts(PROMPTS)
    twins: dict[str, Path] = {}
    with ExitStack() as stack:
        engines: dict[tuple[str, str], list[Engine]] = {}
        for model in models:
            family, _, quantization = model.partition(":")
            latent = family in LATENT_ATTENTION
            checkpoint = make_checkpoint(
                family, folder / f"{family}-{quantization}", quantization=quantization or None,
                config=GPU_HEADS if latent else None,
            )  # fmt: skip
            twins[model] = (
                dequantise(checkpoint, folder / f"{family}-{quantization}-twin") if quantization else checkpoint
            )
            for dtype in ("bfloat16",) if quantization or latent else ("float32", "bfloat16"):
                arguments = {
                    "model": str(checkpoint), "dtype": dtype, "max_model_len": 512, "max_num_batched_tokens": 512,
                    "kv_cache_memory_bytes": 1 << 28, "enable_prefix_caching": False, "max_num_seqs": 16,
                    "gpu_memory_utilization": 0.3,  # asked for at the start, while other engines hold memory too
                } | ({} if latent else {"attention_backend": "TRITON_ATTN"}) | extra  # fmt: skip
                for name, settings in variants(experts):
                    log = folder / f"{family}-{quantization}-{dtype}-{name}.log"
                    engine = Engine(name, settings, arguments, log)
                    engines.setdefault((model, dtype), []).append(engine)
                    stack.callback(engine.stop)
        truth = {model: hugging_face(twin, prompts) for model, twin in twins.items()}
        for (model, dtype), (off, *ons) in engines.items():
            for on in ons:
                result: dict[str, object] = {"model": model, "dtype": dtype, "experts": on.name}
                try:
                    result |= compare(off, on, prompts, truth[model])
                except RuntimeError as e:
                    result |= {"failed": str(e)}
                yield result


def compare(off: Engine, on: Engine, prompts: list[list[int]], truth: Mapping[str, Any]) -> dict[str, object]:
    """Agreement of greedy tokens, and root mean square errors of log-probabilities of the reference's own text."""
    engines = {"off": off, "on": on}
    tokens = {name: e.ask("generate", prompts=prompts, new_tokens=NEW_TOKENS) for name, e in engines.items()}
    texts = [prompt + new for prompt, new in zip(prompts, truth["tokens"], strict=True)]
    logprobs = {name: e.ask("logprobs", texts=texts) for name, e in engines.items()}
    return {
        "methods": on.ask("methods"),
        "on_equals_off": agreement(tokens["on"], tokens["off"]),
        "on_equals_reference": agreement(tokens["on"], truth["tokens"]),
        "off_equals_reference": agreement(tokens["off"], truth["tokens"]),
        "error_on": distance(logprobs["on"], truth["logprobs"]),
        "error_off": distance(logprobs["off"], truth["logprobs"]),
        "on_from_off": distance(logprobs["on"], logprobs["off"]),
    }


def distance(a: list[list[float]], b: list[list[float]]) -> float:
    """Root mean square of the differences."""
    pairs = [(x, y) for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True)]
    return (sum((x - y) ** 2 for x, y in pairs) / len(pairs)) ** 0.5


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """The fraction of tokens that are equal."""
    pairs = [x == y for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True)]
    return sum(pairs) / len(pairs)


def hugging_face(checkpoint: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Greedy tokens in float32 on the CPU, and the log-probabilities of prompt and tokens."""
    import torch

    from vllm_moe_modular.testing.reference_tokens import greedy_tokens, load_model

    model = load_model(checkpoint)
    tokens = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]
    logprobs = []
    with torch.inference_mode():
        for prompt, new in zip(prompts, tokens, strict=True):
            text = torch.tensor([prompt + new])
            scores = model(text).logits[0, :-1].log_softmax(-1)
            logprobs.append(scores.gather(1, text[0, 1:, None])[:, 0].tolist())
    return {"tokens": tokens, "logprobs": logprobs}


def measure_speed(
    folder: Path, experts: Sequence[str], extra: Mapping[str, Any], *, quantization: str, rounds: int, profile: bool
) -> Iterator[dict[str, object]]:
    """Tokens per second, in turns."""
    model = folder / "model"
    model.mkdir()
    quantized = {"quantization_config": SPEED_QUANTIZATION[quantization]} if quantization else {}
    (model / "config.json").write_text(json.dumps(SPEED_MODEL | quantized))
    arguments = {
        "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "max_model_len": 2048, "max_num_batched_tokens": 8192, "max_num_seqs": 256,
        "gpu_memory_utilization": 0.84 / (1 + len(experts)),
        "enable_prefix_caching": False, "attention_backend": "TRITON_ATTN",
    } | extra  # fmt: skip
    with ExitStack() as stack:
        engines = []
        for name, settings in variants(experts):
            # One after the other: while memory is being profiled, nobody else may take any.
            engines.append(Engine(name, settings, arguments, folder / f"speed-{name}.log"))
            stack.callback(engines[-1].stop)
            engines[-1].ask("kv_cache_blocks")
        for engine in engines:
            yield {"engine": engine.name, "methods": engine.ask("methods"), "blocks": engine.ask("kv_cache_blocks")}
        for load in LOADS:
            prompts = [
                [3 + (i * 7919 + j * 104729) % 150000 for j in range(load.tokens_in)] for i in range(load.prompts)
            ]
            ask: Callable[[Engine], float] = lambda e, p=prompts, n=load.tokens_out: e.ask(  # noqa: E731
                "seconds", prompts=p, new_tokens=n
            )
            for engine in engines:
                ask(engine)
            times: dict[str, list[float]] = {engine.name: [] for engine in engines}
            for _ in range(rounds):
                for engine in engines:
                    times[engine.name].append(ask(engine))
            rates = {name: load.counted / median(taken) for name, taken in times.items()}
            over_off = {name: rate / rates["off"] for name, rate in rates.items() if name != "off"}
            yield {"load": load.name, "tokens_per_s": rates, "over_off": over_off, "all": times}
            if profile:
                for engine in engines:
                    rows = engine.ask("profile", prompts=prompts, new_tokens=load.tokens_out)
                    yield {"load": load.name, "profile": engine.name, "kernels": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tokens", "speed", "engine"))
    parser.add_argument("arguments", nargs="?", help="of an engine, JSON")
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file; logs go beside it")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--experts", nargs="+", default=["triton"])
    parser.add_argument("--quantization", choices=SPEED_QUANTIZATION, default="", help="of the dummy")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vLLM's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.what == "engine":
        run_engine(json.loads(args.arguments))
        return
    if args.out is None:
        parser.error("--out is needed")
    from vllm_moe_modular.bench.timing import machine

    args.out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{args.what}-", dir=args.out.parent))
    if args.what == "tokens":
        results = check_tokens(args.models, args.experts, folder, args.engine)
    else:
        how = {"quantization": args.quantization, "rounds": args.rounds, "profile": args.profile}
        results = measure_speed(folder, args.experts, args.engine, **how)
    where = machine()
    with args.out.open("a") as f:
        for result in results:
            f.write(json.dumps(result | where) + "\n")
            f.flush()
            print({k: v for k, v in result.items() if k != "kernels"}, flush=True)


if __name__ == "__main__":
    main()
