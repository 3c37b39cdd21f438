"""`kvstrata docs` lists pages, prints one by a part of its name, and finds words."""

import pytest

from kvstrata_client.cli import main

pytestmark = pytest.mark.unit


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(("docs", *arguments))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_the_list_has_every_page_with_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)

    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0
    assert rows["PAGE"] == "TITLE"
    assert rows["docs/install.md"] == "Installing on a cluster"
    assert not [page for page in rows if page.startswith((".venv", "build"))]


@pytest.mark.parametrize("name", ["KvstrataRedisDown", "kvstrataredisdown", "docs/runbooks/KvstrataRedisDown.md"])
def test_a_page_is_printed_by_its_name_or_its_path(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, name)

    assert code == 0
    assert out.startswith("# KvstrataRedisDown\n")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("instal", "did you mean docs/install.md?"), ("readme", "examples/README.md"), ("zzzz", "0 pages")],
)
def test_a_name_of_no_page_or_of_several_is_refused_with_what_is_alike(
    capsys: pytest.CaptureFixture[str], name: str, meant: str
) -> None:
    code, _, err = run(capsys, name)

    assert code == 1
    assert meant in err


def test_a_search_names_page_and_line_and_says_by_its_status_that_it_found_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "--search", "HELM upgrade")
    assert code == 0
    assert any(line.startswith("docs/install.md:") for line in out.splitlines())

    assert run(capsys, "--search", "xyzzy plugh quux")[:2] == (1, "")
