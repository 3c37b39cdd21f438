"""What a medium holds, what is under way on it, and what of that a power loss may leave: every sector or none."""

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

PAGE_BYTES: Final = 4096
SECTOR_BYTES: Final = 512
"""Smallest unit that a disk writes whole."""

WHOLE: Final = 0xFF
"""All eight sectors of a page."""

_HOLE: Final = bytes(PAGE_BYTES)

Fate = Mapping[int, int]
"""What arrived of a change: the mask of sectors of each page. For names, page 0 says it with any mask but 0."""

_DRAWN_PART: Final = 10
"""Of more states than can be tried, a tenth of what would be tried is drawn: chance repeats itself."""

NOTHING: Final[Fate] = {}


@dataclass(slots=True)
class File:
    """Size and pages that are not zeros; pages are never changed in place, so copies share them."""

    size_bytes: int
    pages: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> "File":
        """Return a file that changes on its own."""
        return File(self.size_bytes, dict(self.pages))


@dataclass(slots=True)
class Image:
    """Names and files, as a start would find them."""

    names: dict[str, int] = field(default_factory=dict)
    files: dict[int, File] = field(default_factory=dict)

    def copy(self) -> "Image":
        """Return an image that changes on its own."""
        named = set(self.names.values())
        return Image(dict(self.names), {n: f.copy() for n, f in self.files.items() if n in named})

    def digest(self) -> bytes:
        """Digest of all content, equal for equal images."""
        made = hashlib.blake2b(digest_size=16)
        for name, number in sorted(self.names.items()):
            file = self.files[number]
            made.update(f"{name}/{file.size_bytes}/".encode())
            for page in sorted(file.pages):
                made.update(page.to_bytes(8, "big") + file.pages[page])
        return made.digest()

    @property
    def size_bytes(self) -> int:
        """Bytes of all named files."""
        return sum(self.files[n].size_bytes for n in set(self.names.values()))


@dataclass(slots=True, eq=False)
class Change:
    """One change that may or may not be on the medium: new pages of a file, or names that point elsewhere."""

    number: int
    """File that is written, made or renamed."""
    pages: Mapping[int, bytes] = field(default_factory=dict)
    names: tuple[tuple[str, int | None], ...] = ()
    """Names and the files that they point to from now on; None removes one."""
    size_bytes: int = 0
    """Size of a file that is made."""

    def apply(self, image: Image, fate: Fate | None = None) -> None:
        """Change `image` as far as `fate` says; all of it when there is none."""
        if self.names:
            if fate is None or fate.get(0):
                self._apply_names(image)
            return
        file = image.files.get(self.number)
        if file is None:
            return
        for page, content in self.pages.items():
            mask = WHOLE if fate is None else fate.get(page, 0)
            if mask:
                file.pages[page] = content if mask == WHOLE else _torn(file.pages.get(page, _HOLE), content, mask)

    def _apply_names(self, image: Image) -> None:
        for name, number in self.names:
            if number is None:
                image.names.pop(name, None)
            else:
                image.names[name] = number
                image.files.setdefault(number, File(self.size_bytes))

    def fates(self) -> Iterator[Fate]:
        """Every way in which a power loss may leave the change, nothing and all of it included.

        Names change at once or not. Of up to three pages every subset is tried, of more every run that begins or
        ends with the change and each single page; besides, every page torn at each sector, with and without the rest.
        """
        if self.names:
            yield from (NOTHING, {0: WHOLE})
            return
        pages = sorted(self.pages)
        for chosen in _subsets(pages):
            yield dict.fromkeys(chosen, WHOLE)
        for page, count, is_rest_there in itertools.product(pages, range(1, 8), (False, True)):
            rest = dict.fromkeys(pages, WHOLE) if is_rest_there else {}
            yield rest | {page: (1 << count) - 1}

    def random_fate(self, rng: random.Random) -> Fate:
        """One of the ways, and of the many that `fates` leaves out: any set of sectors."""
        if self.names:
            return rng.choice((NOTHING, {0: WHOLE}))
        kind = rng.randrange(4)
        if kind == 0:
            return NOTHING
        if kind == 1:
            return dict.fromkeys(self.pages, WHOLE)
        whole = {page: rng.choice((0, WHOLE)) for page in self.pages}
        return whole if kind == 2 else {page: rng.randrange(WHOLE + 1) for page in self.pages}


def _subsets(pages: list[int]) -> Iterator[tuple[int, ...]]:
    if len(pages) <= 3:
        for count in range(len(pages) + 1):
            yield from itertools.combinations(pages, count)
        return
    yield ()
    yield tuple(pages)
    for cut in range(1, len(pages)):
        yield tuple(pages[:cut])
        yield tuple(pages[cut:])
    yield from ((page,) for page in pages[1:-1])


def _torn(old: bytes, new: bytes, mask: int) -> bytes:
    sectors = (
        (new if mask >> n & 1 else old)[n * SECTOR_BYTES : (n + 1) * SECTOR_BYTES]
        for n in range(PAGE_BYTES // SECTOR_BYTES)
    )
    return b"".join(sectors)


def crash_images(disk: Image, changes: list[Change], most: int, rng: random.Random) -> Iterator[Image]:
    """Every image that a power loss may leave of `disk` with `changes` under way, in the order they began.

    Where there are more than `most`, at most one change is torn inside of a page; where there are still more, some are
    drawn by `rng`.
    """
    fine = [list(c.fates()) for c in changes]
    coarse = [[f for f in ways if set(f.values()) <= {WHOLE}] for ways in fine]
    plans = [fine] if _count(fine) <= most else [[*coarse[:n], fine[n], *coarse[n + 1 :]] for n in range(len(fine))]
    if sum(map(_count, plans)) <= most:
        for chosen in itertools.chain.from_iterable(itertools.product(*plan) for plan in plans):
            yield _crashed(disk, changes, chosen)
        return
    for _ in range(max(1, most // _DRAWN_PART)):
        yield _crashed(disk, changes, tuple(c.random_fate(rng) for c in changes))


def _count(plan: list[list[Fate]]) -> int:
    return math.prod(map(len, plan))


def _crashed(disk: Image, changes: list[Change], chosen: tuple[Fate, ...]) -> Image:
    image = Image(dict(disk.names), {n: f.copy() for n, f in disk.files.items()})
    for change, fate in zip(changes, chosen, strict=True):
        change.apply(image, fate)
    return image.copy()
