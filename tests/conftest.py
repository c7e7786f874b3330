"""What all tests share: the modules can be imported, and nothing of the machine leaks in."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PRIVATE = re.compile(r"(OPENAI|DASHSCOPE)_.*|.*_PROXY", re.IGNORECASE)

for folder in (str(HERE), str(HERE.parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _without_private_variables():
    """Take keys, addresses and proxies out of os.environ; returns what was taken."""
    return {name: os.environ.pop(name) for name in list(os.environ) if PRIVATE.fullmatch(name)}


# subtle: not only in the fixture, since react_min reads its defaults when it is imported, and that
# is while the tests are collected
TAKEN = _without_private_variables()


# subtle: a shell starts its background jobs with Ctrl-C ignored, and their children inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _clean_environment():
    """No test may depend on, or talk to, the server that a developer has set up."""
    _without_private_variables()
    yield
    os.environ.update(TAKEN)


@pytest.fixture(scope="session")
def started_demo():
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    command = [sys.executable, "react_min.py", "--demo", "--messages"]
    env = {**os.environ, "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}  # nobody is there
    process = subprocess.Popen(command, cwd=HERE.parent, env=env, **streams)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="session")
def demo(started_demo):
    """(exit status, standard output, standard error) of one run of the demo"""
    out, err = started_demo.communicate(timeout=60)
    return started_demo.returncode, out, err.replace(b"\r\n", b"\n")
