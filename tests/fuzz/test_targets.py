"""Every target lives: it takes its seeds, and keeps its promises over the committed corpus and some mutations."""

import random
from pathlib import Path

import pytest

from fuzz import registry

MUTATIONS = 300
CORPUS = Path(__file__).parent / "corpus"
CORPUS_BYTES_MAX = 300_000

pytestmark = pytest.mark.unit


def _corpus(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_target_takes_its_seeds_and_keeps_its_promises_over_mutations_of_what_is_known(name: str) -> None:
    target = registry.target(name)
    seeds = list(target.seeds())
    taken = [target.check(seed) for seed in seeds]
    assert any(taken), "a target that takes none of its seeds tries nothing"
    known = [*seeds, *_corpus(name)]
    for data in known:
        target.check(data)

    rng = random.Random(20261127)
    for _ in range(MUTATIONS // 10 if target.is_slow else MUTATIONS):
        data = target.settle(target.mutate(rng.choice(known), rng), rng)
        assert len(data) <= 2 * target.bytes_max + 20_000
        target.check(data)


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_seed_that_needs_no_repair_is_not_changed_by_it(name: str) -> None:
    target = registry.target(name)
    repaired = [target.repair(seed) for seed in target.seeds()]
    assert [target.repair(one) for one in repaired] == repaired


def test_targets_are_listed_once_by_the_part_that_has_them() -> None:
    for part in registry.PARTS:
        module = __import__(f"fuzz.{part.module}", fromlist=["TARGETS"])
        assert tuple(one.name for one in module.TARGETS) == part.names
    assert len(set(registry.NAMES)) == len(registry.NAMES)


def test_the_committed_corpus_is_small_and_of_targets_that_there_are() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(registry.NAMES)
    assert sum(path.stat().st_size for path in files) <= CORPUS_BYTES_MAX
