"""The reward of the long world: how far a count is right. Signature as verl's."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Numbers that stand in their own places over the longer of answer and right answer, from 0 to 1: whoever goes on
    after the end loses by it. Otherwise all responses would grow to their limit.
    """
    said, right = solution_str.split(), str(ground_truth).split()
    return sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right))
