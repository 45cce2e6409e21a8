"""Installed packages that announce parts: what works, what is broken, and who hears of it."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vllm_moe_modular.errors import NoUsablePartError
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.problem import Device, Problem
from vllm_moe_modular.selection.registry import PartKind
from vllm_moe_modular.selection.select import Selection, select
from vllm_moe_modular.selection.third_party import GROUPS, add_entry_points, full_registry

LAPTOP = Device(kind="cpu")
DP2_EP = Problem(num_experts=8, num_local_experts=4, top_k=2, hidden=64, intermediate=32, dp_size=2, ep_size=2)
EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_all_to_all"

MODULE = """
from dataclasses import replace
from vllm_moe_modular.activation_format import ActivationFormat
from vllm_moe_modular.selection.registry import Part, PartKind

def raising(problem, device):
    raise KeyError("hidden")

GOOD = Part(
    name="good", kind=PartKind.PREPARE_FINALIZE, target="{name}:Class", activation_format=ActivationFormat.STANDARD,
    reduces=frozenset({{"experts"}}), preference=1, summary="theirs",
)
MISSING_CLASS = replace(GOOD, name="missing_class", target="{name}:Nothing")
NO_BUILD = replace(GOOD, name="no_build", target="{name}:raising")
TAKEN = replace(GOOD, name="torch")
EXPERTS = replace(GOOD, name="experts", kind=PartKind.EXPERTS)
RAISING = replace(GOOD, name="raising", checks=(raising,))
NESTED = replace(GOOD, name="nested", requires=("a.b",))
TEXT = "good"

def make():
    return replace(GOOD, name="made")

def fails():
    raise RuntimeError("no licence")

def leaves():
    raise SystemExit(3)

class Class:
    @classmethod
    def build(cls, context):
        return cls()
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with these all-to-all entry points ("part = object") on the path."""
    name = f"theirs_{tmp_path.name.replace('-', '_')}"  # its own, so that no test sees another's import

    def put(*points: str, module: str = MODULE) -> Path:
        info = tmp_path / "their_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
        lines = [f"{part} = {name}:{value}" for part, _, value in (point.partition(" = ") for point in points)]
        (info / "entry_points.txt").write_text("\n".join([f"[{next(iter(GROUPS))}]", *lines]))
        (tmp_path / f"{name}.py").write_text(module.format(name=name))
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    return put


def choose(all2all: str = "auto", *, import_targets: bool = False) -> Selection:
    return select(full_registry(import_targets=import_targets), DP2_EP, LAPTOP, all2all=all2all)


def test_a_part_of_theirs_that_is_named_is_chosen_and_said_to_be_theirs(install: Install) -> None:
    install("good = GOOD")
    selection = choose("good", import_targets=True)
    assert selection.choice is not None
    assert selection.choice.all2all.provided_by == "their-package"
    assert (
        "chosen  good (from their-package)  asked for by name although comes with their-package" in selection.explain()
    )


def test_that_a_package_is_installed_changes_nothing_about_what_auto_takes(install: Install) -> None:
    before = choose()
    install("good = GOOD")  # which it prefers to all others
    after = choose(import_targets=True)
    assert str(after.choice) == str(before.choice) == "torch + torch"
    assert "by name  good (from their-package)  comes with their-package, not with this package; name it to use it" in (
        after.explain()
    )


def test_an_entry_point_may_be_a_function(install: Install) -> None:
    install("made = make")
    assert str(choose("made").choice) == "made + torch"


@pytest.mark.parametrize(
    ("point", "why"),
    [
        ("gone = GONE", "AttributeError"),
        ("text = TEXT", "must be a Part, or a function that returns one, and is a str"),
        ("fails = fails", "RuntimeError: no licence"),
        ("leaves = leaves", "SystemExit: 3"),
        ("torch = TAKEN", "is already registered by vllm_moe_modular"),
        ("experts = EXPERTS", "the part is of kind 'experts', the entry point's group is for 'all-to-all'"),
        ("another = GOOD", "the part is called 'good', the entry point 'another'"),
        ("missing_class = MISSING_CLASS", "has no attribute 'Nothing'"),
        ("no_build = NO_BUILD", "has no classmethod build(context)"),
        ("nested = NESTED", "requires takes top-level modules, not a.b"),
    ],
    ids=lambda value: value.split(" ")[0],
)
def test_a_broken_one_is_told_to_whoever_names_it_and_to_nobody_else(point: str, why: str, install: Install) -> None:
    install(point, "good = GOOD")
    registry = full_registry(import_targets=True)
    (broken,) = registry.broken
    name = point.split(" ")[0]
    assert (broken.name, broken.provided_by) == (name, "their-package")
    assert why in broken.why
    assert str(select(registry, DP2_EP, LAPTOP, all2all="good").choice) == "good + torch"
    with pytest.raises(NoUsablePartError) as error:
        select(registry, DP2_EP, LAPTOP, all2all=name)
    assert why in str(error.value)
    assert "their-package" in str(error.value)


def test_a_module_that_does_not_import_is_broken_in_one_line(install: Install) -> None:
    install("good = GOOD", module="raise ImportError('libnothing.so.3: cannot open\\nshared object file')")
    (broken,) = full_registry().broken
    assert "ImportError: libnothing.so.3: cannot open shared object file; mend or uninstall their-package" in broken.why


def test_a_check_that_raises_is_an_objection_that_names_the_package(install: Install) -> None:
    install("raising = RAISING")
    assert str(choose().choice) == "torch + torch"
    assert "its check raised KeyError: 'hidden'; tell the authors of their-package" in choose("raising").explain()


def test_what_rules_out_every_part_rules_out_theirs(install: Install) -> None:
    install("good = GOOD")
    selection = select(full_registry(), replace(DP2_EP, lora=True), LAPTOP, all2all="good")
    assert selection.choice is None
    assert "without --enable-lora" in selection.why_not


def test_targets_are_imported_only_where_asked(install: Install) -> None:
    install("missing_class = MISSING_CLASS")
    assert not full_registry().broken
    assert full_registry(import_targets=True).broken


def test_an_entry_point_without_a_distribution_is_named_all_the_same() -> None:
    registry = builtin_registry()
    point = EntryPoint("x", "no_such_module:PART", "vllm_moe_modular.experts")
    add_entry_points(registry, PartKind.EXPERTS, [point])
    assert "experts 'x' of an unnamed distribution cannot be used: no_such_module:PART: ModuleNotFoundError" in str(
        registry.broken[0]
    )


def test_reading_entry_points_imports_neither_torch_nor_vllm() -> None:
    code = "import sys; from vllm_moe_modular.selection.third_party import full_registry; full_registry()"
    code += "; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_example_is_short() -> None:
    files = [path for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]
    assert sum(len(path.read_text().splitlines()) for path in files) < 120
