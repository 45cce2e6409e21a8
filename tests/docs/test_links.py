"""Every link of every page leads somewhere, and every page is in the navigation."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, all_pages, anchors, links, site_pages


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", all_pages(), ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead, f"{name(page)} links to what is not there: {dead}"


@pytest.mark.parametrize("page", site_pages(), ids=name)
def test_pages_of_the_site_link_to_pages_of_the_site(page: Path) -> None:
    """What lies outside docs/ is not in the built site: name it as code."""
    outside = [
        link
        for link in links(page)
        if not re.match(r"https?://|#", link)
        and not (page.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS)
    ]
    assert not outside


def test_the_navigation_has_every_page_once() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    listed = re.findall(r": (\S+\.md)$", nav, flags=re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in site_pages())


def test_pictures_have_a_text() -> None:
    bare = [name(page) for page in all_pages() if re.search(r"!\[\s*\]\(", page.read_text())]
    assert not bare


def test_nothing_is_fetched_from_elsewhere() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    assert not re.findall(r"https?://", config)
