"""Documents link to what is there, each is in a chapter of the site, and a list needs no empty line before it."""

from pathlib import Path

import pytest
import yaml

import docs_build

pytestmark = pytest.mark.unit


class Config(yaml.SafeLoader):
    """The site's configuration, without the Python objects in it."""


Config.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def test_every_link_leads_to_a_page_and_a_heading_that_are_there() -> None:
    assert docs_build.broken() == []
    assert len(docs_build.pages()) >= 250
    assert sum(1 for page in docs_build.pages() for _ in docs_build.links(page)) >= 500


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see [this](b.md)", "docs/a.md:3: docs/b.md is not there"),
        ("see [this](#elsewhere)", "docs/a.md:3: docs/a.md has no heading #elsewhere"),
        ("![a picture](../docs)", "docs/a.md:3: docs is a folder, name a file of it"),
        ("[a](#one-two) [b](a.md#one-two) `[c](c.md)` [d](https://example.org/d)", ""),
        ("```\n[a](b.md)\n```", ""),
    ],
)
def test_a_link_to_nothing_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(f"# One `two`\n\n{text}\n")

    assert docs_build.broken(tmp_path) == ([said] if said else [])


def test_every_page_is_in_one_chapter_of_the_site() -> None:
    given = yaml.load((docs_build.ROOT / docs_build.CONFIG).read_text(), Config)  # noqa: S506

    def flat(chapters: object) -> list[str]:
        if isinstance(chapters, str):
            return [chapters]
        assert isinstance(chapters, (dict, list))
        return [page for part in (chapters.values() if isinstance(chapters, dict) else chapters) for page in flat(part)]

    listed = flat(docs_build.navigation(given["nav"]))
    assert sorted(listed) == [page.as_posix() for page in docs_build.pages()]


def test_every_decision_is_in_the_list_of_decisions_once() -> None:
    folder = docs_build.ROOT / "docs/decisions"
    listed = (folder / "README.md").read_text()

    found = {file.name: listed.count(f"]({file.name})") for file in folder.glob("[0-9]*.md")}
    assert found
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_a_list_after_a_paragraph_gets_an_empty_line_and_nothing_else_does() -> None:
    text = "words:\n- a\n- b\n  more of b\n- c\n\n1. one\n\n```\nwords\n- code\n```\n| t |\n"

    assert docs_build.spaced(text) == text.replace("words:\n- a", "words:\n\n- a")


def test_the_wheel_has_the_pages_of_users_and_not_the_history() -> None:
    packed = {page.as_posix() for page in docs_build.packed()}

    assert {
        "README.md",
        "docs/install.md",
        "docs/runbooks/KvstrataRedisDown.md",
        "examples/05-vllm/README.md",
    } <= packed
    assert not [page for page in packed if page.startswith(("docs/decisions", "docs/evidence", "tests"))]
