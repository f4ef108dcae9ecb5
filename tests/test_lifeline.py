"""A process that has asked for it ends with the one that started it, also if that was gone before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHILD = """
import os, sys, time
from appliance.lifeline import end_with_parent
end_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())]); time.sleep(60)"


def test_a_killed_parent_takes_its_child_along() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as output:
        assert int(output.readline()) != parent.pid
        parent.kill()
        parent.wait()
        assert output.read() == b""  # at once: nobody holds the pipe any more


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    somebody_else = os.getppid()
    done = subprocess.run([sys.executable, "-c", CHILD, str(somebody_else)], cwd=ROOT, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
