"""What happens between vLLM's layer and a kernel: slices, bounds, and what 0.11 asks of expert load balancing."""

from typing import Any

import pytest
import torch

from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.modular.build import BuildContext
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.modular.kernel import ModularKernel
from vllm_moe_modular.modular.placement import ExpertPlacement
from vllm_moe_modular.modular.prepare_finalize import Dispatched, PrepareAndFinalize, StandardRows
from vllm_moe_modular.modular.two_kernels import TwoKernels
from vllm_moe_modular.modular.weight_and_reduce import WeightAndReduceBy
from vllm_moe_modular.modular.workspace import Workspace
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import PartKind
from vllm_moe_modular.selection.select import Choice
from vllm_moe_modular.settings import Settings
from vllm_moe_modular.vllm_adapter.layer import MoELayer, Ranks, make_activation
from vllm_moe_modular.vllm_adapter.method import ModularForward, require_eplb_maps
from vllm_moe_modular.vllm_adapter.runtime import Runtime

PAIR = {PartKind.PREPARE_FINALIZE: "local", PartKind.EXPERTS: "torch"}

MAPS = {"expert_load_view": None, "logical_to_physical_map": None, "logical_replica_count": None}


class Fp8MoEMethod: ...


def test_eplb_of_a_method_that_cannot_names_the_old_method() -> None:
    with pytest.raises(NotImplementedError, match="Fp8MoEMethod"):
        require_eplb_maps(Fp8MoEMethod(), supported=False, **MAPS)


def test_eplb_of_a_method_that_can_demands_all_three_maps() -> None:
    with pytest.raises(ValueError, match="logical_to_physical_map, logical_replica_count is missing"):
        require_eplb_maps(Fp8MoEMethod(), supported=True, **{**MAPS, "expert_load_view": torch.zeros(1)})


def test_eplb_with_all_maps_is_fine() -> None:
    require_eplb_maps(Fp8MoEMethod(), supported=True, **dict.fromkeys(MAPS, torch.zeros(1)))


def test_eplb_error_is_ours() -> None:
    assert issubclass(UnsupportedError, NotImplementedError)


class Recorder(PrepareAndFinalize[None]):
    """An all-to-all of one rank that notes what it was given."""

    activation_format = ActivationFormat.STANDARD
    weight_and_reduce_by = WeightAndReduceBy.EXPERTS

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def most_rows(self, max_tokens_per_rank: int) -> int:
        return max_tokens_per_rank

    def prepare(self, x_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor, **more: Any):  # type: ignore[no-untyped-def]
        self.seen.append((x_TH.shape[0], more["max_tokens_per_rank"]))
        return Dispatched(StandardRows(x_TH, topk_ids_TK, topk_weights_TK), None)

    def finalize(self, y: torch.Tensor, ticket: None, *, out_TH: torch.Tensor) -> None:  # noqa: ARG002
        out_TH.copy_(y)


class Layer(MoELayer):
    name = "layer"
    activation = None
    expert_map = None
    router_weight_on_input = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @property
    def ranks(self) -> Ranks:  # type: ignore[override]
        return self._ranks

    @property
    def problem(self) -> Problem:  # type: ignore[override]
        raise AssertionError("not asked for at a forward")

    def weights(self) -> ExpertWeights:
        generator = torch.Generator().manual_seed(0)
        return ExpertWeights(
            w13=torch.randn(4, 12, 8, generator=generator), w2=torch.randn(4, 8, 6, generator=generator)
        )

    def replace_quant_method(self, method: Any) -> None: ...


def forward(ranks: Ranks, bound: int | None) -> tuple[ModularForward, Recorder]:
    from vllm_moe_modular.experts.torch_experts import TorchExperts

    recorder = Recorder()
    experts = TorchExperts(activation=Activation(kind=ActivationKind.SILU))
    kernel = ModularKernel(recorder, experts, allocate=Workspace(torch.device("cpu")))
    return ModularForward(kernel, Layer(ranks), tokens_bound=lambda: bound), recorder


def tokens(T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(T)]).to(torch.int32)
    return torch.randn(T, 8, generator=generator), torch.rand(T, 2, generator=generator), ids


@pytest.mark.parametrize("T", [1, 2, 3, 7], ids="{} tokens".format)
def test_slices_of_tensor_parallel_ranks_add_up_to_the_whole(T: int) -> None:
    x, weights, ids = tokens(T)
    whole, _ = forward(Ranks(0, 1, 0, 1, False), None)
    parts = [forward(Ranks(r, 3, r, 3, False), None)[0](x, weights, ids) for r in range(3)]
    assert torch.allclose(sum(parts), whole(x, weights, ids), atol=1e-5)  # type: ignore[arg-type]


def test_a_slice_may_be_empty_and_is_still_dispatched() -> None:
    last, recorder = forward(Ranks(1, 2, 1, 2, False), None)
    assert not last(*tokens(1)).any()
    assert recorder.seen == [(0, 1)]


def test_a_sliced_output_is_left_for_vllm_to_sum() -> None:
    assert not forward(Ranks(0, 2, 0, 2, False), None)[0].output_is_reduced
    assert forward(Ranks(0, 2, 0, 1, False), None)[0].output_is_reduced


def test_the_bound_of_slices_is_that_of_the_fullest_data_parallel_rank() -> None:
    first, recorder = forward(Ranks(0, 4, 0, 2, False), 9)
    first(*tokens(3))
    assert recorder.seen == [(2, 5)]


def test_the_bound_is_that_of_a_sequence_parallel_slice() -> None:
    sliced, recorder = forward(Ranks(0, 4, 0, 2, True), 9)  # 9 tokens on the fullest data-parallel rank
    sliced(*tokens(4))
    assert recorder.seen == [(4, 5)]


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("silu", None, Activation(kind=ActivationKind.SILU)),
        ("silu", 7.0, Activation(kind=ActivationKind.SILU, limit=7.0)),
        ("gelu_tanh", None, Activation(kind=ActivationKind.GELU_TANH)),
        ("swigluoai", None, Activation(kind=ActivationKind.SWIGLU_OAI, limit=7.0, interleaved=True)),
        ("swigluoai_uninterleave", 5.0, Activation(kind=ActivationKind.SWIGLU_OAI, limit=5.0, alpha=1.0, beta=0.0)),
        ("situ", None, None),
    ],
)
def test_vllm_activation_names(name: str, limit: float | None, expected: Activation | None) -> None:
    assert make_activation(name, limit, None, None) == expected


def test_a_choice_of_two_pairs_is_built_as_two_kernels_over_shared_parts() -> None:
    runtime = Runtime(Settings(enabled=True), device=Device(kind="cpu"))
    parts = [next(p for p in runtime.registry.of(kind) if p.name == name) for kind, name in PAIR.items()]
    context = BuildContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        placement=ExpertPlacement.linear(4, 1),
        rank=0,
        group=None,
        hidden=8,
        top_k=2,
        capacity_tokens=16,
        activation=Activation(kind=ActivationKind.SILU),
        low_latency_tokens=4,
    )
    one = runtime.build_kernel(Choice(*parts), context, most_small=6)
    two = runtime.build_kernel(Choice(*parts, small=Choice(*parts)), context, most_small=6)
    assert isinstance(one, ModularKernel)
    assert isinstance(two, TwoKernels)
    assert two.most_small == 6
    assert two.small.prepare_finalize is two.large.prepare_finalize is one.prepare_finalize
