"""vllm_adapter.peers: what they refuse without a GPU."""

import pytest
import torch

from vllm_moe_modular.errors import UnsupportedError
from vllm_moe_modular.modular.experts import Activation, ActivationKind, ExpertWeights
from vllm_moe_modular.vllm_adapter.peers import matmul_ogs


def test_matmul_ogs_takes_no_fp8_blocks() -> None:
    weights = ExpertWeights(w13=torch.empty(2, 4, 2), w2=torch.empty(2, 2, 2), w13_scale=torch.empty(2, 1, 1))
    with pytest.raises(UnsupportedError, match="fp8 in blocks of 128 x 128 in matmul_ogs"):
        matmul_ogs(weights, Activation(kind=ActivationKind.SILU))
