"""A made workload, for where no recorded ones are at hand: chats, agents with tools, and one-off prompts. Pure.

Its shares and gaps are round figures near those of the recordings that are public (tools answer within seconds, people
within minutes, most chats have one turn); nothing in it was fitted to any of them.
"""

import random
from collections.abc import Iterator
from typing import Final

from kvstrata_agent.replay.chains import Request, Trace, build

BLOCK_TOKENS: Final = 16
SYSTEM_PROMPTS: Final = 12
CHAT_SHARE: Final = 0.55
AGENT_SHARE: Final = 0.25
ARRIVAL_S: Final = 2.0
"""Mean time between sessions."""
TOOL_S: Final = 8.0
PERSON_S: Final = 120.0
CHAT_GOES_ON: Final = 0.45
AGENT_GOES_ON: Final = 0.9
REWRITES: Final = 0.15
"""Turns that continue from the middle of the turn before."""


def synthetic(sessions: int, seed: int = 1) -> Trace:
    """Make a trace of so many sessions."""
    return build(f"synthetic-{sessions}", BLOCK_TOKENS, _requests(sessions, random.Random(seed)), "everything")


def _requests(sessions: int, draw: random.Random) -> Iterator[Request]:
    start_s, fresh = 0.0, iter(range(1 << 40, 1 << 62))
    systems = [[next(fresh) for _ in range(draw.randint(8, 60))] for _ in range(SYSTEM_PROMPTS)]
    for session in range(sessions):
        start_s += draw.expovariate(1 / ARRIVAL_S)
        sort = draw.random()
        goes_on = CHAT_GOES_ON if sort < CHAT_SHARE else AGENT_GOES_ON if sort < CHAT_SHARE + AGENT_SHARE else 0.0
        chain = list(systems[min(SYSTEM_PROMPTS - 1, int(draw.expovariate(0.4)))])
        at_s = start_s
        while True:
            new = draw.randint(2, 40) if goes_on != AGENT_GOES_ON else draw.randint(1, 120)
            chain = [*chain, *(next(fresh) for _ in range(new))]
            is_last, is_tool = draw.random() >= goes_on, goes_on == AGENT_GOES_ON and draw.random() < AGENT_GOES_ON
            stop = "tool_use" if is_tool and not is_last else "end_turn"
            kind = "agent" if goes_on == AGENT_GOES_ON else "chat"
            yield Request(at_s, tuple(chain), session, kind, stop, draw.randint(1, 20))
            if is_last:
                break
            at_s += draw.expovariate(1 / (TOOL_S if is_tool else PERSON_S))
            if draw.random() < REWRITES:
                chain = chain[: len(chain) - new // 2]
