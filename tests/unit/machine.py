"""How fast this machine is now, so that a bound of seconds holds the code and not the machine."""

import time

OBJECTS = 200_000  # fresh memory is what takes up to four times as long on a machine that others use
USUAL_S = 0.3  # of the processors on which bounds were set


def times_slower() -> float:
    """Of the processor's time of many small objects: 1 to 4."""
    begun = time.process_time()
    pairs = {(number, number + 1): [number] for number in range(OBJECTS)}
    sorted(pairs.items(), key=lambda item: -item[0][0])
    return min(4.0, max(1.0, (time.process_time() - begun) / USUAL_S))
