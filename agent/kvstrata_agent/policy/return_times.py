"""When blocks are used again, learned from the requests that come: one table of hazards for each class. Pure.

A *record* is one point of a chain at one use: what was known then, and how long it took until a request had that
point again, whether its blocks were still there or not. Records start when a request comes, because ages that start at
its end leave out those that come back meanwhile. Classes are the leaves of a tree of splits, each made where two
classes describe the records shorter than one does (minimum description length, with Krichevsky-Trofimov estimates).

The worth of a block of a class at an age is its Gittins index: the greatest rate, over all times to wait, of uses for
each second that it is held (Gittins, 1979; Aalto, Ayesta and Righter, 2009, on ages).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

RECORDS_MAX: Final = 65_536
"""Records that are remembered, up to 25 MB with what `expected_reuse` keeps of each; an older one counts as if it had
never been. With fewer, caches of many small requests hold blocks that no record tells of."""
FIT_RECORDS: Final = 16_384
"""Classes are learned from so many of them, evenly drawn: one step of the loop must not take longer."""
LEVELS: Final = 16
"""Values of a feature, 0 to 15."""
BINS: Final = 44
"""Ages: two bins for each doubling, from `FIRST_AGE_S`; the last begins after two days."""
FIRST_AGE_S: Final = 0.1
CLASSES_MAX: Final = 32
"""Leaves of the tree."""
CLASS_RECORDS_MIN: Final = 32
"""Fewer records are no class of their own."""
FIT_FIRST: Final = 256
"""Records before the first tree; it is made anew when there are a quarter more, and every `FIT_EVERY`."""
FIT_EVERY: Final = 4096
RETURNS_MIN: Final = 16
"""Fewer say nothing of when things return: the younger stays worth more, as before anything is learned."""
TOLD_AFTER: Final = 2.0
"""Records go back so many times further than a block was idle before its chance of a return is believed."""
_BINS_JOINED: Final = 11
"""Splits are chosen by four ranges of ages: fewer figures to describe, so smaller differences show."""
_COARSE: Final = BINS // _BINS_JOINED
_PRIOR_RECORDS: Final = 4.0
"""How many records a class's parent counts for in its hazards."""
_PRIOR_HAZARD: Final = 0.02
"""Chance of a use within a bin of which nothing is known, counted as one record: ages that nobody has seen are worth
little."""
_EDGES_S: Final = FIRST_AGE_S * 2.0 ** (np.arange(BINS) / 2)
_ENDS_S: Final = _EDGES_S[:-1].tolist()
"""Last age of each bin but the last, which has none."""
_WIDTHS_S: Final = np.diff(np.concatenate(([0.0], _EDGES_S)))
_LOG_GAMMA_HALF: Final = np.concatenate(([0.0], np.cumsum(np.log(np.arange(FIT_RECORDS * 2) + 0.5)))).astype(np.float64)
"""log of gamma(n + 1/2) / gamma(1/2)."""
_LOG_FACTORIAL: Final = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, FIT_RECORDS * 2 + 1))))).astype(np.float64)

Counts = NDArray[np.int64]


@dataclass(slots=True)
class _Node:
    """One node of the tree; a leaf has no feature."""

    feature: int = -1
    threshold: int = 0
    """Records up to this level go left."""
    left: int = -1
    right: int = -1
    class_number: int = 0


def age_bin(age_s: float) -> int:
    """The bin of an age."""
    return bisect_left(_ENDS_S, age_s)


