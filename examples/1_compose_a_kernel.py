"""A mixture-of-experts layer composed by hand, on a CPU: an all-to-all, experts, and the kernel that calls them.

    python examples/1_compose_a_kernel.py

Letters: T tokens, K top-k, H hidden, F intermediate, E experts.
"""

import torch

from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.prepare_finalize.local import LocalPrepareAndFinalize
from vllm_moe_modular.reference.moe_layer import moe_layer

T, K, H, F, E = 16, 2, 64, 32, 8


def main() -> None:
    """Runs the layer and compares it with one written as loops in float64."""
    torch.manual_seed(0)
    cpu, silu = torch.device("cpu"), Activation(kind=ActivationKind.SILU)
    weights = ExpertWeights(w13=torch.randn(E, 2 * F, H) * H**-0.5, w2=torch.randn(E, H, F) * F**-0.5)

    one_rank = ExpertPlacement.linear(num_experts=E, num_ranks=1)
    kernel = ModularKernel(
        LocalPrepareAndFinalize(placement=one_rank, rank=0, device=cpu),
        TorchExperts(activation=silu),
        allocate=Workspace(cpu),
    )

    # What a router does: K experts for each token, with weights.
    x_TH = torch.randn(T, H)
    topk_weights_TK, topk_ids_TK = torch.randn(T, E).softmax(dim=1).topk(K)
    out_TH = kernel.apply(x_TH, topk_ids_TK, topk_weights_TK, weights, max_tokens_per_rank=T)

    truth_TH = moe_layer(x_TH, topk_ids_TK, topk_weights_TK, weights, silu, router_weight_on_input=False)
    error = (out_TH.double() - truth_TH).abs().max().item()
    print(f"{type(kernel.prepare_finalize).__name__} + {type(kernel.experts).__name__}: {list(out_TH.shape)}")
    print(f"largest error against float64: {error:.1e}")
    assert error < 1e-5, "float32 should be closer to float64 than that"


if __name__ == "__main__":
    main()
