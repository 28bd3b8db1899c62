"""Images of tools and agents are removed when no sample, no checkpoint and no response under way has them."""

import os
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from test_image_turns import CONFIG, MOST, model  # noqa: F401

from mrl.checkpoint.group_files import GroupRecord, group_file, images_of_group, write_group
from mrl.data.image_reader import ImageReader, path_in
from mrl.data.samples import RowImage, Sample, packed
from mrl.driver.turn_images import TurnImages
from mrl.record.run_dir import RunDir
from mrl.record.sample_files import images_of_step, keep_within, write_samples

LONG_AGO = 1_000_000_000


def picture(shade: int) -> bytes:
    out = BytesIO()
    Image.new("RGB", (64, 32), (shade, 0, 0)).save(out, "PNG")
    return out.getvalue()


class Run:
    """A run directory, and what stores images in it."""

    def __init__(self, folder, model):  # noqa: F811
        self.dir = RunDir(folder)
        self.reader = ImageReader(CONFIG, str(model), self.dir.images, MOST)

    def take(self, shade: int, age: float | None = LONG_AGO) -> str:
        """Stores an image, as if it had been done long ago."""
        (known,) = self.reader.take([picture(shade)])
        if age is not None:
            os.utime(path_in(self.dir.images, known.name), (age, age))
        return known.name

    def samples(self, *names: str):
        rows = [
            Sample(0, 0, number, 0, (5, 6), (7, 8), (0.0, 0.0), "stop", 0, images=(RowImage(name, 2, 1, (1, 2, 2)),))
            for number, name in enumerate(names)
        ]
        return packed(rows)

    def step(self, step: int, *names: str) -> None:
        self.dir.samples.mkdir(exist_ok=True)
        made = self.samples(*names)
        write_samples(self.dir.samples, step, [made], [{"score": 0.0, "reason": "ok"}] * len(made), images=True)

    def group(self, folder, number: int, name: str) -> None:
        folder.mkdir(parents=True)
        write_group(folder / group_file(number, 0), GroupRecord(number, 0, self.samples(name), {}))

    def left(self) -> set[str]:
        return {file.name for file in self.dir.images.glob("??/*")}


@pytest.fixture
def run(tmp_path, model):  # noqa: F811
    return Run(tmp_path, model)


def test_an_image_stays_while_something_refers_to_it(run):
    data, sampled, saved, spooled, _ = (run.take(shade) for shade in range(5))
    run.step(1, sampled, sampled)
    run.group(run.dir.checkpoints / "step-1", 3, saved)
    run.group(run.dir.spool / "ab12", 4, spooled)
    assert images_of_group(run.dir.spool / "ab12" / group_file(4, 0)) == {spooled}
    images = TurnImages(run.dir.path, {data}, steps=2)
    assert images.remove_unused() == 0
    young = run.take(5, age=None)
    assert images.remove_unused() == 0, "a response from before the start may be under way"
    assert images.remove_unused() == 1 and run.left() == {data, sampled, saved, spooled, young}
    (run.dir.checkpoints / "step-1" / group_file(3, 0)).unlink()
    (run.dir.samples / "step-1.parquet").unlink()
    assert images.remove_unused() == 3 and run.left() == {data, spooled}


def test_an_image_that_is_shown_again_is_used_again_and_one_that_is_gone_is_stored_again(run):
    again, gone = (run.take(shade) for shade in range(2))
    images = TurnImages(run.dir.path, (), steps=1)
    images.remove_unused()
    assert run.take(0, age=None) == again and run.reader.is_kept(again)
    assert images.remove_unused() == 1 and run.left() == {again} and not run.reader.is_kept(gone)
    assert run.take(1, age=None) == gone and run.left() == {again, gone}
    assert path_in(run.dir.images, gone).read_bytes() == picture(1)


def test_without_knowing_what_refers_to_images_none_is_removed(run):
    name = run.take(0)
    images = TurnImages(run.dir.path, (), steps=0)
    run.step(1, name)
    (run.dir.samples / "step-2.parquet").write_bytes(b"damaged")
    assert images.remove_unused() == 0 and run.left() == {name}
    (run.dir.samples / "step-2.parquet").unlink()
    (run.dir.samples / "step-1.parquet").unlink()
    assert images.remove_unused() == 1 and run.left() == set()


@pytest.mark.parametrize("content", [b"PK\x03\x04damaged", b"", b"damaged"])
def test_a_damaged_group_removes_none_either(run, content):
    name = run.take(0)
    images = TurnImages(run.dir.path, (), steps=0)
    group = run.dir.spool / "ab12" / group_file(4, 0)
    group.parent.mkdir(parents=True)
    group.write_bytes(content)
    assert images.remove_unused() == 0 and run.left() == {name}


def test_an_image_that_is_used_while_it_is_removed_stays(run, monkeypatch):
    name = run.take(0)
    images = TurnImages(run.dir.path, (), steps=0)
    rename = Path.rename

    def used_before(file: Path, to: Path) -> Path:
        if to.name.endswith(".unused"):
            assert run.reader.is_kept(name)
        return rename(file, to)

    monkeypatch.setattr(Path, "rename", used_before)
    assert images.remove_unused() == 0 and run.left() == {name} and run.reader.is_kept(name)


def test_images_count_in_the_size_of_samples_with_the_newest_step_that_has_them(run):
    data, first, both = (run.take(shade) for shade in range(3))
    run.step(1, data, first, both)
    run.step(2, both)
    run.step(3, data)
    images = TurnImages(run.dir.path, {data}, steps=0)
    of = {name: path_in(run.dir.images, name).stat().st_size for name in (first, both)}
    assert images.bytes_of_steps() == {1: of[first], 2: of[both], 3: 0}
    files = {step: (run.dir.samples / f"step-{step}.parquet").stat().st_size for step in (1, 2, 3)}
    limit = sum(files.values()) + sum(of.values())
    assert keep_within(run.dir.samples, limit, images.bytes_of_steps()) == []
    assert keep_within(run.dir.samples, limit - 1, images.bytes_of_steps()) == [1]
    assert images.remove_unused() == 1 and run.left() == {data, both}
    assert images_of_step(run.dir.samples, 2) == {both}


@pytest.mark.parametrize("is_there", [False, True], ids=["it was gone", "it was stored again"])
def test_a_removal_that_was_killed_half_way_is_undone(run, is_there):
    name = run.take(0)
    file = path_in(run.dir.images, name)
    aside = file.with_name(f".{name}.unused")
    file.rename(aside)
    if is_there:
        assert run.take(0) == name
    images = TurnImages(run.dir.path, (), steps=1)
    assert images.remove_unused() == 0 and run.left() == {name} and file.read_bytes() == picture(0)
    assert images.remove_unused() == 1 and run.left() == set()
