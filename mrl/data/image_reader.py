"""From a row's images to what a model is given of them, by the model's own processor.

    row's images --> encoded bytes --> name and number of tokens
    prompt       --> one token an image, by the chat template --> as many as the image has, recorded as RowImage
    data files   --> encoded bytes, each in a file of the run directory under its name, once the run has one; those of
                     later turns, from tools and clients, beside them (`take`)
    name         --> RGB --> pixels [patches, numbers of a patch], wherever they are needed: in engines, on ranks

A name is the digest of the bytes and of the processor's settings. Encoded bytes alone are stored, since pixels are a
hundred times as large. The processor is transformers' class on PIL, so that an installation without torchvision makes
the same numbers as one with it.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mrl.data.images import image_bytes, open_image
from mrl.data.row_files import BadRow, RawRow, images_of
from mrl.data.samples import MOST_KNOWN, ImageStore, KnownImage, RowImage
from mrl.errors import ConfigError, DataError, EnvironmentFault
from mrl.plain_files import TEXT_BYTES, read_settings
from mrl.whole_file import appears_whole

FEW = 256  # rows with images that are looked at in the process itself, before others are started for them
_PROCESSES = 16  # at most
_AHEAD = 4  # rows a process
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_CHANNELS = 3  # of RGB
_SIZES = ("patch_size", "temporal_patch_size", "spatial_merge_size")  # of config.json's vision_config


def path_in(store: Path, name: str) -> Path:
    """Returns the file of an image's encoded bytes."""
    return store / name[:2] / name


class _Looked(NamedTuple):
    """An image that can be read: its name and size."""

    name: str
    width: int
    height: int


Look = Callable[[], list[KnownImage]]


def _look(entries: Sequence[Any], folder: Path, most_pixels: int, settings: bytes, first: int = 1) -> list[_Looked]:
    """Reads all images of a row. `settings`: of the processor, for names. Raises BadRow."""
    found = []
    for number, entry in enumerate(entries, first):
        data = image_bytes(entry, number, folder)
        image = open_image(data, number, most_pixels)
        found.append(_Looked(_name(data, settings), *image.size))
    return found


def _name(data: bytes, settings: bytes) -> str:
    return hashlib.blake2b(settings + data, digest_size=32).hexdigest()


def _entries(raw: RawRow, key: str) -> list[Any]:
    """Returns the images of a row; none of a bad row, whose fault is told when it is parsed."""
    with suppress(BadRow):
        if raw.problem is None:
            return images_of(raw, key)
    return []


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with appears_whole(path) as work:
            work.write_bytes(data)
    except OSError as error:
        raise EnvironmentFault(f"{path}: an image of the data cannot be written: {error}") from error


