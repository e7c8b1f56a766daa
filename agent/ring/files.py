"""Private files in shared memory, and the locks that show which processes live."""

import errno
import fcntl
import os
import resource
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mp_agent.errors import RingError
from mp_agent.ring.interruptions import pass_on

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
_CREATE_ATTEMPTS = 5
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a planted FIFO would hang.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

SHORTAGES = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Errors where no room is left, or allowed."""
_MEBIBYTE = 1 << 20
ROOM_BYTES = 16 * _MEBIBYTE
"""Room that a rank should find free: its ring, and more for other optimizers and layers."""
_FLOCK = struct.Struct("hhqqi0q")
"""struct flock: type, whence, start, length, pid."""
_FIRST_OF_PROGRAM = 3
"""Those below are standard streams, to which any library of the process may print."""


@contextmanager
def beyond_standard_streams() -> Iterator[None]:
    """Let no descriptor that is made within become a standard stream, of which some may be closed.

    What a C library prints would damage the file.
    """
    placeholders: list[int] = []
    try:
        while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) < _FIRST_OF_PROGRAM:
            placeholders.append(fd)
        os.close(fd)
        yield
    finally:
        for fd in placeholders:
            os.close(fd)


def open_standard_streams() -> None:
    """Open those standard streams of this process that are closed, for good."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < _FIRST_OF_PROGRAM:
        os.set_inheritable(fd, True)
    os.close(fd)


@contextmanager
def appearing(path: Path) -> Iterator[int]:
    """Make a private file that gets its name when the block ends without error; yield its fd.

    No process sees the file incomplete. The fd stays open, and is the caller's. On error nothing is
    left behind. Raises FileExistsError when the name is taken, RingError for foreign directories.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    fd = _create(hidden)
    try:
        yield fd
        os.link(hidden, path)
    except BaseException:
        os.close(fd)
        raise
    finally:
        hidden.unlink(missing_ok=True)


def _create(path: Path) -> int:
    for attempt in range(1, _CREATE_ATTEMPTS + 1):
        make_private_directory(path.parent)
        # Left by an exception from a signal handler, or by a process that had this id.
        path.unlink(missing_ok=True)
        try:
            with beyond_standard_streams():
                return os.open(path, _CREATE_FLAGS | os.O_EXCL, _FILE_MODE)
        except FileNotFoundError:
            # The node agent of an earlier attempt removes empty directories.
            if attempt == _CREATE_ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def make_private_directory(directory: Path) -> None:
    """Make a directory and its parents for their owner alone; keep those that exist.

    Raises RingError when the directory is not ours, or when one of the two above it is neither
    ours nor root's: their owner could put other files in place of ours.
    """
    for missing in reversed([directory, *directory.parents]):
        if not missing.exists():
            missing.mkdir(_DIRECTORY_MODE, exist_ok=True)
    _refuse_foreign(directory, {os.geteuid()})
    for above in directory.parents[:2]:
        _refuse_foreign(above, {os.geteuid(), 0})


def _refuse_foreign(directory: Path, owner_uids: set[int]) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise RingError(f"{directory}: not a directory")
    if status.st_uid not in owner_uids:
        raise RingError(f"{directory}: belongs to uid {status.st_uid}, not to {os.geteuid()}")


def open_private(path: Path, *, owner_uid: int | None = None) -> int:
    """Return an fd for reading a file of ours, or of `owner_uid`.

    Raises OSError when it cannot be opened, RingError when it is foreign or not a regular file.
    """
    fd = os.open(path, _READ_FLAGS)
    try:
        _refuse_foreign_file(path, fd, os.geteuid() if owner_uid is None else owner_uid)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_private(path: Path, bytes_max: int) -> bytes | None:
    """Return what a file of ours holds, at most its first `bytes_max` bytes.

    Returns None when it is absent, foreign or cannot be read.
    """
    if not os.access(path, os.F_OK):  # asked often, and cheaper than to look into an exception
        return None
    try:
        fd = open_private(path)
    except (OSError, RingError) as error:
        pass_on(error)
        return None
    try:
        return os.read(fd, bytes_max)
    except OSError as error:
        pass_on(error)
        return None
    finally:
        os.close(fd)


def _refuse_foreign_file(path: Path, fd: int, owner_uid: int) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise RingError(f"{path}: not a regular file")
    if status.st_uid != owner_uid:
        raise RingError(f"{path}: belongs to uid {status.st_uid}, not to {owner_uid}")


def replace_atomically(path: Path, content: bytes) -> None:
    """Put a private file with `content` in place of `path`; readers see the old or the new one."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    with beyond_standard_streams():
        fd = os.open(hidden, _CREATE_FLAGS | os.O_TRUNC, _FILE_MODE)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def lock_for_life(fd: int) -> None:
    """Lock a file until this process ends or closes *any* fd of it; forked children hold nothing.

    Raises OSError when another process holds the lock.
    """
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(fd: int) -> bool:
    """Return whether another process holds a lock on the file. Takes none itself.

    A process never sees its own `lock_for_life`.
    """
    return _lock_of_another(fd)[0] != fcntl.F_UNLCK


