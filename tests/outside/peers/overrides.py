"""hydra's reading of drawn values, and verl's own configuration with drawn overrides composed into it.

Texts are drawn from pieces of the override grammar, so that some are refused. Orders of a section, its keys and what
replaces them are drawn too, because a mapping is merged and anything else is not.
"""

import math
from importlib.util import find_spec
from pathlib import Path
from random import Random

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Sweep
from hydra.errors import HydraException
from omegaconf import OmegaConf

PEERS = ("hydra-core", "omegaconf", "verl")
VALUES, COMPOSED = 1200, 60
WORDS = (
    "1 -3 +5 0 007 2_0 1_000.5 .5 10. 1.e5 1e-6 -1E+3 1e inf -inf NaN infinity true FALSE True yes no off null Null "
    "None none vllm seq-mean-token-mean /a/b:c.parquet hdfs://x/y $x ${x} ${x}/y:z a=b a@b x|y? 3.1.4 1-2 - ~ # ! & < "
    r"a\,b a\ b \\ \{x\} é 'x' 'a,b' 'it\'s' 'a\\' 'a\nb' '' '1' 'true' '{a:1}'"
)
SCALARS = [*WORDS.split(), '"x y"', '"a\'b"', "a b", " a", "a ", "'a' b", "1 2", "", "\\ "]


def _names(tree: dict) -> list[str]:
    below = {name: _names(names) if isinstance(names, dict) else [""] for name, names in tree.items()}
    return [f"{name}.{rest}".rstrip(".") for name, rests in below.items() for rest in rests]


SECTIONS = {
    "actor_rollout_ref.actor.optim": {"lr": "5e-6 1e-5", "weight_decay": "0.0 0.1", "clip_grad": "0.5 2"},
    "actor_rollout_ref.rollout": {
        "temperature": "0.5 0.9", "n": "4 8", "val_kwargs": {"n": "2 4", "do_sample": "True", "temperature": "0.7 1"},
    },
    "actor_rollout_ref.rollout.engine_kwargs.vllm": {
        "max_num_seqs": "128 7", "compilation_config": {"cudagraph_mode": "FULL 'NONE'", "sizes": "[1,2] [4]"},
    },
    "data": {"train_batch_size": "32 64", "train_files": "[/a/b.parquet,'c,d'] /x.parquet", "shuffle": "false TRUE"},
    "data.apply_chat_template_kwargs": {"enable_thinking": "false true", "how": "'a,b' c"},
    "algorithm": {"kl_ctrl": {"kl_coef": "0.5 0.01", "type": "fixed"}, "adv_estimator": "grpo rloo"},
    "trainer": {"total_training_steps": "11 null", "logger": "[console] ['console','wandb']"},
    "reward.reward_kwargs": {"overlong_buffer_cfg": {"enable": "True", "len": "5 512"}, "max_resp_len": "512"},
}  # fmt: skip
NAMED = [f"{section}.{name}" for section, names in SECTIONS.items() for name in _names(names)]


def cases() -> list[dict]:
    draw = Random(11)
    parser = OverridesParser.create()
    texts = dict.fromkeys([*SCALARS, *(_text(draw, 0) for _ in range(VALUES))])
    read = [_read(parser, text) for text in texts]
    with initialize_config_dir(str(Path(find_spec("verl").origin).parent / "trainer" / "config"), version_base=None):
        base = _plain(compose("ppo_megatron_trainer"))
        composed = [_composed(_words(draw), base) for _ in range(COMPOSED)]
    return [*read, *composed]


def _text(draw: Random, depth: int) -> str:
    kind = draw.random() if depth < 3 else 0.0
    if (depth and kind < 0.5) or kind < 0.1:
        return draw.choice(SCALARS)
    blank = draw.choice(("", "", " "))
    items = [_text(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    if kind < 0.7:
        return f"[{blank}{f'{blank},{blank}'.join(items)}{blank}]"
    names = [draw.choice(("a", "b", "lr", "a-b", "x/y", "1", "true", "a.b", "'q'", "c d")) for _ in items]
    pairs = [f"{name}{blank}:{blank}{item}" for name, item in zip(names, items, strict=True)]
    return f"{{{f'{blank},{blank}'.join(pairs)}{blank}}}"


def _read(parser: OverridesParser, text: str) -> dict:
    """`read` is False for what hydra refuses, and for a sweep, which verl refuses."""
    try:
        value = parser.parse_override(f"key={text}").value()
    except HydraException:
        return {"text": text, "read": False}
    if isinstance(value, Sweep | Glob):
        return {"text": text, "read": False}
    return {"text": text, "read": True, "gave": _named(value)}


def _named(value: object) -> object:
    """Spells numbers that JSON has not, with names as texts, as a section has them."""
    if isinstance(value, dict):
        return {str(name): _named(below) for name, below in value.items()}
    if isinstance(value, list):
        return [_named(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return str(value) if type(value).__name__ == "QuotedString" else value


def _words(draw: Random) -> list[str]:
    words = []
    for section in draw.sample(sorted(SECTIONS), draw.randint(1, 3)):
        for _ in range(draw.randint(1, 3)):
            key, names = section, SECTIONS[section]
            while draw.random() < 0.4:  # a key of the section, or one deeper
                name = draw.choice(sorted(names))
                key, names = f"{key}.{name}", names[name]
                if isinstance(names, str):
                    break
            words.append(f"++{key}={_value(draw, names)}")
    return words


def _value(draw: Random, names: dict | str) -> str:
    if isinstance(names, str):
        return draw.choice(names.split(" "))
    chosen = draw.sample(sorted(names), draw.randint(1, len(names)))
    blank = draw.choice(("", " "))
    return "{" + f",{blank}".join(f"{name}:{blank}{_value(draw, names[name])}" for name in chosen) + "}"


def _plain(config: object) -> dict:
    return dict(_leaves(OmegaConf.to_container(config, resolve=False), ""))


def _leaves(tree: object, key: str):
    if isinstance(tree, dict) and tree:
        for name, below in tree.items():
            yield from _leaves(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def _composed(words: list[str], base: dict) -> dict:
    """`changed` is what is another in verl's configuration with the overrides, `holds` what their sections hold."""
    now = _plain(compose("ppo_megatron_trainer", overrides=words))
    changed = {key: value for key, value in now.items() if key not in base or base[key] != value}
    return {"words": words, "changed": changed, "holds": {key: now[key] for key in NAMED if key in now}}
