"""Whose the entries of a bounded table are: over its bound, the account that has most gives. No clock, no I/O."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairOrder(Generic[K]):
    """Keys by account, in order of last use. Law: no account loses a key while another one has more."""

    def __init__(self) -> None:
        self._accounts: dict[str, OrderedDict[K, None]] = {}
        self._account_of: dict[K, str] = {}

    def __len__(self) -> int:
        return len(self._account_of)

    def use(self, account: str, key: K) -> None:
        """Note that a key was used just now, on this account."""
        self.drop(key)
        self._account_of[key] = account
        self._accounts.setdefault(account, OrderedDict())[key] = None

    def drop(self, key: K) -> None:
        """Forget a key. Idempotent."""
        account = self._account_of.pop(key, None)
        if account is not None:
            keys = self._accounts[account]
            del keys[key]
            if not keys:
                del self._accounts[account]

    def count(self, account: str) -> int:
        """How many keys an account has."""
        return len(self._accounts.get(account, ()))

    def payer(self) -> str:
        """Account that has most keys; there must be one."""
        return max(self._accounts, key=self.count)

    def of(self, account: str) -> Iterator[K]:
        """Keys of an account, least recently used first; not to be changed meanwhile."""
        return iter(self._accounts.get(account, ()))

    def surplus(self) -> K:
        """Least recently used key of the account that has most; there must be one."""
        return next(self.of(self.payer()))
