"""The checks that parts are made of. Each takes its limits and returns a `Check`."""

from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import Check


def replaceable(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """What rules out every part."""
    if problem.irreplaceable:
        return problem.irreplaceable
    if problem.lora:
        return "LoRA keeps a kernel from before the swap and would be ignored; serve without --enable-lora"
    if problem.elastic_ep:
        return "elastic expert parallelism would change the ranks under a swapped layer; pass --no-enable-elastic-ep"
    if problem.micro_batches:
        return "a step in micro-batches (DBO) was not tried on a modular method; serve without --enable-dbo"
    if problem.pcp_size > 1:
        return "prefill context parallelism is not supported; pass --prefill-context-parallel-size 1"
    return None


def communicates(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """For all-to-alls that move tokens between ranks."""
    if problem.ep_size > 1:
        return None
    if problem.dp_size > 1:
        return (
            f"data parallel size {problem.dp_size} without expert parallelism cuts every expert over the ranks; "
            "pass --enable-expert-parallel"
        )
    return (
        "one rank holds all experts, there is nobody to send tokens to; pass --enable-expert-parallel with -tp or -dp"
    )


def tokens_everywhere(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """For `local`: no tokens have to move."""
    if problem.tokens_replicated:
        return None
    if problem.dp_size > 1 and problem.ep_size == 1:
        return (
            f"data parallel size {problem.dp_size} without expert parallelism needs every rank's tokens; "
            "pass --enable-expert-parallel"
        )
    return (
        f"each of the {problem.ep_size} expert-parallel ranks has its own tokens; choose an all-to-all that moves them"
    )


def activation_one_of(*names: str) -> Check:
    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        if problem.activation in names:
            return None
        return f"activation {problem.activation} is not one of {', '.join(names)}; leave the layer to vLLM"

    return check


def weights_one_of(*schemes: str) -> Check:
    """For experts that read the weights off the layer, unquantised ("none") or in other schemes."""

    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        if problem.irreplaceable:
            return None  # which says it all
        if problem.quant_scheme == "none" and "none" not in schemes:
            return f"the weights are not quantised, it reads {', '.join(schemes)}; choose other experts"
        if problem.quant_scheme not in schemes:
            known = ", ".join(s for s in schemes if s != "none") or "unquantised ones"
            return f"the weights are quantised ({problem.quant_scheme}), it reads {known}; use the vllm experts"
        return problem.weights_missing or None

    return check


def no_bias(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """For GEMMs of a library that adds none."""
    return "the experts have biases, which it does not add; use triton or vllm experts" if problem.has_bias else None


def sizes_multiple_of(unquantized: int, quantized: int) -> Check:
    """Of the hidden and the intermediate size: what a block of the GEMMs' contraction needs."""

    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        multiple = unquantized if problem.quant_scheme == "none" else quantized
        sizes = {"hidden": problem.hidden, "intermediate": problem.intermediate}
        if not (odd := [f"{name} size {size}" for name, size in sizes.items() if size % multiple]):
            return None
        return f"{' and '.join(odd)} on a rank: it takes multiples of {multiple}; choose other experts"

    return check


def compute_capability(*known: int) -> Check:
    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        if device.kind != "cuda" or device.sm in known:
            return None
        names = ", ".join(f"{sm // 10}.{sm % 10}" for sm in known)
        return f"compute capability {device.sm // 10}.{device.sm % 10} is not {names}, where it was tested"

    return check


def fp8_in_triton(problem: Problem, device: Device) -> str | None:
    """For kernels that read weights in float8_e4m3fn, which Triton has from compute capability 8.9 on."""
    if problem.quant_scheme == "none" or device.kind != "cuda" or device.sm >= 89:
        return None
    where = f"{device.sm // 10}.{device.sm % 10}"
    return f"Triton has no float8_e4m3fn on compute capability {where}; leave the layer to vLLM"


def fp8_with_16_bits(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """For experts that quantise rows themselves."""
    if problem.quant_scheme == "none" or problem.dtype != "float32":
        return None
    return "fp8 weights with rows in float32; serve with --dtype bfloat16, or use the torch experts"


def fp8_blocks_of_one_half(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """For experts in which no block of 128 x 128 with one scale may hold both gates and ups."""
    if not problem.quant_scheme.endswith("128x128"):
        return None
    if problem.activation == "swigluoai":
        return "gates and ups lie interleaved in blocks of 128 x 128 with one scale; use the torch experts"
    if problem.intermediate % 128:
        return (
            f"intermediate {problem.intermediate} is not a multiple of 128, the size of a block with one scale; use a "
            "smaller tensor-parallel size or expert parallelism, or the torch experts"
        )
    return None


def compared_when_served(*schemes: str) -> Check:
    """A reservation: where a served model was not yet compared with vLLM's own kernels, on tokens and on speed.

    Args:
        schemes: for which it was: on one Hopper GPU, in bfloat16.
    """

    def check(problem: Problem, device: Device) -> str | None:
        if device.kind != "cuda":
            return None
        if device.sm != 90:
            where = f" on compute capability {device.sm // 10}.{device.sm % 10}"
        elif max(problem.tp_size, problem.dp_size, problem.ep_size) > 1:
            where = " over several GPUs"
        elif problem.quant_scheme not in schemes:
            where = "" if problem.quant_scheme == "none" else f" with weights in {problem.quant_scheme}"
        elif problem.dtype != "bfloat16":
            where = f" in {problem.dtype}"
        else:
            return None
        return f"not yet compared with vLLM's kernels in a served model{where}; name it to use it"

    return check


def vllm_experts_reusable(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """For `vllm`."""
    return problem.vllm_experts or None


def only_with_expert_parallelism(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """A reservation of `vllm`: without an all-to-all there is nothing to put its experts behind."""
    if problem.ep_size == 1:
        return "without expert parallelism vLLM runs the same kernel itself; name the part to run it here all the same"
    return None


def device_kind(kind: str) -> Check:
    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        return None if device.kind == kind else f"runs on {kind}, this device is {device.kind}"

    return check


def dtype_one_of(*names: str) -> Check:
    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        if problem.dtype in names:
            return None
        return f"dtype {problem.dtype} is not one of {', '.join(names)}; pass --dtype {names[0]}"

    return check


def one_host_with_peer_access(problem: Problem, device: Device) -> str | None:
    """For transports that store straight into a peer's memory."""
    if problem.hosts > 1:
        return f"the ranks are on {problem.hosts} hosts, it reaches one; choose an all-to-all over a network"
    return peer_access(problem, device)


def ranks_one_of(*known: int) -> Check:
    """Of the ranks that share experts."""

    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        if problem.ep_size == 1 or problem.ep_size in known:
            return None
        return f"{problem.ep_size} ranks share the experts, it takes {', '.join(map(str, known))}; choose another one"

    return check


def hosts_of(gpus: int) -> Check:
    """For libraries that take the ranks to be on hosts of so many GPUs each, all of them in use, or on a single one."""

    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        if problem.hosts == 1 and problem.ep_size <= gpus:
            return None
        if problem.ep_size == gpus * problem.hosts:
            return None
        return (
            f"{problem.ep_size} ranks on {problem.hosts} host{'s'[: problem.hosts > 1]}: it takes up to {gpus} on one "
            f"host, or {gpus} on each; choose another one"
        )

    return check


def one_host(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """For two transports that would each initialise NVSHMEM in its own way."""
    if problem.hosts > 1:
        return f"the ranks are on {problem.hosts} hosts, and its two modes do not yet share NVSHMEM; choose one of them"
    return None


def hidden_at_most(limit: int) -> Check:
    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        if problem.hidden <= limit:
            return None
        return f"hidden size {problem.hidden} is more than {limit}, the largest that it takes; choose another one"

    return check


def top_k_at_most(limit: int) -> Check:
    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        if problem.top_k <= limit:
            return None
        return f"each token goes to {problem.top_k} experts, it sends to {limit} at most; choose another one"

    return check


def local_experts_at_most(limit: int) -> Check:
    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        if problem.num_local_experts <= limit:
            return None
        return (
            f"{problem.num_local_experts} experts on a rank, it takes {limit} at most; spread them over more ranks or "
            "choose another one"
        )

    return check


def weighs_at_home(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """For all-to-alls that send one row for all experts of a token and weight in finalize."""
    if problem.router_weight_on_input and problem.top_k > 1:
        return (
            f"the router's weights multiply the input of {problem.top_k} experts of a token, it sends one row for all "
            "of them; choose an all-to-all whose experts weight"
        )
    return None


def not_yet_served(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """A reservation of an all-to-all that no served model was run on beside vLLM's own."""
    if device.kind == "cuda":
        return "not yet compared with vLLM's own all-to-alls in a served model; name it to use it"
    return None


def peer_access(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """For transports over NVLink within a host, and over something else beyond."""
    if device.kind == "cuda" and not device.peer_access:
        return "the GPUs of this host cannot access each other's memory; choose an all-to-all over NCCL"
    return None


def no_cuda_graph(why: str) -> Check:
    def check(problem: Problem, device: Device) -> str | None:
        if device.kind == "cuda" and problem.cuda_graph:
            return (
                f"cannot be captured in a CUDA graph ({why}); name it, so that MoE layers run between graphs where "
                "vLLM compiles in pieces, or pass --enforce-eager"
            )
        return None

    return check


def not_on(kind: str, why: str) -> Check:
    """A reservation: `auto` does not use the part on such devices."""

    def check(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
        return why if device.kind == kind else None

    return check


def needs_expert_parallel_on_cpu(problem: Problem, device: Device) -> str | None:
    """A reservation: without expert parallelism vLLM's own CPU kernel is the better choice."""
    if device.kind == "cpu" and problem.ep_size == 1:
        return "without expert parallelism vLLM's own CPU kernel is faster; name the part to use it all the same"
    return None


def replicated_tokens(problem: Problem, device: Device) -> str | None:  # noqa: ARG001
    """A reservation: tokens that every rank already has need not be sent."""
    if problem.tokens_replicated:
        return "every rank already has all tokens, sending them gains nothing; `local` does without"
    return None
