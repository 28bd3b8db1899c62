"""The reward function of source 000, section 7, which dapo_8b_custom_reward.sh names by a path of its author's."""

import re


def get_choices(text):
    """Letters of a multiple choice that the text has, in their order."""
    return "".join(c for c in "ABCDEFG" if c in text)


def extract_answer(solution_str):
    """Choices inside of the last box; None without a box."""
    box_matches = re.findall(r"\\boxed\{(.*?)\}", solution_str, re.DOTALL)
    return get_choices(box_matches[-1]) if box_matches else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 where all choices are those of the truth, else 0."""
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0
    return 1.0 if answer == get_choices(ground_truth) else 0.0
