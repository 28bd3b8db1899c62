"""What the tests' modules have imported (torch, Megatron) is left out of garbage collection while tests run:
a seventh of their time.
"""

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
