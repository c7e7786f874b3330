"""What all tests share: the modules can be imported, and nothing of the machine leaks in."""

import os
import re
import signal
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
