"""Model families that launch scripts name and this trainer does not have."""

import re
from pathlib import Path

from mrl.model import FAMILIES, known_models

# (a part of the model's name, what it is), the first that fits
_OTHERS = (
    (r"omni|[-_.]vl|vl[-_.]|internvl|minicpm|glm-?4\.?(1|5)v|paligemma|geo3k", "a model that also reads images or sound"),
    (r"qwen3[-_.]?next|qwen3\.5|qwen3\.6", "Qwen3-Next or Qwen3.5 (linear attention beside full attention)"),
    (r"deepseek[-_]?(v2|v3|v4|r1)|671b|moonlight|kimi", "DeepSeek's multi-head latent attention"),
    (r"deepseek|llama", "Llama"),
    (r"gpt[-_]?oss", "gpt-oss (attention sinks, biased experts)"),
    (r"glm", "GLM-4"),
    (r"mimo", "MiMo (multi-token prediction)"),
    (r"mistral|mixtral", "Mistral"),
    (r"gemma", "Gemma"),
    (r"nemotron", "Nemotron (state-space layers)"),
    (r"longcat", "LongCat (experts of size zero)"),
    (r"seed", "Seed-OSS"),
)


def unknown_family(path: str, is_there: bool) -> str | None:
    """Why the model of a script cannot be trained or planned, with what can; None where its folder is there and speaks for itself."""
    if is_there:
        return None
    name = Path(path).name
    other = next((what for pattern, what in _OTHERS if re.search(pattern, name.lower())), None)
    if other is not None:
        return f"{name} is {other}, a family that is not here; families: {', '.join(FAMILIES)}"
    return (
        f"{name} is not on this machine and no name that is known, so nothing can be checked against it; families: {', '.join(FAMILIES)}; "
        f"known by name: {', '.join(known_models())}"
    )
