"""A file appears whole or not at all."""

import pytest

from mrl.whole_file import appears_whole


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with appears_whole(path) as work:
        work.write_text("new")
        assert path.read_text() == "old" and work.parent == tmp_path and work.name.startswith(".")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_of_one_that_fails_nothing_stays(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(error), appears_whole(path) as work:
        work.write_text("half")
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_block_that_writes_nothing_is_an_error_and_takes_nothing_away(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), appears_whole(path):
        pass
    assert path.read_text() == "old"
