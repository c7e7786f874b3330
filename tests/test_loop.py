"""The loop: what holds whatever the model, the tools and the callbacks do."""

import contextvars
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import react_min
import wire
from react_min import ModelError, run_agent
from tools import Tool

ROOT = Path(__file__).resolve().parent.parent
TEXT = {"type": "string"}


def tool(name, execute, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": name, "parameters": parameters}
    return Tool({"type": "function", "function": function}, execute)


ECHO = tool("echo", lambda text: text, text=TEXT)
HANG = tool("hang", lambda: threading.Event().wait(20))
CALL = wire.calls([("echo", {"text": "A"}, "a")])
GOOD = wire.say("好")


def ask(server, question="hi", **options):
    use = {"base_url": server.base_url, "model": "m", "tools": [ECHO, HANG]}
    return run_agent(question, **{**use, **options})


def sent(server, number):
    return server.requests[number].body["messages"]


def roles(messages):
    return [message["role"] for message in messages]


def usable(messages):
    """Each call has its result right after it, so that a server accepts the list."""
    waiting = []
    for message in messages:
        if message["role"] == "tool":
            assert waiting.pop(0) == message["tool_call_id"]
        else:
            assert not waiting
        waiting += [call["id"] for call in message.get("tool_calls", [])]
    return not waiting


# ------------------------------------------------------------------ rule 1: pairing


def test_each_call_gets_one_tool_message_in_call_order_whatever_fails():
    def explode():
        raise SystemExit("bye")

    wanted = [
        ("echo", {"text": "A"}, "a"),
        ("nobody", {}, "b"),
        ("echo", "{bad", "c"),
        ("explode", {}, "d"),
        ("echo", {}, "e"),
        ("silent", {}, "f"),
        ("hang", {}, "g"),
    ]
    available = [ECHO, tool("explode", explode), tool("silent", lambda: None), HANG]
    with wire.server([wire.calls(wanted), GOOD]) as server:
        assert ask(server, tools=available, tool_timeout=0.2) == "好"
        assistant, *results = sent(server, 1)[2:]
    assert [c["id"] for c in assistant["tool_calls"]] == list("abcdefg")
    assert roles(results) == ["tool"] * 7
    assert [m["tool_call_id"] for m in results] == list("abcdefg")
    a, b, c, d, e, f, g = [m["content"] for m in results]
    assert a == "A" and b.startswith("未找到工具 nobody") and "{bad" in c
    assert d == "工具执行失败: bye" and "缺少参数 text" in e and f.strip() and "超时" in g


def test_calls_without_ids_get_ids_of_their_own():
    with wire.server([wire.calls([("echo", {"text": t}, "") for t in "AB"]), GOOD]) as server:
        ask(server)
        assistant, first, second = sent(server, 1)[2:]
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert ids == [first["tool_call_id"], second["tool_call_id"]] and len(set(ids)) == 2


# ------------------------------------------------------------------ rule 2: half a stream


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
def test_half_a_stream_is_no_answer(framing):
    half = wire.sse(wire.chunk({"content": "半个回答"}), done=False)
    messages = []
    with wire.server([wire.Reply([half], framing=framing)]) as server:
        with pytest.raises(ModelError, match="中途断开"):
            ask(server, messages=messages)
        assert len(server.requests) == 1  # something was shown: not asked again
    assert roles(messages) == ["system", "user"]


@pytest.mark.parametrize("end", ["cut", "reset"])
def test_a_broken_connection_is_no_answer_and_runs_no_tool(end):
    ran = []
    half = CALL[: CALL.index(b'"tool_calls"}')]
    with wire.server([wire.Reply([half], end=end)]) as server:
        with pytest.raises(ModelError):
            ask(server, tools=[Tool(ECHO.definition, lambda text: ran.append(text))])
    assert ran == []


def test_finish_reason_or_done_is_each_enough():
    only_done = wire.sse(wire.chunk({"content": "甲"}))
    only_finish = wire.sse(wire.chunk({"content": "乙"}), wire.chunk({}, "stop"), done=False)
    with wire.server([only_done, only_finish]) as server:
        assert (ask(server), ask(server)) == ("甲", "乙")


# ------------------------------------------------------------------ rule 3: arguments


@pytest.mark.parametrize(
    "arguments, finish",
    [
        ('{"text": "A', "tool_calls"),
        ('{"text": "A', "length"),
        ('["A"]', "tool_calls"),
        ('"A"', "tool_calls"),
        ("text=A", "stop"),
    ],
)
def test_arguments_that_are_no_object_do_not_run(arguments, finish):
    ran = []
    spy = Tool(ECHO.definition, lambda text: ran.append(text))
    with wire.server([wire.calls([("echo", arguments)], finish=finish), GOOD]) as server:
        assert ask(server, tools=[spy]) == "好"
        assistant, result = sent(server, 1)[2:]
    assert ran == []
    assert result["content"].startswith("工具参数不是合法 JSON")
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {}


@pytest.mark.parametrize("finish", ["null", "None"])
def test_null_as_a_word_does_not_end_a_message(finish):
    half = wire.sse(wire.chunk({"content": "半"}, finish), done=False)
    with wire.server([half]) as server:
        with pytest.raises(ModelError, match="中途断开"):
            ask(server)


def test_keep_alives_after_the_message_do_not_keep_it_back():
    def pieces():
        yield wire.sse(wire.chunk({"content": "好"}), wire.chunk({}, "stop"), done=False)
        for _ in range(60):
            time.sleep(0.2)
            yield b": ping\n\n"

    begun = time.monotonic()
    with wire.server([wire.Reply(pieces())]) as server:
        assert ask(server) == "好"
        assert time.monotonic() - begun < 8


@pytest.mark.parametrize("finish", ["length", "network_error"])
def test_a_call_without_its_arguments_at_the_output_limit_does_not_run(finish):
    ran = []
    spy = tool("spy", lambda: ran.append(1))
    with wire.server([wire.calls([("spy", "")], finish=finish), GOOD]) as server:
        assert ask(server, tools=[spy]) == "好"
    assert ran == []


COUNT = tool("count", lambda n, unit="": n + 1, n={"type": "integer", "enum": [5, 7]})
MAYBE = tool("maybe", lambda n: f"{n}", n={"type": ["integer", "null"]})
EITHER = tool("either", lambda n: repr(n), n={"type": ["integer", "string"]})
COUNT.definition["function"]["parameters"]["properties"]["step"] = {"type": "integer"}


@pytest.mark.parametrize(
    "name, arguments, result",
    [
        ("count", {"n": "5"}, "6"),
        ("count", {"n": 5.0}, "6"),
        ("count", {"properties": {"n": 5}, "type": "object"}, "6"),
        ("count", {"arguments": {"n": 5}}, "6"),
        ("count", '"{\\"n\\": 5}"', "6"),
        ("count", '```json\n{"n": 5}\n```', "6"),
        ("count", {"n": 5, "step": None}, "6"),
        ("maybe", {"n": None}, "None"),
        ("either", {"n": "5"}, "'5'"),
        ("echo", {"text": 12345}, "12345"),
        ("count", {"n": 5, "unit": "c"}, "6\n（已忽略未知参数：unit）"),
        ("count<|channel|>x", {"n": 5}, "6"),
        ("echo", '{"text": "a\nb"}', "a\nb"),  # a raw line break
    ],
)
def test_a_call_is_mended_where_nothing_is_lost(name, arguments, result):
    with wire.server([wire.calls([(name, arguments)]), GOOD]) as server:
        ask(server, tools=[COUNT, ECHO, MAYBE, EITHER])
        assert sent(server, 1)[-1]["content"] == result


@pytest.mark.parametrize(
    "arguments", [{"n": "5 items"}, {"n": True}, {"n": 5.5}, {"n": 6}, {"m": 5}, {"n": None}]
)
def test_arguments_that_do_not_fit_are_explained(arguments):
    with wire.server([wire.calls([("count", arguments)]), GOOD]) as server:
        ask(server, tools=[COUNT])
        result = sent(server, 1)[-1]["content"]
    assert result.startswith("工具参数有误") and '"n"' in result


# ------------------------------------------------------------------ rule 4: never nothing


@pytest.mark.parametrize("empty", [wire.say(""), wire.say(" \n\n "), wire.say("", "想")])
def test_an_empty_reply_is_asked_for_once_more_with_tool_choice_none(empty):
    messages = []
    with wire.server([empty, GOOD]) as server:
        assert ask(server, messages=messages) == "好"
        assert [r.body["tool_choice"] for r in server.requests] == ["auto", "none"]
    assert roles(messages) == ["system", "user", "assistant"]


def test_two_empty_replies_are_an_error_and_never_an_empty_answer():
    messages = []
    with wire.server([wire.say(""), wire.say("\n"), GOOD]) as server:
        with pytest.raises(ModelError, match="没有给出回答"):
            ask(server, messages=messages)
        assert len(server.requests) == 2
    assert roles(messages) == ["system", "user"]


def test_only_thinking_at_the_output_limit_says_so():
    with wire.server([wire.say("", "想", finish="length"), GOOD]) as server:
        with pytest.raises(ModelError, match="max_tokens.*--no-thinking"):
            ask(server)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "finish", ["length", "content_filter", "network_error", "model_length", "max_tokens", "abort"]
)
def test_a_cut_answer_is_marked_for_the_reader_and_not_for_the_model(finish):
    heard, messages = [], []
    with wire.server([wire.say("半个回答", finish=finish)]) as server:
        answer = ask(server, on_content=heard.append, messages=messages)
    assert answer.startswith("半个回答\n") and "截断" in answer
    assert "".join(heard) == answer
    assert messages[-1]["content"] == "半个回答"


