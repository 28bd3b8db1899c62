"""Decides which switches make updates of a configuration faster, for `mrl init` and `mrl plan --search` alike.

The table of a device has the switches (mrl/platforms/hosting.py), and the rules say which a model or layout refuses.
"""

from typing import Any

from mrl.config.efficiency_rules import FLEX
from mrl.config.load import ResolvedConfig
from mrl.config.rules import violations
from mrl.config.schema import RunConfig, leaf, with_values
from mrl.model import ModelSpec
from mrl.platforms.hosting import get_hosting
from mrl.tools.search import SearchProblem

# Not among a device's switches, because its package has no pinned build: docs/efficiency.md
DEEPEP = {"model.override_transformer_config.moe_token_dispatcher_type": FLEX}


def missing_switches(config: RunConfig, model: ModelSpec) -> dict[str, Any]:
    """Returns the device's switches that the configuration says nothing about and no rule refuses.

    Those of the model need kernels that plain layers of torch do not have.
    """
    table = get_hosting(config.cluster.device).switches
    if config.model.allow_torch_layers:
        table = {key: value for key, value in table.items() if not key.startswith("model.")}
    missing = {key: value for key, value in table.items() if leaf(config, key) is None}
    while missing:
        broken = violations(ResolvedConfig(with_values(config, missing), {}), model)
        refused = missing.keys() & {violation.field for violation in broken}
        if not refused:
            break
        missing = {key: value for key, value in missing.items() if key not in refused}
    return missing


def with_switches(config: RunConfig, model: ModelSpec) -> RunConfig:
    """Returns the configuration with all switches of its device that fit it."""
    return with_values(config, missing_switches(config, model))


def deepep_would_spare(problem: SearchProblem, expert_ranks: int) -> bool:
    """Tells whether DeepEP would spare traffic: it sends a token to each node once, whose experts then share it.

    False where it is on already.
    """
    if problem.work.once_a_node or not get_hosting(problem.device.platform).has_flex_dispatcher:
        return False
    return expert_ranks > problem.per_node
