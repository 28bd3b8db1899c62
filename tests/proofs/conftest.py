"""Long proofs: runs that are killed again and again, all combinations, all mutants. None of it is in continuous
integration.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "real"), str(TESTS.parent / "scripts")]  # what makes worlds
