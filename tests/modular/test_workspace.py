import pytest
import torch

from vllm_moe_modular.errors import CapacityError
from vllm_moe_modular.modular.workspace import BufferSpec, Workspace

CPU = torch.device("cpu")


def test_buffers_of_one_step_do_not_overlap() -> None:
    a, b = Workspace(CPU)([BufferSpec((3, 5), torch.bfloat16), BufferSpec((7,), torch.float32)])
    a.fill_(1)
    b.fill_(2)
    assert a.shape == (3, 5)
    assert (a == 1).all()
    assert b.data_ptr() % 256 == a.data_ptr() % 256


def test_memory_is_used_again() -> None:
    workspace = Workspace(CPU)
    first = workspace([BufferSpec((100,), torch.float32)])[0]
    assert workspace([BufferSpec((50,), torch.float64)])[0].data_ptr() == first.data_ptr()


def test_lanes_have_memory_of_their_own() -> None:
    lanes = iter([0, 1])
    workspace = Workspace(CPU, lane=lambda: next(lanes))
    spec = BufferSpec((8,), torch.float32)
    assert workspace([spec])[0].data_ptr() != workspace([spec])[0].data_ptr()
    assert workspace.nbytes == 2 * spec.nbytes


def test_locked_workspace_does_not_grow() -> None:
    workspace = Workspace(CPU)
    workspace.reserve(1024)
    workspace.lock()
    workspace([BufferSpec((256,), torch.float32)])
    with pytest.raises(CapacityError, match="lane 0: a step needs 1280 bytes, 1024 were reserved"):
        workspace([BufferSpec((257,), torch.float32)])


def test_scratch_of_no_elements_has_its_shape() -> None:
    assert Workspace(CPU)([BufferSpec((0, 4), torch.float32)])[0].shape == (0, 4)
