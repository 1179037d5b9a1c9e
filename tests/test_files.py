"""Whole files and folders: complete or absent, whatever happens in between."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turbogr.errors import UserError
from turbogr.files import read_json, said_where, whole_file, whole_folder, write_json


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".partial-" in path.name]


def test_a_folder_appears_only_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "store"
    with whole_folder(target) as partial:
        (partial / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert not leftovers(tmp_path)


def test_a_block_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "store") as partial:
        (partial / "a").write_text("1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "store"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_without_overwrite(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with pytest.raises(UserError, match="exists already.*--overwrite"), whole_folder(tmp_path / "store"):
        pass


def test_overwrite_replaces_the_folder_and_keeps_the_old_one_when_the_block_fails(tmp_path: Path) -> None:
    target = tmp_path / "store"
    target.mkdir()
    (target / "manifest.json").write_text('{"format": "turbogr-store", "version": 1}')
    with pytest.raises(RuntimeError), whole_folder(target, overwrite=True):
        raise RuntimeError
    assert (target / "manifest.json").exists()
    with whole_folder(target, overwrite=True) as partial:
        (partial / "manifest.json").write_text('{"format": "turbogr-store", "version": 2}')
    assert [path.read_text() for path in target.iterdir()] == ['{"format": "turbogr-store", "version": 2}']


def test_overwrite_never_removes_what_turbogr_did_not_write(tmp_path: Path) -> None:
    """Catches: `--overwrite` over the raw log itself, or over a folder of notes."""
    log, notes = tmp_path / "log.csv", tmp_path / "notes"
    log.write_text("u,i,t")
    notes.mkdir()
    (notes / "thesis.md").write_text("years")
    for target in (log, notes):
        with pytest.raises(UserError, match="was not written by turbogr"), whole_folder(target, overwrite=True):
            pass
    assert log.read_text() == "u,i,t" and (notes / "thesis.md").exists()


def test_overwrite_replaces_only_its_own_kind(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "truth.json").write_text("{}")
    with (
        pytest.raises(UserError, match="holds something else, a synthetic log"),
        whole_folder(tmp_path / "log", overwrite=True) as partial,
    ):
        (partial / "manifest.json").write_text('{"format": "turbogr-store"}')
    assert (tmp_path / "log" / "truth.json").exists()


def test_a_killed_process_leaves_no_file_for_ever(tmp_path: Path) -> None:
    target = tmp_path / "config.json"
    code = (
        "import sys, time; from pathlib import Path; from turbogr.files import whole_file\n"
        "with whole_file(Path(sys.argv[1])) as partial: print('in', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.kill()
    process.wait()
    assert list(tmp_path.iterdir()) != []
    with whole_file(target) as partial:
        partial.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_place_that_cannot_be_a_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"), whole_folder(tmp_path / "file" / "store"):
        pass


def test_a_killed_process_leaves_no_folder_and_its_rest_is_removed_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "store"
    code = (
        "import sys, time; from pathlib import Path; from turbogr.files import whole_folder\n"
        "with whole_folder(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'a').write_text('1'); print('in', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "in\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not target.exists()
    assert len(leftovers(tmp_path)) == 1
    with whole_folder(target):
        pass
    assert not leftovers(tmp_path)


def test_the_folder_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f".store.partial-{os.getpid()}-x").mkdir()
    with whole_folder(tmp_path / "store"):
        pass
    assert len(leftovers(tmp_path)) == 1


def test_a_file_is_replaced_whole_or_kept(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    write_json(target, {"a": 1})
    with pytest.raises(RuntimeError), whole_file(target) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"a": 1}
    assert not leftovers(tmp_path)


def test_a_reader_never_sees_a_half_written_file(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    write_json(target, 0)
    code = (
        "import sys; from pathlib import Path; from turbogr.files import write_json\n"
        "for i in range(30): write_json(Path(sys.argv[1]), list(range(3000)))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(target)])
    while child.poll() is None:
        json.loads(target.read_text())
        time.sleep(0.001)
    assert child.returncode == 0
    assert read_json(target) == list(range(3000))


def test_a_full_disk_is_one_sentence_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No space left while writing .*store"), whole_folder(tmp_path / "store"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_refused_folder_is_one_sentence_with_the_place() -> None:
    with pytest.raises(UserError, match="/proc/x may not be written"), said_where(Path("/proc/x")):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_json_that_is_absent_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_json(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"a": ')
    with pytest.raises(UserError, match="bad.json is not valid JSON"):
        read_json(tmp_path / "bad.json")
