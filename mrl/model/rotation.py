"""Rotary positions (RoPE, arXiv:2104.09864): how a model turns queries and keys, read from its config.json.

Of each head, `rotated` numbers are turned in pairs, and the others pass. At position p, pair i is turned by the angle
p x frequency(i). Rotated numbers are multiplied by a magnitude, too. With power(i) = base^(2i / rotated):

    kind       frequency(i)                                                     magnitude
    default    1 / power(i)                                                     1
    linear     1 / (factor x power(i))                                          1
    dynamic    1 / power(i), or of a larger base if the model has `alpha`       1
    llama3     slow pairs are divided by factor, fast ones are not,             1
               those between are interpolated
    yarn       likewise, between two pairs (arXiv:2309.00071)                   1 + ln(factor) / 10, or as given
    longrope   1 / (short_factor(i) x power(i)) (arXiv:2402.13753)              from the ratio of lengths

Multimodal rotation (`mrope_section`) turns some pairs by other positions of an image. A text's positions are equal, so
each pair turns as it would without it.

transformers changes the frequencies of `dynamic` and `longrope` with the length of a call. vLLM does not. Both compute
what is written here up to `Rotation.longest` positions, and no sample may be longer (mrl/config/rollout_rules.py).

Frequencies are float32, by the same operations in the same order as transformers' ROPE_INIT_FUNCTIONS and vLLM's rotary
classes (tests/unit/test_rotation.py). The powers themselves may differ by a rounding from one library to another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mrl.errors import ConfigError, shown

Floats = NDArray[np.float32]
HfConfig = Mapping[str, Any]
DEFAULT = "default"
_SECTIONS = "mrope_section"


@dataclass(frozen=True)
class Stretch:
    """The kind of a rotation. This one changes nothing, and others change some of it."""

    kind: ClassVar[str] = DEFAULT

    @property
    def magnitude(self) -> float:
        """The number by which rotated queries and keys are multiplied."""
        return 1.0

    def base(self, base: float, rotated: int) -> float:
        """Returns the base of the powers."""
        return base

    def frequencies(self, powers: Floats, base: float) -> Floats:
        """Returns the frequency of each pair from its power."""
        return 1.0 / powers

    def longest(self, positions: int) -> int:
        """Returns the tokens of the longest sample. `positions`: max_position_embeddings."""
        return positions

    def rows(self, positions: int) -> int:
        """Returns the rows of vLLM's table of cosines."""
        return positions


@dataclass(frozen=True)
class Linear(Stretch):
    """All angles are smaller by a factor."""

    kind: ClassVar[str] = "linear"
    factor: float

    def frequencies(self, powers: Floats, base: float) -> Floats:
        return 1.0 / powers / self.factor

    def rows(self, positions: int) -> int:
        return ceil(positions * self.factor)


@dataclass(frozen=True)
class Dynamic(Stretch):
    """Angles that become smaller in calls of more than max_position_embeddings tokens, which no sample has.

    `alpha` (Hunyuan) makes them smaller for every length, by a larger base.
    """

    kind: ClassVar[str] = "dynamic"
    alpha: float | None = None

    def base(self, base: float, rotated: int) -> float:
        if self.alpha is None:
            return base
        return base * self.alpha ** (rotated / (rotated - 2))


@dataclass(frozen=True)
class Llama3(Stretch):
    """The rotation of Llama 3.1.

    Over `original_max_position_embeddings` positions, pairs of at most `low_freq_factor` turns are slower by `factor`,
    and those of at least `high_freq_factor` turns are unchanged.
    """

    kind: ClassVar[str] = "llama3"
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float

    def frequencies(self, powers: Floats, base: float) -> Floats:
        plain = 1.0 / powers
        low, high = self.low_freq_factor, self.high_freq_factor
        length = self.original_max_position_embeddings
        of_one_turn = 1.0 / plain * (2 * pi)  # positions; torch divides a number by a tensor so
        share = (1.0 / of_one_turn * length - low) / (high - low)
        between = (1 - share) * plain / self.factor + share * plain
        slow = np.where(of_one_turn > length / low, plain / self.factor, between)
        return np.where(of_one_turn < length / high, plain, slow)


