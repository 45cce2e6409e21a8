from pathlib import Path

import pytest

from vllm_moe_modular.vllm_adapter.contract import Calls, Overrides, Reads, drift

SOURCE = """
from x import imported
if True:
    class Method:
        known: int = 0

        def __init__(self, a, b=1):
            self.set_here = 3

        def apply(self, layer, x, *, extra=None): ...
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "m.py").write_text(SOURCE)
    (tmp_path / "__init__.py").write_text("def top(a): ...")
    return tmp_path


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (Overrides("vllm.layers.m:Method.apply", ("layer", "x", "extra")), []),
        (Overrides("vllm.layers.m:Method.apply", ("layer", "x")), ["new parameter extra"]),
        (Overrides("vllm.layers.m:Method.apply", ("layer", "x", "extra", "ids")), ["parameter ids is gone"]),
        (Calls("vllm.layers.m:Method.apply", ("layer", "x")), []),
        (Calls("vllm.layers.m:Method.__init__", ("a",)), []),
        (Calls("vllm.layers.m:Method.__init__", ()), ["new required parameter a"]),
        (Calls("vllm.layers.m:Method.__init__", ("a", "c")), ["parameter c is gone"]),
        (Calls("vllm:top", ("a",)), []),
        (Calls("vllm.layers.m:Method.known", ()), ["no longer a function"]),
        (Reads("vllm.layers.m:Method.known"), []),
        (Reads("vllm.layers.m:Method.set_here"), []),
        (Reads("vllm.layers.m:imported"), []),
        (Reads("vllm.layers.m:Gone"), ["gone"]),
        (Reads("vllm.layers.gone:Method"), ["gone"]),
    ],
)
def test_drift_is_named(root: Path, expected: Calls | Overrides | Reads, says: list[str]) -> None:
    assert drift([expected], root) == [f"{expected.path}: {s}" for s in says]
