"""The share of neighbours in a response that are alike."""

from itertools import pairwise


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(one == other for one, other in pairwise(solution_str)) / max(len(solution_str) - 1, 1)