# ------------------------------------------------------------------ rule 5: callbacks


def test_callbacks_run_on_the_callers_thread():
    here, heard = threading.get_ident(), set()

    def hear(kind):
        return lambda text: heard.add((kind, threading.get_ident()))

    kinds = ["on_tool_call", "on_tool_result", "on_reasoning", "on_content"]
    with wire.server([CALL, wire.say("好", "想")]) as server:
        ask(server, **{kind: hear(kind) for kind in kinds})
    assert heard == {(kind, here) for kind in kinds}


def test_all_calls_are_told_before_the_first_tool_starts():
    log = []
    spy = Tool(ECHO.definition, lambda text: log.append("ran") or text)
    many = wire.calls([("echo", {"text": str(n)}) for n in range(10)])
    with wire.server([many, GOOD]) as server:
        ask(server, tools=[spy], on_tool_call=log.append)
    assert log[:10] == [f'调用工具 echo({{"text": "{n}"}})' for n in range(10)]
    assert log[10:] == ["ran"] * 10


@pytest.mark.parametrize("where", ["on_tool_call", "on_tool_result", "on_content", "on_reasoning"])
def test_a_callback_that_raises_leaves_no_threads_and_a_usable_list(where):
    def stop(text):
        raise KeyError("stop")

    messages = []
    many = wire.calls([("echo", {"text": str(n)}) for n in range(20)])
    replies = [many, wire.say("好", "想")]
    with wire.server(lambda request: replies.pop(0) if replies else GOOD) as server:
        before = set(threading.enumerate())
        with pytest.raises(KeyError):
            ask(server, messages=messages, **{where: stop})
        deadline = time.monotonic() + 2
        while set(threading.enumerate()) - before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not set(threading.enumerate()) - before
        assert usable(messages)
        replies.clear()
        assert ask(server, "again", messages=messages) == "好"
        assert sent(server, -1)[-1]["content"] == "again" and usable(sent(server, -1))


