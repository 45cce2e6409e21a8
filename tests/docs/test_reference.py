"""The reference pages and the code name the same things."""

import argparse
import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, all_pages, prose, sections
from vllm_moe_modular import errors
from vllm_moe_modular.cli.main import PROGRAM, SUBCOMMANDS
from vllm_moe_modular.selection.builtin import builtin_registry
from vllm_moe_modular.selection.registry import PartKind
from vllm_moe_modular.settings import PREFIX, VARIABLES, Settings
from vllm_moe_modular.testing.checkpoints import FAMILIES, QUANTIZATIONS

REFERENCE = DOCS / "reference"
PACKAGE = ROOT / "vllm_moe_modular"
OF_THE_PAGES = {"my_transport", "my_experts", "example_broadcast"}
"""Parts that pages and examples make themselves."""

MISSPELT = {f"{PREFIX}_EXPERT"}
"""Shown as what an error is about."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def example_texts() -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "examples").rglob("*")):
        if file.suffix in (".py", ".yaml", ".env", ".md", ".toml") and "build" not in file.parts:
            yield str(file.relative_to(ROOT)), text_of(file)


ALL_TEXTS = [*((str(page.relative_to(ROOT)), text_of(page)) for page in all_pages()), *example_texts()]


def rows(text: str) -> list[list[str]]:
    """The cells of its tables, heads left out."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if not line.startswith("| --- ")]


def as_text(value: object) -> str:
    """A default as the page writes it."""
    plain = {None: "none", (): "none", False: "0", "auto": "`auto`"}
    return plain.get(value) or f"{value:g}"  # type: ignore[call-overload, str-format]


def test_the_settings_page_has_every_setting_with_its_key_and_default() -> None:
    table = {cells[0]: cells for cells in rows(text_of(REFERENCE / "settings.md")) if cells[0] != "variable"}
    want = {f"`{v.name}`": [f"`{v.key}`", as_text(getattr(Settings(), v.key))] for v in VARIABLES}
    assert {name: cells[1:3] for name, cells in table.items()} == want


def test_the_settings_page_explains_every_setting() -> None:
    terms = re.findall(r"^(`.*`)\n: ", text_of(REFERENCE / "settings.md"), flags=re.MULTILINE)
    assert set(re.findall(rf"{PREFIX}\w*", " ".join(terms))) == {v.name for v in VARIABLES}


def test_the_readme_has_every_setting() -> None:
    assert {v.name for v in VARIABLES} <= set(re.findall(rf"{PREFIX}\w*", text_of(ROOT / "README.md")))


@pytest.mark.parametrize(("name", "text"), ALL_TEXTS, ids=[name for name, _ in ALL_TEXTS])
def test_variables_commands_and_parts_that_are_named_exist(name: str, text: str) -> None:
    known = {v.name for v in VARIABLES} | MISSPELT
    assert {found.rstrip("_") for found in re.findall(rf"\b{PREFIX}\w*", text)} <= known
    commands = set(re.findall(rf"\b{PROGRAM} +([a-z]\w+)", text))
    assert commands <= {command.name for command in SUBCOMMANDS}
    of_dev = set(re.findall(r"(?<![\w.])\./dev +([a-z]+)", text)) - {"makes", "lists"}
    assert of_dev <= dev_commands()
    for kind, key in ((PartKind.PREPARE_FINALIZE, "all2all"), (PartKind.EXPERTS, "experts")):
        parts = {part.name for part in builtin_registry().of(kind)} | OF_THE_PAGES | {"auto"}
        asked = rf"(?:_{key.upper()}=|--{key}[= ]|\"{key}\": ?\"|^ +{key}: )([a-z]\w+)"
        assert set(re.findall(asked, text, flags=re.MULTILINE)) <= parts, name


def dev_commands() -> set[str]:
    usage = text_of(ROOT / "dev").partition("<<'EOF'\n")[2].partition("\nEOF")[0]
    return set(re.findall(r"^  ([a-z]+) ", usage, flags=re.MULTILINE))


