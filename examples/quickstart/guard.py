"""Runs one command and leaves no process of it behind, whatever happens to the process that asked for it.

    python guard.py GRACE_S COMMAND [ARGUMENT ...]

The asker holds the other end of this process's standard input and never writes to it: closing it, or dying in
any way, ends the command. The command is asked to stop (SIGTERM) and killed after ``GRACE_S`` seconds; everything
that it started is killed with it, in whatever group or session. The exit status is the command's, 128 + n where
signal n ended it.

Standard library only: it is run as a file, without the packages of this project.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_EXECUTE = 126
_ORPHAN_GRACE_S = 1.0  # for helpers that tidy up (shared memory) when their parent has ended


def _children() -> Iterator[int]:
    """Ids of this process's living children: the orphans that the command left behind."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if int(parent) == os.getpid() and state not in "ZX":
            yield int(entry.name)


def _reap() -> bool:
    """Collect every child that has ended. Whether none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _end_orphans() -> None:
    """Let every descendant end, then kill it. The children of a killed one become ours: hence the rounds."""
    deadline = time.monotonic() + _ORPHAN_GRACE_S
    while not _reap():
        if time.monotonic() > deadline:
            for child in _children():
                os.kill(child, signal.SIGKILL)  # ours and not collected, so the id still belongs to it
        time.sleep(0.01)


def _run(command: list[str], grace_s: float) -> int:
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error}", file=sys.stderr)
        return _CANNOT_EXECUTE
    ended = os.pidfd_open(process.pid)
    select.select([sys.stdin, ended], [], [])
    if process.poll() is None:
        process.terminate()
        select.select([ended], [], [], grace_s)
    process.kill()  # does nothing where it has ended
    status = process.wait()
    _end_orphans()
    return status if status >= 0 else 128 - status


def main() -> int:
    """Run the command of this process's arguments; its exit status."""
    # Orphans of the command become children of this process, so that they can be found and collected.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print("the kernel refused PR_SET_CHILD_SUBREAPER", file=sys.stderr)
        return _CANNOT_EXECUTE
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Only the asker decides. A handler, not SIG_IGN: the command would inherit that.
        signal.signal(number, lambda _number, _frame: None)
    return _run(sys.argv[2:], float(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
