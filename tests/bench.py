"""Fast and light? This project and its peers, measured side by side in one run.

    python tests/bench.py            # the whole table, in three or four minutes
    python tests/bench.py --quick    # fewer repetitions, within one minute
    python tests/bench.py --save     # writes tests/bench.json too

The peers are what `pip install openai httpx-sse sseclient-py langchain-openai` brings, in an
environment of their own; a row whose peer is missing says so. CPU time and memory are those of a
fresh process for each measurement. The contenders of a row take turns, and what counts is the ratio
of their medians, since seconds say more of the machine than of the code.

But:
- no connection but the loopback: neither TLS nor a distant server is part of any number
- for Linux: the peak of memory is what /proc says
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import pickle
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import distribution, distributions
from pathlib import Path
from statistics import median
from typing import Any, Callable

# The user's settings are no part of it, and bytecode is kept, as usual: before our own imports.
for name in list(os.environ):
    if re.match(r"(?i)OPENAI_|DASHSCOPE_|LANG(CHAIN|SMITH)_|\w+_PROXY$|PYTHONDONTWRITE", name):
        del os.environ[name]
sys.dont_write_bytecode = False
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wire  # noqa: E402
from react_min import call_model_stream, run_agent  # noqa: E402
from tools import Tool  # noqa: E402

PEERS = ("openai", "httpx-sse", "sseclient-py", "langchain-openai")
VERSIONS = {found.metadata["Name"]: found.version for found in distributions()}
MISSING = set(PEERS) - set(VERSIONS)
DELTAS = 20_000
ASK = [{"role": "user", "content": "?"}]

# id, what is measured, in what, of whom, against whom, and the most that the ratio of both may be
# (or the number itself, where there is nobody to compare it with)
TABLE = (
    ("sse-httpx", "SSE parsing", "CPU ms", "ours", "httpx-sse", 0.6),
    ("sse-openai", "SSE parsing", "CPU ms", "ours", "openai", 0.2),
    ("sse-sseclient", "SSE parsing", "CPU ms", "ours", "sseclient-py", None),
    ("sse-json", "SSE parsing", "CPU ms", "ours", "json.loads", 0.35),
    ("line-doubled", "one huge line", "CPU ms", "16 MiB", "8 MiB", 2.3),
    ("line-httpx", "one huge line", "CPU ms", "8 MiB", "httpx-sse", 1.0),
    ("lines-doubled", "one event of lines", "CPU ms", "200,000", "100,000", 2.3),
    ("lines-httpx", "one event of lines", "CPU ms", "100,000", "httpx-sse", 1.0),
    ("round-openai", "a whole round", "CPU ms", "ours", "openai", 0.05),
    ("round-langchain", "a whole round", "CPU ms", "ours", "langchain-openai", 0.04),
    ("round-requests", "a whole round", "CPU ms", "ours", "requests + json", None),
    ("first-chunked", "first token", "ms", "chunked", "", 5),
    ("first-close", "first token", "ms", "close-delimited", "", 5),
    ("first-gzip", "first token", "ms", "gzip", "", 5),
    ("help", "start", "CPU ms", "--help", "import requests", 1.2),
    ("import", "start", "CPU ms", "import react_min", "import requests", 1.1),
    ("memory-requests", "peak of memory", "MiB", "ours", "requests + json", 1.15),
    ("memory-openai", "peak of memory", "MiB", "ours", "openai", 0.5),
    ("tools", "8 parallel tools", "ms", "ours", "the slowest", 1.05),
    ("connections", "5 rounds", "", "connections", "", 1),
    ("silent", "silence after [DONE]", "ms", "waited", "", 5),  # no wait; 5 is no more than noise
    ("packages", "install", "", "packages", "", 5),
    ("size", "install", "MB", "size", "", 3),
    ("foreign", "install", "", "other packages", "", 0),
)
COLUMNS = ("id", "what", "in", "against", "ours", "theirs", "value", "unit", "goal", "reached")
Numbers = dict[tuple[str, str], float]  # (what, of whom): the number


def run(setup: str, value: str, data: bytes = b"") -> list[float]:
    """Of an expression in a fresh process: CPU milliseconds, its value, and the peak in MiB."""
    # subtle: ru_maxrss of a child begins at its parent's, VmHWM begins at the exec
    code = rf"""{setup}
import gc, re, time
gc.collect()
start = time.process_time()
value = {value}
print(1000 * (time.process_time() - start), value)
print(int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1]) / 1024)"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, input=data, stdout=subprocess.PIPE)
    return list(map(float, done.stdout.split()))


# ------------------------------------------------------------------ parsing

PARSERS = {  # chunks in, events out, as each library's own user would call it
    "ours": ("from sse import iter_events", "iter_events(chunks)"),
    "httpx-sse": (
        "from httpx import Response\nfrom httpx_sse import EventSource as Source\n"
        "head = {'content-type': 'text/event-stream'}",
        "Source(Response(200, headers=head, content=iter(chunks))).iter_sse()",
    ),
    "openai": ("from openai._streaming import SSEDecoder", "SSEDecoder().iter_bytes(iter(chunks))"),
    "sseclient-py": ("from sseclient import SSEClient", "SSEClient(iter(chunks)).events()"),
    "json.loads": ("from json import loads", "map(loads, chunks)"),
}


