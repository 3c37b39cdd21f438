"""A block that changes while it is stored has the checksum of what lies in its slot."""

import threading

import numpy as np
import pytest

from kvstrata_api.checksum import checksum
from kvstrata_client.verbs.copying import fill
from kvstrata_client.verbs.results import Reservation

pytestmark = pytest.mark.unit

BLOCK_BYTES = 16 << 20
ROUNDS = 12
KEY = bytes(range(20))


def test_a_callers_late_change_is_stored_or_not_and_never_half_of_it() -> None:
    block, stop = np.zeros(BLOCK_BYTES, np.uint8), threading.Event()

    def change() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 251
            block[::4096] = value  # Every page, over and over.

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for stamp in range(ROUNDS):
            slot = memoryview(bytearray(BLOCK_BYTES))
            assert fill(Reservation(1, KEY, 7, stamp, 1, slot), block.data) == checksum(slot, KEY, 7, stamp)
    finally:
        stop.set()
        changer.join()
