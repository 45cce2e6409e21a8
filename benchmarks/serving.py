"""vLLM with the plugin against vLLM without it: the same tokens, and tokens per second.

    python -m benchmarks.serving tokens --out serving.jsonl [--models qwen3_moe qwen3_moe:fp8_block ...] [--experts ...]
    python -m benchmarks.serving speed --out serving.jsonl [--quantization fp8_block] [--experts ...] [--profile]
    ... --ranks 2 --all2all nvlink allgather

Each variant is an engine of its own in its own process, all of them on the one device at the same time; what is timed
runs in turns, while the others are idle. `tokens` serves tiny checkpoints with compilation and CUDA graphs: in float32
it counts greedy tokens that agree with stock vLLM and with Hugging Face, in bfloat16 it compares the error of the
log-probabilities of a given text with that of stock. `speed` serves a dummy of Qwen3-30B-A3B's shape with 24 layers.
`--engine` takes what else vLLM is given, with and without the plugin: '{"moe_backend": "marlin"}'.

`--ranks` serves with data and expert parallelism: `tokens` against stock vLLM on one rank, `speed` against stock vLLM
on as many, per rank. Each rank is a process with a GPU of its own. Where there are fewer GPUs, ranks share them, which
says whether tokens are right and nothing about speed: it takes an NCCL from 2.30 on (LD_PRELOAD, VLLM_NCCL_SO_PATH).
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines import Engine, Ranks, start

PROMPTS, NEW_TOKENS = 8, 24
ENGINES_AT_A_TIME = 12  # with some gigabytes of CUDA graphs each
ON = {"VLLM_MOE_MODULAR": "1"}
OFF = {"VLLM_MOE_MODULAR": "0"}
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
RANK_LOADS = (
    Load("small: 8 x (32 in, 64 out)", 8, 32, 64),
    Load("decode: 256 x (32 in, 64 out)", 256, 32, 64),
    Load("mixed: 128 x (512 in, 64 out)", 128, 512, 64),
)
"""Of each rank."""


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        ranks: with one, the all-to-all is `local`.
        extra: more arguments of vLLM's, with and without the plugin.
        extra_on: more of those with it, over `ranks`, as what one rank does not take.
    """

    experts: Sequence[str]
    all2alls: Sequence[str]
    ranks: int
    extra: Mapping[str, Any]
    extra_on: Mapping[str, Any]

    def variants(self) -> dict[str, dict[str, str]]:
        """The settings by name: each pair of parts."""
        return {
            experts if self.ranks == 1 else f"{all2all} {experts}": ON
            | {"VLLM_MOE_MODULAR_ALL2ALL": all2all, "VLLM_MOE_MODULAR_EXPERTS": experts}
            for all2all in (["local"] if self.ranks == 1 else self.all2alls)
            for experts in self.experts
        }


def check_tokens(models: Sequence[str], plan: Plan, folder: Path) -> Iterator[dict[str, object]]:
    """Serve each model, "family" or "family:quantization", in each dtype without the plugin and with each variant."""
    at_a_time = max(1, ENGINES_AT_A_TIME // (2 * (1 + plan.ranks * len(plan.variants()))))
    for first in range(0, len(models), at_a_time):
        yield from check_together(models[first : first + at_a_time], plan, folder)


def check_together(models: Sequence[str], plan: Plan, folder: Path) -> Iterator[dict[str, object]]:
    from vllm_moe_modular.testing.checkpoints import dequantise, make_checkpoint
    from vllm_moe_modular.testing.reference_tokens import default_prompts

    prompts = default_prompts(PROMPTS)
    twins: dict[str, Path] = {}
    with ExitStack() as stack:
        engines: dict[tuple[str, str], list[Engine | Ranks]] = {}
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
                } | ({} if latent else {"attention_backend": "TRITON_ATTN"}) | plan.extra  # fmt: skip
                for name, settings in ({"off": OFF} | plan.variants()).items():
                    log = folder / f"{family}-{quantization}-{dtype}-{name.replace(' ', '-')}.log"
                    if name == "off":
                        engine = start(name, settings, arguments, log, ranks=1)
                    else:
                        engine = start(name, settings, arguments | plan.extra_on, log, ranks=plan.ranks)
                    engines.setdefault((model, dtype), []).append(engine)
                    stack.callback(engine.stop)
        truth = {model: hugging_face(twin, prompts) for model, twin in twins.items()}
        for (model, dtype), (off, *ons) in engines.items():
            for on in ons:
                result: dict[str, object] = {"model": model, "dtype": dtype, "experts": on.name}
                try:
                    result |= compare(off, on, prompts, truth[model])
                    if plan.extra_on.get("enable_eplb"):  # no line: experts never moved, and nothing was shown
                        result["rearranged"] = on.lines_with("Rearranging experts")
                except RuntimeError as e:
                    result |= {"failed": str(e)}
                yield result