def parsing(what: str, whose: str, parser: str, chunks: list[Any]) -> Numbers:
    imports, events = PARSERS[parser]
    setup = f"{imports}\nimport pickle, sys\nchunks = pickle.load(sys.stdin.buffer)"
    cpu, found, _ = run(setup, f"sum(1 for _ in {events})", pickle.dumps(chunks))
    assert found == (DELTAS if what == "SSE parsing" else 1), f"{parser} finds {found} events"
    return {(what, whose): cpu}


def parsings() -> Iterator[Callable[[], Numbers]]:
    events = list(map(event, range(DELTAS)))
    stream = cut(b"".join(events), 16 << 10)
    line, lines = b"x" * (8 << 20), b"data: a line of text\n" * 100_000
    for what, whose, parser, chunks in (
        *(("SSE parsing", name, name, stream) for name in PARSERS if name != "json.loads"),
        ("SSE parsing", "json.loads", "json.loads", [event[6:-2].decode() for event in events]),
        ("one huge line", "8 MiB", "ours", cut(b"data: %s\n\n" % line)),
        ("one huge line", "httpx-sse", "httpx-sse", cut(b"data: %s\n\n" % line)),
        ("one huge line", "16 MiB", "ours", cut(b"data: %s%s\n\n" % (line, line))),
        ("one event of lines", "100,000", "ours", cut(lines + b"\n")),
        ("one event of lines", "httpx-sse", "httpx-sse", cut(lines + b"\n")),
        ("one event of lines", "200,000", "ours", cut(lines + lines + b"\n")),
    ):
        if parser not in MISSING:
            yield partial(parsing, what, whose, parser, chunks)


def event(number: int) -> bytes:
    value = dict(wire.chunk({"content": f"第{number}段"}), created=1764547200, model="qwen3-1.7b")
    value.update(system_fingerprint="fp_" + "0" * 36, usage=None)
    return f"data: {json.dumps(value)}\n\n".encode()


def cut(raw: bytes, largest: int = 1 << 10) -> list[bytes]:
    """In chunks of 1 KiB up to `largest`."""
    dice, source = random.Random(1), io.BytesIO(raw)
    return list(iter(lambda: source.read(dice.randint(1 << 10, largest)), b""))


# ------------------------------------------------------------------ a whole round

CLIENTS = {  # each streams one reply, of the server's `model`: how long are the pieces of its text
    "ours": """
from react_min import call_model_stream
def stream(model):
    heard = []
    hear = lambda text: heard.append(len(text))
    call_model_stream(ASK, model=model, **SERVER, on_reasoning=hear, on_content=hear)
    return heard""",
    "openai": """
from openai import OpenAI
client = OpenAI(**SERVER)
def stream(model):
    for part in client.chat.completions.create(model=model, messages=ASK, stream=True):
        yield len(part.choices[0].delta.content or "")""",
    "langchain-openai": """
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(model="m", **SERVER)
def stream(model):
    return (len(part.content) for part in chat.stream("?", model=model))""",
    "requests + json": """
import json, requests
def stream(model):
    body = {"model": model, "messages": ASK, "stream": True}
    reply = requests.post(SERVER["base_url"] + "/chat/completions", json=body, stream=True)
    for line in reply.iter_lines(None):
        if line.startswith(b"data: {"):
            yield len(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")""",
}


def a_round(name: str, server: dict[str, str]) -> Numbers:
    setup = f"ASK, SERVER = {ASK}, {server}{CLIENTS[name]}\nsum(stream('small'))"  # to warm up
    cpu, length, peak = run(setup, "sum(stream('deltas'))")
    assert length == sum(len(f"第{number}段") for number in range(DELTAS)), name
    return {("a whole round", name): cpu, ("peak of memory", name): peak}


FRAMINGS: Any = {"chunked": {}, "close-delimited": {"framing": "close"}, "gzip": {"gzip": True}}


def answer(request: wire.Request) -> wire.Reply:
    """What the server sends; the name of the model says what is wanted."""
    wanted, stop = request.body["model"], wire.sse(wire.chunk({}, "stop"))
    if wanted == "deltas":
        return wire.Reply([*map(event, range(DELTAS)), stop])
    if wanted == "tools" and request.body["messages"][-1]["role"] == "user":
        return wire.Reply([wire.calls([("wait", {"number": n}) for n in range(8)])])
    if wanted in FRAMINGS:
        first = wire.sse(wire.chunk({"content": repr(time.time())}), done=False)
        return wire.Reply([first, stop], gap=0.05, **FRAMINGS[wanted])
    return wire.Reply([wire.say("好")], end="hang" if wanted == "silent" else "clean")


def serve(pipe: Any) -> None:
    """The process of the server, which ends with its parent."""
    with wire.server(answer) as server:
        pipe.send(server.base_url)
        pipe.recv()


# ------------------------------------------------------------------ first token, tools, start


