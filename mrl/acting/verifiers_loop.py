"""Plays one row with an environment of the package `verifiers` 0.4, whose model is the endpoint, and posts its reward.

    python verifiers_loop.py < {"row", "config", "url", "reward_key"}       plays
    python verifiers_loop.py rows COUNT < {"config"}                        prints tasks, a line of JSON each
    python verifiers_loop.py check < {"config"}                             ends with what is wrong with it

A program of its own, run by an interpreter that has verifiers and need not have mrl. `config` is the environment's
configuration as verifiers reads it under [env]. A seat that names no runtime runs as processes of this host, where
verifiers would rent a machine.
"""

import asyncio
import itertools
import json
import math
import os
import sys
import urllib.request

MOST_PARTS = 16
TASK = "verifiers"  # key of extra_info


def environment(config):
    """Returns the environment that a configuration names."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    for role in agent_config_fields(resolve_env_config(json.loads(json.dumps(config)))):
        config.setdefault(role, {}).setdefault("runtime", {"type": "subprocess"})
    return load_environment(resolve_env_config(config))


def rows(config, count):
    """Prints tasks of the environment's taskset."""
    for task in itertools.islice(environment(config).taskset, count):
        data = task.data.model_dump(mode="json")
        prompt = task.data.prompt_text
        print(json.dumps({"data": data, "prompt": prompt, "system": task.data.system_prompt, "name": task.data.name}))


async def play(context):
    """Plays the row's task. Raises ValueError where that gives no reward."""
    import verifiers.v1 as vf

    env = environment(dict(context["config"]))
    kind = type(env.taskset).task_type()
    given = context["row"]["extra_info"][TASK]
    data = kind.data_type().model_validate(json.loads(given) if isinstance(given, str) else given)
    task = kind(data, env.config.taskset.task)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise ValueError(f"the episode has {len(trained)} agents that are trained; a response has one")
    (trace,) = trained
    errors = [*episode.errors, *trace.errors]
    if errors and not is_over(errors):
        raise ValueError("; ".join(f"{error.type}: {error.message}"[:500] for error in errors))
    if errors and not trace.rewards:  # it was cut off, and so not judged
        await task.score(trace)
    return trace.reward, parts(trace)


def is_over(errors):
    """Tells whether the only errors are that the conversation had no further turn."""
    return all("the conversation is over" in error.message for error in errors)


def parts(trace):
    """Returns rewards and metrics by name."""
    found = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    found.update(trace.metrics)
    numbers = {name[:64]: float(value) for name, value in found.items() if isinstance(value, (int, float))}
    return dict(
        itertools.islice(((name, value) for name, value in numbers.items() if math.isfinite(value)), MOST_PARTS)
    )


def post(context, reward, parts):
    """Gives the reward."""
    body = json.dumps({"reward": reward, "parts": parts}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + context["reward_key"]}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the endpoint is on this host
    opener.open(urllib.request.Request(context["url"] + "/v1/reward", body, headers)).close()


def check(config):
    """Ends with one line where the configuration is wrong, or names what is not installed."""
    try:
        environment(config)
    except Exception as error:  # of the package, and of a taskset's module
        raise SystemExit(said(error)) from None


def said(error):
    """Returns an error in one line; of a validation each key with what is wrong."""
    if hasattr(error, "errors"):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return f"{type(error).__name__}: {error}"


def main():
    """Does what the arguments say."""
    context = json.load(sys.stdin)
    if sys.argv[1:2] == ["rows"]:
        return rows(context["config"], int(sys.argv[2]))
    if sys.argv[1:2] == ["check"]:
        return check(context["config"])
    post(context, *asyncio.run(play(context)))


if __name__ == "__main__":
    main()
