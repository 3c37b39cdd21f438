"""One stage and one undisturbed run for all claims of a process."""

import atexit
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

from adversity.runs import Reference, record
from adversity.scenario import Admin
from adversity.stage import Keeper, Stage


@dataclass(frozen=True, slots=True)
class Shared:
    """What the claims over the scenario have in common."""

    stage: Stage
    keeper: Keeper
    reference: Reference


@cache
def stage() -> Stage:
    """The control plane, made when it is first asked for; it ends with the process."""
    stack = ExitStack()
    atexit.register(stack.close)
    made = stack.enter_context(Stage())
    Admin(made.plane).set_up()
    return made


@cache
def shared() -> Shared:
    """The healthy operator and what it does undisturbed."""
    made = stage()
    keeper = made.operator()
    keeper.__enter__()
    return Shared(made, keeper, record(made, keeper))
