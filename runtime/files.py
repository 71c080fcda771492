"""Files: written whole, made once, locked by one process, downloaded from the Hugging Face hub."""

import atexit
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from runtime.errors import UserError, first_line


def hash_of(value) -> str:
    """Hash anything JSON can hold to a short name."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def write_file(file: Path, content: str | bytes):
    """Write a file atomically: a kill leaves the old content or the new, never half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.rename(file)


LOCKS: dict[Path, IO] = {}  # locks of this process, held until it ends


def lock(directory: Path, wait: bool = False):
    """Make this process the only writer of a directory, at once or after waiting for another process."""
    if directory in LOCKS:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("w")
    except OSError as error:
        reason = f"cannot write there ({error.strerror})"
        raise UserError(f"{directory}: {reason}: choose another --runs") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        locked = f"{directory} is locked by another process"
        if not wait:
            raise UserError(f"{locked}: wait, or choose another --name") from None
        print(f"{locked}: waiting for it", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    LOCKS[directory] = file
    atexit.register(remove_if_empty, directory)


def unlock(directory: Path):
    """Release a lock of this process."""
    LOCKS.pop(directory).close()


def remove_if_empty(directory: Path):
    """Remove a directory in which nothing but the lock was written."""
    if directory.is_dir() and [file.name for file in directory.iterdir()] == ["lock"]:
        (directory / "lock").unlink()
        directory.rmdir()


@contextmanager
def made_once(directory: Path) -> Iterator[Path | None]:
    """Yield a place to make `directory` in, or None if it exists: one process makes it, whole or not."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if directory.exists():
                yield None
                return
            partial = directory.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
            partial.mkdir()
            yield partial
            partial.rename(directory)
    except OSError as error:
        raise UserError(f"--cache {directory.parent}: data could not be prepared there ({error})") from None


def download(
    name: str, flag: str, files: list[str], kind="model", revision: str | None = None, *, holding=""
) -> Path:
    """Return a local directory, or download files (patterns) of a repository from the hub, once.

    `holding` describes the files in an error.
    """
    path = Path(name)
    holding = holding or ", ".join(files)
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.endswith("/") or len(path.parts) > 2 or path.is_file():
        raise UserError(f"{flag} {name}: no such directory; give one with {holding}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        problem = f"no such directory, and no such {kind} on the hub ({first_line(error).rstrip('.')})"
        raise UserError(f"{flag} {name}: {problem}; give a directory with {holding}") from None
