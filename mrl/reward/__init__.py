"""Scores responses with built-in rules or a user's function, in processes that can be killed.

`RewardSpec` names the function, a `RewardItem` is one response, a `RewardResult` its score or the reason why it has
none. `RewardPool` holds the processes. `worker` runs in them. Its imports from this package need the standard library
alone (and math-verify for the rule `math`). So it starts in milliseconds. May import `errors`.
"""
