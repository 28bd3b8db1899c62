"""Words that this project once used in a sense of its own, and what to write instead. No page or message has them."""

import re

INSTEAD = {
    r"(?:the|this|a) house|light rooms?": "the code, packages that import no torch",
    r"borders?": "weight version boundary",
    r"stand-ins?": "mock, replacement",
    r"stands?|stood": "is, are",
    r"told": "reported, printed, logged",
    r"(?:is|are) said": "is reported, is printed",
    r"held[- ]out": "validation",
    r"held against": "compared with",
    r"hangs? on": "depends on",
    r"strangers?": "untrusted input",
    r"nobody|somebody": "who or what it is",
    r"for good|for ever": "permanently",
    r"likeliest": "most likely",
    r"in vain": "without success",
    r"beat": "heartbeat",
    r"leash|kin": "the field's own term",
    r"cures?|cured": "fix",
    r"death by": "killed by",
    r"are no numbers": "is not finite",
    r"(?:a|the) start before": "an earlier start",
    r"(?:somebody|another|others?) else's": "of another user",
    r"(?:FP8|8-bit|all other|all) words": "values (of FP8), tokens (of a vocabulary)",
}
_ANY = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b", re.IGNORECASE)


def odd_words(text: str) -> list[str]:
    """Returns each such word of a text in its surroundings."""
    return [text[max(0, found.start() - 40) : found.end() + 20] for found in _ANY.finditer(text)]
