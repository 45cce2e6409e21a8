"""The one table of built-in parts."""

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.selection import checks
from vllm_moe_modular.selection.registry import Part, PartKind, Registry

_BY_EXPERTS = frozenset({"experts"})

_FP8 = ("fp8", "fp8 128x128", "compressed-tensors float8", "compressed-tensors float8 128x128")

_FP8_BLOCKS = tuple(scheme for scheme in _FP8 if scheme.endswith("128x128"))

_GATED = ("silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave")

_ON_DEEP_GEMM = (
    checks.device_kind("cuda"),
    checks.compute_capability(90),
    checks.dtype_one_of("bfloat16"),
    checks.activation_one_of(*_GATED),
    checks.no_bias,
    checks.sizes_multiple_of(unquantized=64, quantized=128),
)

_DEEP_GEMM = (checks.replaceable, checks.weights_one_of("none", "fp8 128x128"), *_ON_DEEP_GEMM)

_DEEPEP = (
    checks.replaceable,
    checks.communicates,
    checks.device_kind("cuda"),
    checks.compute_capability(90),
    checks.dtype_one_of("bfloat16"),
    checks.peer_access,
    checks.hosts_of(8),
)

# Their limits are compiled into the library: prepare_finalize.deepep_library says where each comes from.
_HIGH_THROUGHPUT = (
    checks.ranks_one_of(2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160),
    checks.hidden_at_most(7936),
    checks.local_experts_at_most(128),
    checks.top_k_at_most(32),
)

_LOW_LATENCY = (checks.hidden_at_most(8192), checks.top_k_at_most(11), checks.weighs_at_home)

_NOT_SERVED = (checks.replicated_tokens, checks.not_yet_served)

_GRAPH = "the host reads how many rows arrive"

