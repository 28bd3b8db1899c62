"""What plans and validates in full and cannot be trained yet: one table, so that `mrl train` can say so and nothing falls back silently."""

from collections.abc import Callable

from mrl.config.schema import RunConfig

_MISSING: tuple[tuple[Callable[[RunConfig], bool], str], ...] = (
    (lambda c: c.rollout.data_parallel_size > 1, "rollout.data_parallel_size above 1 (use more num_engines)"),
    (
        lambda c: c.rollout.tensor_model_parallel_size > c.cluster.n_gpus_per_node,
        "rollout.tensor_model_parallel_size above cluster.n_gpus_per_node (use a smaller one and more num_engines)",
    ),
)


def missing_capabilities(config: RunConfig) -> list[str]:
    """What the configuration asks for and `mrl train` cannot do yet, each with what to use instead; empty when it can run."""
    return [message for asked, message in _MISSING if asked(config)]