def lock_holder(fd: int) -> int:
    """Return the other process with a `lock_for_life`, by its number in this PID namespace.

    0 where there is none, and where it is in a namespace that cannot be seen from here.
    """
    lock_type, pid = _lock_of_another(fd)
    return 0 if lock_type == fcntl.F_UNLCK else pid


def _lock_of_another(fd: int) -> tuple[int, int]:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    lock_type, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return lock_type, pid


def open_and_lock(path: Path) -> int | None:
    """Return an fd that locks the file at `path` until it is closed; None when it is locked.

    The file is made if need be. Children that inherit the fd hold the lock too. Raises OSError
    when the file cannot be made, RingError when it is foreign.
    """
    while True:
        with beyond_standard_streams():
            fd = os.open(path, _CREATE_FLAGS, _FILE_MODE)
        try:
            _refuse_foreign_file(path, fd, os.geteuid())
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            if _is_at(path, fd):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        # The holder before us removed the file between our open and our lock.
        os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def is_still(fd: int, status: os.stat_result) -> bool:
    """Return whether `fd` is the file that it was, and has not been closed by the program."""
    try:
        return os.path.samestat(os.fstat(fd), status)
    except OSError:
        return False


def no_room(path: Path, needed_bytes: int, shortage: int = errno.ENOSPC) -> str:
    """Return which file system lacks room for a ring of this rank, and what size to ask for.

    shortage: one of `SHORTAGES`; EFBIG: the process may not make a file so large.
    """
    if shortage == errno.EFBIG:
        limit_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit, needed = _size(limit_bytes), _size(needed_bytes)
        return f"a file may grow to {limit} (ulimit -f), and a ring needs {needed} more"
    place = path
    while not place.exists() or not os.path.ismount(place):
        place = place.parent
    size = os.statvfs(place)
    if size.f_files and not size.f_favail:
        return f"{place} is full: it holds all {size.f_files} files that it may (df -i; nr_inodes)"
    free_bytes, size_bytes = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    rings = int(ranks) if ranks.isdecimal() and int(ranks) else 1
    wanted_bytes = size_bytes - free_bytes + rings * max(needed_bytes, ROOM_BYTES)
    return (
        f"{place} is full: {_size(free_bytes)} of {_size(size_bytes)} are free, and a ring takes "
        f"{_size(needed_bytes)}. Make it at least {_size(wanted_bytes)}, in Docker by --shm-size, "
        "in Kubernetes by an emptyDir with medium: Memory"
    )


def _size(size_bytes: int) -> str:
    """Return a size in KiB or MiB, rounded up."""
    if size_bytes < _MEBIBYTE:
        return f"{-(-size_bytes // 1024)} KiB"
    return f"{-(-size_bytes // _MEBIBYTE)} MiB"
