"""What is written into the cache folder is there whole or not at all, and what killed runs left is cleared away."""
import os
import time

import pytest

from kvlab import folders
from kvlab.folders import passing, remove, settle


def filled(folder, content="new"):
    folder.mkdir(parents=True)
    (folder / "part").write_text(content)
    return folder


def test_a_file_gets_to_its_place_in_one_step_and_replaces_another(tmp_path):
    place = tmp_path / "deep" / "file"
    with passing(place.parent) as made:
        assert made.parent == place.parent and list(made.iterdir()) == []
        (made / "x").write_text("first")
        settle(made / "x", place)
        assert place.read_text() == "first"
        (made / "x").write_text("second")
        settle(made / "x", place)
    assert place.read_text() == "second" and list(place.parent.iterdir()) == [place]


def test_nothing_is_left_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), passing(tmp_path) as made:
        filled(made / "x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_of_two_folders_the_first_stays(tmp_path):
    """Also where rename itself is what fails: another process made the folder between a look and the rename."""
    with passing(tmp_path) as made, passing(tmp_path) as other:
        settle(filled(other / "x", "quicker"), tmp_path / "place")
        settle(filled(made / "x", "slower"), tmp_path / "place")
    assert (tmp_path / "place" / "part").read_text() == "quicker"
    assert list(tmp_path.iterdir()) == [tmp_path / "place"]


def test_a_folder_that_cannot_be_moved_is_said(tmp_path):
    (tmp_path / "place").write_text("a file")
    with passing(tmp_path) as made, pytest.raises(OSError):
        settle(filled(made / "x"), tmp_path / "place")
    assert (tmp_path / "place").read_text() == "a file"


def test_every_file_is_on_the_disk_before_it_is_in_place(tmp_path, monkeypatch):
    done, true = [], os.fsync
    monkeypatch.setattr(folders.os, "fsync", lambda number: done.append(os.readlink(f"/proc/self/fd/{number}")
                                                                        if os.path.exists("/proc/self/fd") else "?")
                        or true(number))
    with passing(tmp_path) as made:
        filled(made / "x" / "deep")
        (made / "x" / "other").write_text("")
        settle(made / "x", tmp_path / "place")
        assert len(done) == 2 and all(made.name in name or name == "?" for name in done)
        (made / "y").write_text("")
        settle(made / "y", tmp_path / "file")
    assert len(done) == 3


def test_what_was_left_long_ago_is_swept_and_what_is_being_written_is_not(tmp_path):
    long_ago = time.time() - folders.LEFT_S - 60
    for name in ("left", "busy"):
        filled(tmp_path / f"{folders.PASSING}{name}")
    filled(tmp_path / "other")
    for path in [*tmp_path.rglob("*")]:
        os.utime(path, (long_ago, long_ago))
    os.utime(tmp_path / f"{folders.PASSING}busy" / "part")                # its folder looks old: only the file grows
    with passing(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {f"{folders.PASSING}busy", "other"}


def test_removing_takes_files_links_and_folders_and_what_is_not_there(tmp_path):
    kept = filled(tmp_path / "kept")
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "file").write_text("")
    filled(tmp_path / "folder")
    for name in ("link", "file", "folder", "none"):
        remove(tmp_path / name)
    assert list(tmp_path.iterdir()) == [kept] and (kept / "part").exists()
