"""The site of the documents is built strictly, fetches nothing from elsewhere, and searches when opened as a file."""

import re
from pathlib import Path
from typing import Any

import pytest

import docs_build
from support.engines.environments import python_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\"\s>]+)|<link\b[^>]*\bhref=\"?([^\"\s>]+)")
IMPORTED = re.compile(r"url\(\"?(?!data:)([a-z]+:[^)\"]+)|@import \"?([a-z]+:[^\"]+)")


def test_the_site_is_whole_loads_nothing_from_elsewhere_and_searches_without_a_server(tmp_path: Path) -> None:
    """One test: each would build it anew."""
    assert docs_build.build(docs_build.ROOT, python_of("docs"), tmp_path / "site") == 0

    every_page_is_built_and_loads_nothing_from_elsewhere(tmp_path / "site")
    browser = pytest.importorskip("drawing.browser", reason="playwright is not installed: make tools")
    try:
        browser.find()
    except browser.NoBrowserError as e:
        pytest.skip(f"the site was built; not looked at: {e}")
    a_page_that_was_opened_as_a_file_finds_words_and_asks_no_other_host(tmp_path / "site", browser)


def every_page_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    built = list(site.rglob("*.html"))
    loaded = {a or b for path in built for a, b in LOADED.findall(path.read_text(encoding="utf-8"))}
    imported = {a or b for path in site.rglob("*.css") for a, b in IMPORTED.findall(path.read_text(encoding="utf-8"))}

    assert len(built) >= len(docs_build.pages())
    assert any(path.endswith(".js") for path in loaded)
    assert {path for path in loaded if re.match(r"[a-z]+:|//", path) and not path.startswith("data:")} == set()
    assert imported == set()


def a_page_that_was_opened_as_a_file_finds_words_and_asks_no_other_host(site: Path, browser: Any) -> None:
    asked = list[str]()
    with browser.start() as chromium, browser.tab(chromium) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "docs/operations.html").as_uri())
        query = page.locator("[data-md-component=search-query]").first
        query.click()
        query.press_sequentially("watermark")
        found = page.locator(".md-search-result__link").first
        found.wait_for()
        found.click()
        page.wait_for_url("**?h=watermark*")

    assert any(url.endswith("search_index.js") for url in asked)
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []
