"""The layering of the package, executed. Reads source; imports nothing of it but its name."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_moe_modular

ROOT = Path(vllm_moe_modular.__file__).parent
PACKAGE = ROOT.name
NOTHING = frozenset({"version", "errors", "activation_format"})

MAY_IMPORT = {
    "__init__": {"version"},
    "version": set(),
    "errors": set(),
    "activation_format": set(),
    "settings": {*NOTHING},
    "modular": {*NOTHING},
    "reference": {*NOTHING, "modular"},
    "kernels": {*NOTHING, "modular", "reference"},
    "prepare_finalize": {*NOTHING, "modular", "kernels", "reference"},
    "experts": {*NOTHING, "modular", "kernels", "reference"},
    "selection": {*NOTHING, "settings"},
    "vllm_adapter": {*NOTHING, "modular", "selection", "settings", "experts", "prepare_finalize", "kernels"},
    "plugin": {*NOTHING, "settings", "vllm_adapter"},
    "testing": {*NOTHING, "modular", "reference", "kernels", "prepare_finalize", "experts", "selection", "settings"},
    "bench": {
        *NOTHING,
        "modular",
        "reference",
        "kernels",
        "prepare_finalize",
        "experts",
        "selection",
        "testing",
        "vllm_adapter",
    },
    "cli": {*NOTHING, "modular", "kernels", "selection", "settings", "testing", "vllm_adapter", "bench"},
}
"""By layer, the other layers that it may import."""

MAY_IMPORT_VLLM = {"vllm_adapter", "plugin"}
MAY_IMPORT_MATPLOTLIB = {ROOT / "cli" / name for name in ("trace_figures.py", "bench_figures.py")}  # an optional extra
NO_TORCH_AT_IMPORT = [
    "",
    ".settings",
    ".plugin",
    ".errors",
    ".selection.select",
    ".selection.builtin",
    ".selection.from_config",
    ".selection.tables",
    ".selection.third_party",
    ".bench.all_to_all_cases",
    ".bench.all_to_all_report",
    ".bench.report",
    ".bench.shapes",
    ".cli.bench",
    ".cli.bench_all_to_all",
    ".cli.bench_experts",
    ".cli.conformance",
    ".cli.doctor",
    ".cli.explain",
    ".cli.trace",
    ".cli.tune",
    ".testing.conformance",
    ".testing.ranks",
]

NO_TRITON_AT_IMPORT = [
    ".experts.torch_experts",
    ".prepare_finalize.local",
    ".prepare_finalize.torch_all_to_all",
    ".prepare_finalize.allgather",
]
"""What runs on a CPU, where there may be none."""


def imports(path: Path) -> set[str]:
    """Every imported name with its module; a relative one begins with its dots."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return names | {
        f"{'.' * n.level}{n.module or ''}.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names
    }


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert layer in MAY_IMPORT, f"{layer} has no place in MAY_IMPORT yet"
    for name in imports(path):
        top, *rest = name.split(".")
        assert top != "vllm" or layer in MAY_IMPORT_VLLM, f"{layer} imports {name}"
        assert top != "matplotlib" or path in MAY_IMPORT_MATPLOTLIB, f"{path.name} imports {name}"
        assert not name.startswith("."), f"{layer} imports {name}; write the whole name, which says the layer"
        if top == PACKAGE and rest:
            assert rest[0] == layer or rest[0] in MAY_IMPORT[layer] or rest[0].startswith("__"), (
                f"{layer} imports {name}, which is not below it"
            )


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_layers_have_an_order(layer: str) -> None:
    seen: set[str] = set()
    below = {layer}
    while below := {b for name in below for b in MAY_IMPORT[name]} - seen:
        assert layer not in below, f"{layer} may import itself by way of others"
        seen |= below


def test_what_runs_before_the_flag_is_read_imports_neither_torch_nor_vllm() -> None:
    code = "import sys\n" + "\n".join(f"import {PACKAGE}{module}" for module in NO_TORCH_AT_IMPORT)
    code += "\nprint([m for m in ('torch', 'vllm', 'triton', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


WITHOUT_TRITON = """
import importlib, sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTriton())
importlib.import_module("vllm_moe_modular" + sys.argv[1])
"""


@pytest.mark.parametrize("module", NO_TRITON_AT_IMPORT)
def test_what_runs_on_a_cpu_needs_no_triton(module: str) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON, module], check=True)