@dataclass(frozen=True)
class Yarn(Stretch):
    """YaRN: the first pairs are unchanged, the last ones slower by `factor`, with a ramp between two pairs.

    Those two turn `beta_fast` and `beta_slow` times in `original_max_position_embeddings` positions.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None  # the magnitude, where config.json gives it
    truncate: bool = True  # the ramp begins and ends at whole numbers

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return self._scale(self.mscale) / self._scale(self.mscale_all_dim)

    def _scale(self, mscale: float) -> float:
        if self.factor <= 1:
            return 1.0
        return 0.1 * mscale * log(self.factor) + 1.0

    def frequencies(self, powers: Floats, base: float) -> Floats:
        first, last = self._ramp(2 * len(powers), base)
        steps = (np.arange(len(powers), dtype=np.float32) - first) / (last - first)
        kept = 1 - np.clip(steps, 0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _ramp(self, rotated: int, base: float) -> tuple[float, float]:
        """Returns where the ramp begins and ends, counted in pairs."""
        first = self._pair(self.beta_fast, rotated, base)
        last = self._pair(self.beta_slow, rotated, base)
        if self.truncate:
            first = floor(first)
            last = ceil(last)
        first = max(first, 0)
        last = min(last, rotated - 1)
        return first, last + 0.001 if first == last else last

    def _pair(self, turns: float, rotated: int, base: float) -> float:
        """Returns the pair that turns so many times in the original positions."""
        return rotated * log(self.original_max_position_embeddings / (turns * 2 * pi)) / (2 * log(base))

    def longest(self, positions: int) -> int:
        return min(positions, self.rows(positions))

    def rows(self, positions: int) -> int:
        return floor(self.original_max_position_embeddings * self.factor)


@dataclass(frozen=True)
class LongRope(Stretch):
    """LongRoPE, for samples of at most `original_max_position_embeddings` tokens.

    For longer ones transformers takes `long_factor`, call by call, and vLLM for all samples of an engine.
    """

    kind: ClassVar[str] = "longrope"
    original_max_position_embeddings: int
    scale: float  # the magnitude
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]

    @property
    def magnitude(self) -> float:
        return self.scale

    def frequencies(self, powers: Floats, base: float) -> Floats:
        return 1.0 / (np.array(self.short_factor, np.float32) * powers)

    def longest(self, positions: int) -> int:
        if self.short_factor == self.long_factor:
            return positions
        return min(positions, self.original_max_position_embeddings)

    def rows(self, positions: int) -> int:
        return self.original_max_position_embeddings + positions


PLAIN = Stretch()


@dataclass(frozen=True)
class Rotation:
    """How a model turns queries and keys."""

    rope_theta: float  # the base
    partial_rotary_factor: float = 1.0  # rotated part of a head
    stretch: Stretch = PLAIN

    @property
    def kind(self) -> str:
        """`rope_type` of config.json."""
        return self.stretch.kind

    @property
    def magnitude(self) -> float:
        """The number by which rotated queries and keys are multiplied."""
        return self.stretch.magnitude

    def rotated(self, head_dim: int) -> int:
        """Returns how many numbers of a head turn."""
        return int(head_dim * self.partial_rotary_factor)

    def base(self, rotated: int) -> float:
        """Returns the base of the powers."""
        return self.stretch.base(self.rope_theta, rotated)

    def powers(self, rotated: int) -> Floats:
        """Returns base^(2i / rotated) of each pair i, float32 [rotated / 2]."""
        exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
        return np.float32(self.base(rotated)) ** exponents

    def frequencies(self, powers: Floats) -> Floats:
        """Returns the angle of a step of each pair, float32 [rotated / 2]. `powers`: those of `powers`, or the same by
        another library.
        """
        return self.stretch.frequencies(powers, self.base(2 * len(powers))).astype(np.float32)

    def longest(self, positions: int) -> int:
        """Returns the tokens of the longest sample that trainer, transformers and vLLM turn alike."""
        return self.stretch.longest(positions)

    def rows(self, positions: int) -> int:
        """Returns the rows of vLLM's table of cosines, each of `rotated` numbers."""
        return self.stretch.rows(positions)


# ---------------------------------------------------------------- reading config.json

