"""The model's own tokenizer, read from its checkpoint folder."""

from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, EnvironmentFault


def load_tokenizer(path: str) -> Any:
    """Hugging Face tokenizer of a local checkpoint folder; code shipped with a checkpoint is never run.

    Raises ConfigError if there is no such folder or it has no chat template, EnvironmentFault if its tokenizer cannot be read.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"model.path: {path} is no folder; give the folder of a Hugging Face checkpoint")
    from transformers import AutoTokenizer  # here: it takes seconds, and readers of data files do not need it

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises anything from OSError to a plain Exception of its Rust half
        raise EnvironmentFault(f"model.path: the tokenizer in {path} cannot be read: {type(error).__name__}: {error}") from error
    if not tokenizer.chat_template:
        raise ConfigError(f"model.path: the tokenizer in {path} has no chat template; add chat_template.jinja beside it")
    return tokenizer


def pad_token_id(tokenizer: Any) -> int:
    """The id that fills up short rows: the tokenizer's pad, else its end of text, else 0; it is masked wherever it stands."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((i for i in candidates if i is not None), 0)
