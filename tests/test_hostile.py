"""What an outsider tried in order to break it; most of these once did."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import react_min
import tools
import wire
from react_min import ModelError, execute_tool_call, run_agent
from tools import Tool, calls_in_text, showable

ROOT = Path(__file__).resolve().parent.parent
KEY = "sk-" + "0123456789abcdef" * 2 + "wxyz"


def spy(ran, name="delete", schema=None):
    text = {"type": "string"}
    schema = schema or {"type": "object", "properties": {"path": text, "dry": text}}
    function = {"name": name, "description": name, "parameters": schema}
    return Tool(
        {"type": "function", "function": function}, lambda **given: ran.append(given) or "ok"
    )


def ask(server, **options):
    use = {"base_url": server.base_url, "model": "m", "api_key": KEY, "tools": []}
    return run_agent("hi", **{**use, **options})


def error_of(server, **options):
    with pytest.raises(ModelError) as caught:
        ask(server, **options)
    return str(caught.value)


# ------------------------------------------------------------------ calls that are none


DELETE = '{"name": "delete", "arguments": {}}'
CUT = "<tool_call>\n<function=delete>\n<parameter=path>\n/home\n</parameter>\n<parameter=dry>\nye"


@pytest.mark.parametrize(
    "text, finish",
    [
        (CUT, "length"),
        (CUT, "stop"),
        (f"<tool_call>{DELETE}", "length"),
        (DELETE, "content_filter"),
        ("<function=delete><parameter=dry>yes", "stop"),
        ("<function=delete><parameter=dry>yes</function>", "stop"),
        ("<tool_call>不要 <function=delete></function> 这样</tool_call>", "stop"),
        ("<tool_call>不要执行 {}</tool_call>", "stop"),
        ('[{"name": "delete", "description": "…"}]', "stop"),
        ('{"name": "delete"}', "stop"),
        ('{"name": "delete", "age": 5}', "stop"),
        ('{"name": "delete", "arguments": {}, "age": 5}', "stop"),
        ('{"name": "delete", "parameters": {"type": "object", "properties": {}}}', "stop"),
        (f"```python\n{DELETE}\n```", "stop"),
        (f"格式示例：\n```json\n{DELETE}\n```", "stop"),
        (f"```json\n{DELETE}\n```\n这是一个例子。", "stop"),
        (f"1. 格式示例：\n   ```json\n   {DELETE}\n   ```", "stop"),
        (f"示例：\n```text\n<tool_call>\n{DELETE}\n</tool_call>", "stop"),
        (f";{DELETE}", "stop"),
        (f"格式是 <tool_call>{DELETE}</tool_call>，请小心。", "stop"),
        ('{"name": "nobody", "arguments": {}}', "stop"),
        ('{"temperature": 3}', "stop"),
        (f'{{"temperature": 3}}\n{DELETE}', "stop"),
        (f'{DELETE}\n{{"name": "delete", "age": 5}}', "stop"),
        ("{" + DELETE, "stop"),
        ("[]", "stop"),
        ("<tool_call>\n</tool_call>", "stop"),
    ],
)
def test_what_is_cut_or_quoted_or_data_does_not_run_and_is_the_answer(text, finish):
    ran, heard = [], []
    with wire.server([wire.say(text, finish=finish)]) as server:
        answer = ask(server, tools=[spy(ran)], on_content=heard.append)
    assert ran == [] and "".join(heard) == answer
    assert answer == text if finish == "stop" else answer.startswith(text)


def test_a_second_name_never_runs_the_first_tool():
    ran = []
    first = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "keep"}}]}
    second = {"tool_calls": [{"index": 0, "function": {"name": "delete", "arguments": "{}"}}]}
    stream = wire.sse(wire.chunk(first), wire.chunk(second), wire.chunk({}, "tool_calls"))
    with wire.server([stream, wire.say("好")]) as server:
        assert ask(server, tools=[spy(ran), spy(ran, "keep")]) == "好"
    assert ran == []


# ------------------------------------------------------------------ secrets


@pytest.mark.parametrize("before", [0, 255, 262, 270, 285, 292, 1190])
def test_no_piece_of_the_key_is_shown_where_an_error_is_cut(before):
    text = "x" * before + KEY
    unauthorized = wire.Reply([text.encode()], 401, {"Content-Type": "text/plain"}, "length")
    moved = wire.Reply([], 302, {"Location": f"http://h/{text}"}, "length")
    in_stream = wire.sse({"error": {"message": text}})
    for reply in (unauthorized, moved, in_stream):
        with wire.server([reply]) as server:
            assert KEY[:8] not in error_of(server)


def test_a_key_with_white_space_in_it_is_not_shown():
    folded = KEY[:9] + "\n" + KEY[9:]
    reply = wire.Reply([folded.encode()], 401, {"Content-Type": "text/plain"}, "length")
    with wire.server([reply]) as server:
        text = error_of(server)
    assert KEY[:9] not in text and KEY[9:] not in text


@pytest.mark.parametrize(
    "url",
    [
        "http://u:SECRET@h:99999/v1",
        "http://u:SECRET@[::1",
        "ftp://u:SECRET@h",
        "u:SECRET@h/v1",
        "http://u:SECRET@127.0.0.1:9/v1",
    ],
)
def test_a_password_in_the_address_is_not_shown(url):
    with pytest.raises(ModelError) as caught:
        run_agent("hi", base_url=url, api_key="")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "proxy", ["http://u:SECRET@h:99999", "http://u:SECRET@", "http://u:SECRET@127.0.0.1:9"]
)
def test_a_password_of_a_proxy_is_not_shown(proxy, monkeypatch):
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(ModelError) as caught:
        run_agent("hi", base_url="http://model.test/v1", api_key="")
    assert "SECRET" not in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------ bodies without an end


def endless(piece, gap=0.0):
    while True:
        yield piece
        time.sleep(gap)


def test_the_endless_body_of_a_busy_server_is_not_read(monkeypatch):
    monkeypatch.setattr("urllib3.util.retry.time.sleep", lambda seconds: None)
    busy = wire.Reply(endless(b"x" * 65536), 503, {"Content-Type": "text/plain"})
    with wire.server([busy, wire.say("好")]) as server:
        begun = time.monotonic()
        assert ask(server) == "好"
        assert time.monotonic() - begun < 10


@pytest.mark.parametrize("how", [{"gap": 0.1}, {"end": "hang"}], ids=["drips", "hangs"])
def test_the_body_of_an_error_is_read_for_a_few_seconds_only(how, monkeypatch):
    monkeypatch.setattr(react_min, "EXPLANATION_TIME", 0.5)
    pieces = [b"x"] * (200 if "gap" in how else 1)  # twenty seconds of drip, or silence
    reply = wire.Reply(pieces, 500, {"Content-Type": "text/plain"}, **how)
    with wire.server([reply]) as server:
        begun = time.monotonic()
        assert "500" in error_of(server)
        assert time.monotonic() - begun < 12


def test_a_stream_without_an_event_is_not_read_for_ever(monkeypatch):
    monkeypatch.setattr("sse._MAX_EVENT", 1 << 20)
    with wire.server([wire.Reply(endless(b"x" * 65536), 200)]) as server:
        assert "没有尽头" in error_of(server)


def test_a_long_stream_of_short_events_is_read(monkeypatch):
    monkeypatch.setattr("sse._MAX_EVENT", 1 << 16)
    with wire.server([wire.sse(*[wire.chunk({"content": "字"})] * 2000)]) as server:
        assert ask(server) == "字" * 2000


def test_the_body_of_a_redirect_is_not_read(monkeypatch):
    monkeypatch.setattr(tools, "_judge_name", lambda host: None)
    monkeypatch.setattr(tools, "_judged_addresses", lambda host, port: ["127.0.0.1"])
    hop = wire.Reply(endless(b"x" * 65536), 302, {"Location": "/there"})
    with wire.server([hop, wire.Reply([b"here"])]) as server:
        assert tools.fetch(server.base_url, seconds=5).body == b"here"
        assert server.requests[1].path == "/there"


@pytest.mark.parametrize("end", ["hang", "reset", "cut"])
def test_what_happens_after_finish_reason_does_not_cost_the_answer(end):
    whole = wire.sse(wire.chunk({"content": "好"}), wire.chunk({}, "stop"), done=False)
    with wire.server([wire.Reply([whole], end=end)]) as server:
        begun = time.monotonic()
        assert ask(server) == "好"
        assert time.monotonic() - begun < 10


def test_a_finish_reason_in_every_chunk_says_nothing_about_the_end():
    for text in ("半", "半个"):
        chunks = [wire.chunk({"content": letter}, "stop") for letter in text]
        with wire.server([wire.Reply([wire.sse(*chunks, done=False)], end="reset")]) as server:
            error_of(server)


def test_text_after_a_finish_reason_is_waited_for(monkeypatch):
    monkeypatch.setattr("sse.END_WAIT", 0.6)

    def pieces():
        yield wire.sse(wire.chunk({"role": "assistant"}), done=False)
        for letter, pause in zip("一二三四", (0, 0, 0.9, 0.9)):
            time.sleep(pause)
            yield wire.sse(wire.chunk({"content": letter}, "stop"), done=False)

    with wire.server([wire.Reply(pieces())]) as server:
        assert ask(server) == "一二三四"


def test_a_finish_reason_before_the_end_of_the_text_says_nothing_about_the_end():
    chunks = [wire.chunk({"content": "半"}), *(wire.chunk({"content": x}, "stop") for x in "个回")]
    with wire.server([wire.Reply([wire.sse(*chunks, done=False)], end="reset")]) as server:
        error_of(server)


def test_endless_blank_lines_in_arguments_are_read_at_once():
    assert tools.read_arguments("```json" + "\n" * 100_000 + "x") is None
    assert tools.read_arguments("```" + "a" * 100_000) is None


# ------------------------------------------------------------------ foreign forms


@pytest.mark.parametrize(
    "message",
    [
        None,
        "x",
        {"role": "assistant", "tool_calls": ["x"]},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [{"id": 1, "function": "x"}]},
        {"role": "assistant", "tool_calls": [{"id": ["a"]}]},
        {"role": "tool", "tool_call_id": ["a"], "content": "x"},
        {"role": "user", "content": b"bytes"},
    ],
)
def test_odd_messages_in_a_history_do_no_harm(message):
    with wire.server([wire.say("好")]) as server:
        assert ask(server, messages=[{"role": "system", "content": "s"}, message]) == "好"


def test_image_parts_pass_through_unchanged():
    parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with wire.server([wire.say("好")]) as server:
        ask(server, messages=[{"role": "user", "content": parts}])
        assert server.requests[0].body["messages"][0]["content"] == parts


@pytest.mark.parametrize("call_id", ["a", ""])
def test_equal_ids_in_a_history_keep_their_own_results(call_id):
    call = {"id": call_id, "function": {"name": "f", "arguments": "{}"}}
    results = [{"role": "tool", "tool_call_id": call_id, "content": n} for n in "12"]
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call, call]}]
    with wire.server([wire.say("好")]) as server:
        ask(server, messages=history + results)
        messages = server.requests[0].body["messages"]
    ids = [c["id"] for c in messages[1]["tool_calls"]]
    assert all(ids) and len(set(ids)) == 2
    assert [(m["tool_call_id"], m["content"]) for m in messages[2:4]] == list(zip(ids, "12"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"path": True}},
        {"type": "object", "properties": {"path": {"enum": None}}},
        {"type": "object", "properties": {"path": {"type": ["string", {}]}}, "required": True},
        {"type": "object", "properties": {"path": {"anyOf": [{"type": "string"}]}}},
        True,
    ],
)
def test_a_schema_in_a_form_that_is_not_known_is_not_checked(schema):
    ran = []
    call = {"function": {"name": "delete", "arguments": '{"path": "x"}'}}
    assert execute_tool_call(call, {"delete": spy(ran, schema=schema)}) == "ok"
    assert ran == [{"path": "x"}]


@pytest.mark.parametrize("call", [{}, {"function": "x"}, {"function": {"name": 7}}])
def test_a_call_without_a_function_is_answered(call):
    assert execute_tool_call(call).startswith("未找到工具")


def test_an_unknown_name_is_clipped_and_harmless():
    text = execute_tool_call({"function": {"name": "x</tool_response>" + "y" * 9_000_000}})
    assert len(text) < 1000 and "</tool_response>" not in text


@pytest.mark.parametrize(
    "mark",
    ["<|im_start|>", "<｜User｜>", "</tool_response>", "<tool_call>", "</think>", "<end_of_turn>"]
    + ["<<SYS>>", "[/INST]", "[TOOL_RESULTS]", "</s>"],
)
def test_page_text_cannot_forge_the_templates_marks(mark):
    text = tools.as_data(f"a {mark} b < c [d]")
    assert mark not in text and text.replace(f"{mark[0]} {mark[1:]}", mark) == f"a {mark} b < c [d]"


def test_an_exception_that_cannot_be_printed_is_told_at_once():
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    def fail():
        raise Mute

    tool = Tool({"type": "function", "function": {"name": "f"}}, fail)
    with wire.server([wire.calls([("f", {})]), wire.say("好")]) as server:
        assert ask(server, tools=[tool]) == "好"
        assert server.requests[1].body["messages"][-1]["content"] == "工具执行失败: Mute"


def test_halves_of_a_letter_are_joined_in_the_answer():
    first, second = (
        'data: {"choices":[{"delta":{"content":"' + half + '"}}]}\n\n'
        for half in (r"\ud83d", r"\ude00")
    )
    stream = first + second + "data: [DONE]\n\n"
    with wire.server([stream.encode()]) as server:
        assert ask(server) == "\U0001f600"


def test_a_reply_in_one_piece_may_be_long():
    text = "长" * 700_000
    reply = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
    with wire.server([wire.sse(reply)[6:-16]]) as server:
        assert ask(server) == text


@pytest.mark.parametrize("timeout", [float("inf"), 1e30])
def test_a_time_out_without_limit_is_no_crash(timeout):
    with wire.server([wire.calls([("get_time", {})]), wire.say("好")]) as server:
        assert ask(server, tools=[tools.get_time], tool_timeout=timeout, timeout=timeout) == "好"


def test_a_thread_that_cannot_start_is_that_calls_message(monkeypatch):
    start = threading.Thread.start

    def no_more(self):
        if self.daemon and "run" in repr(self._target):
            raise RuntimeError("can't start new thread")
        start(self)

    call = {"id": "a", "function": {"name": "get_time", "arguments": "{}"}}
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        results = react_min.run_tool_calls([call], [1])
    assert "can't start new thread" in results[0]["content"]


# ------------------------------------------------------------------ the command line


def command(server, shell, **env):
    env = {**os.environ, "OPENAI_BASE_URL": server.base_url, "PYTHON": sys.executable, **env}
    return subprocess.run(shell, cwd=ROOT, env=env, shell=True, capture_output=True, timeout=30)


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
@pytest.mark.parametrize(
    "ending, status",
    [(">&-", 0), ("2>&-", 0), (">/dev/full", 1), ("2>/dev/full", 0), ("--timeout inf", 2)],
)
def test_closed_and_full_outputs_are_no_traceback_and_cost_no_answer(ending, status):
    calls = wire.calls([("get_time", {})])
    with wire.server([calls, wire.say("三点")]) as server:
        done = command(server, f'"$PYTHON" react_min.py hi {ending}')
    assert done.returncode == status, done.stderr
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
    if ending.startswith("2>"):
        assert done.stdout.decode() == "三点\n"


def test_thinking_before_a_bare_closing_tag_stays_out_of_a_pipe():
    with wire.server([wire.say("秘密思考</think>答案")]) as server:
        assert command(server, f'"{sys.executable}" react_min.py hi').stdout.decode() == "答案\n"


def test_half_an_emoji_inside_a_line_is_shown_whole():
    texts, heard = ["好", "\ud83d", "\ude00"], []
    stream = "".join(f"data: {json.dumps(wire.chunk({'content': text}))}\n\n" for text in texts)
    with wire.server([wire.sse(stream)]) as server:
        assert ask(server, on_content=heard.append) == "好😀"
    assert "".join(heard) == "好😀"


def test_half_an_emoji_in_a_delta_costs_nothing_of_what_follows():
    texts, heard = ["\ud83d", "\ude00 看\n```", "json\n{}\n```"], []
    stream = "".join(f"data: {json.dumps(wire.chunk({'content': text}))}\n\n" for text in texts)
    with wire.server([wire.sse(stream)]) as server:
        assert ask(server, on_content=heard.append) == "😀 看\n```json\n{}\n```"
    assert "".join(heard).endswith(" 看\n```json\n{}\n```")


# ------------------------------------------------------------------ what is shown too early

CALL = '{"name": "delete", "arguments": {"path": "/"}}'
XML = "<function=delete>\n<parameter=path>\n/\n</parameter>\n</function>"


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"\n\n[{CALL},\n{CALL}]",
        f"{{{CALL}}}",
        f"`{CALL}`",
        f"``\n{CALL}\n``",
        f"``` {CALL} ```",
        f"[[{CALL}]]",
        f"```json\n{CALL}\n```",
        f"  ```\n{CALL}",
        f"我来查。\n<tool_call>\n{CALL}\n</tool_call>\n\n<tool_call>{CALL}",
        f"我来查。\n  \t<tool_call>{CALL}</tool_call>",
        f"好。\n<tools>\n{CALL}\n</tools>\n",
        f"好。\n {XML}",
    ],
)
def test_nothing_of_what_becomes_a_call_is_shown_wherever_it_is_cut(text):
    before, calls = calls_in_text(text, [spy([])])
    assert calls
    for first in range(len(text)):
        shown = 0
        for end in range(first, len(text)):
            shown = showable(text[:end], shown)
            assert before.startswith(text[:shown].rstrip(" ")), text[:shown]
