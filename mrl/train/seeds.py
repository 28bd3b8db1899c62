"""Seeds as pure functions of what they are for, so that nothing depends on order or on what ran before."""

import hashlib


def sample_seed(run_seed: int, purpose: str, step: int, prompt_id: int, index: int) -> int:
    """Seed of response `index` of a prompt in a step; 48 bits, which every engine and platform accepts."""
    text = f"{run_seed}/{purpose}/{step}/{prompt_id}/{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