class ImageReader:
    """Reads images for one model."""

    def __init__(self, config: dict[str, Any], folder: str, store: Path, most_pixels: int):
        """`config`: config.json of the model that reads images, from its `folder`. `store`, `most_pixels`: as in
        ImageStore.

        Raises ConfigError for a folder without an image processor of Qwen's models, and for one that cuts images in
        another way than the model expects.
        """
        processor = _load_processor(folder)
        for key in ("image_token_id", "vision_config"):
            if key not in config:
                raise ConfigError(f"model.path {folder}: config.json has no {key}; write it there, as it came")
        self.image_token = config["image_token_id"]
        self._processor = processor
        self._store = store
        self._most_pixels = most_pixels
        self._checked: set[str] = set()
        self._writing = Lock()
        self._merge = processor.merge_size
        _check_sizes(config["vision_config"], processor)
        self._settings = json.dumps(processor.to_dict(), sort_keys=True, default=str).encode()

    @classmethod
    def of(cls, folder: str, store: ImageStore) -> "ImageReader":
        """Returns the reader for the model in `folder`."""
        config = read_settings(Path(folder) / "config.json", TEXT_BYTES)
        return cls(config, folder, Path(store.folder), store.most_pixels)

    def ahead(self, rows: Iterable[RawRow], key: str) -> Iterator[tuple[RawRow, Look]]:
        """Yields rows with the functions that return their images, which raise BadRow. `key`: column of images.

        From the FEW-th row with images on, several processes look at them, some rows ahead. Whole images are in their
        memory alone, one at a time in each.
        """
        processes = min(_PROCESSES, len(os.sched_getaffinity(0)))
        asked = 0
        waiting: deque[tuple[RawRow, Look]] = deque()
        with ExitStack() as stack:
            pool = None
            for raw in rows:
                entries = _entries(raw, key)
                folder = Path(raw.file).parent
                asked += bool(entries)
                if entries and asked > FEW and pool is None:
                    pool = stack.enter_context(ProcessPoolExecutor(processes, get_context("spawn")))
                look = partial(self.read_images, entries, folder)
                if entries and pool is not None:
                    looked = pool.submit(_look, entries, folder, self._most_pixels, self._settings)
                    look = partial(self._known_later, looked)
                waiting.append((raw, look))
                if len(waiting) > _AHEAD * processes:
                    yield waiting.popleft()
            yield from waiting

    def _known_later(self, looked: "Future[list[_Looked]]") -> list[KnownImage]:
        try:
            return self._known(looked.result())
        except BrokenProcessPool:
            raise EnvironmentFault(
                "a process that looks at the images of the data was ended, by the system's memory killer as a rule; "
                "lower data.max_image_pixels"
            ) from None

    def read_images(self, entries: Sequence[Any], folder: Path) -> list[KnownImage]:
        """Reads images as a row's column has them. `folder`: that of the data file. Raises BadRow."""
        return self._known(_look(entries, folder, self._most_pixels, self._settings))

    def take(self, images: Sequence[bytes], first: int = 1) -> list[KnownImage]:
        """Reads encoded images that came with a turn, and writes them into the store unless they are there. `first`:
        the number of the first one in messages.

        Raises BadRow for one that is not read, EnvironmentFault if one cannot be written.
        """
        known = self._known(_look(images, Path(), self._most_pixels, self._settings, first), first)
        for image, data in zip(known, images, strict=True):
            with self._writing:
                self._write_once(image.name, data)
        return known

    def _write_once(self, name: str, data: bytes) -> None:
        path = path_in(self._store, name)
        if (name in self._checked or self._is_whole(path, name)) and self.is_kept(name):
            return
        try:
            _write(path, data)
        except EnvironmentFault:
            if not self._is_whole(path, name):  # another engine has written it meanwhile
                raise
        self._note(name)

    def is_kept(self, name: str) -> bool:
        """Tells whether an image is in the store, and marks it as used, so that it stays there
        (mrl/driver/turn_images.py).
        """
        path = path_in(self._store, name)
        try:
            os.utime(path)
        except PermissionError:  # of another user, who does not remove it here
            return path.exists()
        except OSError:
            return False
        return True

    def _note(self, name: str) -> None:
        if len(self._checked) >= MOST_KNOWN:
            self._checked.clear()
        self._checked.add(name)

    def _known(self, looked: "Iterable[_Looked]", first: int = 1) -> list[KnownImage]:
        found = []
        for number, (name, width, height) in enumerate(looked, first):
            grid = self._grid(number, width, height)
            found.append(KnownImage(name, grid, grid[1] * grid[2] // self._merge**2))
        return found

    def _grid(self, number: int, width: int, height: int) -> tuple[int, int, int]:
        """Returns the patches of an image of that size, without computing its pixels."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self._processor.size
        patch = self._processor.patch_size
        try:
            to = smart_resize(height, width, patch * self._merge, size.shortest_edge, size.longest_edge)
        except ValueError as error:
            raise BadRow(f"image {number} is {width} x {height} pixels: {error}", "shape of an image") from None
        return 1, to[0] // patch, to[1] // patch

    def keep(self, rows: Iterable[tuple[Sequence[Any], Path]], store: Path, names: Iterable[str]) -> None:
        """Writes the images called `names` into `store`, unless they are whole there. `rows`: what `read_images` was
        given, again.

        Raises DataError if the rows no longer have some of them, EnvironmentFault if they cannot be written.
        """
        missing = {name for name in names if not self._is_whole(path_in(store, name), name)}
        if not missing:
            return
        for entries, folder in rows:
            for number, entry in enumerate(entries, 1):
                with suppress(BadRow):  # told when it was read
                    data = image_bytes(entry, number, folder)
                    name = _name(data, self._settings)
                    if name in missing:
                        _write(path_in(store, name), data)
                        missing.remove(name)
            if not missing:
                return
        raise DataError(f"{len(missing)} images of the data have changed since the run began to read them")

    def bring(self, names: Iterable[str], source: Path, store: Path) -> bool:
        """Copies the images called `names` from another run's store into `store`, unless they are whole there.

        Returns whether all of them are there. Raises EnvironmentFault if one cannot be written.
        """
        for name in names:
            path = path_in(store, name)
            if not self._is_whole(path, name):
                other = path_in(source, name)
                if not self._is_whole(other, name):
                    return False
                _write(path, other.read_bytes())
        return True

    def _is_whole(self, path: Path, name: str) -> bool:
        try:
            return _name(path.read_bytes(), self._settings) == name
        except OSError:
            return False

    def check(self, names: Iterable[str]) -> None:
        """Reads the files of images, each once while it is remembered. Raises EnvironmentFault as `pixels` does."""
        for name in names:
            if name not in self._checked:
                self._encoded(name)
                self._note(name)

    def pixels(self, name: str) -> NDArray[np.float32]:
        """Returns what the tower is given of an image, [patches, numbers of a patch].

        Raises EnvironmentFault where its file is missing or has other bytes.
        """
        return self._processor(open_image(self._encoded(name), 1, self._most_pixels))["pixel_values"]

    @property
    def patch_numbers(self) -> int:
        """The length of a patch in `pixels`."""
        return _CHANNELS * self._processor.temporal_patch_size * self._processor.patch_size**2

    def file_of(self, name: str) -> Path:
        """Returns the file of an image in the store."""
        return path_in(self._store, name)

    def _encoded(self, name: str) -> bytes:
        path = self.file_of(name)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise EnvironmentFault(f"{path}: an image of the data cannot be read: {error}") from error
        if _name(data, self._settings) != name:
            raise EnvironmentFault(f"{path}: an image of the data has changed, or was stored by another processor")
        return data

    def expanded(self, ids: Sequence[int], images: Sequence[KnownImage]) -> tuple[list[int], tuple[RowImage, ...]]:
        """Returns a prompt's tokens with all of its images' in the place of one each, and where they are.

        Raises BadRow if there are other tokens of images than one for each.
        """
        places = [place for place, token in enumerate(ids) if token == self.image_token]
        if len(places) != len(images):
            raise BadRow(
                f"the chat template gives {len(places)} tokens of images for {len(images)} images: a text must not "
                "hold the model's own token of an image",
                "tokens of images",
            )
        found: list[int] = []
        rows = []
        last = 0
        for place, image in zip(places, images, strict=True):
            found += ids[last:place]
            rows.append(RowImage(image.name, len(found), image.tokens, image.grid))
            found += [self.image_token] * image.tokens
            last = place + 1
        if any(one.start + one.tokens == other.start for one, other in pairwise(rows)):
            raise BadRow("two images touch, and the model counts positions between them: put a word there", "touching")
        return [*found, *ids[last:]], tuple(rows)


def _load_processor(folder: str) -> Any:
    """Loads the image processor of a checkpoint folder, on PIL. Code that a checkpoint brings is never run."""
    if not any((Path(folder) / name).is_file() for name in _PROCESSORS):
        raise ConfigError(
            f"model.path {folder}: has no image processor ({', '.join(_PROCESSORS)}); put it there, as it came with "
            "the model: model.vision reads images by it"
        )
    from transformers import AutoImageProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        processor = AutoImageProcessor.from_pretrained(
            folder, backend="pil", trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises what it likes
        raise ConfigError(
            f"model.path {folder}: its image processor ({', '.join(_PROCESSORS)}) cannot be read: {error}"
        ) from None
    if type(processor) is not Qwen2VLImageProcessorPil:
        raise ConfigError(f"model.path {folder}: its image processor is {type(processor).__name__}, which is not read")
    if not processor.do_resize:
        raise ConfigError(
            f"model.path {folder}: preprocessor_config.json has do_resize: false; images are counted by the size that "
            "the processor makes of them, so take it out"
        )
    edges = (processor.size.shortest_edge, processor.size.longest_edge)
    if not all(isinstance(edge, int | float) and edge > 0 for edge in edges):
        raise ConfigError(
            f"model.path {folder}: preprocessor_config.json takes images of {edges[0]!r} to {edges[1]!r} pixels; write "
            "numbers above 0 as its min_pixels and max_pixels, as they came with the model"
        )
    return processor


def _check_sizes(vision: dict[str, Any], processor: Any) -> None:
    own = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
    for key, value in zip(_SIZES, own, strict=True):
        if key not in vision:
            raise ConfigError(f"config.json: vision_config has no {key}; write it there, as it came with the model")
        if vision[key] != value:
            raise ConfigError(
                f"preprocessor_config.json: {key.removeprefix('spatial_')} = {value}, and vision_config.{key} of "
                f"config.json is {vision[key]}: the processor is not the model's"
            )
