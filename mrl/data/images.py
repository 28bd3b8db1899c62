"""Images of rows as users have them: where one lies, what cannot be one, and its place among a prompt's words.

    images column   bytes, or {bytes, path} of the datasets library, or a path, or a file:// URL; paths lie in the
                    folder of the data file; or the bytes in a URL, data:image/png;base64,...
    prompt          "<image>" in the text of messages, or a part {type: image} of a message's content, one an image

Every fault is a BadRow with the image's number, from 1, before the row costs an engine anything. Formats are a few,
since some of PIL's readers run programs. What is read is what vLLM's server would read of the same file: upright, as
RGB, transparent pixels on white.
"""

import errno
import re
import warnings
from base64 import b64decode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from mrl.data.row_files import BadRow
from mrl.plain_files import LFS_POINTER, NOT_PULLED
from mrl.units import MIB

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "<image>"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
IMAGE_BYTES = 64 * MIB  # of an encoded image
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")  # PIL's names of what becomes RGB without a loss of bits
_SEVERAL_VIEWS = "MPO"  # a photograph with further views of the same scene behind it
_OWN_KEYS = ("bytes", "path", "image", "type")  # of a mapping that is an image
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def with_images(messages: Sequence[Mapping[str, Any]], images: int) -> list[dict[str, Any]]:
    """Returns the messages with a part {type: image} in the place of each mark.

    A message without images keeps its text as it is. Raises BadRow unless there are as many marks as `images`.
    """
    found = [_in_parts(message) for message in messages]
    parts = [part for message in found if isinstance(message["content"], list) for part in message["content"]]
    marks = sum(part["type"] == "image" for part in parts)
    if marks != images:
        raise BadRow(
            f"the prompt has {marks} images ({MARK} in its text, or parts of the type image), and the row has {images}",
            "number of images",
        )
    return found


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [_part(part) for part in content]}
    if MARK not in content:
        return dict(message)
    pieces = [piece for piece in re.split(f"({MARK})", content) if piece]
    return {**message, "content": [{"type": "image"} if p == MARK else {"type": "text", "text": p} for p in pieces]}


def _part(part: Any) -> dict[str, Any]:
    # parquet gives every part all fields of the struct; a null one was not written
    given = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    if given.get("type") == "text" and isinstance(given.get("text"), str):
        return {"type": "text", "text": given["text"]}
    if given == {"type": "image"}:
        return given
    raise BadRow(
        f"a part of a message is {str(part)[:100]!r}: {{type: text, text}} and {{type: image}} are read, and the "
        "images are those of the column, in order",
        "part of a message",
    )


def image_bytes(entry: Any, number: int, folder: Path) -> bytes:
    """Returns the encoded bytes of an image. `number`: its number in the row. `folder`: that of the data file.

    Raises BadRow for what is no image, lies elsewhere or is too large.
    """
    if isinstance(entry, Mapping):
        entry = _of_mapping(entry, number)
    if isinstance(entry, str):
        entry = _of_text(entry, number, folder)
    if not isinstance(entry, bytes):
        raise BadRow(f"image {number} is {type(entry).__name__}: bytes, {{bytes, path}}, a path or a file URL are read")
    if len(entry) > IMAGE_BYTES:
        raise BadRow(f"image {number} has {len(entry)} bytes, more than {IMAGE_BYTES}", "bytes of an image")
    return entry


def _of_mapping(entry: Mapping[str, Any], number: int) -> Any:
    given = {key: value for key, value in entry.items() if value is not None}
    if others := sorted(given.keys() - set(_OWN_KEYS)):
        raise BadRow(
            f"image {number} has {', '.join(map(str, others))}: only bytes, path or image are read, and its size is "
            "what the model's processor makes of it",
            "keys of an image",
        )
    for key in ("bytes", "image", "path"):
        if key in given:
            return given[key]
    raise BadRow(f"image {number} has neither bytes nor a path")


def base64_in_url(url: str) -> str | None:
    """Returns the base64 text that a data URL holds; None for any other URL."""
    head, comma, data = url.partition(",")
    if not comma or not re.fullmatch("data:.*;base64", head, re.IGNORECASE):
        return None
    return data


def from_base64(text: str) -> bytes:
    """Decodes base64 with any blanks in it. Raises ValueError, also for a letter outside of ASCII."""
    return b64decode("".join(text.split()), validate=True)


