from dataclasses import replace
from pathlib import Path

import pytest

from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.checks import no_cuda_graph
from vllm_moe_modular.selection.registry import PartKind, Registry
from vllm_moe_modular.selection.tables import BEGIN, END, tables, with_tables

PARTS_MD = Path(__file__).parents[2] / "docs" / "parts.md"


def test_the_document_is_up_to_date() -> None:
    document = PARTS_MD.read_text()
    assert document == with_tables(document, tables(builtin_registry())), (
        "docs/parts.md is stale; run python -m vllm_moe_modular.selection.tables docs/parts.md"
    )


def test_every_part_is_in_it() -> None:
    made = tables(builtin_registry())
    for kind in PartKind:
        for part in builtin_registry().of(kind):
            assert f"| `{part.name}` | {part.activation_format.value} |" in made
            assert f"{kind.value} `{part.name}`\n" in made


def test_what_people_wrote_around_the_tables_stays() -> None:
    assert with_tables(f"before\n{BEGIN}\nold\n{END}\nafter\n", "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


def test_a_document_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs these two lines"):
        with_tables("text", "new")


def row(made: str, title: str, *cells: str) -> list[str]:
    """What a table says after the cells that its row begins with, by the order of parts in its head."""
    _, _, section = made.partition(f"\n## {title}\n")
    (line,) = [
        line for line in section.partition("\n## ")[0].splitlines() if line.startswith(f"| {' | '.join(cells)} |")
    ]
    return [cell.strip() for cell in line.strip("|").split(" | ")][len(cells) :]


def test_a_check_is_what_empties_the_cell_of_a_feature() -> None:
    registry = Registry()
    for name, checks in (("able", ()), ("unable", (no_cuda_graph("why"),))):
        part = next(p for p in builtin_registry().of(PartKind.EXPERTS) if p.name == "torch")
        registry.add(replace(part, name=name, checks=checks))
    registry.add(next(p for p in builtin_registry().of(PartKind.PREPARE_FINALIZE) if p.name == "local"))
    made = tables(registry)
    assert row(made, "What experts can do", "CUDA graphs", "captured") == ["yes", ""]
    assert "- cannot be captured in a CUDA graph (why); name it, so that" in made


@pytest.mark.parametrize("group", ["format", "hosts", "CUDA graphs", "EPLB", "DBO", "LoRA", "router"])
def test_what_people_ask_of_an_all_to_all_has_a_row(group: str) -> None:
    _, _, section = tables(builtin_registry()).partition("## What all-to-alls can do")
    assert f"\n| {group} | " in section.partition("## What experts can do")[0]


@pytest.mark.parametrize("group", ["format", "weights", "activation", "dtype", "CUDA graphs", "EPLB", "DBO", "LoRA"])
def test_what_people_ask_of_experts_has_a_row(group: str) -> None:
    assert f"\n| {group} | " in tables(builtin_registry()).partition("## What experts can do")[2]


def test_what_no_part_does_is_said_once() -> None:
    made = tables(builtin_registry())
    assert set(row(made, "What experts can do", "LoRA", "`--enable-lora`")) == {""}
    assert made.count("serve without --enable-lora") == 1