_ENTRIES = ("rope_parameters", "rope_scaling")
_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_KEYS = (
    *_BESIDE, "rope_type", "type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
    "truncate", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "alpha", _SECTIONS,
    "mrope_interleaved",
)  # fmt: skip
# of older vLLM, which multiplied it with the usual magnitude
_RENAMED = {
    "attn_factor": ", nor do transformers and vLLM 0.32 read it; give the whole magnitude, attn_factor * (1 + 0.1 "
    "ln(factor)), as attention_factor, or leave it out"
}
_LENGTH = "original_max_position_embeddings"


def settings(config: HfConfig) -> dict[str, Any]:
    """Returns the settings of the rotary positions: `rope_type` and all that belongs to it.

    transformers 5 keeps them in `rope_parameters`. Older files have `rope_scaling`, and some settings beside it. An
    empty entry is none. Raises ConfigError for two entries that differ: transformers and vLLM then take `rope_scaling`
    alone, with the class' own base, and other readers `rope_parameters`.
    """
    beside = {key: config[key] for key in _BESIDE if config.get(key) is not None}
    entries = {key: _entry(key, config[key], beside) for key in _ENTRIES if config.get(key)}
    if not entries:
        return {"rope_type": DEFAULT, **beside}
    first, *others = entries.values()
    if any(other != first for other in others):
        values = " and ".join(f"{key} = {shown(config[key])}" for key in entries)
        raise ConfigError(f"config.json: {values} describe different rotations: remove the one that is wrong")
    return first


def given(config: HfConfig) -> set[str]:
    """Returns the keys of the entries that describe the rotation."""
    return {key for name in _ENTRIES for key in config.get(name) or ()}


def _entry(name: str, entry: HfConfig, beside: HfConfig) -> dict[str, Any]:
    """Returns one entry's settings with those `beside` it. Raises ConfigError for what readers disagree about."""
    for key, value in entry.items():
        if key not in _KEYS:
            mend = _RENAMED.get(key, "")
            raise ConfigError(
                f"config.json: {name}.{key} = {shown(value)} is not supported: training would not compute it{mend}"
            )
        if value is None and key != "attention_factor":
            raise ConfigError(f"config.json: {name}.{key} = None: vLLM reads no such value; leave it out")
        if beside.get(key, value) != value:
            raise ConfigError(
                f"config.json: {name}.{key} = {shown(value)} beside {key} = {shown(beside[key])}: remove the wrong one"
            )
    kinds = {entry[key] for key in ("rope_type", "type") if key in entry}
    if len(kinds) > 1:
        raise ConfigError(
            f"config.json: {name}.rope_type = {shown(entry['rope_type'])} beside {name}.type = {shown(entry['type'])}: "
            "remove the wrong one"
        )
    found = {key: value for key, value in entry.items() if key != "type"}
    return {**beside, **found, "rope_type": next(iter(kinds), DEFAULT)}


def read_rotation(config: HfConfig, head_dim: int, share: float, is_latent: bool) -> Rotation:
    """Returns the rotation of a model.

    `head_dim`: of queries and keys, or their rotated part in latent attention. `share`: partial_rotary_factor of a
    configuration without the key. Raises ConfigError for a missing setting, and for one that trainer, transformers and
    vLLM would compute differently.
    """
    rope = settings(config)
    kind = rope["rope_type"]
    readers = _LATENT if is_latent else _READERS
    if kind not in readers:
        raise ConfigError(f"config.json: rope_type = {kind!r} is not supported (only {', '.join(readers)})")
    if rope.get(_SECTIONS) and kind != DEFAULT:
        raise ConfigError(
            f"config.json: rope_type = {kind!r} beside {_SECTIONS} is not supported: vLLM turns other pairs by it than "
            "transformers"
        )
    share = float(_needed({"partial_rotary_factor": share, **config, **rope}, "partial_rotary_factor"))
    rotated = int(head_dim * share)
    if not 2 <= rotated <= head_dim or rotated % 2:
        size = "qk_rope_head_dim" if is_latent else "head_dim"
        raise ConfigError(
            f"config.json: partial_rotary_factor = {share} of {size} = {head_dim} are {rotated} rotated numbers, which "
            f"must be an even number from 2 to {head_dim}"
        )
    stretch = readers[kind](rope, config, rotated)
    return Rotation(float(_needed(rope, "rope_theta")), share, stretch)


