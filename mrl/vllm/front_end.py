"""What differs between the front ends (AsyncLLM) of the supported generations of vLLM, one class each. vLLM itself is not imported.

0.23, the newest that vllm-ascend supports, starts and ends a weight update as 0.32 does, and knows no weight versions: an engine there
vouches for the version itself, by what it served before and after a request. Source: vllm/v1/engine/async_llm.py of 0.23.0 and 0.32.0.
"""

from typing import Any, Protocol

from mrl.errors import EnvironmentFault


class FrontEnd(Protocol):
    """Calls that differ."""

    async def set_version(self, llm: Any, version: int) -> None:
        """Says which version the weights have that the engine holds."""
        ...

    def versions(self, answer: Any, before: int | None, after: int | None) -> set[str]:
        """Versions that took part in a completion. `before`, `after`: what the engine served when the request came and when it ended."""
        ...


class FrontEnd032:
    """vLLM 0.32 stamps completions with the versions of the weights they were sampled from."""

    async def set_version(self, llm: Any, version: int) -> None:
        await llm.update_weight_version(str(version))

    def versions(self, answer: Any, before: int | None, after: int | None) -> set[str]:
        return {span.version for span in answer.weight_versions or ()}


class FrontEnd023:
    """vLLM 0.23 has no weight versions."""

    async def set_version(self, llm: Any, version: int) -> None:
        pass

    def versions(self, answer: Any, before: int | None, after: int | None) -> set[str]:
        return {str(before), str(after)}


_GENERATIONS: dict[str, type[FrontEnd]] = {"0.23": FrontEnd023, "0.32": FrontEnd032}


def front_end(version: str) -> FrontEnd:
    """The front end of vLLM `version`. Raises EnvironmentFault that lists the supported generations."""
    generation = ".".join(version.split(".")[:2])
    if generation not in _GENERATIONS:
        raise EnvironmentFault(
            f"vLLM {version} is of no supported generation ({', '.join(_GENERATIONS)}); `mrl doctor` says what to install"
        )
    return _GENERATIONS[generation]()
