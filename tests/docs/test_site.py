"""The site builds without a warning, and is complete in itself."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, site_pages


@pytest.mark.full
def test_the_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run([ROOT / "dev", "docs", "--site-dir", str(site)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in site_pages():
        html = (site / page.relative_to(ROOT / "docs")).with_suffix(".html").read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=[\"']?(https?:[^\"' >]+)", html)
        assert not fetched, f"{page.name} fetches {fetched}"
