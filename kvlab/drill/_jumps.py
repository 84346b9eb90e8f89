"""A wall clock that jumps, for a process of its own."""
from __future__ import annotations

import datetime
import random
import threading
import time
from collections.abc import Callable

HOUR_S = 3600.0
BY_S = (HOUR_S, -HOUR_S, 26 * HOUR_S, -26 * HOUR_S, 1e8, -1e8, 9e8, -8e8)      # hours to decades, forwards and back


def jump_about(rng: random.Random, said: Callable[[float], None]) -> None:
    """From now on this process's time of day jumps every few hundredths of a second."""
    from kvlab.record import environment, held
    real, offset = time.time, [0.0]

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.fromtimestamp(time.time(), tz)

    time.time = lambda: real() + offset[0]                  # before anything that copies it, such as tqdm, is imported
    held.datetime = environment.datetime = Jumping
    from tqdm import tqdm
    tqdm.set_lock(threading.RLock())                        # not one between processes, which a kill would leave behind

    def go() -> None:
        while True:
            time.sleep(rng.random() * 0.2)
            offset[0] = rng.choice(BY_S)
            said(offset[0])
    threading.Thread(target=go, daemon=True).start()