def test_the_commands_page_has_every_command_in_the_order_of_the_help() -> None:
    page = sections(REFERENCE / "commands.md")
    assert set(page) == {command.name for command in SUBCOMMANDS} | {"./dev"}
    assert set(re.findall(r"^\| `\./dev ([a-z]+)`", page["./dev"], flags=re.MULTILINE)) == dev_commands()


@pytest.mark.parametrize("command", SUBCOMMANDS, ids=lambda command: command.name)
def test_the_commands_page_has_every_option(command: object) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    import_module(command.module).add_arguments(parser)  # type: ignore[attr-defined]
    options = options_of(parser)
    section = sections(REFERENCE / "commands.md")[command.name]  # type: ignore[attr-defined]
    cells = " ".join(cells[0] for cells in rows(section))
    assert set(re.findall(r"`(-[\w-]+)`", cells)) == options


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Those of its subcommands too, but for --help."""
    found = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found.union(*(options_of(child) for action in below for child in action.choices.values()))


def test_the_commands_page_has_what_checkpoint_can_make() -> None:
    section = sections(REFERENCE / "commands.md")["checkpoint"]
    named = set(re.findall(r"`([a-z]\w+)`", section))
    assert {*FAMILIES, *QUANTIZATIONS} <= named


def error_classes() -> dict[str, Path]:
    """Every class of the package whose base is an error of it, by name."""
    found: dict[str, Path] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(base, ast.Name) and (base.id == "MoEModularError" or base.id in found) for base in node.bases
            ):
                found[node.name] = file
    return found


def test_the_errors_page_has_every_error() -> None:
    page = sections(REFERENCE / "errors.md")
    others = page.pop("Errors of commands and tools")
    in_errors = {name for name in vars(errors) if name.endswith("Error")}
    assert set(page) == in_errors
    for name in in_errors - {"MoEModularError"}:
        assert "**Do:**" in page[name], f"{name}: what to do"
    elsewhere = {name for name, file in error_classes().items() if file.name != "errors.py"}
    assert {cells[0].strip("`") for cells in rows(others)} - {"class"} == elsewhere


def test_the_errors_page_says_which_builtin_error_each_is_as_well() -> None:
    page = sections(REFERENCE / "errors.md")
    for name, cls in vars(errors).items():
        if name.endswith("Error") and name != "MoEModularError":
            also = [base.__name__ for base in cls.__bases__ if base.__module__ == "builtins"]
            said = re.findall(r"Also\s+an?\s+`(\w+)`", page[name])
            assert said == also, name


def test_the_api_page_names_what_is_there() -> None:
    for target in re.findall(r"^::: (\S+)", text_of(REFERENCE / "api.md"), flags=re.MULTILINE):
        module = ROOT.joinpath(*target.split(".")).with_suffix(".py")
        if module.is_file():
            continue
        parent, _, member = target.rpartition(".")
        file = ROOT.joinpath(*parent.split("."))
        source = text_of(file.with_suffix(".py") if file.with_suffix(".py").is_file() else file / "__init__.py")
        names = {getattr(node, "name", "") for node in ast.parse(source).body} | set(re.findall(r'"(\w+)",', source))
        assert member in names, target


def test_numbers_of_advice_are_measurements() -> None:
    """A decimal outside code, on the pages that advise, is in docs/measurements.md."""
    measured = set(re.findall(r"\d+(?:\.\d+)?", text_of(DOCS / "measurements.md")))
    for page in (DOCS / "choosing.md", ROOT / "README.md"):
        text = re.sub(
            r"`[^`]*`|vLLM [\d.]+(?: to [\d.]+)?(?: and [\d.]+)?|Python [\d.]+|Apache-[\d.]+",
            "",
            "\n".join(prose(page)),
        )
        said = set(re.findall(r"(?<![\w.])\d+\.\d+|(?<![\w.-])\d{4,}", text))
        assert said <= measured, f"{page.name}: {sorted(said - measured)}"
