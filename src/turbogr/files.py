"""Files that are whole or absent: all that is written goes to a temporary name first and is renamed at the end."""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turbogr.errors import UserError


@contextlib.contextmanager
def whole_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes `target` when the block ends well, and vanishes when it does not.

    A process that is killed leaves at most a `.partial-*` folder beside the target, which the next call removes.
    """
    if os.path.lexists(target) and not overwrite:
        raise UserError(f"{target} exists already: choose another place or pass --overwrite.")
    if os.path.lexists(target) and _kind(target) is None:
        raise UserError(f"{target} was not written by turbogr and stays as it is: choose another place.")
    with said_where(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        partial = Path(tempfile.mkdtemp(prefix=_partial_prefix(target), dir=target.parent))
        partial.chmod(0o755)
        try:
            yield partial
            if target.exists() and _kind(target) not in ("empty", _kind(partial)):
                raise UserError(f"{target} holds something else, a {_kind(target)}: choose another place.")
            _sync_tree(partial)
            replace_folder(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _kind(target: Path) -> str | None:
    """What a folder of ours holds, by its describing file; `empty` for an empty folder, None for what is not ours."""
    if not target.is_dir():
        return None
    if not any(target.iterdir()):
        return "empty"
    if (target / "truth.json").exists():
        return "synthetic log"
    for name in ("manifest.json", "meta.json", "config.json"):
        try:
            form = json.loads((target / name).read_text()).get("format", "")
        except (OSError, ValueError, AttributeError):
            continue
        if str(form).startswith("turbogr-"):
            return str(form)
    return None


def _partial_prefix(target: Path) -> str:
    return f".{target.name}.partial-{os.getpid()}-"


def replace_folder(source: Path, target: Path) -> None:
    """Rename `source` to `target`; an old `target` changes places with it in one step, and is then removed."""
    if not target.exists():
        os.rename(source, target)
    elif _exchange(source, target):
        shutil.rmtree(source, ignore_errors=True)
    else:
        # no such call here: for a moment neither has the name
        aside = target.with_name(f".{target.name}.partial-{os.getpid()}-old")
        os.rename(target, aside)
        os.rename(source, target)
        shutil.rmtree(aside, ignore_errors=True)
    _sync_folder(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically, where the system can (Linux)."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    # AT_FDCWD -100, RENAME_EXCHANGE 2 (linux/fs.h)
    return int(rename(-100, os.fsencode(one), -100, os.fsencode(other), 2)) == 0


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that replaces `target` when the block ends well."""
    with said_where(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        handle, name = tempfile.mkstemp(prefix=_partial_prefix(target), dir=target.parent)
        os.close(handle)
        partial = Path(name)
        partial.chmod(0o644)
        try:
            yield partial
            with partial.open("rb+") as stream:
                os.fsync(stream.fileno())
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def write_json(target: Path, value: Any) -> None:
    with whole_file(target) as partial:
        partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): it was damaged or is another kind of file.") from None


def read_versioned(path: Path, form: str, version: int, refusal: type[UserError], remedy: str) -> dict[str, Any]:
    """The JSON object at `path`, refused where it is of another format (`turbogr-KIND`) or of another version of it."""
    raw, kind = read_json(path), form.removeprefix("turbogr-")
    if not isinstance(raw, dict) or raw.get("format") != form:
        raise refusal(f"{path} does not describe a turbogr {kind}.")
    if raw.get("version") != version:
        found = raw.get("version")
        raise refusal(
            f"{path.parent} has {kind} format version {found}, this turbogr reads version {version}: {remedy}."
        )
    return raw


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def said_where(target: Path) -> Iterator[None]:
    """Turn a full disk or a refused folder into one sentence that names the place."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(f"No space left while writing {target}: free some or choose another disk.") from error
        on_the_way = str(error.filename) in map(str, (target, *target.parents))
        if on_the_way and error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG):
            reason = os.strerror(error.errno)
            raise UserError(f"{target} cannot be made ({reason}: {error.filename}): choose another place.") from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            why = os.strerror(error.errno)
            raise UserError(f"{target} may not be written ({why}): choose another place.") from error
        raise


def _remove_leftovers(target: Path) -> None:
    """Remove `.partial-PID-*` of processes that no longer live."""
    for leftover in target.parent.glob(f".{target.name}.partial-*"):
        owner = leftover.name.removeprefix(f".{target.name}.partial-").split("-")[0]
        if not owner.isdigit() or _alive(int(owner)):
            continue
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb+") as stream:
                os.fsync(stream.fileno())
    _sync_folder(folder)