def test_a_callback_that_raises_does_not_wait_for_a_hanging_tool():
    def stop(line):
        raise KeyError("stop")

    begun = time.monotonic()
    with wire.server([wire.calls([("hang", {}), ("echo", {"text": "A"})])]) as server:
        with pytest.raises(KeyError):
            ask(server, on_tool_result=stop)
    assert time.monotonic() - begun < 5


# ------------------------------------------------------------------ the conversation


def test_the_list_can_be_handed_in_again():
    messages = []
    with wire.server([CALL, wire.say("一"), wire.say("二")]) as server:
        ask(server, "甲", messages=messages)
        ask(server, "乙", messages=messages)
        assert [m["content"] for m in sent(server, 2)[1:]] == ["甲", "", "A", "一", "乙"]
    assert roles(messages)[-3:] == ["assistant", "user", "assistant"]


def test_a_system_prompt_of_ones_own_stays():
    messages = [{"role": "system", "content": "mine"}]
    with wire.server([GOOD]) as server:
        ask(server, messages=messages)
        assert sent(server, 0)[0] == {"role": "system", "content": "mine"}
    assert roles(messages) == ["system", "user", "assistant"]


def test_the_list_goes_on_after_the_fuse():
    messages, rounds = [], [wire.calls([("echo", {"text": str(n)})]) for n in range(2)]
    with wire.server([*rounds, GOOD]) as server:
        fuse = ask(server, messages=messages, max_rounds=2)
        assert fuse == "工具调用超过 2 轮，未能完成任务" == messages[-1]["content"]
        assert ask(server, messages=messages) == "好"
        assert usable(sent(server, 2))


