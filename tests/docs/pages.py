"""The Markdown pages as data: links, anchors, code blocks, sections. Standard library only."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^ *(```+|~~~+)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#+) +(.*?)(?: +\{ *#([\w-]+) *\})?$")


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        title: of `title="..."` in its first line; empty: none.
        heading: anchor of the heading above it.
    """

    language: str
    title: str
    text: str
    heading: str


def site_pages() -> list[Path]:
    """The pages of the site."""
    return sorted(DOCS.rglob("*.md"))


def all_pages() -> list[Path]:
    """Those of the site, and those that are read in the repository."""
    others = [*ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    return [*site_pages(), *sorted(others)]


def prose(page: Path) -> Iterator[str]:
    """The lines outside fenced and indented code. What is indented below `!!!` is a note, not code."""
    fence, in_note = "", False
    for line in page.read_text(encoding="utf-8").splitlines():
        if found := _FENCE.match(line):
            fence = "" if fence and found[1].startswith(fence) else fence or found[1]
        elif not fence:
            in_note = line.startswith("!!!") or (in_note and line.startswith("    ")) or (in_note and not line)
            if in_note or not line.startswith("    "):
                yield line.strip() if in_note else line


def links(page: Path) -> list[str]:
    """Targets of its links and pictures, inline code left out."""
    text = re.sub(r"`[^`\n]*`", lambda code: code[0].replace("](", "] ("), "\n".join(prose(page)))
    return [match[1] for match in _LINK.finditer(text)]


def anchors(page: Path) -> set[str]:
    """What its headings can be linked as; as the site and GitHub make them."""
    found: set[str] = set()
    for line in prose(page):
        if heading := _HEADING.match(line):
            slug = heading[3] or slugify(heading[2])
            found.add(slug if slug not in found else f"{slug}_1")
    return found


def slugify(heading: str) -> str:
    """As the `toc` extension of Python-Markdown does."""
    plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def sections(page: Path) -> dict[str, str]:
    """By title, the text below each heading of the second level."""
    _, *parts = re.split(r"^## +", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {title.strip("`"): text for title, _, text in (part.partition("\n") for part in parts)}


def blocks(page: Path) -> list[Block]:
    """Its fenced code blocks, in their order."""
    found, heading, opening, inside = [], "", "", list[str]()
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            if not opening:
                opening, inside = line, []
                continue
            title = re.search(r'title="([^"]*)"', opening)
            language = opening.removeprefix("```").split(" ")[0]
            found.append(Block(language, title[1] if title else "", "\n".join(inside) + "\n", heading))
            opening = ""
        elif opening:
            inside.append(line)
        elif match := _HEADING.match(line):
            heading = slugify(match[2])
    return found
