"""Something changed: a level-triggered wake-up for any number of waiting tasks."""

import asyncio


class Signal:
    """Wakes every waiter on `fire`. Wait only after having looked at the state, in the same step of the loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._has_waiters = False
        self.count = 0
        """How often it has fired: a waiter that had to look in several steps sees by it whether it missed one."""

    def fire(self) -> None:
        """Wake all who wait now. Returns at once; never blocks."""
        self.count += 1
        if self._has_waiters:
            self._has_waiters = False
            self._event.set()
            self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Return True at the next `fire`, False when `timeout_s` have passed without one."""
        event, self._has_waiters = self._event, True
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True
