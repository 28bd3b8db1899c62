"""What the tests' modules have imported (torch, Megatron) is left out of garbage collection while tests run:
a seventh of their time. And no call of Ray's starts a cluster by itself.
"""

import gc
import os

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