def compare(
    off: Engine | Ranks, on: Engine | Ranks, prompts: list[list[int]], truth: Mapping[str, Any]
) -> dict[str, object]:
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
    plan: Plan, folder: Path, *, quantization: str, kv_gib: int, rounds: int, profile: bool
) -> Iterator[dict[str, object]]:
    """Tokens per second, of each rank, in turns."""
    model = folder / "model"
    model.mkdir()
    quantized = {"quantization_config": SPEED_QUANTIZATION[quantization]} if quantization else {}
    (model / "config.json").write_text(json.dumps(SPEED_MODEL | quantized))
    arguments = {
        "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16",
        "max_model_len": 2048, "max_num_batched_tokens": 8192, "max_num_seqs": 256,
        "gpu_memory_utilization": 0.84 / (1 + len(plan.variants())),
        "enable_prefix_caching": False, "attention_backend": "TRITON_ATTN",
    } | ({"kv_cache_memory_bytes": kv_gib << 30} if kv_gib else {}) | plan.extra  # fmt: skip
    with ExitStack() as stack:
        engines = []
        for name, settings in ({"off": OFF} | plan.variants()).items():
            log = folder / f"speed-{name.replace(' ', '-')}.log"
            engines.append(start(name, settings, arguments, log, ranks=plan.ranks))
            stack.callback(engines[-1].stop)
            if not kv_gib:  # while one profiles the memory, nobody else may take any
                engines[-1].ask("kv_cache_blocks")
        for engine in engines:
            yield {"engine": engine.name, "methods": engine.ask("methods"), "blocks": engine.ask("kv_cache_blocks")}
        for load in LOADS if plan.ranks == 1 else RANK_LOADS:
            prompts = [
                [3 + (i * 7919 + j * 104729) % 150000 for j in range(load.tokens_in)]
                for i in range(load.prompts * plan.ranks)
            ]
            ask: Callable[[Engine | Ranks], float] = lambda e, p=prompts, n=load.tokens_out: e.ask(  # noqa: E731
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
    parser.add_argument("what", choices=("tokens", "speed"))
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file; logs go beside it")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--experts", nargs="+", default=["triton"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--all2all", nargs="+", default=["nvlink", "allgather"], help="with several ranks")
    parser.add_argument("--quantization", choices=SPEED_QUANTIZATION, default="", help="of the dummy")
    parser.add_argument(
        "--kv-gib", type=int, default=0, help="of each engine's KV cache, so that all start at once; how much "
        "each would have taken is not compared",
    )  # fmt: skip
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vLLM's")
    parser.add_argument("--engine-on", type=json.loads, default={}, metavar="JSON", help="more, with the plugin")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.out is None:
        parser.error("--out is needed")
    from vllm_moe_modular.bench.timing import machine

    args.out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{args.what}-", dir=args.out.parent))
    plan = Plan(args.experts, args.all2all, args.ranks, args.engine, args.engine_on)
    if args.what == "tokens":
        results = check_tokens(args.models, plan, folder)
    else:
        how = {"quantization": args.quantization, "kv_gib": args.kv_gib, "rounds": args.rounds, "profile": args.profile}
        results = measure_speed(plan, folder, **how)
    where = machine()
    with args.out.open("a") as f:
        for result in results:
            f.write(json.dumps(result | where) + "\n")
            f.flush()
            print({k: v for k, v in result.items() if k != "kernels"}, flush=True)


if __name__ == "__main__":
    main()
