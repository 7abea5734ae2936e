"""Files are written whole or not at all, and several together."""

import os
import stat

import pytest

from megatron_scalevec.files import write_file, write_files


def content_of(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_files_appear_together(tmp_path):
    (tmp_path / "old").write_text("before")
    (tmp_path / "gone").touch()
    gone = [tmp_path / "gone", tmp_path / "was never there"]
    write_files({tmp_path / "old": "after ö", str(tmp_path / "new"): b"bytes"}, gone)
    assert content_of(tmp_path) == {"old": "after ö", "new": "bytes"}


@pytest.mark.parametrize("bad", ["absent/file", "folder", "pipe"])
def test_what_keeps_one_from_being_written_keeps_all(tmp_path, bad):
    for name, make in (("folder", os.mkdir), ("pipe", os.mkfifo)):
        if name == bad:
            make(tmp_path / name)
    (tmp_path / "old").write_text("before")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file|Is a directory|no regular file"):
        write_files({tmp_path / "new": "x", tmp_path / "old": "after", tmp_path / bad: "y"})
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "old").read_text() == "before"


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_an_interruption_leaves_the_file_and_no_draft(tmp_path, monkeypatch, function):
    def interrupted(*_):
        raise KeyboardInterrupt

    (tmp_path / "old").write_text("before")
    monkeypatch.setattr(os, function, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "old", "after")
    assert content_of(tmp_path) == {"old": "before"}


def test_modes_and_links_stay(tmp_path):
    (tmp_path / "old").write_text("before")
    (tmp_path / "old").chmod(0o640)
    (tmp_path / "link").symlink_to("old")
    mask = os.umask(0o027)
    try:
        write_files({tmp_path / "link": "after", tmp_path / "new": "x"})
    finally:
        os.umask(mask)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "old").read_text() == "after"
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("old", "new")] == [0o640, 0o640]
