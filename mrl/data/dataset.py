"""Validated, tokenised prompts in verl's schema, with a report of every rejected row.

The schema has these columns; others are not read:

* `data_source` (`reward_fn_key`): a string.
* The prompt (`prompt_key`): a list of {role, content}, or one string, which is a single user message.
* `reward_model`: {ground_truth, style}.
* `extra_info`: an optional mapping.
* `images` (`image_key`): has to be empty or missing, unless `PromptParameters.images` reads them (mrl.data.images).
* `videos`: has to be empty or missing.

The last part of this file loads the tokenizer.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from mrl.data.batch import Prompt
from mrl.data.images import MARK, with_images
from mrl.data.order import epoch_counts, permutation
from mrl.data.prompt_store import PromptStore, SeenPrompts
from mrl.data.row_files import BadRow, RawRow, images_of, parse_row, read_rows, with_read_calls
from mrl.data.samples import KnownImage, RowImage
from mrl.errors import ConfigError, DataError, EnvironmentFault
from mrl.plain_files import LFS_POINTER, NOT_PULLED, read_json
from mrl.units import counted

if TYPE_CHECKING:  # a run without images imports nothing of them
    from mrl.data.image_reader import ImageReader, Look

EXAMPLES = 10
MOST_BAD_ROWS = 10_000  # so many are reported one by one
WHY = 500  # characters of the reason that is reported
SAMPLED = 2  # last number of a sample's random stream, which makes it differ from those of all epochs
THINKING = "enable_thinking"  # the switch's name in the templates of Qwen3 and of models after it
_TEMPLATE = "chat_template"  # transformers' argument for a template in place of the tokenizer's own
RESERVED_TEMPLATE_KEYS = (
    "add_generation_prompt",
    "tokenize",
    "return_dict",
    "return_tensors",
    "padding",
    "truncation",
    "max_length",
)


class ChatTokenizer(Protocol):
    """The part of a tokenizer that makes prompts."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...


