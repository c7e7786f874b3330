"""The command line, as a process: what goes where, how it ends, and what a terminal gets."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import wire

ROOT = Path(__file__).resolve().parent.parent
POSIX = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and terminals")
COMMAND = [sys.executable, "react_min.py"]
THOUGHT = wire.sse(wire.chunk({"reasoning_content": "想一想"}), done=False)
HALF = wire.sse(wire.chunk({"content": "等一等"}), done=False)
TIME = wire.calls([("get_time", {}, "t")], content="我看看。")


def environment(server=None, **env):
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", **env}
    if server:
        env.update(OPENAI_BASE_URL=server.base_url, OPENAI_MODEL="m")
    return {name: value for name, value in env.items() if value is not None}


def run(*arguments, server=None, stdin=b"", **env):
    """(exit status, standard output, standard error), both as bytes"""
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env=environment(server, **env),
        input=stdin,
        capture_output=True,
        timeout=30,
    )
    assert b"Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr.replace(b"\r\n", b"\n")


@pytest.fixture(scope="module", autouse=True)
def _early(started_demo):
    """The demo plays for some seconds; it does so beside these tests."""


def asked(server):
    return server.requests[0].body["messages"][-1]["content"]


# ------------------------------------------------------------------ a pipe


def test_a_pipe_gets_the_bare_answer_and_all_else_goes_to_standard_error():
    final = wire.say("下午三点", reasoning="知道了")
    with wire.server([TIME, final]) as server:
        status, out, err = run("几点？", server=server)
    assert (status, out.decode().rstrip("\r\n")) == (0, "下午三点")
    lines = err.decode().split("\n")
    assert "我看看。" in lines and "调用工具 get_time({})" in lines and "知道了" in lines
    assert any(line.startswith("工具结果 get_time → ") for line in lines)
    assert "\x1b" not in err.decode()


def test_the_fuse_reaches_the_pipe():
    rounds = [wire.calls([("nobody", {"n": n})]) for n in range(5)]
    with wire.server(rounds) as server:
        status, out, _ = run("hi", server=server)
    assert (status, out.decode().strip()) == (0, "工具调用超过 5 轮，未能完成任务")


@pytest.mark.parametrize("locale", [None, "C"])
def test_chinese_arrives_whole_from_the_command_line_and_from_a_pipe(locale):
    env = {"LC_ALL": locale, "PYTHONIOENCODING": None if locale else "utf-8"}
    with wire.server(
        lambda request: wire.say(f"回：{request.body['messages'][-1]['content']}")
    ) as s:
        question = "北京的天气🌞？"
        by_argument = run(question, server=s, **env)
        by_pipe = run(server=s, stdin=f"{question}\n".encode(), **env)
        assert [r.body["messages"][-1]["content"] for r in s.requests] == [question] * 2
    assert by_argument[1].decode().strip() == by_pipe[1].decode().strip() == f"回：{question}"


def test_bytes_that_are_no_text_are_no_traceback():
    with wire.server(lambda request: wire.say("好")) as server:
        assert run(server=server, stdin=b"a\xff\xfeb")[0] == 0
        assert asked(server) == "a\ufffd\ufffdb"


@pytest.mark.parametrize("encoding", ["gbk", "ascii"])
def test_a_console_that_cannot_print_a_letter_prints_another(encoding):
    with wire.server([wire.say("晴 🌞 ok", reasoning="🌞")]) as server:
        status, out, _ = run("hi", server=server, PYTHONIOENCODING=encoding)
    assert status == 0
    expected = "晴 ? ok" if encoding == "gbk" else "? ? ok"
    assert out.decode(encoding).strip() == expected


PIECES = [
    ["a\x1b[31mb\x07c\x1b]0;title\x07d\u202ee\x9b1mf\rg\x7fh\u2066i"],
    ["a\x1b", "[31mb\x07c\x1b]0;ti", "tle\x07d\u202e", "e\x9b", "1mf\rg\x7f", "h\u2066i"],
    list("a\x1b[31mb\x07c\x1b]0;title\x07d\u202ee\x9b1mf\rg\x7fh\u2066i"),
]


def slowly(*deltas, gap=0.1):
    """A stream whose pieces come as from a small model."""

    def pieces():
        for delta in deltas:
            delta = {"content": delta} if isinstance(delta, str) else delta
            yield f"data: {json.dumps(wire.chunk(delta))}\n\n".encode()
            time.sleep(gap)
        yield wire.sse(wire.chunk({}, "stop"))

    return wire.Reply(pieces())


THOUGHT_AFTER = {"reasoning_content": "想"}


@pytest.mark.parametrize(
    "deltas, answer",
    [
        (["一二", "三四", THOUGHT_AFTER], "一二三四"),
        (["一二", "三四", THOUGHT_AFTER, "五"], "一二三四五"),
        (["他说â\x80\x9c你好â\x80\x9d，十二度。"], "他说â你好â，十二度。"),
        (["a\x1b]0;never ", "ended"], "a]0;never ended"),
        (["晴\ud83c", "\udf1e好"], "晴🌞好"),
    ],
    ids=["thought after", "thought between", "wrong set", "open string", "halves"],
)
@pytest.mark.parametrize("gap", [0, 0.25])
def test_a_pipe_gets_the_answer_once_and_whole(deltas, answer, gap):
    with wire.server([slowly(*deltas, gap=gap)]) as server:
        status, out, _ = run("hi", server=server)
    assert (status, out.decode().strip()) == (0, answer)


PATIENT = """
import sys, react_min
react_min.Terminal.PAUSE = 9  # a busy machine may pause too
sys.exit(react_min.main(["hi"]))
"""


def patiently(*replies):
    with wire.server(replies) as server:
        command, env = [sys.executable, "-c", PATIENT], environment(server)
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=30)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_thinking_that_comes_slowly_before_a_bare_closing_tag_stays_out_of_a_pipe():
    status, out, err = patiently(slowly("想", "想", "想。", "</think>\n\n", "三", "点"))
    assert (status, out.strip(), err) == (0, "三点", "想想想。\n")


def test_a_remark_before_a_call_stays_out_of_a_pipe():
    call = {"index": 0, "id": "a", "function": {"name": "get_time", "arguments": "{}"}}
    remark = slowly(*"我先看看现在几点", {"tool_calls": [call]}, gap=0.08)
    status, out, err = patiently(remark, wire.say("三点"))
    assert (status, out) == (0, "三点\n")
    assert err.startswith("我先看看现在几点\n调用工具 get_time({})\n")


@pytest.mark.parametrize("pieces", PIECES, ids=["whole", "cut", "letters"])
@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_nothing_that_a_terminal_obeys_is_printed(field, pieces):
    chunks = [wire.chunk({field: piece}) for piece in pieces]
    last = [] if field == "content" else [wire.chunk({"content": "ok"})]
    with wire.server([wire.sse(*chunks, *last, wire.chunk({}, "stop"))]) as server:
        _, out, err = run("hi", server=server)
    printed = out if field == "content" else err
    assert printed.decode().strip() == "abcdefghi"


def test_nothing_that_a_terminal_obeys_is_printed_of_calls_and_errors():
    call = wire.calls([("x\x1b[2Jy", '{"a": "\x1b]0;t\x07\u202e"}')])
    error = wire.sse({"error": {"message": "no\x1b[2J\u202e"}})
    with wire.server([call, error]) as server:
        status, _, err = run("hi", server=server)
    assert status == 1 and b"xy" in err and b"no" in err
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", err.decode())


# ------------------------------------------------------------------ how it ends


def test_help_has_two_examples():
    status, out, err = run("--help")
    assert (status, err) == (0, b"")
    examples = out.decode().split("例子：")[1]
    assert examples.count("python react_min.py") == 2
    for name in ("--demo", "--messages", "--no-thinking", "--timeout", "OPENAI_BASE_URL"):
        assert name in out.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [""],
        ["  "],
        ["--nonsense"],
        ["a", "b"],
        ["--timeout", "x", "a"],
        ["--timeout", "0", "a"],
        ["--demo", "--timeout", "nan"],
    ],
)
def test_wrong_usage_is_2(arguments):
    status, out, err = run(*arguments)
    assert (status, out) == (2, b"") and err.strip()


@pytest.mark.parametrize(
    "reply, words",
    [
        (wire.Reply([b'{"error": {"message": "so sorry"}}'], 500, {}), "HTTP 500.*so sorry"),
        (HALF, "中途断开"),
        (wire.sse({"error": "so\nsorry"}), "so sorry"),
    ],
    ids=["http", "cut", "stream"],
)
def test_an_error_of_the_model_is_1_one_line_and_no_output(reply, words):
    with wire.server([reply]) as server:
        status, out, err = run("hi", server=server)
    assert (status, out) == (1, b"")
    assert len(err.decode().strip().split("\n")) == 1 and re.search(words, err.decode())


def test_timeout_is_obeyed():
    with wire.server([wire.Reply([HALF], end="hang")]) as server:
        begun = time.monotonic()
        assert run("--timeout", "0.3", "hi", server=server)[0] == 1
        assert time.monotonic() - begun < 5


def test_no_thinking_reaches_the_server():
    with wire.server([wire.say("好"), wire.say("好")]) as server:
        run("--no-thinking", "hi", server=server)
        run("hi", server=server)
        assert [r.body["enable_thinking"] for r in server.requests] == [False, True]


def test_messages_prints_the_array_to_standard_error():
    with wire.server([TIME, wire.say("三点")]) as server:
        status, out, err = run("--messages", "几点？", server=server)
    assert status == 0 and out.decode().strip() == "三点"
    text = err.decode()
    messages = json.loads(text[text.index("\n[\n") :])
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [m["role"] for m in messages] == roles
    assert messages[3]["tool_call_id"] == messages[2]["tool_calls"][0]["id"]


HANGING_TOOL = """
import sys, threading, react_min, tools
hang = tools.Tool(tools.get_time.definition, lambda **_: threading.Event().wait(20))
options = react_min.run_agent.__kwdefaults__
options["tools"] = [hang]
sys.exit(react_min.main(["hi"]))
"""


@POSIX
@pytest.mark.parametrize(
    "command, reply, heard",
    [
        (COMMAND + ["hi"], wire.Reply([], wait=20), None),
        (COMMAND + ["hi"], wire.Reply([THOUGHT, HALF], end="hang"), "想一想"),
        (COMMAND + ["hi"], wire.Reply([], 503, {}), "HTTP 503"),
        ([sys.executable, "-c", HANGING_TOOL], wire.calls([("get_time", {})]), "调用工具"),
    ],
    ids=["waiting", "streaming", "retrying", "tool hanging"],
)
def test_ctrl_c_is_130_within_a_second(command, reply, heard):
    with wire.server(lambda request: reply) as server:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment(server), **both)
        deadline = time.monotonic() + 10
        while not server.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        pressed = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=10)
        assert time.monotonic() - pressed < 3  # a second, and what a busy machine adds
    assert process.returncode == 130
    assert b"Traceback" not in out
    assert heard is None or heard in out.decode()


@POSIX
def test_a_closed_pipe_is_no_traceback():
    with wire.server([wire.say("行\n" * 300)]) as server:
        command = f'"{sys.executable}" react_min.py hi | head -1'
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 30}
        done = subprocess.run(command, cwd=ROOT, env=environment(server), shell=True, **both)
    assert done.stdout.decode() == "行\n" and done.stderr == b""


@POSIX
def test_a_reader_that_closes_early_ends_the_process():
    gate = threading.Event()

    def pieces():
        yield HALF
        gate.wait(10)
        yield wire.say("完")

    with wire.server([wire.Reply(pieces())]) as server:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [*COMMAND, "hi"]
        process = subprocess.Popen(command, cwd=ROOT, env=environment(server), **both)
        process.stdout.close()
        gate.set()
        err = process.stderr.read()
        process.wait(10)
        process.stderr.close()
    assert err == b"" and process.returncode == 141


# ------------------------------------------------------------------ a terminal


class Screen:
    """A process on a pseudo-terminal, and what it has printed there."""

    def __init__(self, *arguments, server, **env):
        import pty

        self.text, self._raw = "", b""
        self._master, slave = pty.openpty()
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        env = environment(server, TERM="xterm", **{"NO_COLOR": None, **env})
        self.process = subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, env=env, **streams)
        os.close(slave)

    def read(self, until=None):
        """Read on until `until` is there, or to the end; returns all that was printed so far."""
        import select

        deadline = time.monotonic() + 10
        while until is None or until not in self.text:
            assert time.monotonic() < deadline, self.text
            if not select.select([self._master], [], [], 0.1)[0]:
                continue
            try:
                piece = os.read(self._master, 4096)
            except OSError:  # Linux: the other side is closed
                piece = b""
            if not piece:
                assert until is None, self.text
                break
            self._raw += piece
            self.text = self._raw.decode("utf-8", "ignore").replace("\r\n", "\n")
        return self.text

    def close(self):
        text = self.read()
        status = self.process.wait(10)
        os.close(self._master)
        return status, text


def styles_are_closed(text):
    return (re.findall(r"\x1b\[(\d*)m", text) or ["0"])[-1] == "0"


@POSIX
def test_on_a_terminal_the_thinking_is_dimmed_and_the_answer_is_not():
    with wire.server([wire.say("晴天", reasoning="想想")]) as server:
        status, text = Screen("hi", server=server).close()
    assert status == 0
    assert re.sub(r"\x1b\[0m\x1b\[2m", "", text) == "\x1b[2m想想\x1b[0m\n晴天\n"


@POSIX
@pytest.mark.parametrize("value, styled", [("1", False), ("", True)])
def test_no_color_is_obeyed(value, styled):
    with wire.server([wire.say("晴天", reasoning="想想")]) as server:
        status, text = Screen("hi", server=server, NO_COLOR=value).close()
    assert status == 0 and ("\x1b" in text) == styled
    assert re.sub(r"\x1b\[\d*m", "", text) == "想想\n晴天\n"


@POSIX
def test_on_a_terminal_everything_streams_as_it_comes():
    seen = threading.Semaphore(0)

    def pieces():
        for delta in ({"reasoning_content": "想"}, {"content": "一"}, {"content": "二"}):
            yield wire.sse(wire.chunk(delta), done=False)
            seen.acquire(timeout=5)
        yield wire.sse(wire.chunk({"content": "三"}), wire.chunk({}, "stop"))

    with wire.server([wire.Reply(pieces())]) as server:
        screen = Screen("hi", server=server)
        for letter in "想一二":
            assert "三" not in screen.read(until=letter)  # shown before the rest is sent
            seen.release()
        status, text = screen.close()
    assert status == 0 and text.endswith("\n一二三\n")


@POSIX
def test_a_pipe_too_gets_a_long_answer_as_it_comes():
    gate = threading.Event()

    def pieces():
        yield wire.sse(wire.chunk({"content": "一"}), done=False)
        time.sleep(0.4)
        yield wire.sse(wire.chunk({"content": "二"}), done=False)
        gate.wait(5)
        yield wire.sse(wire.chunk({"content": "三"}), wire.chunk({}, "stop"))

    with wire.server([wire.Reply(pieces())]) as server:
        command = [*COMMAND, "hi"]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=ROOT, env=environment(server), **pipe)
        early = os.read(process.stdout.fileno(), 100)
        in_time = not gate.is_set()
        gate.set()
        rest = process.communicate(timeout=10)[0]
    assert in_time and early.decode() == "一二" and rest.decode() == "三\n"


@POSIX
def test_on_a_terminal_calls_and_results_have_lines_of_their_own():
    with wire.server([TIME, wire.say("三点")]) as server:
        status, text = Screen("几点？", server=server).close()
    lines = text.split("\n")
    assert status == 0 and lines[:2] == ["我看看。", "调用工具 get_time({})"]
    assert lines[2].startswith("工具结果 get_time → ") and lines[-2:] == ["三点", ""]


@POSIX
@pytest.mark.parametrize("field", ["reasoning_content", "content"])
def test_ctrl_c_leaves_the_terminal_clean(field):
    half = wire.sse(wire.chunk({field: "等一等"}), done=False)
    with wire.server([wire.Reply([half], end="hang")]) as server:
        screen = Screen("hi", server=server)
        screen.read(until="等一等")
        time.sleep(0.2)
        screen.process.send_signal(signal.SIGINT)
        status, text = screen.close()
    assert status == 130 and styles_are_closed(text)
    assert text.endswith("\n") and "Traceback" not in text


# ------------------------------------------------------------------ the demo


def test_the_demo_needs_no_model(demo):
    assert demo[0] == 0


def test_the_demo_says_at_once_that_it_is_a_recording_and_how_to_use_a_real_model(demo):
    first = demo[2].decode().split("\n")[0]
    assert "recording" in first and "录音" in first
    assert "ollama pull qwen3:1.7b" in first and "DASHSCOPE_API_KEY" in first


def test_the_demo_shows_the_parallel_case(demo):
    text = demo[2].decode()
    parallel = text[text.index("北京和上海今天哪里更热？") : text.index("帮我看看")]
    told = re.findall(r"^(调用工具|工具结果) get_weather", parallel, re.M)
    assert told == ["调用工具", "调用工具", "工具结果", "工具结果"]


def test_the_demo_shows_the_sequential_case(demo):
    text = demo[2].decode()
    sequential = text[text.index("帮我看看今天 AI 新闻里第一条的正文。") :]
    told = re.findall(r"^(调用工具|工具结果) (\w+)", sequential, re.M)
    assert told == [
        ("调用工具", "get_news"),
        ("工具结果", "get_news"),
        ("调用工具", "read_url"),
        ("工具结果", "read_url"),
    ]
    url = re.search(r'调用工具 read_url\(\{"url": ?"([^"]+)"', sequential)[1]
    assert url in sequential[: sequential.index("调用工具 read_url")]


def test_the_demos_answers_alone_are_on_standard_output(demo):
    answers = demo[1].decode().strip()
    assert answers and "调用工具" not in answers and "工具结果" not in answers
