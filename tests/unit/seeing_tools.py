"""Tools and an environment of a user's file that answer with images."""

from pathlib import Path

from PIL import Image

from mrl.acting.environment import Environment, Reply


def board(side: int, colour: str = "red") -> Image.Image:
    """Returns a picture of one colour, a little higher than wide."""
    return Image.new("RGB", (side, side + 32), colour)


def zoom(side: int, count: int = 1) -> Reply:
    """Shows pictures.

    Args:
        side: of the first
        count: how many
    """
    return Reply("here <|image_pad|> it is", images=[board(side + 64 * number) for number in range(count)])


def broken(what: str) -> Reply:
    """Shows what cannot be read.

    Args:
        what: kind of damage
    """
    bad = {
        "cut": Path(__file__).read_bytes()[:40],
        "number": 3,
        "large": board(2000),
        "colours": Image.new("CMYK", (32, 32)),
        "thin": Image.new("RGB", (900, 2)),
    }
    return Reply("never read", images=[board(32), bad[what]])


class Walk(Environment):
    """Shows the picture of the row in other sizes."""

    actions = ("turn",)
    repeatable = True

    def reset(self, row, seed):
        """Opens the row's picture."""
        (file,) = row["images"]
        self.picture = Image.open(file)
        self.side = 32

    def turn(self) -> Reply:
        """Comes nearer."""
        self.side += 32
        return Reply(f"{self.side} wide", self.side / 64, images=[self.picture.resize((self.side, 64))])


class Judging(Environment):
    """Shows what it judged, which nobody reads."""

    actions = ("show",)

    def reset(self, row, seed):
        """Takes what it shows."""
        self.shown = b"no picture" if row["extra_info"]["shown"] == "damaged" else board(64)

    def show(self) -> Reply:
        """Shows it."""
        return Reply("here", 0.25, images=[self.shown])

    def judge(self) -> Reply:
        """Judges."""
        return Reply("well", 0.5, images=[self.shown])