def _of_text(text: str, number: int, folder: Path) -> bytes:
    held = base64_in_url(text)
    if held is None:
        return _of_file(text, number, folder)
    try:
        return from_base64(held)
    except ValueError as error:
        raise BadRow(f"image {number} is {text[:100]!r}, which is no base64: {error}", "base64 of an image") from None


def _of_file(name: str, number: int, folder: Path) -> bytes:
    try:
        return _read_file(name, number, folder)
    except (OSError, ValueError, RuntimeError) as error:  # no URL, a loop of links, no permission, base64 text
        why = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            why = f"{why}; base64 is read behind data:image/png;base64,"
        raise BadRow(f"image {number}: {name[:100]!r} cannot be read: {why}", "file of an image") from None


def _read_file(name: str, number: int, folder: Path) -> bytes:
    address = name
    if _SCHEME.match(name):
        parts = urlsplit(name)
        if parts.scheme.lower() != "file" or parts.netloc not in ("", "localhost"):
            raise BadRow(
                f"image {number} is {name[:100]!r}: nothing is fetched; give bytes, a path, or a URL that begins with "
                "file: or data:image/png;base64,",
                f"images from {parts.scheme}",
            )
        address = unquote(parts.path)
    if "\0" in address:
        raise BadRow(f"image {number}: a path with a zero byte")
    root = folder.resolve()
    path = (root / address).resolve()
    if not path.is_relative_to(root):
        raise BadRow(f"image {number} is {name[:200]!r}, outside of the data file's folder {root}", "path of an image")
    if not path.is_file():
        raise BadRow(f"image {number}: {path} is no file", "no file of an image")
    with path.open("rb") as file:
        return file.read(IMAGE_BYTES + 1)


def open_image(data: bytes, number: int, most_pixels: int) -> "Image":
    """Returns the image as RGB. `most_pixels`: limit of width x height, which is looked at before anything is decoded.

    Raises BadRow for what cannot be read completely, and for what would become another picture.
    """
    from PIL import Image  # here: rows of text need none

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PIL's own limit, and of metadata
        try:
            image = Image.open(BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise _too_large(number, most_pixels, str(error).partition(",")[0]) from None
        except Image.UnidentifiedImageError:
            if data.startswith(LFS_POINTER):
                raise BadRow(f"image {number} {NOT_PULLED}", "pointers") from None
            raise BadRow(
                f"image {number} is no readable image of {len(data)} bytes; read are {', '.join(FORMATS)}", "no image"
            ) from None
        except Exception as error:  # readers of formats raise what their files make them
            raise BadRow(f"image {number} cannot be read: {type(error).__name__}: {error}", "unreadable") from None
        _check(image, number, most_pixels)
        try:
            return _as_rgb(image)
        except Exception as error:
            raise BadRow(
                f"image {number} ({image.format}, {image.width} x {image.height}) cannot be decoded: {error}",
                "decoding",
            ) from None


def _too_large(number: int, most_pixels: int, size: str) -> BadRow:
    return BadRow(
        f"image {number} is too large: {size}, and data.max_image_pixels = {most_pixels}; make it smaller, or raise it",
        "pixels of an image",
    )


def _check(image: "Image", number: int, most_pixels: int) -> None:
    """Raises BadRow for an opened image, which is not decoded yet, that is not taken."""
    width, height = image.size
    if width < 1 or height < 1:
        raise BadRow(f"image {number} is {width} x {height} pixels", "an image without pixels")
    if width * height > most_pixels:
        raise _too_large(number, most_pixels, f"{width} x {height} pixels")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != _SEVERAL_VIEWS:
        raise BadRow(f"image {number} has {frames} frames: only still images are read", "frames of an image")
    if any(";16" in str(tile[3]) for tile in getattr(image, "tile", ())) or ";16" in image.mode:
        raise BadRow(f"image {number} has 16 bits a colour: convert it to 8, which is what models see", "16 bits")
    if image.mode not in _MODES:
        raise BadRow(
            f"image {number} has colours of the kind {image.mode}: RGB, RGBA, greyscale and palettes are read; convert "
            "it",
            f"colours {image.mode}",
        )


def _as_rgb(image: "Image") -> "Image":
    from PIL import Image, ImageOps

    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":  # also where one colour is marked as transparent, which vLLM leaves as it is
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")