PARTS = (
    Part(
        name="local",
        kind=PartKind.PREPARE_FINALIZE,
        target="vllm_moe_modular.prepare_finalize.local:LocalPrepareAndFinalize",
        activation_format=ActivationFormat.STANDARD,
        reduces=_BY_EXPERTS,
        preference=10,
        summary="no communication: one rank, or tokens that every rank already has",
        checks=(checks.replaceable, checks.tokens_everywhere),
    ),
    Part(
        name="nvlink",
        kind=PartKind.PREPARE_FINALIZE,
        target="vllm_moe_modular.prepare_finalize.nvlink:NvlinkPrepareAndFinalize",
        activation_format=ActivationFormat.STANDARD,
        reduces=_BY_EXPERTS,
        preference=20,
        summary="one host with peer access between its GPUs: one-sided Triton kernels, nothing to build",
        checks=(
            checks.replaceable,
            checks.communicates,
            checks.device_kind("cuda"),
            checks.one_host_with_peer_access,
            checks.dtype_one_of("bfloat16", "float16", "float32"),
        ),
        declines=(checks.replicated_tokens,),
        requires=("triton",),
    ),
    Part(
        name="deepep_auto",
        kind=PartKind.PREPARE_FINALIZE,
        target="vllm_moe_modular.prepare_finalize.deepep_high_throughput:DeepEPHighThroughputPrepareAndFinalize",
        activation_format=ActivationFormat.STANDARD,
        reduces=_BY_EXPERTS,
        preference=30,
        summary="deepep_low_latency for small steps and all captured ones, deepep_high_throughput for the others",
        checks=(*_DEEPEP, checks.one_host, *_HIGH_THROUGHPUT[:-1], *_LOW_LATENCY[1:]),
        declines=_NOT_SERVED,
        requires=("triton", "deep_ep"),
        small_steps="deepep_low_latency",
    ),
    Part(
        name="deepep_high_throughput",
        kind=PartKind.PREPARE_FINALIZE,
        target="vllm_moe_modular.prepare_finalize.deepep_high_throughput:DeepEPHighThroughputPrepareAndFinalize",
        activation_format=ActivationFormat.STANDARD,
        reduces=_BY_EXPERTS,
        preference=32,
        summary="DeepEP for large steps, one host or many: each token once per rank; waits 100 s for a lost rank",
        checks=(*_DEEPEP, *_HIGH_THROUGHPUT, checks.no_cuda_graph(_GRAPH)),
        declines=_NOT_SERVED,
        requires=("triton", "deep_ep"),
    ),
    Part(
        name="deepep_low_latency",
        kind=PartKind.PREPARE_FINALIZE,
        target="vllm_moe_modular.prepare_finalize.deepep_low_latency:DeepEPLowLatencyPrepareAndFinalize",
        activation_format=ActivationFormat.BATCHED,
        reduces=frozenset({"finalize"}),
        preference=34,
        summary="DeepEP for small steps, one host or many, in rounds: rows into blocks; waits 100 s for a lost rank",
        checks=(*_DEEPEP, *_LOW_LATENCY),
        declines=_NOT_SERVED,
        requires=("triton", "deep_ep"),
    ),
    Part(
        name="pplx",
        kind=PartKind.PREPARE_FINALIZE,
        target="vllm_moe_modular.prepare_finalize.pplx:PplxPrepareAndFinalize",
        activation_format=ActivationFormat.BATCHED,
        reduces=frozenset({"finalize"}),
        preference=36,
        summary="pplx-kernels, one host or many, in rounds: rows into blocks; waits without limit for a lost rank",
        checks=(
            checks.replaceable,
            checks.communicates,
            checks.device_kind("cuda"),
            checks.compute_capability(90),
            checks.dtype_one_of("bfloat16", "float16"),
            checks.peer_access,
            checks.hosts_of(8),
            checks.weighs_at_home,
        ),
        declines=_NOT_SERVED,
        requires=("triton", "pplx_kernels"),
    ),
    Part(
        name="torch",
        kind=PartKind.PREPARE_FINALIZE,
        target="vllm_moe_modular.prepare_finalize.torch_all_to_all:TorchPrepareAndFinalize",
        activation_format=ActivationFormat.STANDARD,
        reduces=_BY_EXPERTS,
        preference=50,
        summary="ragged all-to-all over torch.distributed (gloo, NCCL), each token once per rank",
        checks=(checks.replaceable, checks.communicates, checks.no_cuda_graph(_GRAPH)),
        declines=(checks.replicated_tokens,),
    ),
    Part(
        name="allgather",
        kind=PartKind.PREPARE_FINALIZE,
        target="vllm_moe_modular.prepare_finalize.allgather:AllGatherPrepareAndFinalize",
        activation_format=ActivationFormat.STANDARD,
        reduces=_BY_EXPERTS,
        preference=60,
        summary="every rank's tokens to every rank, partial sums back",
        checks=(checks.replaceable, checks.communicates),
        declines=(checks.replicated_tokens,),
    ),
    Part(
        name="triton_or_deep_gemm",
        kind=PartKind.EXPERTS,
        target="vllm_moe_modular.experts.triton_or_deep_gemm_experts:TritonOrDeepGemmExperts",
        activation_format=ActivationFormat.STANDARD,
        reduces=_BY_EXPERTS,
        preference=15,
        summary="in fp8 for each call whichever of the two is the faster, else triton; needs what deep_gemm needs",
        checks=(*_DEEP_GEMM, checks.fp8_blocks_of_one_half),
        declines=(checks.compared_when_served(),),
        requires=("triton", "vllm.third_party.deep_gemm or deep_gemm"),
        raw_weights=True,
        fp8_rows=("fp8 128x128",),
    ),
    Part(
        name="triton",
        kind=PartKind.EXPERTS,
        target="vllm_moe_modular.experts.triton_experts:TritonExperts",
        activation_format=ActivationFormat.STANDARD,
        reduces=_BY_EXPERTS,
        preference=20,
        summary="our own grouped GEMMs, activation in the epilogue, no host synchronisation",
        checks=(
            checks.replaceable,
            checks.weights_one_of("none", *_FP8),
            checks.device_kind("cuda"),
            checks.dtype_one_of("bfloat16", "float16", "float32"),
            checks.activation_one_of(*_GATED),
            checks.fp8_in_triton,
            checks.fp8_with_16_bits,
            checks.fp8_blocks_of_one_half,
        ),
        declines=(checks.compared_when_served("none"),),
        requires=("triton",),
        raw_weights=True,
        fp8_rows=_FP8_BLOCKS,
    ),
    Part(
        name="deep_gemm",
        kind=PartKind.EXPERTS,
        target="vllm_moe_modular.experts.deep_gemm_experts:DeepGemmExperts",
        activation_format=ActivationFormat.STANDARD,
        reduces=_BY_EXPERTS,
        preference=30,
        summary="DeepGEMM's grouped GEMMs for many rows, bf16 or fp8; compiles at start-up, needs nvcc",
        checks=_DEEP_GEMM,
        declines=(checks.compared_when_served(),),
        requires=("triton", "vllm.third_party.deep_gemm or deep_gemm"),
        raw_weights=True,
        fp8_rows=("fp8 128x128",),
    ),
    Part(
        name="deep_gemm_batched",
        kind=PartKind.EXPERTS,
        target="vllm_moe_modular.experts.deep_gemm_batched_experts:DeepGemmBatchedExperts",
        activation_format=ActivationFormat.BATCHED,
        reduces=frozenset({"finalize"}),
        preference=45,
        summary="DeepGEMM's masked grouped GEMM for fp8; compiles at start-up, needs nvcc",
        checks=(checks.replaceable, checks.weights_one_of("fp8 128x128"), *_ON_DEEP_GEMM),
        declines=(checks.compared_when_served(),),
        requires=("triton", "vllm.third_party.deep_gemm or deep_gemm"),
        raw_weights=True,
        fp8_rows=("fp8 128x128",),
    ),
    Part(
        name="triton_batched",
        kind=PartKind.EXPERTS,
        target="vllm_moe_modular.experts.triton_batched_experts:TritonBatchedExperts",
        activation_format=ActivationFormat.BATCHED,
        reduces=frozenset({"finalize"}),
        preference=40,
        summary="our own grouped GEMMs over the real rows of each expert's block, no host synchronisation",
        checks=(
            checks.replaceable,
            checks.weights_one_of("none", *_FP8),
            checks.device_kind("cuda"),
            checks.dtype_one_of("bfloat16", "float16", "float32"),
            checks.activation_one_of(*_GATED),
            checks.fp8_in_triton,
            checks.fp8_with_16_bits,
            checks.fp8_blocks_of_one_half,
        ),
        declines=(checks.compared_when_served(),),
        requires=("triton",),
        raw_weights=True,
        fp8_rows=_FP8_BLOCKS,
    ),
    Part(
        name="torch",
        kind=PartKind.EXPERTS,
        target="vllm_moe_modular.experts.torch_experts:TorchExperts",
        activation_format=ActivationFormat.STANDARD,
        reduces=frozenset({"experts", "finalize"}),
        preference=90,
        summary="plain torch; the CPU kernel and the reference for all others",
        checks=(
            checks.replaceable,
            checks.weights_one_of("none", *_FP8),
            checks.activation_one_of(
                *_GATED, "silu_no_mul", "gelu_no_mul", "relu2_no_mul",
            ),
            checks.no_cuda_graph("the host loops over the experts that have rows"),
        ),
        declines=(
            checks.needs_expert_parallel_on_cpu,
            checks.not_on("cuda", "far slower than vLLM's own kernels on a GPU; name it to use it as a reference"),
        ),
        raw_weights=True,
    ),
    Part(
        name="vllm",
        kind=PartKind.EXPERTS,
        target="vllm_moe_modular.vllm_adapter.vllm_experts:VllmExperts",
        activation_format=ActivationFormat.STANDARD,
        reduces=_BY_EXPERTS,
        preference=95,
        summary="the kernel that vLLM chose for the layer's quant method, reused: every quantised checkpoint",
        checks=(checks.replaceable, checks.vllm_experts_reusable),
        declines=(
            checks.only_with_expert_parallelism,
            checks.not_on("cuda", "not yet compared with vLLM alone in a served model; name it to use it"),
        ),
        requires=("vllm",),
        per_layer=True,
    ),
)  # fmt: skip


def builtin_registry() -> Registry:
    """A new registry with the parts of this package."""
    registry = Registry()
    registry.add_all(PARTS)
    return registry
