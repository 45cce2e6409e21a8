import torch

from vllm_moe_modular.modular.weight_and_reduce import TorchTopKWeightAndReduce

NAN = float("nan")


def test_neither_row_nor_weight_behind_minus_one_is_read() -> None:
    y = torch.tensor([[[1.0, 2.0], [NAN, NAN]], [[3.0, 4.0], [5.0, 6.0]]])
    ids, weights = torch.tensor([[0, -1], [1, 0]]), torch.tensor([[0.5, NAN], [1.0, 2.0]])
    out = torch.empty(2, 2)
    TorchTopKWeightAndReduce().apply(y, ids, weights, router_weight_on_input=False, out_RH=out)
    assert out.tolist() == [[0.5, 1.0], [13.0, 16.0]]


def test_weights_of_the_input_are_not_applied_again() -> None:
    out = torch.empty(1, 1)
    TorchTopKWeightAndReduce().apply(
        torch.tensor([[[2.0], [3.0]]]),
        torch.tensor([[0, 1]]),
        torch.tensor([[9.0, 9.0]]),
        router_weight_on_input=True,
        out_RH=out,
    )
    assert out.item() == 5.0


def test_rounds_once_at_the_end() -> None:
    """In bfloat16 256 + 1 + 1 is 256 if every sum is rounded."""
    y = torch.tensor([[[256.0], [1.0], [1.0]]]).bfloat16()
    out = torch.empty(1, 1, dtype=torch.bfloat16)
    TorchTopKWeightAndReduce().apply(
        y, torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3), router_weight_on_input=False, out_RH=out
    )
    assert out.item() == 258.0
