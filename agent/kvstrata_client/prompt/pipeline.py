"""How blocks of a prompt come and go in helpings: while one is worked on, the agent has those around it. Sans-I/O."""

from collections.abc import Sized
from typing import Protocol

from kvstrata_client.verbs.calls import Calls, Operation, Post


class Walk(Protocol):
    """One walk along blocks: what is ready to be worked on, and what was asked for and not answered yet."""

    @property
    def ready(self) -> Sized:
        """Helpings that can be worked on."""

    @property
    def flying(self) -> Sized:
        """Calls that were sent ahead."""

    def send_next(self) -> Operation[None]:
        """Ask for the next batch, if more is of use now."""

    def work_next(self) -> Operation[None]:
        """Copy the first helping that is ready, and send what follows from it."""

    def collect_next(self) -> Operation[None]:
        """Take in what the first call that was sent ahead has brought."""

    def close(self) -> None:
        """Want no more, and nothing of what is ready."""

    def giving_back(self) -> Calls:
        """Take what is of no use any more, as calls that give it back; none where there is nothing."""


def along(walk: Walk, count: int) -> Operation[None]:
    """Keep `count` batches under way until nothing is ready or under way any more; what is of no use goes back."""
    try:
        for _ in range(count):  # One by one: the first one is not to wait for the others.
            yield from walk.send_next()
        while walk.ready or walk.flying:
            yield from walk.work_next() if walk.ready else walk.collect_next()
            if unused := walk.giving_back():
                yield Post(unused)
    except BaseException:
        walk.close()
        if unused := walk.giving_back():
            yield Post(unused)
        raise
