from pathlib import Path

import pytest

from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.registry import PartKind
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