def _needed(rope: HfConfig, key: str) -> Any:
    if rope.get(key) is None:
        raise ConfigError(f"config.json has no {key} of its rotary positions; is the checkpoint complete?")
    return rope[key]


def _refuse(key: str, value: Any, must: str) -> None:
    raise ConfigError(f"config.json: {key} = {shown(value)} of its rotary positions: {must}")


def _plain(rope: HfConfig, config: HfConfig, rotated: int) -> Stretch:
    return PLAIN


def _linear(rope: HfConfig, config: HfConfig, rotated: int) -> Stretch:
    factor = _needed(rope, "factor")
    if not isinstance(factor, float):
        _refuse("factor", factor, f"write {factor}.0, because vLLM stops at a whole number here")
    return Linear(factor)


def _dynamic(rope: HfConfig, config: HfConfig, rotated: int) -> Stretch:
    if rotated == 2:
        _refuse("rope_type", Dynamic.kind, "needs heads of which more than two numbers turn")
    if "alpha" in rope:
        return Dynamic(float(rope["alpha"]))
    _needed(rope, "factor")  # which changes calls that are longer than any sample
    return Dynamic()


def _llama3(rope: HfConfig, config: HfConfig, rotated: int) -> Stretch:
    low, high = (float(_needed(rope, key)) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        _refuse("high_freq_factor", high, f"must be above low_freq_factor = {low}")
    return Llama3(float(_needed(rope, "factor")), _needed(rope, _LENGTH), low, high)


def _yarn(rope: HfConfig, config: HfConfig, rotated: int) -> Stretch:
    scales = (rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0)
    mscale, of_all = scales if all(scales) else (1.0, 0.0)
    magnitude = rope.get("attention_factor")
    return Yarn(
        float(_needed(rope, "factor")),
        _needed(rope, _LENGTH),
        float(rope.get("beta_fast") or 32),
        float(rope.get("beta_slow") or 1),
        float(mscale),
        float(of_all),
        None if magnitude is None else float(magnitude),
        rope.get("truncate", True),
    )


def _latent_yarn(rope: HfConfig, config: HfConfig, rotated: int) -> Stretch:
    """Reads yarn of latent attention, whose softmax is scaled by mscale_all_dim, too."""
    for key, plain in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, plain) != plain:
            _refuse(key, rope[key], f"only {plain} is supported: training would not compute this model")
    scales = (rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0)
    if not all(scales) and any(scales):
        _refuse("mscale, mscale_all_dim", scales, "both or neither, because transformers and vLLM differ otherwise")
    return _yarn(rope, config, rotated)


def _longrope(rope: HfConfig, config: HfConfig, rotated: int) -> Stretch:
    length = _needed(rope, _LENGTH)
    lists = {key: tuple(map(float, _needed(rope, key))) for key in ("short_factor", "long_factor")}
    for key, factors in lists.items():
        if len(factors) != rotated // 2 or min(factors) <= 0:
            _refuse(key, f"{len(factors)} numbers", f"must be {rotated // 2} numbers above 0, one for each pair")
    ratio = _needed(config, "max_position_embeddings") / length
    scale = sqrt(1 + log(ratio) / log(length)) if ratio > 1 else 1.0
    # transformers reads both, vLLM neither
    if rope.get("factor", ratio) != ratio:
        _refuse("factor", rope["factor"], f"must be max_position_embeddings / {_LENGTH} = {ratio}, which vLLM takes")
    magnitude = rope.get("attention_factor")
    if magnitude is not None and abs(magnitude - scale) > 1e-6:
        _refuse("attention_factor", magnitude, f"must be {scale}, which vLLM takes")
    return LongRope(length, scale, **lists)


_Reader = Callable[[HfConfig, HfConfig, int], Stretch]
_READERS: dict[str, _Reader] = {
    DEFAULT: _plain,
    Linear.kind: _linear,
    Dynamic.kind: _dynamic,
    Llama3.kind: _llama3,
    Yarn.kind: _yarn,
    LongRope.kind: _longrope,
}
_LATENT: dict[str, _Reader] = {DEFAULT: _plain, Yarn.kind: _latent_yarn}
