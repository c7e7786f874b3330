"""Fast and light? This project and its peers, measured side by side in one run.

    python tests/bench.py            # the whole table
    python tests/bench.py --quick    # fewer repetitions, within a minute
    python tests/bench.py --save     # and tests/bench.json

A peer that is not installed is left out: `pip install openai httpx-sse sseclient-py
langchain-openai`, in an environment of their own. All contenders of a row take turns; what counts
is CPU time, and of that the ratio of the medians, since seconds say more of the machine than of
the code. Servers run in another process, and so does each client that streams a whole reply.

But:
- no connection but the loopback: neither TLS nor a distant server is part of any number
- not for Windows (the CPU time of children)
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import io
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import wire  # noqa: E402

PEERS = {  # the distribution and its module
    "openai": "openai",
    "httpx-sse": "httpx_sse",
    "sseclient-py": "sseclient",
    "langchain-openai": "langchain_openai",
}
DELTAS = 20_000
ASK = [{"role": "user", "content": "?"}]
MODEL = {"model": "m", "api_key": "k"}


class Row(NamedTuple):
    """One line of the table; `value` is None if there is no peer, `goal` if there is no goal."""

    what: str
    against: str
    value: Optional[float]
    goal: Optional[float]
    unit: str = ""  # "": a ratio

    def reached(self) -> str:
        if self.value is None:
            return "no peer"
        return "-" if self.goal is None else "yes" if self.value <= self.goal else "NO"

    def __str__(self) -> str:
        value = "-" if self.value is None else f"{self.value:.3f}"
        goal = "-" if self.goal is None else f"{self.goal:g}"
        left = f"{self.what:24}{self.against:28}{value:>8} {self.unit:9}"
        return f"{left}goal {goal:6}{self.reached()}"


def installed(name: str) -> bool:
    return importlib.util.find_spec(PEERS.get(name, name)) is not None


def interleaved(contenders: dict[str, Callable[[], float]], repeat: int) -> dict[str, float]:
    """The median of what each contender returns; they take turns, each time in another order."""
    seen: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name in random.sample(list(contenders), len(contenders)):
            seen[name].append(contenders[name]())
    return {name: statistics.median(values) for name, values in seen.items()}


def ratio(medians: dict[str, float], ours: str, other: str) -> Optional[float]:
    return medians[ours] / medians[other] if other in medians else None


# ------------------------------------------------------------------ parsing, in this process


def cpu_of(parse: Callable[..., Iterable[Any]], source: Any, events: int) -> float:
    gc.collect()
    start = time.process_time()
    found = sum(1 for _ in parse(source))
    spent = time.process_time() - start
    assert found == events, f"{parse}: {found} events, not {events}"
    return spent


def parsers() -> dict[str, Callable[[list[bytes]], Iterable[Any]]]:
    """Chunks in, events out, as each library's own user would call it."""
    import sse

    found: dict[str, Any] = {"ours": sse.iter_events}
    if installed("httpx-sse"):
        from httpx import Response
        from httpx_sse import EventSource

        kind = {"content-type": "text/event-stream"}
        response = partial(Response, 200, headers=kind)
        found["httpx-sse"] = lambda chunks: EventSource(response(content=iter(chunks))).iter_sse()
    if installed("openai"):
        from openai._streaming import SSEDecoder

        found["openai"] = lambda chunks: SSEDecoder().iter_bytes(iter(chunks))
    if installed("sseclient-py"):
        from sseclient import SSEClient

        found["sseclient-py"] = lambda chunks: SSEClient(iter(chunks)).events()
    return found


def cut(raw: bytes, smallest: int, largest: int) -> list[bytes]:
    dice, source = random.Random(1), io.BytesIO(raw)
    return list(iter(lambda: source.read(dice.randint(smallest, largest)), b""))


def payload(number: int) -> str:
    value = dict(wire.chunk({"content": f"第{number}段"}), created=1764547200, model="qwen3-1.7b")
    return json.dumps(dict(value, system_fingerprint="fp_" + "0" * 36, usage=None))


