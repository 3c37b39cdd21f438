"""Builds the site of the documents, checks their links, and names the pages that the wheel carries.

Every page keeps its path in the tree, so one link serves the tree, the site and the wheel. The site is built by mkdocs
in an environment of its own (`peers.py docs`), strictly: a link to nothing and a page in no chapter are errors. Nothing
of it is fetched when it is read, and it reads from a folder as from a server. The standard library alone until it is
built: hatchling's hook imports this where nothing else is installed.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
CONFIG: Final = "mkdocs.yml"
SITE: Final = Path("build/site")
ASSETS: Final = Path("hack/docs_assets")
"""What the site has besides: its width, and what lets a page that was opened as a file search."""
_FOLDERS: Final = (
    "agent", "bench", "charts", "crds", "dashboards", "docs", "examples", "hack", "metadata", "operator",
    "requirements", "tests",
)  # fmt: skip
_NOT_OURS: Final = ("modules", "vendor", "node_modules", "build")
"""Folders below these that hold what was fetched or made."""
_UNLIKELY: Final = ("docs/decisions/", "docs/evidence/", "CHANGELOG.md", "bench/history.md")
"""Pages that a search shows below others."""
_NOT_PACKED: Final = ("docs/decisions/", "docs/evidence/", "tests/", "hack/", "requirements/", "bench/history")
"""Pages for those who have the tree: not in the wheel."""
_BELOW: Final = "---\nsearch:\n  boost: 0.3\n---\n"
_FENCE: Final = re.compile(r"^ {0,3}(```|~~~)")
_LINK: Final = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_CODE: Final = re.compile(r"(`+).+?\1")
_HEADING: Final = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$")
_ITEM: Final = re.compile(r"^(?:[-*+]|\d+\.) ")
_SCHEME: Final = re.compile(r"^[a-z][a-z0-9+.-]*:")


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a page to somewhere in the tree."""

    page: Path
    """Relative to the tree, as all paths here."""
    line: int
    target: Path
    anchor: str
    """Empty where the link names a whole page."""


def pages(root: Path = ROOT) -> tuple[Path, ...]:
    """Every document of the tree."""
    found = [*root.glob("*.md"), *(path for folder in _FOLDERS for path in (root / folder).rglob("*.md"))]
    relative = (path.relative_to(root) for path in found)
    return tuple(sorted(path for path in relative if not set(path.parts) & set(_NOT_OURS)))


def packed(root: Path = ROOT) -> tuple[Path, ...]:
    """The documents that the wheel carries."""
    return tuple(path for path in pages(root) if not path.as_posix().startswith(_NOT_PACKED))


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside of fenced blocks, with their numbers from 1."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        if mark := _FENCE.match(line):
            fence = "" if fence == mark[1] else (fence or mark[1])
        elif not fence:
            yield number, line


def anchors(text: str) -> frozenset[str]:
    """What a page's headings are called in links; as GitHub and the site call them."""
    headings = (_HEADING.match(line) for _, line in prose(text))
    return frozenset(slug(heading[1]) for heading in headings if heading)


