"""The reward of the long world: how far a count is right. Signature as verl's."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Share of the right answer's numbers that stand in their own places, from 0 to 1."""
    said, right = solution_str.split(), str(ground_truth).split()
    return sum(a == b for a, b in zip(said, right, strict=False)) / len(right)