class ReturnTimes:
    """Learns from records; holds `RECORDS_MAX` of them."""

    def __init__(self, features: int, records_max: int = RECORDS_MAX) -> None:
        self._records_max = records_max
        self._features = np.zeros((records_max, features), np.int16)
        self._started_s = [0.0] * records_max
        self._took_s = np.full(records_max, np.nan)
        """NaN while the point has not been used again."""
        self.noted = 0
        """Records so far; a record's number is its place in this count."""
        self._fit_at = FIT_FIRST
        self._nodes = [_Node()]
        self._worths: list[list[float]] = [[1.0 / edge_s for edge_s in _EDGES_S.tolist()]]
        """Uses for each second held, by class and age; before anything is learned the younger is worth more."""
        self._overall = self._worths[0]
        self._overall_survival = [1.0] * (BINS + 1)
        """Part that is not used by the beginning of each age; nothing returns before anything is learned."""
        self._survival = [self._overall_survival]
        """The same by class."""
        self._classes = [0] * records_max

    def note(self, features: Sequence[int], now_s: float) -> int:
        """Start a record; returns its number."""
        number = self.noted
        at = number % self._records_max
        self._features[at] = features
        self._started_s[at] = now_s
        self._took_s[at] = np.nan
        self._classes[at] = self.class_of(features)
        self.noted += 1
        return number

    def returned(self, number: int, now_s: float) -> None:
        """The point of a record is used again; once only, and later than that it is too late."""
        if self.is_known(number):
            at = number % self._records_max
            if np.isnan(self._took_s[at]):
                self._took_s[at] = max(0.0, now_s - self._started_s[at])

    def amend(self, number: int, feature: int, level: int) -> None:
        """Set a feature of a known record that was learned after its start."""
        at = number % self._records_max
        self._features[at, feature] = level
        self._classes[at] = self.class_of(self.features_of(number))

    def is_known(self, number: int) -> bool:
        """True while a record is remembered."""
        return max(0, self.noted - self._records_max) <= number < self.noted

    def features_of(self, number: int) -> tuple[int, ...]:
        """Features of a record that is known."""
        return tuple(self._features[number % self._records_max].tolist())

    def age_s(self, number: int, now_s: float) -> float:
        """Seconds since a record that is known was started."""
        return now_s - self._started_s[number % self._records_max]

    def worth(self, number: int, now_s: float, idle_s: float = inf) -> float:
        """Uses for each second that what a known record stands for is held from now on.

        `idle_s` is for how long it was not used where it was, after the record was started.
        """
        at = number % self._records_max
        return self._worths[self._classes[at]][bisect_left(_ENDS_S, min(idle_s, now_s - self._started_s[at]))]

    def overall(self, age_s: float) -> float:
        """The same of what no record tells of, used so many seconds ago."""
        return self._overall[age_bin(age_s)]

    def chance(self, number: int, now_s: float, within_s: float, idle_s: float = inf) -> float:
        """Probability that what a known record stands for is used within so many seconds from now; see `worth`."""
        at = number % self._records_max
        return _chance(self._survival[self._classes[at]], min(idle_s, now_s - self._started_s[at]), within_s)

    def overall_chance(self, age_s: float, within_s: float) -> float:
        """The same of what no record tells of, used so many seconds ago."""
        return _chance(self._overall_survival, age_s, within_s)

    def tells(self, idle_s: float, now_s: float) -> bool:
        """True when uses are remembered from long enough ago that what is so old had time to return."""
        if self._fit_at == FIT_FIRST:
            return False
        oldest_s = self._started_s[max(0, self.noted - self._records_max) % self._records_max]
        return now_s - oldest_s >= TOLD_AFTER * idle_s

    def class_of(self, features: Sequence[int]) -> int:
        """Class of what has these features."""
        node = self._nodes[0]
        while node.feature >= 0:
            node = self._nodes[node.left if features[node.feature] <= node.threshold else node.right]
        return node.class_number

    def is_due(self) -> bool:
        """True when the classes should be learned anew."""
        return self.noted >= self._fit_at

    def fit(self, now_s: float) -> None:
        """Learn classes and worths from what is remembered."""
        self._fit_at = self.noted + min(FIT_EVERY, max(FIT_FIRST, self.noted) // 4)
        known = min(self.noted, self._records_max)
        drawn = np.linspace(0, known - 1, min(known, FIT_RECORDS)).astype(np.int64)
        features, took_s = self._features[drawn], self._took_s[drawn]
        is_event = ~np.isnan(took_s)
        if is_event.sum() < RETURNS_MIN:
            return
        seconds = np.where(is_event, took_s, now_s - np.array(self._started_s)[drawn])
        bins = np.searchsorted(_EDGES_S[:-1], seconds).astype(np.int64)
        self._grow(features, bins, is_event)
        self._classes[:known] = self._classes_of(self._features[:known]).tolist()

    def _grow(self, features: NDArray[np.int16], bins: Counts, is_event: NDArray[np.bool_]) -> None:
        everything = np.arange(len(bins))
        count = features.shape[1]
        # One cell for each feature, level and range of ages, so that one pass counts for all splits.
        cells = features.astype(np.int64) * _COARSE + (bins // _BINS_JOINED)[:, None]
        cells += np.arange(count) * (LEVELS * _COARSE)
        events, at_risk = _tables(bins, is_event)
        hazard = (events + _PRIOR_HAZARD) / (at_risk + 1.0)
        is_seen = at_risk > 0
        self._overall, self._overall_survival = gittins(hazard).tolist(), _surviving(hazard, is_seen)
        self._nodes = [_Node()]
        worths: list[list[float]] = []
        survival: list[list[float]] = []
        open_nodes = [(0, everything, hazard, _best_split(cells, is_event, count))]
        leaves = 1
        while open_nodes:
            # The split that saves most comes first, so a bound on classes leaves out the least.
            open_nodes.sort(key=lambda n: n[3][0])
            number, rows, hazard, (gain, feature, threshold) = open_nodes.pop()
            node = self._nodes[number]
            if gain <= 0 or leaves >= CLASSES_MAX:
                node.class_number = len(worths)
                worths.append(gittins(hazard).tolist())
                survival.append(_surviving(hazard, is_seen))
                continue
            is_left = features[rows, feature] <= threshold
            node.feature, node.threshold = feature, threshold
            for part in (rows[is_left], rows[~is_left]):
                events, at_risk = _tables(bins[part], is_event[part])
                below = (events + _PRIOR_RECORDS * hazard) / (at_risk + _PRIOR_RECORDS)
                self._nodes.append(_Node())
                open_nodes.append((len(self._nodes) - 1, part, below, _best_split(cells[part], is_event[part], count)))
            node.left, node.right = len(self._nodes) - 2, len(self._nodes) - 1
            leaves += 1
        self._worths, self._survival = worths, survival

    def _classes_of(self, features: NDArray[np.int16]) -> Counts:
        """Class of each row."""
        classes = np.zeros(len(features), np.int64)
        parts = [(self._nodes[0], np.arange(len(features)))]
        while parts:
            node, rows = parts.pop()
            if node.feature < 0:
                classes[rows] = node.class_number
                continue
            is_left = features[rows, node.feature] <= node.threshold
            parts += [(self._nodes[node.left], rows[is_left]), (self._nodes[node.right], rows[~is_left])]
        return classes


def _best_split(cells: Counts, is_event: NDArray[np.bool_], count: int) -> tuple[float, int, int]:
    """Nats that the best split saves, its feature and threshold; `cells` has a row for each record (see `_grow`)."""
    if len(cells) < 2 * CLASS_RECORDS_MIN:
        return 0.0, -1, 0
    shape = (count, LEVELS, _COARSE)
    size = count * LEVELS * _COARSE
    events = np.bincount(cells[is_event].ravel(), minlength=size).reshape(shape).cumsum(1)
    ends = np.bincount(cells.ravel(), minlength=size).reshape(shape).cumsum(1)
    at_risk = ends[:, :, ::-1].cumsum(2)[:, :, ::-1]
    left = _code_length(events, at_risk)
    right = _code_length(events[:, -1:] - events, at_risk[:, -1:] - at_risk)
    gains = left[:, -1:] - left - right - np.log(count * LEVELS)
    sizes = at_risk[:, :, 0]
    gains[(sizes < CLASS_RECORDS_MIN) | (len(cells) - sizes < CLASS_RECORDS_MIN)] = -np.inf
    feature, threshold = divmod(int(gains.argmax()), LEVELS)
    gain = float(gains[feature, threshold])
    return (gain, feature, threshold) if gain > 0 else (0.0, -1, 0)


def _tables(bins: Counts, is_event: NDArray[np.bool_]) -> tuple[Counts, Counts]:
    """Uses in each bin, and records that reached it."""
    ends = np.bincount(bins, minlength=BINS)
    return np.bincount(bins[is_event], minlength=BINS), ends[::-1].cumsum()[::-1]


def _code_length(events: Counts, at_risk: Counts) -> NDArray[np.float64]:
    """Nats for the uses in all bins by Krichevsky and Trofimov's mixture, along the last axis."""
    without = at_risk - events
    coded = _LOG_FACTORIAL[at_risk] - _LOG_GAMMA_HALF[events] - _LOG_GAMMA_HALF[without]
    return np.asarray(coded.sum(-1), np.float64)


def _surviving(hazard: NDArray[np.float64], is_seen: NDArray[np.bool_]) -> list[float]:
    """Part that is not used by the beginning of each bin, and by the end of the last.

    Ages that no record has reached promise nothing: a prior for each of them would add up to a fourth.
    """
    return [1.0, *np.cumprod(1.0 - np.where(is_seen, hazard, 0.0)).tolist()]


def _chance(survival: Sequence[float], age_s: float, within_s: float) -> float:
    """Of what is so old, the part that is used within so many seconds."""
    left = survival[age_bin(age_s)]
    end = survival[BINS] if within_s == inf else survival[min(BINS, age_bin(age_s + within_s) + 1)]
    return 1.0 - end / left if left > 0 else 0.0


def gittins(hazard: NDArray[np.float64]) -> NDArray[np.float64]:
    """Greatest rate of uses for each second held from each bin on; `hazard` is the chance of a use within each bin."""
    survives = np.concatenate(([1.0], np.cumprod(1.0 - hazard)))
    held_s = 0.5 * (survives[:-1] + survives[1:]) * _WIDTHS_S
    used = np.concatenate(([0.0], np.cumsum(survives[:-1] * hazard)))
    spent_s = np.concatenate(([0.0], np.cumsum(held_s)))
    uses = used[None, 1:] - used[:-1, None]
    costs_s = spent_s[None, 1:] - spent_s[:-1, None]
    rates = np.where(np.triu(np.ones_like(uses)) > 0, uses / np.maximum(costs_s, 1e-12), 0.0)
    return np.asarray(rates.max(1), np.float64)
