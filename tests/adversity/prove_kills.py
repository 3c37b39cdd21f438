"""The operator is killed by SIGKILL before and after each of its API calls, and started again."""

import sys
from collections.abc import Sequence

from adversity import runs
from adversity.kill_points import KILLS, TRIES, Aim, Book, Way, points_of, rounds_of, sweep
from adversity.shared import shared
from support.runner.outcome import Outcome, Scale

SHORT_RUNS = 2


def run(scale: Scale) -> Outcome:
    """Sweep over all kill points with several kills in a run; then what was not met has runs of its own, in each way.

    An earlier kill changes what is left to do, so that it may take a point away: alone, nothing is killed before it. A
    point that a kill brought about is aimed at behind that kill.
    """
    about = shared()
    book, violations, slowest_s, count = Book(points_of(about.reference)), list[str](), 0.0, 0

    def tried(aims: Sequence[Aim], way: Way = Way.AS_IT_COMES) -> None:
        nonlocal slowest_s, count
        for result in sweep(about.stage, about.keeper, about.reference, book, aims, way):
            violations.extend(result.violations)
            slowest_s, count = max(slowest_s, result.slowest_s), count + 1

    rounds = rounds_of(book.points, KILLS)
    tried(scale.of(rounds, rounds[:SHORT_RUNS]))
    ways = list(Way) * scale.of(TRIES, 0)
    for way in ways:
        tried([(point,) for point in book.unmet()], way)
    for way in ways:
        tried(book.unmet_born(), way)
    if scale.is_full:
        sys.stdout.writelines(f"    not met: {book.why(point)}\n" for point in book.unmet())
        sys.stdout.writelines(f"    not met: {book.why(p)}, behind a kill {b}\n" for b, p in book.unmet_born())
    values = {
        "points": len(book.points),
        "points_met": len(book.points & book.met),
        "born": len(book.born),
        "born_met": len(book.born.keys() & book.met),
        **{f"met_{way.name.lower()}": number for way, number in book.ways.items()},
        "runs": count,
        "slowest_s": round(slowest_s, 1),
    }
    return Outcome(book.kills, "kills", tuple(violations), _is_control_caught(), values)


def _is_control_caught() -> bool:
    """An operator that withdraws only what it has seen placed itself must be found when it dies in between."""
    about = shared()
    with about.stage.operator("remembers-placements") as keeper:

        def die_before_nodes_leave(step: int) -> None:
            if step == 2:
                keeper.stop()

        plan = runs.Plan(die_before_nodes_leave, keeper.run)
        result = runs.run(about.stage, keeper, about.reference, plan)
    return any("p.b" in line for line in result.violations)