def first_token(framing: str, server: dict[str, str]) -> Numbers:
    late: list[float] = []
    hear = {"on_content": lambda sent: late.append(time.time() - float(sent))}
    call_model_stream(ASK, model=framing, **server, **hear)
    return {("first token", framing): 1000 * late[0]}


def silence(server: dict[str, str]) -> Numbers:
    heard: list[float] = []
    hear = {"on_content": lambda _: heard.append(time.monotonic())}
    call_model_stream(ASK, model="silent", **server, **hear)
    return {("silence after [DONE]", "waited"): 1000 * (time.monotonic() - heard[0])}


def tools_at_once(server: dict[str, str]) -> Numbers:
    definition = {"type": "function", "function": {"name": "wait", "parameters": {}}}
    ran: list[int] = []
    tool = Tool(definition, lambda number: time.sleep(0.5) or ran.append(number))
    start, what = time.monotonic(), "8 parallel tools"  # and the model's two rounds
    run_agent("?", tools=[tool], model="tools", **server)
    spent = 1000 * (time.monotonic() - start)
    assert sorted(ran) == list(range(8))
    return {(what, "ours"): spent, (what, "the slowest"): 500}


def connections() -> Numbers:
    replies = [wire.calls([("get_time", {}, f"c{n}")]) for n in range(4)] + [wire.say("好")]
    with wire.server(replies) as server:
        run_agent("?", base_url=server.base_url, model="m", api_key="k")
        assert len(server.requests) == 5
        return {("5 rounds", "connections"): server.connections}


def start(name: str) -> Numbers:
    command = [sys.executable, *(("react_min.py", name) if name == "--help" else ("-c", name))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
    assert status == 0, command
    return {("start", name): 1000 * (used.ru_utime + used.ru_stime)}


FOREIGN = """import sys, requests  # which takes along what it finds, say zstandard
packages = lambda: {n.split(".")[0] for n, at in sys.modules.items() if "site-packages" in repr(at)}
known = packages()
import react_min, sse, tools"""


def install() -> Numbers:
    needed, size = ["requests"], 0
    for name in needed:
        package = distribution(name)
        size += sum(file.size or 0 for file in package.files or [])  # without bytecode
        requires = [line for line in package.requires or [] if "extra ==" not in line]
        needed += {re.split(r"[^\w.-]", line)[0] for line in requires}.difference(needed)
    _, foreign, _ = run(FOREIGN, "len(packages() - known)")
    numbers = {"packages": len(needed), "size": size / 1e6, "other packages": foreign}
    return {("install", name): number for name, number in numbers.items()}


# ------------------------------------------------------------------ the table


def plan(server: dict[str, str]) -> Iterator[tuple[int, list[Callable[[], Numbers]]]]:
    """What takes turns with what, and how many times as often as the slow ones."""
    yield 2, list(parsings())
    yield 1, [partial(a_round, name, server) for name in CLIENTS if name not in MISSING]
    yield 4, [partial(first_token, framing, server) for framing in FRAMINGS]
    yield 4, [partial(start, n) for n in ("--help", "import react_min", "import requests")]
    yield 1, [partial(tools_at_once, server), partial(silence, server), connections, install]


def row(numbers: Numbers, key: str, what: str, unit: str, who: str, whom: str, goal: Any) -> Any:
    ours, theirs = numbers[what, who], numbers.get((what, whom))
    value = (ours / theirs if theirs else None) if whom else ours
    reached = "-" if goal is None else "yes" if value is not None and value <= goal else "NO"
    reached = "not installed" if value is None else reached
    who = f"{who} / {whom}" if whom else who
    return (key, what, unit, who, ours, theirs, value, "" if whom else unit, goal, reached)


def as_text(cells: Any) -> str:
    texts = (f"{round(c, 3):g}" if isinstance(c, (int, float)) else c or "-" for c in cells)
    return "{1:21}{2:8}{3:35}{4:>9}{5:>9}{6:>8}{8:>6}  {9}".format(*texts)


def main() -> None:
    parser = argparse.ArgumentParser(description="This project and its peers, side by side")
    parser.add_argument("--quick", action="store_true", help="3 repetitions instead of 12")
    parser.add_argument("--save", action="store_true", help="write tests/bench.json too")
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    multiprocessing.Process(target=serve, args=[there], daemon=True).start()
    seen: dict[tuple[str, str], list[float]] = {}
    for times, measures in plan({"base_url": here.recv(), "api_key": "k"}):
        for _ in range(times * (3 if options.quick else 12)):
            print(".", end="", flush=True, file=sys.stderr)
            for measure in random.sample(measures, len(measures)):
                for key, number in measure().items():
                    seen.setdefault(key, []).append(number)
    rows = [row({key: median(found) for key, found in seen.items()}, *entry) for entry in TABLE]
    saved: Any = {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]}
    saved["versions"] = {name: VERSIONS.get(name) for name in ("requests", "urllib3", *PEERS)}
    print("", saved, as_text(COLUMNS), *map(as_text, rows), sep="\n")
    if options.save:
        saved["rows"] = [dict(zip(COLUMNS, cells)) for cells in rows]
        (ROOT / "tests/bench.json").write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