def sse_rows(repeat: int) -> Iterator[Row]:
    texts = [payload(number) for number in range(DELTAS)]
    chunks = cut("".join(f"data: {text}\n\n" for text in texts).encode(), 1 << 10, 16 << 10)
    contenders = {name: partial(cpu_of, parse, chunks, DELTAS) for name, parse in parsers().items()}
    contenders["json.loads"] = partial(cpu_of, partial(map, json.loads), texts, DELTAS)
    medians = interleaved(contenders, 3 * repeat)
    goals = {"httpx-sse": 0.6, "openai": 0.2, "sseclient-py": None, "json.loads": 0.35}
    for other, goal in goals.items():
        yield Row("SSE parsing", f"CPU / {other}", ratio(medians, "ours", other), goal)


SHAPES = {  # one event: its beginning, what makes it huge, its end
    "8 MiB line": (b"data: ", b"x" * (8 << 20), b"\n\n"),
    "100,000 data lines": (b"", b"data: a line of text\n" * 100_000, b"\n"),
}


def parse(name: str, what: str, times: str) -> None:
    """One measurement in a process of its own: what was allocated before makes these unsteady."""
    head, body, tail = SHAPES[what]
    chunks = cut(head + body * int(times) + tail, 1 << 10, 1 << 10)
    print(cpu_of(parsers()[name], chunks, 1))


def hostile_rows(repeat: int) -> Iterator[Row]:
    def measure(*how: str) -> float:
        return float(run(__file__, "--parse", *how))

    for what in SHAPES:
        contenders = {name: partial(measure, name, what, "1") for name in ("ours", "httpx-sse")}
        contenders["twice"] = partial(measure, "ours", what, "2")
        if not installed("httpx-sse"):
            del contenders["httpx-sse"]
        medians = interleaved(contenders, 2 * repeat)
        yield Row(what, "CPU, twice the size / once", ratio(medians, "twice", "ours"), 2.3)
        yield Row(what, "CPU / httpx-sse", ratio(medians, "ours", "httpx-sse"), 1.0)


# ------------------------------------------------------------------ a whole round, in processes


def answer(request: wire.Request) -> wire.Reply:
    """What the server process sends; the path says what is wanted."""
    kind = request.path.split("/")[1]
    end = [wire.chunk({}, "stop")]
    if kind == "deltas":
        events = (f"data: {payload(number)}\n\n".encode() for number in range(DELTAS))
        return wire.Reply([*events, wire.sse(*end)])
    if kind == "tools" and request.body["messages"][-1]["role"] == "user":
        return wire.Reply([wire.calls([("wait", {"number": n}) for n in range(8)])])
    if kind in ("chunked", "close", "gzip"):
        first = wire.sse(wire.chunk({"content": repr(time.time())}), done=False)
        framing = "close" if kind == "close" else "chunked"
        return wire.Reply([first, wire.sse(*end)], framing=framing, gap=0.05, gzip=kind == "gzip")
    return wire.Reply([wire.say("好")], end="hang" if kind == "silent" else "clean")


def serve() -> None:
    with wire.server(answer) as server:
        print(server.base_url[: -len("/v1")], flush=True)
        sys.stdin.read()  # until the parent is gone


