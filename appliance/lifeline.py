"""A process of ours does not outlive the one that started it: the kernel sends it SIGKILL when that ends, whatever ended it.

The signal comes when the *thread* that started the process ends, so start processes in threads that live as long as they may.
"""

from __future__ import annotations

import ctypes
import os
import signal

import structlog

_PR_SET_PDEATHSIG = 1
_log = structlog.get_logger()


def end_with_parent(parent: int | None = None) -> None:
    """Call it first in a new process.

    `parent`: process id of who started this one; then even a parent that is gone by now ends it. Not needed by a process
    that has a pipe from its parent, whose end it sees.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _log.warning("this process may outlive the one that started it", reason=os.strerror(ctypes.get_errno()))
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