def test_an_error_in_the_second_round_keeps_the_first():
    messages = []
    half = wire.sse(wire.chunk({"content": "半"}), done=False)
    with wire.server([CALL, half, GOOD]) as server:
        with pytest.raises(ModelError):
            ask(server, messages=messages)
        assert roles(messages) == ["system", "user", "assistant", "tool"] and usable(messages)
        assert ask(server, "go on", messages=messages) == "好"


@pytest.mark.parametrize(
    "field, pieces, whole",
    [
        ("reasoning_content", ["想", "想看"], "想想看"),
        ("reasoning", ["想", "想看"], "想想看"),
        ("reasoning_details", [[{"text": "想"}], [{"data": "x"}]], [{"text": "想"}, {"data": "x"}]),
    ],
)
def test_thinking_goes_back_in_its_field_within_the_run_only(field, pieces, whole):
    function = {"name": "echo", "arguments": '{"text": "A"}'}
    thinking = wire.sse(
        *(wire.chunk({field: piece}) for piece in pieces),
        wire.chunk({"tool_calls": [{"index": 0, "id": "a", "function": function}]}),
        wire.chunk({}, "tool_calls"),
    )
    messages, fields = [], {"reasoning_content", "reasoning", "reasoning_details"}
    with wire.server([thinking, GOOD, wire.say("再")]) as server:
        ask(server, messages=messages)
        ask(server, "next", messages=messages)
        within, after = sent(server, 1), sent(server, 2)
    assert within[2][field] == whole and len(fields & set(within[2])) == 1
    assert not any(fields & set(message) for message in after)


# ------------------------------------------------------------------ repetitions


def test_repeated_calls_are_told_answered_for_and_not_run_a_third_time():
    ran, messages = [], []
    spy = Tool(ECHO.definition, lambda text: ran.append(text) or text)
    with wire.server([CALL, CALL, CALL, GOOD]) as server:
        assert ask(server, tools=[spy], messages=messages) == "好"
        assert [r.body["tool_choice"] for r in server.requests] == ["auto", "auto", "none", "none"]
    results = [m["content"] for m in messages if m["role"] == "tool"]
    assert results[0] == "A"
    assert results[1].startswith("A\n") and "完全相同" in results[1]
    assert "不再执行" in results[2]
    assert ran == ["A", "A"]


def test_the_same_arguments_written_otherwise_are_the_same_call():
    again = wire.calls([("echo", '{ "text":"A"}', "b")])
    with wire.server([CALL, again, GOOD]) as server:
        ask(server)
        assert server.requests[2].body["tool_choice"] == "none"


def test_a_round_with_one_new_call_is_no_repetition():
    new_too = wire.calls([("echo", {"text": "A"}), ("echo", {"text": "B"})])
    with wire.server([CALL, new_too, GOOD]) as server:
        ask(server)
        assert server.requests[2].body["tool_choice"] == "auto"
        assert [m["content"] for m in sent(server, 2)[-2:]] == ["A", "B"]


def test_the_next_run_may_repeat_a_call():
    messages = []
    with wire.server([CALL, GOOD, CALL, GOOD]) as server:
        ask(server, messages=messages)
        ask(server, messages=messages)
        assert [r.body["tool_choice"] for r in server.requests] == ["auto"] * 4


# ------------------------------------------------------------------ calls written as text

WRITTEN = '{"name": "echo", "arguments": {"text": "A"}}'


@pytest.mark.parametrize(
    "text",
    [
        WRITTEN,
        f"[{WRITTEN}]",
        "{" + WRITTEN + "}",
        f"```json\n{WRITTEN}\n```",
        f"<tool_call>\n{WRITTEN}\n</tool_call>",
        f"<tools>{WRITTEN}</tools>",
        f"{WRITTEN}\n```",
        f'{WRITTEN}\n```json\n{{"made": "up"}}\n```',
        f"{WRITTEN}\n{WRITTEN}",
        f"好的。\n<tool_call>{WRITTEN}</tool_call>",
        "<function=echo>\n<parameter=text>\nA\n</parameter>\n</function>",
        f"<tool_call>\n{WRITTEN}\n</tool_call><|im_end|>\n",
        f"{WRITTEN}\n</tool_call>",
        f"```JSON\r\n{WRITTEN}\r\n```",
        f"```xml\n<tool_call>\n{WRITTEN}\n</tool_call>\n```",
        f"<tool_call>{WRITTEN}</tool_call>\n{WRITTEN}",
        f'<tool_call>{WRITTEN}</tool_call>\n<tool_response>\n{{"made": "up"',
    ],
)
def test_a_call_written_as_text_runs_and_is_not_shown(text):
    heard = []
    with wire.server([wire.say(text), GOOD]) as server:
        assert ask(server, on_content=heard.append) == "好"
        assert sent(server, 1)[-1]["content"] == "A"
        assert sent(server, 1)[2]["tool_calls"][0]["function"]["name"] == "echo"
    assert "echo" not in "".join(heard)