CLIENTS = {  # each streams one reply and yields the lengths of the pieces of its text
    "ours": """
from react_min import call_model_stream
def stream(url):
    found = []
    hear = lambda text: found.append(len(text))
    call_model_stream(ASK, base_url=url, **MODEL, on_reasoning=hear, on_content=hear)
    return found""",
    "openai": """
from openai import OpenAI
def stream(url):
    client = OpenAI(base_url=url, api_key="k")
    for part in client.chat.completions.create(model="m", messages=ASK, stream=True):
        yield len(part.choices[0].delta.content or "")""",
    "langchain-openai": """
from langchain_openai import ChatOpenAI
def stream(url):
    return (len(part.content) for part in ChatOpenAI(base_url=url, **MODEL).stream("?"))""",
    "requests": """
import requests
def stream(url):
    response = requests.post(url + "/chat/completions", json={}, stream=True)
    return map(len, response.iter_content(None))""",
}
# One small reply to warm up, then the measured one. subtle: on Linux ru_maxrss of a child begins at
# its parent's, VmHWM begins at the exec; in KiB.
WORK = """
import gc, os, re, resource, sys, time
sum(stream(sys.argv[1] + "/warm/v1"))
gc.collect()
start = time.process_time()
length = sum(stream(sys.argv[1] + "/deltas/v1"))
print(time.process_time() - start, length)
if os.path.exists("/proc/self/status"):
    print(*re.findall(r"VmHWM:\s*(\d+)", open("/proc/self/status").read()))
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def round_rows(url: str, repeat: int) -> Iterator[Row]:
    names = ["ours", "requests", *filter(installed, ("openai", "langchain-openai"))]
    rss: dict[str, list[float]] = {name: [] for name in names}
    lengths: set[float] = set()

    def measure(name: str) -> float:
        code = f"ASK, MODEL = {ASK}, {MODEL}{CLIENTS[name]}{WORK}"
        cpu, length, peak = map(float, run("-c", code, url).split())
        rss[name].append(peak)
        if name != "requests":  # which counts the bytes
            lengths.add(length)
        return cpu

    cpu = interleaved({name: partial(measure, name) for name in names}, repeat)
    assert len(lengths) == 1, f"not the same text: {lengths}"
    for other, goal in (("openai", 0.05), ("langchain-openai", 0.04), ("requests", None)):
        yield Row("a whole round", f"CPU / {other}", ratio(cpu, "ours", other), goal)
    peaks = {name: statistics.median(values) for name, values in rss.items()}
    for other, goal in (("requests", 1.15), ("openai", 0.5)):
        yield Row("memory", f"peak RSS / {other}", ratio(peaks, "ours", other), goal)


def ask(url: str, **hear: Callable[[str], object]) -> None:
    import react_min  # not above: main() first takes the user's settings out of os.environ

    react_min.call_model_stream(ASK, base_url=url + "/v1", **MODEL, **hear)


def first_token_rows(url: str, repeat: int) -> Iterator[Row]:
    def measure(kind: str) -> float:
        late: list[float] = []
        ask(f"{url}/{kind}", on_content=lambda text: late.append(time.time() - float(text)))
        return late[0] * 1000

    kinds = ("chunked", "close", "gzip")
    medians = interleaved({kind: partial(measure, kind) for kind in kinds}, 4 * repeat)
    for kind in kinds:
        yield Row("first token", kind, medians[kind], 5, "ms")


# ------------------------------------------------------------------ start, tools, connections


def start_rows(repeat: int) -> Iterator[Row]:
    def cpu(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    commands = {
        "requests": ["-c", "import requests"],
        "--help": ["react_min.py", "--help"],
        "import react_min": ["-c", "import react_min"],
    }
    contenders = {name: partial(cpu, *command) for name, command in commands.items()}
    medians = interleaved(contenders, 3 * repeat)
    for ours, goal in (("--help", 1.2), ("import react_min", 1.1)):
        yield Row("start: " + ours, "CPU / import requests", ratio(medians, ours, "requests"), goal)


def tool_rows(url: str, repeat: int) -> Iterator[Row]:
    from react_min import run_agent
    from tools import Tool

    definition = {"type": "function", "function": {"name": "wait", "parameters": {}}}
    tool = Tool(definition, lambda number: time.sleep(0.5) or f"waited {number}")

    def measure() -> float:
        seen: list[float] = []  # when the calls were told, then when the results were
        note = lambda *_: seen.append(time.monotonic())  # noqa: E731
        hear = {"on_tool_call": note, "on_tool_result": note}
        run_agent("?", tools=[tool], base_url=url + "/tools/v1", **MODEL, **hear)
        assert len(seen) == 16
        return (seen[-1] - seen[0]) / 0.5

    median = interleaved({"": measure}, repeat)[""]
    yield Row("8 tools of 0.5 s", "time / the slowest", median, 1.05)


def connection_rows(url: str, repeat: int) -> Iterator[Row]:
    from react_min import run_agent

    replies = [wire.calls([("get_time", {}, f"c{n}")]) for n in range(4)] + [wire.say("好")]
    with wire.server(replies) as server:
        run_agent("?", base_url=server.base_url, **MODEL)
        assert len(server.requests) == 5
        yield Row("5 rounds", "TCP connections", server.connections, 1)

    def measure(kind: str) -> float:
        start = time.monotonic()
        ask(f"{url}/{kind}")
        return 1000 * (time.monotonic() - start)

    kinds = ("silent", "warm")
    medians = interleaved({kind: partial(measure, kind) for kind in kinds}, 2 * repeat)
    waited = medians["silent"] - medians["warm"]  # the goal is none; 100 ms nobody notices
    yield Row("silent after [DONE]", "time waited", waited, 100, "ms")


def install_rows() -> Iterator[Row]:
    needed, size = ["requests"], 0
    for name in needed:
        found = importlib.metadata.distribution(name)
        paths = [Path(str(file.locate())) for file in found.files or [] if file.suffix != ".pyc"]
        size += sum(path.stat().st_size for path in paths if path.exists())
        lines = [line for line in found.requires or [] if "extra ==" not in line]
        names = [re.split(r"[^\w.-]", line)[0].lower() for line in lines]
        needed += [name for name in names if name not in needed]
    yield Row("install", "packages", len(needed), 5)
    yield Row("install", "size on disk", size / 1e6, 3, "MB")
    # against requests, which takes along what it finds, say zstandard
    ours, theirs = (set(run("-c", f"import {name}\n{FOREIGN}").split()) for name in OWN_AND_BARE)
    yield Row("install", "other packages imported", len(ours - theirs), 0)


OWN_AND_BARE = ("react_min, sse, tools", "requests")
FOREIGN = """import sys
for name, module in list(sys.modules.items()):
    if "site-packages" in (getattr(module, "__file__", None) or ""):
        print(name.split(".")[0])"""


# ------------------------------------------------------------------ the table


def measure_all(repeat: int) -> Iterator[Row]:
    command, pipe = [sys.executable, __file__, "--serve"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout and server.stdin
        url = server.stdout.readline().strip()
        for rows in (round_rows, first_token_rows, tool_rows, connection_rows):
            yield from rows(url, repeat)
        server.stdin.close()
    for rows in (sse_rows, hostile_rows, start_rows):
        yield from rows(repeat)
    yield from install_rows()


def main() -> None:
    parser = argparse.ArgumentParser(description="This project and its peers, side by side.")
    parser.add_argument("--quick", action="store_true", help="3 repetitions instead of 7")
    parser.add_argument("--save", action="store_true", help="write tests/bench.json too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parse", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in list(os.environ):
        if re.fullmatch(r"(OPENAI|DASHSCOPE|LANG(CHAIN|SMITH))_.*|.*_PROXY", name, re.IGNORECASE):
            del os.environ[name]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # starting means from compiled modules
    if options.serve or options.parse:
        return serve() if options.serve else parse(*options.parse)
    found = filter(installed, ("requests", "urllib3", *PEERS))
    versions = {name: importlib.metadata.version(name) for name in found}
    saved = {"date": date.today().isoformat(), "python": sys.version.split()[0]}
    print(saved, versions)
    rows = []
    for row in measure_all(3 if options.quick else 7):
        print(row, flush=True)
        rows.append(dict(row._asdict(), reached=row.reached()))
    if options.save:
        text = json.dumps(dict(saved, versions=versions, rows=rows), indent=1)
        (HERE / "bench.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
