"""Measures the user's prompts and answers in tokens, for the lengths and the batch of a first configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.schema import DataConfig, RewardConfig
from mrl.data.dataset import THINKING, ChatTokenizer, PromptDataset, PromptParameters
from mrl.driver.assemble_data import image_reader, prompt_parameters, prompt_tokenizer, rule_in
from mrl.errors import ConfigError
from mrl.reward.truths import right_responses
from mrl.units import MIB, round_up

MOST_BYTES = 64 * MIB  # of all files; reading more takes minutes
ANSWERS_MEASURED = 64  # the longest ones by their characters
_STEP = 8  # tokens that lengths are rounded up to
_NO_LIMIT = 10**9  # tokens


@dataclass(frozen=True)
class MeasuredData:
    """Tokens of each usable prompt, and of the longest answer with its end."""

    train: tuple[int, ...]
    val: tuple[int, ...]  # empty without validation files
    answer: int

    def __str__(self) -> str:
        return (
            f"measured: {len(self.train)} training prompts of {min(self.train)} to {max(self.train)} tokens, "
            f"answers of up to {self.answer}"
        )

    def lengths(self, positions: int, most: int) -> tuple[int, int]:
        """Returns the longest prompt and response, within the model's positions and `most` tokens of a response.

        All prompts fit that leave room for the longest answer. Raises ConfigError where none does.
        """
        longest_prompt = positions - self.answer
        for prompts in filter(None, (self.train, self.val)):
            if min(prompts) > longest_prompt:
                raise ConfigError(
                    f"no prompt of a file fits: the model has {positions} positions, the shortest prompt "
                    f"{min(prompts)} tokens and the longest answer {self.answer}; give shorter rows, or a model of a "
                    "longer context"
                )
        longest = max(tokens for tokens in (*self.train, *self.val) if tokens <= longest_prompt)
        prompt = min(round_up(longest, _STEP), longest_prompt)
        return prompt, min(most, positions - prompt)

    def batch(self, prompt: int, usual: int, mini: int) -> tuple[int, int]:
        """Returns the prompts of a step and of an update, no more than the usual ones and than fit `prompt`."""
        usable = sum(tokens <= prompt for tokens in self.train)
        if usable >= usual:
            return usual, mini
        step = 1 << (usable.bit_length() - 1)
        return step, min(step, 1 << (mini.bit_length() - 1))


def measured(model_path: str, data: DataConfig, reward: RewardConfig, sees: bool = False) -> MeasuredData | None:
    """Measures the files of `data` with the model's tokenizer. `sees`: with the tokens of their images, too.

    Returns None where the tokenizer or a file is not on this host, and where files are too large. Raises DataError as
    the run would, and ConfigError for a model without an image processor where it sees.
    """
    files = [Path(file) for file in (*data.train_files, *data.val_files)]
    here = Path(model_path).is_dir() and all(file.is_file() for file in files)
    if not here or sum(file.stat().st_size for file in files) > MOST_BYTES:
        return None
    if not any(Path(model_path, name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    tokenizer = prompt_tokenizer(model_path, data)
    unlimited = data.model_copy(update={"max_prompt_length": _NO_LIMIT})
    images = image_reader(model_path, data) if sees else None
    parameters = prompt_parameters(unlimited, rule=rule_in(reward), images=images)
    train = _prompts(data.train_files, tokenizer, parameters, False)
    val = _prompts(data.val_files, tokenizer, parameters, True)
    answers = {text for prompts in (train, val) for text in _answers(prompts, reward)}
    longest = sorted(answers, key=len)[-ANSWERS_MEASURED:]
    return MeasuredData(
        tuple(len(prompt.token_ids) for prompt in train),
        tuple(len(prompt.token_ids) for prompt in val),
        1 + max(_tokens(text, tokenizer, data) for text in longest),
    )


def _prompts(
    files: Sequence[str], tokenizer: ChatTokenizer, parameters: PromptParameters, apart: bool
) -> Sequence[Any]:
    if not files:
        return ()
    return PromptDataset.load(files, tokenizer, parameters, files_apart=apart)


def _answers(prompts: Sequence[Any], reward: RewardConfig) -> set[str]:
    """Returns the shortest responses that say the truths as the reward wants them said."""
    if reward.custom_reward_function is not None:
        return {str(prompt.ground_truth) for prompt in prompts}
    return {right_responses(reward.function, prompt.data_source, prompt.ground_truth)[0] for prompt in prompts}


def _tokens(text: str, tokenizer: ChatTokenizer, data: DataConfig) -> int:
    """Returns the tokens of a text: those that it adds to an empty message."""
    switch = {} if data.enable_thinking is None else {THINKING: data.enable_thinking}

    def length(content: str) -> int:
        made = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            return_dict=False,
            add_generation_prompt=True,
            **switch,
        )
        return len(made)

    return max(length(text) - length(""), 1)
