"""A start from another run's checkpoint has the images of responses under way, or generates their groups again."""

import shutil
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from generations import Files, origin_in
from PIL import Image
from test_generation import AHEAD, in_memory  # noqa: F401
from test_image_turns import CONFIG, MOST, model  # noqa: F401
from test_replays import Killed

from mrl.checkpoint.group_files import read_group, write_group
from mrl.data.image_reader import ImageReader, path_in
from mrl.data.row_columns import NAME
from mrl.driver import assemble_files
from mrl.errors import EnvironmentFault
from mrl.generate.kept_groups import read_kept
from mrl.generate.spool import Spool
from mrl.record.run_dir import RunDir


def with_image(samples, name):
    """The rows, each with an image of a tool in the place of one token."""
    one = np.ones(len(samples), np.int32)
    of_images = {
        "image_counts": one, "image_names": np.array([name.encode()] * len(one), NAME), "image_starts": one,
        "image_tokens": one, "image_grids": np.array([[1, 2, 2]] * len(one), np.int32),
    }  # fmt: skip
    return replace(samples, **of_images)


def test_images_of_turns_come_with_the_checkpoint_and_groups_without_theirs_begin_again(tmp_path, model, capsys):  # noqa: F811
    (tmp_path / "run").mkdir()
    run = Killed(tmp_path / "run", AHEAD["two, partial"])
    folder = RunDir(run.folder).checkpoints / "step-2"
    folder.parent.mkdir()
    shutil.move(run.folder / "step-2", folder)
    before, after = (RunDir(tmp_path / name).images for name in ("run", "another"))
    reader = ImageReader(CONFIG, str(model), before, MOST)
    shown = {}
    for number, file in enumerate(run.said["files"]):
        record = read_group(folder / file)
        out = BytesIO()
        Image.new("RGB", (64, 32 + number)).save(out, "PNG")
        (known,) = reader.take([out.getvalue()])
        shown[record.number] = known.name, out.getvalue()
        (folder / file).unlink()
        facts = write_group(folder / file, replace(record, samples=with_image(record.samples, known.name)))
        run.said["files"][file] = facts
    assert len(shown) > 3

    def kept(name):
        spool = Spool(tmp_path / name, Files())
        has_images = assemble_files.images_of_checkpoint(reader.bring, folder, after)
        return read_kept(folder, run.said, spool, origin_in(run.said), has_images)

    found = kept("first")
    assert found.groups.keys() == shown.keys() and "generated again" not in capsys.readouterr().out
    there = ImageReader(CONFIG, str(model), after, MOST)
    for name, data in shown.values():
        assert path_in(after, name).read_bytes() == data
        assert there.pixels(name).shape[1] == there.patch_numbers
    shutil.rmtree(after)
    (lost, (name, _)), (damaged, (other, _)), *_ = shown.items()
    path_in(before, name).unlink()
    path_in(before, other).write_bytes(b"other bytes")
    found = kept("second")
    assert found.groups.keys() == shown.keys() - {lost, damaged}
    again = {group.number: group for group in found.ledger.groups}
    assert all(not again[number].tokens and not any(again[number].ended) for number in (lost, damaged))
    assert "step-2: 2 groups on their way are generated again: images that they show" in capsys.readouterr().out
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        there.pixels(other)