def slug(heading: str) -> str:
    """Name of a heading in links."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", words.replace("`", "").lower()).strip().replace(" ", "-")


def links(page: Path, root: Path = ROOT) -> Iterator[Link]:
    """Every link of a page into the tree; those to other hosts are left out."""
    for number, line in prose((root / page).read_text(encoding="utf-8")):
        for found in _LINK.finditer(_CODE.sub(lambda code: "`" * len(code[0]), line)):
            if not _SCHEME.match(found[1]):
                path, _, anchor = found[1].partition("#")
                target = Path(*_flat((page.parent / path).parts)) if path else page
                yield Link(page, number, target, anchor)


def _flat(parts: tuple[str, ...]) -> list[str]:
    flat = list[str]()
    for part in parts:
        if part == ".." and flat and flat[-1] != "..":
            flat.pop()
        elif part != ".":
            flat.append(part)
    return flat


def broken(root: Path = ROOT) -> list[str]:
    """What is wrong with links: one line each, with page and line."""
    known = pages(root)
    names = {page: anchors((root / page).read_text(encoding="utf-8")) for page in known}
    return [
        f"{link.page}:{link.line}: {why}"
        for page in known
        for link in links(page, root)
        if (why := _why(link, names, root))
    ]


def _why(link: Link, names: dict[Path, frozenset[str]], root: Path) -> str:
    if (root / link.target).is_dir():
        return f"{link.target} is a folder, name a file of it"
    if not (root / link.target).is_file():
        return f"{link.target} is not there"
    if link.anchor and link.anchor not in names.get(link.target, frozenset()):
        return f"{link.target} has no heading #{link.anchor}"
    return ""


def stage(root: Path, target: Path) -> None:
    """Copy pages and what they link to into a new folder, by their paths in the tree."""
    others = {link.target for page in pages(root) for link in links(page, root) if link.target.suffix != ".md"}
    for page in pages(root):
        (target / page).parent.mkdir(parents=True, exist_ok=True)
        head = _BELOW if page.as_posix().startswith(_UNLIKELY) else ""
        (target / page).write_text(head + spaced((root / page).read_text(encoding="utf-8")), encoding="utf-8")
    for path in others:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, target / path)
    shutil.copytree(root / ASSETS, target / "assets")


def spaced(text: str) -> str:
    """Put an empty line before a list that follows a paragraph: Python-Markdown wants one there, GitHub does not."""
    lines, starts, before = text.splitlines(), list[int](), (0, "")
    for number, line in prose(text):
        is_after_words = before[0] == number - 1 and before[1].strip() and before[1][0] not in " #|"
        if _ITEM.match(line) and is_after_words and not _ITEM.match(before[1]):
            starts.append(number - 1)
        before = number, line
    for at in reversed(starts):
        lines.insert(at, "")
    return "\n".join(lines) + "\n"


def navigation(chapters: Any, root: Path = ROOT) -> Any:
    """Chapters with every folder (`docs/decisions/`) replaced by the pages in it, its README first."""
    if isinstance(chapters, list):
        return [navigation(chapter, root) for chapter in chapters]
    if isinstance(chapters, dict):
        return {title: navigation(content, root) for title, content in chapters.items()}
    if not chapters.endswith("/"):
        return chapters
    found = sorted((root / chapters).glob("*.md"), key=lambda path: (path.name != "README.md", path.name))
    return [path.relative_to(root).as_posix() for path in found]


def build(root: Path, python: Path, site: Path) -> int:
    """Build the site into a folder with mkdocs of that interpreter; its exit status."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads names of Python objects, which mkdocs looks up, as nothing."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    given = yaml.load((root / CONFIG).read_text(encoding="utf-8"), Loader)  # noqa: S506  A safe loader.
    with tempfile.TemporaryDirectory(prefix="kvstrata-docs-") as place:
        stage(root, Path(place, "pages"))
        nav = navigation(given["nav"], root)
        own = {"INHERIT": str(root / CONFIG), "docs_dir": "pages", "site_dir": str(site), "nav": nav}
        config = Path(place, CONFIG)
        config.write_text(json.dumps(own), encoding="utf-8")  # JSON is YAML.
        command = [str(python), "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(config)]
        environ = {"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"}
        return subprocess.run(command, check=False, env=environ).returncode


def main() -> int:
    """Check links, and build unless only that is asked for; 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="look at links and anchors alone")
    parser.add_argument("--site", type=Path, default=ROOT / SITE, help="where to (default: build/site)")
    given = parser.parse_args()
    if wrong := broken():
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if given.check:
        print(f"links: ok, in {len(pages())} pages")
        return 0
    import peers

    if build(
        ROOT, peers.ensure(peers.DOCS, lambda line: print(f"[docs] {line}", file=sys.stderr)), given.site.resolve()
    ):
        return 1
    print(f"{len(pages())} pages: {given.site / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