class ToolOffer(Protocol):
    """The tools that the model may call, as mrl.acting.offer implements them."""

    agent: bool  # an agent gets rows with their messages

    def schemas(self, extra_info: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Returns the schemas of what a row's responses may call. Raises ValueError for a row with an unknown name."""

    def needs_row(self, extra_info: Mapping[str, Any]) -> bool:
        """Returns whether an engine needs the row itself and not only its prompt."""


@dataclass(frozen=True)
class PromptParameters:
    """How rows become prompts, under the names of section `data`."""

    prompt_key: str = "prompt"
    max_prompt_length: int = 1024  # tokens
    filter_overlong_prompts: bool = True
    truncation: Literal["error", "left", "right", "middle"] = "error"
    max_bad_row_share: float = 0.01
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None  # None: as the template has it
    drop_duplicates: bool = True
    reward_fn_key: str = "data_source"
    tools: ToolOffer | None = None  # what the model may call
    images: "ImageReader | None" = None  # None: rows with images are bad ones
    image_key: str = "images"
    # from a row's data_source and ground_truth to why no response can be right; None: the reward is the user's own
    unmatched: Callable[[str, Any], str | None] | None = None

    def template_arguments(self, extra_info: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Returns the arguments of the chat template beside the messages. Raises BadRow where the row names unknown
        tools.
        """
        switch = {}
        if self.enable_thinking is not None:
            switch = {THINKING: self.enable_thinking}
        return {**self.apply_chat_template_kwargs, **switch, **self._tools(extra_info)}

    def rows(self, file: str) -> Iterator[RawRow]:
        """Yields the rows of a data file. Raises DataError as `read_rows` does."""
        return read_rows([file], self.prompt_key, self.reward_fn_key, self._images_read)

    def looked_at(self, file: str) -> "Iterator[tuple[RawRow, Look | None]]":
        """Yields the rows of a data file, each with the function that returns its images; None where none are read.

        Raises DataError as `read_rows` does.
        """
        if self.images is not None:
            yield from self.images.ahead(self.rows(file), self.image_key)
            return
        for raw in self.rows(file):
            yield raw, None

    def parsed(self, raw: RawRow) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns a row's messages and other fields, as `parse_row` does. Raises BadRow."""
        return parse_row(raw, self.prompt_key, self.reward_fn_key, self._images_read)

    def shown(self, raw: RawRow, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
        """Returns the messages with parts for the row's images, and the images as its column has them, none where no
        images are read. Raises BadRow unless there are as many marks as images.
        """
        if self.images is None:
            return messages, []
        entries = images_of(raw, self.image_key)
        marked = any(not isinstance(each["content"], str) or MARK in each["content"] for each in messages)
        if not entries and not marked:
            return messages, []
        return with_images(messages, len(entries)), entries

    @property
    def _images_read(self) -> str:
        return self.image_key if self.images is not None else ""

    def check_truth(self, rest: Mapping[str, Any]) -> None:
        """Raises BadRow for a row whose truth the reward can find in no response."""
        why = self.unmatched and self.unmatched(rest["data_source"], rest["ground_truth"])
        if why:
            raise BadRow(why, f"truth of {rest['data_source']}")

    def _tools(self, extra_info: Mapping[str, Any]) -> dict[str, Any]:
        if self.tools is None:
            return {}
        try:
            schemas = list(self.tools.schemas(extra_info))
        except ValueError as problem:
            raise BadRow(str(problem)) from problem
        if schemas:
            return {"tools": schemas}
        return {}


@dataclass(frozen=True)
class SetAside:
    """A row that cannot be used, and the reason."""

    file: str
    row: int
    reason: str
    others: int = 0  # further rows of the file with the same reason

    def __str__(self) -> str:
        others = ""
        if self.others == 1:
            others = " (and 1 more row of the file)"
        elif self.others:
            others = f" (and {self.others} more rows of the file)"
        return f"{self.file}, row {self.row}: {self.reason}{others}"


@dataclass(frozen=True)
class LoadReport:
    """Counts of the rows read: rows = kept + bad + filtered + duplicates."""

    rows: int
    kept: int
    bad: int
    filtered: int  # over max_prompt_length, left out
    truncated: int  # over max_prompt_length, cut; among the kept
    duplicates: int  # the same prompt as an earlier row
    examples: tuple[SetAside, ...]  # the first bad rows, one for each reason and file
    shortest: int | None = None  # tokens of the shortest prompt over max_prompt_length
    texts: int = 0  # rows whose prompt is one string
    bad_rows: tuple[SetAside, ...] = ()  # all of them, MOST_BAD_ROWS at most

    def __str__(self) -> str:
        head = (
            f"{counted(self.rows, 'row')} read: {self.kept} kept ({self.truncated} truncated), {self.bad} bad, "
            f"{self.filtered} over length, {counted(self.duplicates, 'duplicate')}"
        )
        texts = ""
        if self.texts:
            texts = f"; the prompt of {self.texts} is a string, taken as one user message"
        return "\n  ".join([head + texts, *map(str, self.examples)])


@dataclass(frozen=True, eq=False)
class PromptDataset(Sequence[Prompt]):
    """Prompts by position.

    `prompt_id` is the row's number over all files, bad rows counted, so it leads back to the row.
    """

    store: PromptStore  # tokens, and as JSON text prompt_id, data_source, ground_truth, extra_info
    report: LoadReport  # covers the whole files, also where only a part was sampled
    data_sources: frozenset[str]  # all that occur; each must have a reward function
    fingerprint: str  # hash of prompt ids and tokens: an order can be resumed only on the same data
    rows_digest: str  # hash of all that rows have beside tokens: what judges and environments see of them
    sizes: tuple[int, ...]  # prompts of each file, in the order of the files
    sampled: np.ndarray | None = None  # int64: positions in the store of the sampled prompts; None: all

    @classmethod
    def load(
        cls,
        files: Sequence[str],
        tokenizer: ChatTokenizer,
        parameters: PromptParameters,
        files_apart: bool = False,
    ) -> "PromptDataset":
        """Loads all usable prompts of all files.

        With `files_apart` a prompt duplicates only prompts of its own file. So each of several test sets stays whole.

        Raises DataError for unusable files, more bad rows than `max_bad_row_share`, or no prompt left. It does so too
        for prompts over length with truncation `error`. Raises EnvironmentFault where TMPDIR has no space. Raises
        ConfigError for template arguments that users must not set, or a thinking switch that the template lacks.
        """
        _check_template_arguments(tokenizer, parameters)
        loader = _Loader(tokenizer, parameters)
        try:
            for file in files:
                loader.begin_file(files_apart)
                for raw, look in parameters.looked_at(file):
                    loader.add(raw, look)
            if files and not loader.rows:
                raise DataError(f"no prompt is left to train on; 0 rows read of {', '.join(map(str, files))}")
            return loader.finish()
        except BaseException:
            loader.store.close()
            raise

    def sample(self, count: int | None, seed: int | None) -> "PromptDataset":
        """Returns `count` of the prompts, in their order; all where there are no more or `count` is None.

        With a seed they are drawn from each file in proportion to its size, so that every file is represented. Without
        a seed they are the first ones.
        """
        if count is None or count >= len(self):
            return self
        sampled = np.arange(count) if seed is None else _drawn(self.sizes, count, seed)
        ends = np.searchsorted(sampled, np.cumsum((0, *self.sizes)))
        sizes = tuple(int(n) for n in np.diff(ends))
        fingerprint = _digest_of_sampled(self.fingerprint, sampled)
        rows_digest = _digest_of_sampled(self.rows_digest, sampled)
        drawn = replace(self, sampled=sampled, sizes=sizes, fingerprint=fingerprint, rows_digest=rows_digest)
        return replace(drawn, data_sources=frozenset(prompt.data_source for prompt in drawn))

    def __len__(self) -> int:
        if self.sampled is None:
            return len(self.store)
        return len(self.sampled)

    def __getitem__(self, index: int) -> Prompt:
        tokens, rest = self.store[index if self.sampled is None else int(self.sampled[index])]
        fields = json.loads(rest)
        if "images" in fields:
            fields["images"] = tuple(RowImage(**image | {"grid": tuple(image["grid"])}) for image in fields["images"])
        return Prompt(token_ids=tokens, **fields)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    def ground_truth(self, prompt_id: int) -> Any:
        """Returns the ground truth of a prompt by its id; None for one that is not here. Ids ascend."""
        first = bisect_left(range(len(self)), prompt_id, key=lambda index: self[index].prompt_id)
        found = self[first] if first < len(self) else None
        return found.ground_truth if found is not None and found.prompt_id == prompt_id else None


def _digest_of_sampled(digest: str, sampled: np.ndarray) -> str:
    """Returns the digest of a part, given that of the whole."""
    return hashlib.sha256(f"{digest} {sampled.tolist()}".encode()).hexdigest()


def _drawn(sizes: Sequence[int], count: int, seed: int) -> np.ndarray:
    """Draws positions without replacement, from each file in proportion to its size, int64 [count], ascending."""
    starts = np.cumsum((0, *sizes[:-1]))
    shares = epoch_counts(count, sizes)
    parts = [
        start + np.sort(permutation((seed, file, SAMPLED), size)[:share])
        for file, (start, size, share) in enumerate(zip(starts, sizes, shares, strict=True))
    ]
    return np.concatenate(parts)


def _control_tokens(tokenizer: ChatTokenizer) -> list[str]:
    """Returns the texts that a fast tokenizer reads as tokens of the model's own."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return []
    return [token.content for token in core.get_added_tokens_decoder().values() if token.special]


class _Loader:
    """Takes rows one by one and keeps the usable ones."""

    def __init__(self, tokenizer: ChatTokenizer, parameters: PromptParameters):
        self.tokenizer = tokenizer
        self.parameters = parameters
        self.rows = self.kept = self.bad = self.filtered = self.truncated = self.duplicates = 0
        self.sizes: list[int] = []
        self.examples: dict[tuple[str, str], SetAside] = {}  # by file and reason
        self.bad_rows: list[SetAside] = []
        self.overlong: dict[tuple[str, str], SetAside] = {}
        self.shortest: int | None = None  # tokens of the shortest prompt over length
        self.texts = 0
        self.data_sources: set[str] = set()
        self.seen = SeenPrompts()
        self.store = PromptStore()
        self.forging = _control_tokens(tokenizer) if parameters.tools is not None else []
        self.hash = hashlib.sha256()
        self.rows_hash = hashlib.sha256()

    def begin_file(self, apart: bool) -> None:
        """Begins the next file. With `apart` its rows are not compared with those of earlier files."""
        self.sizes.append(0)
        if apart:
            self.seen = SeenPrompts()

    def add(self, raw: RawRow, look: "Look | None" = None) -> None:
        """Adds a row. `look`: returns its images; None where none are read."""
        self.rows += 1
        try:
            messages, rest = self.parameters.parsed(raw)
            self.parameters.check_truth(rest)
            self.texts += isinstance(raw.value[self.parameters.prompt_key], str)
            # two rows on which responses act may begin differently although their prompts are equal: no duplicates
            acts = self.parameters.tools is not None and self.parameters.tools.needs_row(rest["extra_info"])
            images: list[KnownImage] = []
            if look is not None:
                messages, entries = self.parameters.shown(raw, messages)
                images = look() if entries else []
            identity = [messages, self.rows] if acts else messages
            if images:
                identity = [identity, [image.name for image in images]]
            if self.parameters.drop_duplicates and not self.seen.add(json.dumps(identity)):
                self.duplicates += 1
                return
            tokens = self._tokenise(messages, rest["extra_info"])
            if look is not None:
                tokens, rows = self._expanded(tokens, images)
                rest |= {"images": [asdict(row) for row in rows]} if rows else {}
        except BadRow as problem:
            self.bad += 1
            self._note(self.examples, raw, str(problem), problem.alike)
            if len(self.bad_rows) < MOST_BAD_ROWS:
                self.bad_rows.append(SetAside(raw.file, raw.row, str(problem)[:WHY]))
            return
        tokens = self._fit(tokens, raw)
        if tokens is not None:
            acting = {"acts": True} if acts else {}
            if acts and self.parameters.tools.agent:
                acting["messages"] = messages
            self._keep(tokens, {"prompt_id": self.rows - 1, **rest, **acting})

    def finish(self) -> PromptDataset:
        report = LoadReport(
            self.rows,
            self.kept,
            self.bad,
            self.filtered,
            self.truncated,
            self.duplicates,
            tuple(self.examples.values()),
            self.shortest,
            self.texts,
            tuple(self.bad_rows),
        )
        overlong = list(self.overlong.values())
        _check(report, self.truncated if overlong else 0, overlong, self.parameters)
        self.store.finish()
        return PromptDataset(
            self.store,
            report,
            frozenset(self.data_sources),
            self.hash.hexdigest(),
            self.rows_hash.hexdigest(),
            tuple(self.sizes),
        )

    def _expanded(self, ids: list[int], images: list[KnownImage]) -> tuple[list[int], tuple[RowImage, ...]]:
        limit = self.parameters.max_prompt_length
        for number, image in enumerate(images, 1):
            if image.tokens > limit:
                raise BadRow(
                    f"image {number} alone has {image.tokens} tokens, more than data.max_prompt_length = {limit}",
                    "tokens of an image",
                )
        tokens, rows = self.parameters.images.expanded(ids, images)
        cuts = not self.parameters.filter_overlong_prompts and self.parameters.truncation != "error"
        if rows and cuts and len(tokens) > limit:
            raise BadRow(f"a prompt of {len(tokens)} tokens with images is not cut to {limit}", "cut images")
        return tokens, rows

    def _tokenise(self, messages: list[dict[str, Any]], extra_info: Mapping[str, Any]) -> list[int]:
        read = with_read_calls(messages)
        has_read = read != messages
        texts = [text for message in messages for text in texts_of(message["content"])]
        forms = [*messages, *(read if has_read else ())]  # a name that is given twice is in the text alone
        texts += [text for message in forms for key in message if key != "content" for text in _texts(message[key])]
        if forged := next((token for token in self.forging if any(token in text for text in texts)), None):
            raise BadRow(f"a message holds {forged}, a token of the model's own, which would forge a turn", forged)
        arguments = self.parameters.template_arguments(extra_info)
        if has_read:
            with suppress(BadRow):  # the template of DeepSeek-V3 wants arguments as text
                return self._templated(read, arguments)
        return self._templated(messages, arguments)

    def _templated(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
        try:
            out = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **arguments,
            )
        except Exception as error:  # a template is a program of the model's author and raises what it likes
            raise BadRow(f"the chat template refused it: {type(error).__name__}: {error}") from error
        ids = [int(i) for i in (out["input_ids"] if isinstance(out, Mapping) else out)]
        if not ids:
            raise BadRow("the chat template gives no tokens")
        return ids

    def _fit(self, ids: list[int], raw: RawRow) -> list[int] | None:
        """Returns the prompt within max_prompt_length; None where it is left out."""
        limit = self.parameters.max_prompt_length
        if len(ids) <= limit:
            return ids
        self.shortest = len(ids) if self.shortest is None else min(self.shortest, len(ids))
        if self.parameters.filter_overlong_prompts:
            self.filtered += 1
            return None
        self.truncated += 1
        if self.parameters.truncation == "error":
            self._note(self.overlong, raw, f"{len(ids)} tokens")
        return truncate(ids, limit, self.parameters.truncation)

    def _keep(self, ids: list[int], rest: dict[str, Any]) -> None:
        self.kept += 1
        self.sizes[-1] += 1
        seen = [image["name"] for image in rest.get("images", ())]
        self.hash.update(repr((rest["prompt_id"], ids, seen) if seen else (rest["prompt_id"], ids)).encode())
        self.data_sources.add(rest["data_source"])
        text = json.dumps(rest, default=str)
        self.rows_hash.update(f"{text}\n".encode())
        self.store.add(ids, text)

    @staticmethod
    def _note(notes: dict[tuple[str, str], SetAside], raw: RawRow, reason: str, alike: str = "") -> None:
        fault = (raw.file, alike or reason)
        known = notes.get(fault)
        if known is not None:
            notes[fault] = replace(known, others=known.others + 1)
        elif len(notes) < EXAMPLES:
            notes[fault] = SetAside(raw.file, raw.row, reason)


def texts_of(content: str | list[dict[str, Any]]) -> list[str]:
    """Returns the texts of a message, which is one unless it has parts."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _texts(value: Any) -> Iterator[str]:
    """Yields every text within a value: a call's name, its arguments and their names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Cuts a prompt to `limit` tokens: `left` and `right` cut at that side, `middle` keeps both ends.

    With an odd limit the right end is the longer one.
    """
    if side == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    if side == "left":
        return ids[-limit:]
    return ids[:limit]


def _check_template_arguments(tokenizer: ChatTokenizer, parameters: PromptParameters) -> None:
    reserved = [key for key in parameters.apply_chat_template_kwargs if key in RESERVED_TEMPLATE_KEYS]
    if reserved:
        raise ConfigError(f"data.apply_chat_template_kwargs: {', '.join(reserved)} is set by mrl; leave it out")
    named = parameters.apply_chat_template_kwargs.get(THINKING, parameters.enable_thinking)
    if parameters.enable_thinking is not None and named != parameters.enable_thinking:
        raise ConfigError(
            f"data.enable_thinking is {parameters.enable_thinking} and "
            f"data.apply_chat_template_kwargs says {named}; keep one"
        )
    template = parameters.apply_chat_template_kwargs.get(_TEMPLATE) or getattr(tokenizer, "chat_template", None)
    if parameters.enable_thinking is not None and isinstance(template, str) and THINKING not in template:
        raise ConfigError(
            f"data.enable_thinking: the chat template of this model has no such switch (it never mentions {THINKING}); "
            "leave the key out, or name the template's own switch in data.apply_chat_template_kwargs"
        )


def _check(report: LoadReport, too_long: int, overlong: list[SetAside], parameters: PromptParameters) -> None:
    if report.bad > parameters.max_bad_row_share * report.rows:
        raise DataError(
            f"more bad rows than data.max_bad_row_share ({parameters.max_bad_row_share:g}) allows; {report}"
        )
    if too_long:
        raise DataError(
            f"{too_long} prompts are over data.max_prompt_length ({parameters.max_prompt_length} tokens); raise it, "
            "set data.filter_overlong_prompts, or set data.truncation to left, right or middle\n  "
            + "\n  ".join(map(str, overlong))
        )
    if not report.kept:
        raise DataError(f"no prompt is left to train on{_why_none(report, parameters)}; {report}")


def _why_none(report: LoadReport, parameters: PromptParameters) -> str:
    if report.shortest is None:
        return ""
    return (
        f": data.max_prompt_length is {parameters.max_prompt_length} tokens, and the shortest prompt has "
        f"{report.shortest}"
    )


# ---------------------------------------------------------------- the model's own tokenizer


def _without_unknown_type(path: str) -> dict[str, Any]:
    """Returns an argument by which transformers does not read config.json, where it does not know the model's type.

    It would read it as a configuration of no type, which stops at a yarn scaling, as `kimi_k2` has one.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    file = Path(path) / "config.json"
    if not file.is_file() or read_json(file).get("model_type") in CONFIG_MAPPING:
        return {}
    return {"config": PretrainedConfig()}


def load_tokenizer(path: str) -> Any:
    """Loads the Hugging Face tokenizer of a local checkpoint folder. Code that a checkpoint brings is never run.

    Raises ConfigError if there is no such folder, and EnvironmentFault if the tokenizer cannot be read.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"model.path: {path} is no folder; give the folder of a Hugging Face checkpoint")
    from transformers import AutoTokenizer  # here: it takes seconds, and readers of data files do not need it

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True, **_without_unknown_type(path)
        )
    except Exception as error:  # transformers raises anything from OSError to a plain Exception from Rust
        why = f"{type(error).__name__}: {error}"
        for file in Path(path).glob("tokenizer*"):
            with suppress(OSError), file.open("rb") as begin:
                if begin.read(len(LFS_POINTER)) == LFS_POINTER:
                    why = f"{file.name} {NOT_PULLED}"
        raise EnvironmentFault(f"model.path: the tokenizer in {path} cannot be read: {why}") from error
    return tokenizer


def load_chat_tokenizer(path: str, arguments: Mapping[str, Any]) -> Any:
    """Loads the tokenizer of a local checkpoint folder, for chats.

    `arguments`: data.apply_chat_template_kwargs. Raises ConfigError if neither they nor the folder have a chat
    template, and what `load_tokenizer` raises.
    """
    tokenizer = load_tokenizer(path)
    if not (tokenizer.chat_template or arguments.get(_TEMPLATE)):
        raise ConfigError(
            f"model.path: the tokenizer in {path} has no chat template; add {_TEMPLATE}.jinja beside it, or give the "
            f"text of one as data.apply_chat_template_kwargs.{_TEMPLATE}"
        )
    return tokenizer