def test_in_a_tag_even_a_name_alone_is_a_call():
    now = tool("now", lambda: "三点")
    written = wire.say('<tool_call>\n{"name": "now"}\n{"name": "now"}\n</tool_call>')
    with wire.server([written, GOOD]) as server:
        assert ask(server, tools=[now]) == "好"
        assert [message["content"] for message in sent(server, 1)[-2:]] == ["三点", "三点"]


def test_a_call_written_as_text_beside_a_real_one_does_not_run():
    both = wire.calls([("echo", {"text": "B"})], content=f"<tool_call>{WRITTEN}</tool_call>")
    with wire.server([both, GOOD]) as server:
        assert ask(server) == "好"
        assert [message["content"] for message in sent(server, 1) if message["role"] == "tool"] == [
            "B"
        ]


def test_a_result_that_the_model_makes_up_is_no_answer():
    heard, made_up = [], wire.say('<tool_response>\n{"text": "A"}\n</tool_response>')
    with wire.server([made_up, GOOD]) as server:
        assert ask(server, on_content=heard.append) == "好"
        assert server.requests[1].body["tool_choice"] == "none"
    assert "".join(heard) == "好"


def test_json_copied_from_a_result_is_no_answer_unless_it_comes_again():
    call, copy = wire.calls([("echo", {"text": '[{"title": "甲"}]'})]), wire.say('{"title": "甲"}')
    heard = []
    with wire.server([call, copy, GOOD, call, copy, copy]) as server:
        assert ask(server, on_content=heard.append) == "好"
        assert "".join(heard) == "好"
        assert ask(server) == '{"title": "甲"}'


@pytest.mark.parametrize("question", ["hi", '重复：{"title": "乙"}'])
def test_json_of_ones_own_or_out_of_the_question_is_an_answer(question):
    call, own = wire.calls([("echo", {"text": '{"title": "甲"}'})]), wire.say('{"title": "乙"}')
    replies = [call, own] if question == "hi" else [own]
    with wire.server(replies) as server:
        assert ask(server, question) == '{"title": "乙"}'


# ------------------------------------------------------------------ time and threads


def test_a_tool_that_hangs_gives_way_and_the_others_are_kept():
    both = wire.calls([("hang", {}), ("echo", {"text": "A"})])
    begun = time.monotonic()
    with wire.server([both, GOOD]) as server:
        assert ask(server, tool_timeout=0.2) == "好"
        assert [m["content"] for m in sent(server, 1)[3:]] == [
            "工具执行超时：0.2 秒内没有完成",
            "A",
        ]
    assert time.monotonic() - begun < 3


def test_calls_that_have_no_thread_yet_are_not_begun_once_it_is_over():
    begun, over = [], threading.Event()

    def work(n):
        begun.append(n)
        return over.wait(10) if n else "done"

    def stop(line):
        raise ValueError(line)

    seventy = wire.calls([("work", {"n": n}) for n in range(70)])
    with wire.server([seventy]) as server:
        with pytest.raises(ValueError, match="done"):
            ask(server, tools=[tool("work", work, n={"type": "integer"})], on_tool_result=stop)
    over.set()
    assert len(begun) < 68  # 64 threads, and one or two more when the first is free again


def test_the_process_does_not_wait_for_a_tool_that_hangs():
    script = """
import sys, time
sys.path[:0] = ["tests", "."]
import test_loop
hang = test_loop.tool("hang", lambda: time.sleep(20))
use = {"base_url": sys.argv[1], "model": "m", "tools": [hang], "tool_timeout": 0.2}
print(test_loop.run_agent("hi", **use))
"""
    with wire.server([wire.calls([("hang", {})]), wire.say("ok")]) as server:
        command = [sys.executable, "-c", script, server.base_url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=10)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [b"ok"], b"")


