"""Peers' numbers are read from golden files: nothing here needs a peer's package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
