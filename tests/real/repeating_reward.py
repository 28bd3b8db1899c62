"""The share of neighbours in a response that are alike."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    pairs = list(zip(solution_str, solution_str[1:], strict=False))
    return sum(one == other for one, other in pairs) / max(len(pairs), 1)
