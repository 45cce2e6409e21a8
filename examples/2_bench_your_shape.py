"""How long experts take on the shape of your model: the triton experts on a GPU, the torch experts on a CPU.

    python examples/2_bench_your_shape.py --experts 128 --top-k 8 --hidden 2048 --intermediate 768 --rows 1 128 2048

Random routing, bfloat16, medians. `vllm-moe-modular bench experts` is the thorough one: it checks against float64, and
runs vLLM's kernel in turns with ours.
"""

import argparse
from statistics import median
from time import perf_counter

import torch

from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights, PermuteExpertsUnpermute
from vllm_moe_modular.modular.prepare_finalize import StandardRows
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import Workspace

SILU = Activation(kind=ActivationKind.SILU)


def experts_for(device: torch.device) -> PermuteExpertsUnpermute:
    if device.type == "cuda":
        from vllm_moe_modular.experts.triton_experts import TritonExperts

        return TritonExperts(activation=SILU)
    from vllm_moe_modular.experts.torch_experts import TorchExperts

    return TorchExperts(activation=SILU)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("experts", "top-k", "hidden", "intermediate"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rows", type=int, nargs="+", required=True, help="after dispatch, on one rank")
    o = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    like = {"dtype": torch.bfloat16, "device": device}
    w13 = torch.randn(o.experts, 2 * o.intermediate, o.hidden, **like) * o.hidden**-0.5
    w2 = torch.randn(o.experts, o.hidden, o.intermediate, **like) * o.intermediate**-0.5
    weights = ExpertWeights(w13=w13, w2=w2)
    part, workspace = experts_for(device), Workspace(device)
    for R in o.rows:
        topk_weights, topk_ids = torch.rand(R, o.experts, device=device).topk(o.top_k)
        rows, took = StandardRows(torch.randn(R, o.hidden, **like), topk_ids.int(), topk_weights), []
        for _ in range(13):
            began = perf_counter()
            part.apply(rows, weights, workspace=workspace(part.workspace(rows, weights)), router_weight_on_input=False,
                       weight_and_reduce_by=WeightAndReduceBy.EXPERTS)  # fmt: skip
            torch.cuda.synchronize() if device.type == "cuda" else None
            took.append(1e6 * (perf_counter() - began))
        print(f"{type(part).__name__} on {device.type}, {R} rows: {median(took[3:]):.0f} us")


if __name__ == "__main__":
    main()
