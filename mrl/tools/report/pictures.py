"""Small copies of a run's images, inside a page itself."""

import base64
import re
from io import BytesIO
from pathlib import Path

from mrl.data.images import IMAGE_BYTES, open_image
from mrl.data.row_files import BadRow

_NAME = re.compile("[0-9a-f]{64}")  # as the run makes them; a file of samples may be anybody's
_SIDE = 320  # pixels of the longer side
_MOST_PIXELS = 1 << 26


def picture(store: Path, name: str) -> str | None:
    """Returns a small copy of a stored image as a data URI; None for one that is not there or cannot be read."""
    file = store / name[:2] / name
    try:
        if _NAME.fullmatch(name) is None or file.stat().st_size > IMAGE_BYTES:
            return None
        image = open_image(file.read_bytes(), 1, _MOST_PIXELS)
    except (OSError, BadRow, ImportError):
        return None
    image.thumbnail((_SIDE, _SIDE))
    out = BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
