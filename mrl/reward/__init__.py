"""Scores of responses: built-in rules and a user's function, run in processes that can be killed.

`RewardSpec` says which function scores, a `RewardItem` is one response, a `RewardResult` its score or the reason why
there is none; `RewardPool` holds the processes. `worker` runs in them: all that it imports from here needs the standard
library alone (and math-verify for the rule `math`), so that it starts in milliseconds. May import `errors`.
"""
