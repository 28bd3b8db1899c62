"""A reward that an untrained model earns some of, so that advantages are not all zero:
the share of digits in the response.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
