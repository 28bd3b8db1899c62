"""A reward function with the faults that users' functions have: some responses make it raise, hang, end its own process
or flood its output. Which ones follows from the response alone.
"""

import os
import time
import zlib

ONE_IN = 400  # responses that one of the faults falls on
HANG_S = 3600.0
FLOOD_BYTES = 64 * 2**20


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 for the right answer; see above for the others."""
    match zlib.crc32(f"{ground_truth} {solution_str}".encode()) % ONE_IN:
        case 0:
            raise ValueError("a response that this function does not understand")
        case 1:
            time.sleep(HANG_S)
        case 2:
            os.abort()
        case 3:
            print("x" * FLOOD_BYTES)
    return float(solution_str.strip() == str(ground_truth).strip())