@pytest.mark.skipif(os.name == "nt", reason="SIGINT")
def test_ctrl_c_while_a_tool_hangs_returns_within_a_second():
    pressed, messages = [], []

    def press():
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with wire.server([wire.calls([("hang", {}), ("echo", {"text": "A"})]), GOOD]) as server:
        start = iter([threading.Timer(0.3, press).start])  # once, with the first call
        with pytest.raises(KeyboardInterrupt):
            ask(
                server,
                messages=messages,
                on_tool_call=lambda line: next(start, lambda: None)(),
            )
        assert time.monotonic() - pressed[0] < 3  # a second, and what a busy machine adds
        assert usable(messages)
        assert ask(server, messages=messages) == "好"


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit(3)


async def later():
    return "A"


@pytest.mark.parametrize(
    "execute, words",
    [(lambda: later(), "async def"), (lambda: (n for n in range(3)), r"^\[0, 1, 2\]$")],
)
def test_what_cannot_be_a_result_is_said_and_what_can_be_is_read(execute, words):
    with wire.server([wire.calls([("odd", {})]), GOOD]) as server:
        ask(server, tools=[tool("odd", execute)])
        assert re.search(words, sent(server, 1)[-1]["content"])


def test_a_declaration_that_is_no_json_does_not_hang_the_call():
    odd = tool("odd", lambda a: a, a={"enum": {"p", "q"}})
    with wire.server([wire.calls([("odd", {"b": 1})]), GOOD]) as server:
        ask(server, tools=[odd])
        assert "缺少参数 a" in sent(server, 1)[-1]["content"]


@pytest.mark.parametrize(
    "error", [Unspeakable(), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError()]
)
def test_what_a_tool_raises_is_that_calls_message_and_nothing_elses(error):
    def fail():
        raise error

    both = wire.calls([("fail", {}), ("echo", {"text": "A"})])
    with wire.server([both, GOOD]) as server:
        assert ask(server, tools=[tool("fail", fail), ECHO]) == "好"
        failed, fine = [m["content"] for m in sent(server, 1)[3:]]
    assert failed.startswith("工具执行失败: ") and fine == "A"


def test_context_variables_reach_the_tools_and_do_not_leak_out_of_them():
    variable = contextvars.ContextVar("variable", default="lost")
    seen = []

    def look(text):
        seen.append(variable.get())
        variable.set(text)
        return text

    variable.set("found")
    both = wire.calls([("echo", {"text": "A"}), ("echo", {"text": "B"})])
    with wire.server([both, GOOD]) as server:
        ask(server, tools=[Tool(ECHO.definition, look)])
    assert seen == ["found", "found"] and variable.get() == "found"


def test_sixty_four_calls_of_a_round_run_at_once():
    meeting = threading.Barrier(64, timeout=5)
    meet = Tool(ECHO.definition, lambda text: meeting.wait() * 0 + int(text))
    many = wire.calls([("echo", {"text": str(n)}) for n in range(64)])
    with wire.server([many, GOOD]) as server:
        assert ask(server, tools=[meet]) == "好"
        assert [m["content"] for m in sent(server, 1)[3:]] == [str(n) for n in range(64)]


def test_several_runs_at_once_do_not_mix():
    def answer(request):
        question = request.body["messages"][1]["content"]
        result = request.body["messages"][-1]
        if result["role"] == "tool":
            return wire.say(f"{question}: {result['content']}")
        return wire.calls([("echo", {"text": question})])

    def one(question):
        heard = []
        options = {"on_tool_call": heard.append, "on_content": heard.append}
        return ask(server, question, **options), heard[0], "".join(heard[1:])

    with wire.server(answer) as server, ThreadPoolExecutor(8) as pool:
        questions = [f"q{n}" for n in range(24)]
        for question, found in zip(questions, pool.map(one, questions)):
            answered = f"{question}: {question}"
            assert found == (answered, f'调用工具 echo({{"text": "{question}"}})', answered)


def test_an_interrupt_while_the_calls_are_handed_out_stays_an_interrupt(monkeypatch):
    def interrupted(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(react_min.ThreadPoolExecutor, "submit", interrupted)
    with wire.server([CALL]) as server:
        with pytest.raises(KeyboardInterrupt):
            ask(server)
