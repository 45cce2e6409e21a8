"""Experts of your own as a part: announced, chosen by name with reasons, built and run, on a CPU.

    python examples/4_add_a_part.py

An installed package announces its part with an entry point instead of `registry.add`: docs/add_experts.md.
"""

import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.experts.torch_experts import TorchExperts
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.checks import activation_one_of
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import Part, PartKind
from vllm_moe_modular.selection.select import select

T, K, H, F, E = 16, 2, 64, 32, 8


class MyExperts(TorchExperts):
    """Plain torch under another name: put your kernel into `apply`."""


PART = Part(
    name="my_experts", kind=PartKind.EXPERTS, target="__main__:MyExperts", preference=1000, summary="an example",
    activation_format=ActivationFormat.STANDARD, reduces=frozenset({"experts", "finalize"}),
    checks=(activation_one_of("silu"),),
)  # fmt: skip


def main() -> None:
    """Chooses it for a layer, and says why nothing else; then runs the layer on it."""
    registry, cpu = builtin_registry(), torch.device("cpu")
    registry.add(PART)
    problem = Problem(num_experts=E, num_local_experts=E, top_k=K, hidden=H, intermediate=F, dtype="float32")
    selection = select(registry, problem, Device(kind="cpu"), all2all="local", experts="my_experts")
    print(selection.explain())
    context = BuildContext(
        device=cpu, dtype=torch.float32, placement=ExpertPlacement.linear(E, 1), rank=0, group=None, hidden=H, top_k=K,
        capacity_tokens=T, activation=Activation(kind=ActivationKind.SILU), low_latency_tokens=256,
    )  # fmt: skip
    kernel = ModularKernel(*(part.load().build(context) for part in selection.require().parts), allocate=Workspace(cpu))
    weights = ExpertWeights(w13=torch.randn(E, 2 * F, H) * H**-0.5, w2=torch.randn(E, H, F) * F**-0.5)
    topk_weights, topk_ids = torch.randn(T, E).softmax(dim=1).topk(K)
    out = kernel.apply(torch.randn(T, H), topk_ids, topk_weights, weights, max_tokens_per_rank=T)
    print(f"{type(kernel.prepare_finalize).__name__} + {type(kernel.experts).__name__}: {list(out.shape)}")


if __name__ == "__main__":
    main()
