"""The rules that hold whatever the server does, each over real HTTP on loopback."""

import contextvars
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import react_min
import tools
import wire
from react_min import ModelError, call_model_stream, run_agent
from tools import Tool

ROOT = Path(__file__).resolve().parent.parent


def tool(name, execute, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": name, "parameters": parameters}
    return Tool({"type": "function", "function": function}, execute)


ECHO = tool("echo", lambda text: text, text={"type": "string"})


def ask(server, question="hi", **options):
    use = {"base_url": server.base_url, "model": "m", "api_key": "sk-secret-1", "tools": [ECHO]}
    return run_agent(question, **{**use, **options})


def sent(server, number):
    return server.requests[number].body["messages"]


def json_reply(value, status=200, **headers):
    headers = {
        "Content-Type": "application/json",
        **{k.replace("_", "-"): headers[k] for k in headers},
    }
    return wire.Reply([json.dumps(value).encode()], status, headers, framing="length")


def error(message, status=400):
    return json_reply({"error": {"message": message}}, status)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("urllib3.util.retry.time.sleep", lambda seconds: None)


# ------------------------------------------------------------------ the contract's five rules


def test_each_call_gets_one_tool_message_in_call_order_whatever_fails():
    def broken(text):
        raise SystemExit(text)

    calls = wire.calls(
        [
            ("echo", {"text": "A"}, "a"),
            ("nobody", {}, "b"),
            ("echo", "{bad", "c"),
            ("broken", {"text": "bye"}, "d"),
            ("echo", {}, "e"),
        ]
    )
    broken_tool = tool("broken", broken, text={"type": "string"})
    with wire.server([calls, wire.say("好")]) as server:
        assert ask(server, tools=[ECHO, broken_tool]) == "好"
        messages = sent(server, 1)
    assistant, results = messages[2], messages[3:]
    assert [m["tool_call_id"] for m in results] == ["a", "b", "c", "d", "e"]
    assert [c["id"] for c in assistant["tool_calls"]] == ["a", "b", "c", "d", "e"]
    assert results[0]["content"] == "A"
    assert results[1]["content"].startswith("未找到工具 nobody") and "echo" in results[1]["content"]
    assert results[2]["content"].startswith("工具参数不是合法 JSON: {bad")
    assert results[3]["content"] == "工具执行失败: bye"
    assert "text" in results[4]["content"]
    assert json.loads(assistant["tool_calls"][2]["function"]["arguments"]) == {}


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_a_stream_without_finish_reason_and_done_is_no_message(framing):
    half = wire.sse(wire.chunk({"content": "半个"}), done=False)
    with wire.server([wire.Reply([half], framing=framing)]) as server:
        with pytest.raises(ModelError, match="中途断开"):
            ask(server)


def test_finish_reason_or_done_alone_completes_a_message():
    only_done = wire.sse(wire.chunk({"content": "甲"}))
    only_finish = wire.sse(wire.chunk({"content": "乙"}), wire.chunk({}, "stop"), done=False)
    with wire.server([only_done, only_finish]) as server:
        assert ask(server) == "甲"
        assert ask(server) == "乙"


def test_a_call_cut_by_the_output_limit_does_not_run():
    ran = []
    spy = Tool(tool("spy", None).definition, lambda: ran.append(1))
    cut = wire.calls([("spy", "")], finish="length")
    with wire.server([cut, wire.say("好")]) as server:
        assert ask(server, tools=[spy]) == "好"
    assert ran == []


def test_an_empty_reply_is_asked_for_once_more_and_then_an_error():
    empty = wire.say("")
    with wire.server([empty, wire.say("好")]) as server:
        assert ask(server) == "好"
        assert server.requests[1].body["tool_choice"] == "none"
    with wire.server([empty, empty]) as server:
        messages = []
        with pytest.raises(ModelError):
            ask(server, messages=messages)
        assert [m["role"] for m in messages] == ["system", "user"]


def test_callbacks_run_on_the_callers_thread_calls_first_results_as_they_come():
    heard, here = [], threading.get_ident()
    first_done = threading.Event()

    def slow(text):
        first_done.wait(5)
        return text

    def quick(text):
        return text

    def hear(line):
        assert threading.get_ident() == here
        heard.append(line)
        if "结果 quick" in line:
            first_done.set()

    text = {"type": "string"}
    both = [tool("slow", slow, text=text), tool("quick", quick, text=text)]
    calls = wire.calls([("slow", {"text": "1"}), ("quick", {"text": "2"})])
    with wire.server([calls, wire.say("好")]) as server:
        ask(server, tools=both, on_tool_call=hear, on_tool_result=hear)
    assert heard == [
        '调用工具 slow({"text": "1"})',
        '调用工具 quick({"text": "2"})',
        "工具结果 quick → 2",
        "工具结果 slow → 1",
    ]


# ------------------------------------------------------------------ the loop


def test_the_fuse_blows_after_max_rounds_with_the_articles_sentence():
    calls = [wire.calls([("echo", {"text": str(n)})]) for n in range(9)]
    with wire.server(calls) as server:
        messages = []
        assert ask(server, messages=messages) == "工具调用超过 5 轮，未能完成任务"
        assert len(server.requests) == 5
        assert messages[-1]["content"] == "工具调用超过 5 轮，未能完成任务"


def test_a_round_of_repetitions_is_told_so_and_must_be_followed_by_an_answer():
    again = wire.calls([("echo", {"text": "A"})])
    ran = []
    spy = Tool(ECHO.definition, lambda text: ran.append(text) or text)
    with wire.server([again, again, again, wire.say("好")]) as server:
        assert ask(server, tools=[spy]) == "好"
        assert [r.body["tool_choice"] for r in server.requests] == ["auto", "auto", "none", "none"]
        assert "完全相同" in sent(server, 2)[-1]["content"]
    assert ran == ["A", "A"]  # the third one is not executed


def test_a_conversation_goes_on_with_the_same_list():
    messages = []
    with wire.server([wire.say("一"), wire.say("二")]) as server:
        ask(server, "甲", messages=messages)
        ask(server, "乙", messages=messages)
        assert [m["content"] for m in sent(server, 1)[1:]] == ["甲", "一", "乙"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]


def test_thinking_goes_back_within_the_run_and_not_after_the_next_question():
    thinking = wire.sse(
        wire.chunk({"reasoning": "想"}),
        wire.chunk(
            {
                "tool_calls": [
                    {
                        "index": 0,
                        "id": "a",
                        "function": {"name": "echo", "arguments": '{"text":"A"}'},
                    }
                ]
            }
        ),
        wire.chunk({}, "tool_calls"),
    )
    messages = []
    with wire.server([thinking, wire.say("好"), wire.say("再")]) as server:
        ask(server, messages=messages)
        ask(server, messages=messages)
        assert sent(server, 1)[2]["reasoning"] == "想"
        assert all("reasoning" not in m for m in sent(server, 2))


def test_a_cut_answer_says_so():
    with wire.server([wire.say("半个回答", finish="length")]) as server:
        heard = []
        answer = ask(server, on_content=heard.append)
    assert answer.startswith("半个回答") and "截断" in answer
    assert "".join(heard) == answer


def test_a_hung_tool_gives_way_and_the_others_are_kept():
    text = {"type": "string"}
    hang = tool("hang", lambda text: threading.Event().wait(30), text=text)
    calls = wire.calls([("hang", {"text": "1"}, "h"), ("echo", {"text": "2"}, "e")])
    with wire.server([calls, wire.say("好")]) as server:
        assert ask(server, tools=[hang, ECHO], tool_timeout=0.2) == "好"
        assert "超时" in sent(server, 1)[-2]["content"]
        assert sent(server, 1)[-1]["content"] == "2"


def test_a_callback_that_raises_stops_the_run_and_leaves_a_usable_list():
    messages = []
    calls = wire.calls([("echo", {"text": "A"})])

    def stop(line):
        raise KeyError("stop")

    with wire.server([calls, wire.say("好")]) as server:
        with pytest.raises(KeyError):
            ask(server, messages=messages, on_tool_result=stop)
        assert ask(server, messages=messages) == "好"
        assert [m["role"] for m in sent(server, 1)] == ["system", "user", "user"]


def test_several_runs_at_once_do_not_mix():
    def answer(request):
        question = request.body["messages"][1]["content"]
        done = request.body["messages"][-1]["role"] == "tool"
        return wire.say(f"答 {question}") if done else wire.calls([("echo", {"text": question})])

    with wire.server(answer) as server, ThreadPoolExecutor(8) as pool:
        questions = [f"问{n}" for n in range(24)]
        assert list(pool.map(lambda q: ask(server, q), questions)) == [f"答 {q}" for q in questions]


def test_sixty_four_calls_in_a_round():
    calls = wire.calls([("echo", {"text": str(n)}) for n in range(64)])
    with wire.server([calls, wire.say("好")]) as server:
        assert ask(server) == "好"
        assert [m["content"] for m in sent(server, 1)[3:]] == [str(n) for n in range(64)]


# ------------------------------------------------------------------ the request


def test_five_rounds_use_one_connection():
    rounds = [wire.calls([("echo", {"text": str(n)})]) for n in range(4)]
    with wire.server([*rounds, wire.say("好")]) as server:
        assert ask(server) == "好"
        assert server.connections == 1


def test_a_refused_field_is_dropped_for_the_run_and_said_once(capsys):
    def answer(request):
        if "enable_thinking" in request.body:
            return error("Unrecognized request argument supplied: enable_thinking")
        if "max_tokens" in request.body:
            return json_reply({"detail": [{"loc": ["body", "max_tokens"], "msg": "extra"}]}, 422)
        done = any(m["role"] == "tool" for m in request.body["messages"])
        return wire.say("好") if done else wire.calls([("echo", {"text": "A"})])

    with wire.server(answer) as server:
        assert ask(server) == "好"
        assert len(server.requests) == 4
    assert capsys.readouterr().err.count("enable_thinking") == 1


def test_a_refusal_that_names_nothing_is_an_error_after_one_request():
    with wire.server([error("bad request"), wire.say("好")]) as server:
        with pytest.raises(ModelError, match="HTTP 400.*bad request"):
            ask(server)
        assert len(server.requests) == 1


def test_demanded_thinking_is_added_and_never_asked_for_twice():
    def answer(request):
        calling = [m for m in request.body["messages"] if m.get("tool_calls")]
        if not calling:
            return wire.calls([("echo", {"text": "A"})])
        return error("reasoning_content is missing in assistant tool call message")

    with wire.server(answer) as server:
        with pytest.raises(ModelError, match="is missing"):
            ask(server)
        assert len(server.requests) == 3
        assert sent(server, 2)[2]["reasoning_content"] == ""


@pytest.mark.parametrize("suffix", ["", "/", "/chat/completions", "  "])
def test_the_base_url_may_be_written_in_many_ways(suffix):
    with wire.server([wire.say("好")]) as server:
        assert ask(server, base_url=server.base_url + suffix) == "好"
        assert server.requests[0].path == "/v1/chat/completions"


def test_the_key_is_never_shown():
    def answer(request):
        return error(f"bad key {request.headers['authorization']}", 401)

    with wire.server(answer) as server:
        with pytest.raises(ModelError, match="HTTP 401") as caught:
            ask(server)
        assert "sk-secret-1" not in str(caught.value)


def test_the_dashscope_key_goes_to_dashscope_only(monkeypatch):
    monkeypatch.setenv("DASHSCOPE_API_KEY", "sk-d")
    assert react_min._key_for("https://dashscope.aliyuncs.com/compatible-mode/v1") == "sk-d"
    assert react_min._key_for("https://dashscope.aliyuncs.com.evil.test/v1") == ""
    assert react_min._key_for("http://localhost:11434/v1") == ""


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 502, 503])
@pytest.mark.parametrize(
    "body",
    [
        '{"error": {"message": "so sorry"}}',
        "<html><b>so</b> sorry</html>",
        '[{"error": "so sorry"}]',
    ],
)
def test_an_http_error_is_one_line_with_the_status_and_the_servers_words(status, body):
    reply = wire.Reply([body.encode()], status, {"Content-Type": "text/html"}, framing="length")
    with wire.server(lambda request: reply) as server:
        with pytest.raises(ModelError) as caught:
            ask(server)
    text = str(caught.value)
    assert str(status) in text and "so sorry" in text and "\n" not in text and "<" not in text


def test_a_loading_model_is_waited_for():
    with wire.server([error("Loading model", 503), wire.say("好")]) as server:
        assert ask(server) == "好"


def test_a_server_that_asks_for_too_long_a_wait_is_not_waited_for():
    later = json_reply({"error": "later"}, 429, Retry_After="3600")
    with wire.server([later, wire.say("好")]) as server:
        with pytest.raises(ModelError, match="429"):
            ask(server)
        assert len(server.requests) == 1


def test_an_interrupted_history_is_sent_paired():
    call = {"id": "a", "type": "function", "function": {"name": "echo", "arguments": "{}"}}
    history = [
        {"role": "tool", "tool_call_id": "gone", "content": "x"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    with wire.server([wire.say("好")]) as server:
        ask(server, messages=history)
        messages = sent(server, 0)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["content"] == "" and messages[2]["content"]


def test_lone_surrogates_do_not_reach_the_server():
    with wire.server([wire.say("好")]) as server:
        assert ask(server, "天\udc97气") == "好"
        assert sent(server, 0)[-1]["content"] == "天\ufffd气"


def test_a_reply_without_text_at_the_output_limit_is_an_error_that_says_so():
    with wire.server([wire.say("", "想", finish="length")]) as server:
        with pytest.raises(ModelError, match="max_tokens"):
            ask(server)
        assert len(server.requests) == 1


def test_no_thinking_is_said_in_all_ways_that_servers_understand():
    with wire.server([wire.say("好")]) as server:
        ask(server, thinking=False)
        body = server.requests[0].body
    assert body["enable_thinking"] is False and body["reasoning_effort"] == "none"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_without_tools_neither_tools_nor_tool_choice_is_sent():
    with wire.server([wire.say("好")]) as server:
        ask(server, tools=[])
        assert not {"tools", "tool_choice"} & server.requests[0].body.keys()


def test_a_key_with_an_illegal_letter_is_refused_without_showing_it():
    with pytest.raises(ModelError, match="第 1 个字符") as caught:
        run_agent("hi", base_url="http://127.0.0.1:9/v1", api_key="“sk-secret-1”")
    assert "sk-secret" not in str(caught.value)


def test_neither_proxy_nor_netrc_has_a_say_about_loopback(monkeypatch, tmp_path):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    netrc = tmp_path / "netrc"
    netrc.write_text("default login u password p\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with wire.server([wire.say("好"), wire.say("好")]) as server:
        assert ask(server) == "好" and ask(server, api_key="") == "好"
        assert server.requests[0].headers["authorization"] == "Bearer sk-secret-1"
        assert "authorization" not in server.requests[1].headers


def test_netrc_has_no_say_about_other_hosts_either(monkeypatch, tmp_path):
    server = react_min.Server("http://model.test/v1", "")
    assert server.session.auth is not None and server.session.trust_env


def test_a_redirect_is_reported_and_not_followed():
    moved = wire.Reply([], 302, {"Location": "http://127.0.0.1:9/v2"}, framing="length")
    with wire.server([moved, wire.say("好")]) as server:
        with pytest.raises(ModelError, match="/v2"):
            ask(server)
        assert [r.method for r in server.requests] == ["POST"]


def test_a_dropped_connection_is_tried_once_more_but_silence_is_not():
    dropped = wire.Reply([], framing="drop")
    with wire.server([dropped, wire.say("好")]) as server:
        assert ask(server) == "好"
    with wire.server([wire.Reply([], wait=2), wire.say("好")]) as server:
        with pytest.raises(ModelError, match="超时"):
            ask(server, timeout=0.3)
        assert len(server.requests) == 1


def test_context_variables_reach_the_tools():
    variable = contextvars.ContextVar("variable", default="lost")
    variable.set("found")
    spy = Tool(ECHO.definition, lambda text: variable.get())
    with wire.server([wire.calls([("echo", {"text": "A"})]), wire.say("好")]) as server:
        ask(server, tools=[spy])
        assert sent(server, 1)[-1]["content"] == "found"


INTEGER = tool("count", lambda n: n + 1, n={"type": "integer"})


@pytest.mark.parametrize(
    "arguments, result",
    [
        ({"n": "5"}, "6"),
        ({"n": 5.0}, "6"),
        ({"properties": {"n": 5}, "type": "object"}, "6"),
        ({"arguments": {"n": 5}}, "6"),
        ('"{\\"n\\": 5}"', "6"),
        ('```json\n{"n": 5}\n```', "6"),
        ('{"n":\n5}', "6"),
        ({"n": 5, "unit": "c"}, "6\n（已忽略未知参数：unit）"),
    ],
)
def test_arguments_are_mended_where_nothing_is_lost(arguments, result):
    with wire.server([wire.calls([("count<|channel|>x", arguments)]), wire.say("好")]) as server:
        ask(server, tools=[INTEGER])
        assert sent(server, 1)[-1]["content"] == result


@pytest.mark.parametrize(
    "arguments", [{"n": "5 items"}, {"n": True}, {"n": 5.5}, {"m": 5}, {"n": None}]
)
def test_arguments_that_do_not_fit_are_explained(arguments):
    with wire.server([wire.calls([("count", arguments)]), wire.say("好")]) as server:
        ask(server, tools=[INTEGER])
        assert "工具参数有误" in sent(server, 1)[-1]["content"]
        assert '"n"' in sent(server, 1)[-1]["content"]


def test_a_raw_line_break_inside_an_argument_is_kept():
    with wire.server([wire.calls([("echo", '{"text": "a\nb"}')]), wire.say("好")]) as server:
        ask(server)
        assert sent(server, 1)[-1]["content"] == "a\nb"


# ------------------------------------------------------------------ what a stream may hold


def chunks_say(*chunks):
    with wire.server([wire.sse(*chunks)]) as server:
        heard = []
        message = call_model_stream(
            [], base_url=server.base_url, model="m", on_content=heard.append
        )
    return message["content"]


def choice(index, content):
    return {"choices": [{"index": index, "delta": {"content": content}, "finish_reason": None}]}


def test_only_the_first_of_several_choices_is_read():
    assert chunks_say(choice(0, "a"), choice(0, "b"), choice(1, "x"), choice(0, "c")) == "abc"


def test_a_choice_index_that_counts_the_chunks_is_no_other_choice():
    assert chunks_say(choice(7, "a"), choice(8, "b"), choice(9, "c")) == "abc"


def test_the_result_of_a_tool_of_the_servers_own_is_not_the_answer():
    foreign = wire.chunk({"role": "tool", "content": "x"})
    assert chunks_say(wire.chunk({"content": "a"}), foreign, wire.chunk({}, "stop")) == "a"


def test_an_error_as_finish_reason_is_an_error():
    with pytest.raises(ModelError, match="报错"):
        chunks_say(wire.chunk({"content": "a"}), wire.chunk({}, "error"))


# ------------------------------------------------------------------ calls written as text


CALL = '{"name": "echo", "arguments": {"text": "A"}}'


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"[{CALL}]",
        "{" + CALL + "}",
        f"```json\n{CALL}\n```",
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"<tools>{CALL}</tools>",
        f"{CALL}\n```",
        f'{CALL}\n```json\n{{"made": "up"}}\n```',
        f"{CALL}\n{CALL}",
        f"好的。\n<tool_call>{CALL}</tool_call>",
        "<function=echo>\n<parameter=text>\nA\n</parameter>\n</function>",
    ],
)
def test_a_call_written_as_text_runs_and_is_not_shown(text):
    heard = []
    with wire.server([wire.say(text), wire.say("好")]) as server:
        assert ask(server, on_content=heard.append) == "好"
        assert sent(server, 1)[-1]["content"] == "A"
        assert sent(server, 1)[2]["tool_calls"][0]["function"]["name"] == "echo"
    assert "echo" not in "".join(heard)


@pytest.mark.parametrize(
    "text",
    [
        f"格式是 <tool_call>{CALL}</tool_call>，请小心。",
        f"```json\n{CALL}\n```\n这是一个例子。",
        '{"name": "nobody", "arguments": {}}',
        '{"temperature": 3}',
    ],
)
def test_what_is_quoted_or_unknown_is_an_answer(text):
    heard = []
    with wire.server([wire.say(text)]) as server:
        assert ask(server, on_content=heard.append) == text
    assert "".join(heard) == text


def test_a_result_that_the_model_makes_up_is_no_answer():
    made_up = wire.say('<tool_response>\n{"text": "A"}\n</tool_response>')
    heard = []
    with wire.server([made_up, wire.say("好")]) as server:
        assert ask(server, on_content=heard.append) == "好"
        assert server.requests[1].body["tool_choice"] == "none"
    assert "".join(heard) == "好"


def test_json_copied_from_a_result_is_no_answer_unless_it_is_asked_for_again():
    call, copy = wire.calls([("echo", {"text": '[{"title": "甲"}]'})]), wire.say('{"title": "甲"}')
    heard = []
    with wire.server([call, copy, wire.say("好"), call, copy, copy]) as server:
        assert ask(server, on_content=heard.append) == "好"
        assert "".join(heard) == "好"
        assert ask(server) == '{"title": "甲"}'


# ------------------------------------------------------------------ thinking inside the content


@pytest.mark.parametrize("at", range(len("<think>想</think>答")))
def test_think_tags_may_be_cut_anywhere(at):
    text, heard, thought = "<think>想</think>答", [], []
    pieces = [wire.chunk({"content": p}) for p in (text[:at], text[at:]) if p]
    with wire.server([wire.sse(*pieces, wire.chunk({}, "stop"))]) as server:
        message = call_model_stream(
            [{"role": "user", "content": "hi"}],
            base_url=server.base_url,
            model="m",
            on_content=heard.append,
            on_reasoning=thought.append,
        )
    assert (message["content"], "".join(heard), "".join(thought)) == ("答", "答", "想")


def test_all_before_a_bare_closing_tag_is_thinking_but_not_in_code():
    with wire.server([wire.say("想\n</think>\n\n答"), wire.say("写作 `</think>` 即可")]) as server:
        assert ask(server).strip() == "答"
        assert ask(server) == "写作 `</think>` 即可"


# ------------------------------------------------------------------ the command line


def run(*arguments, server=None, stdin=None, **env):
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", **env}
    if server:
        env.update(OPENAI_BASE_URL=server.base_url, OPENAI_MODEL="m")
    command = [sys.executable, "react_min.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, input=stdin, capture_output=True, timeout=30)


def test_a_pipe_gets_the_bare_answer():
    calls = wire.calls([("get_time", {})], content="我看看。")
    with wire.server([calls, wire.say("三点")]) as server:
        done = run("几点？", server=server)
    assert (done.returncode, done.stdout.decode()) == (0, "三点\n")
    assert "调用工具 get_time({})" in done.stderr.decode()
    assert "我看看。" in done.stderr.decode()


def test_the_question_may_come_through_a_pipe():
    with wire.server([wire.say("好")]) as server:
        run(server=server, stdin="天气？".encode())
        assert sent(server, 0)[-1]["content"] == "天气？"


def test_usage_and_help():
    assert run(stdin=b"").returncode == 2
    assert run("--nonsense").returncode == 2
    done = run("--help")
    assert done.returncode == 0 and done.stdout.decode().count("python react_min.py") >= 2


def test_without_a_server_it_says_the_three_ways_on():
    done = run("hi", OPENAI_BASE_URL="http://127.0.0.1:9/v1")
    text = done.stderr.decode()
    assert done.returncode == 1 and done.stdout == b"" and len(text.strip().split("\n")) == 1
    for way in ("127.0.0.1:9", "ollama pull qwen3:1.7b", "DASHSCOPE_API_KEY", "--demo"):
        assert way in text


@pytest.mark.skipif(os.name == "nt", reason="SIGINT")
@pytest.mark.parametrize(
    "reply",
    [
        wire.Reply([], wait=20),
        wire.Reply([wire.sse(wire.chunk({"content": "等"}), done=False)], end="hang"),
        error("Loading model", 503),
    ],
    ids=["waiting", "streaming", "retrying"],
)
def test_ctrl_c_ends_it_within_a_second_with_130(reply):
    with wire.server(lambda request: reply) as server:
        env = {**os.environ, "OPENAI_BASE_URL": server.base_url}
        command = [sys.executable, "react_min.py", "hi"]
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=ROOT, env=env, **quiet)
        while not server.requests:
            time.sleep(0.02)
        time.sleep(0.4)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and time.monotonic() - begun < 1
    assert b"Traceback" not in err


@pytest.mark.parametrize("encoding", ["gbk", "ascii"])
def test_a_console_that_cannot_print_a_letter_prints_a_replacement(encoding):
    with wire.server([wire.say("晴 🌞")]) as server:
        done = run("天气", server=server, PYTHONIOENCODING=encoding)
    assert done.returncode == 0 and done.stdout.strip()


def test_nothing_that_a_terminal_obeys_is_printed_even_when_cut():
    pieces = [
        wire.chunk({"content": p}) for p in ("a\x1b[2", "J\x1b]0;x", "\x07b\u202ec\x9b1md", "\re")
    ]
    with wire.server([wire.sse(*pieces, wire.chunk({}, "stop"))]) as server:
        done = run("hi", server=server)
    assert done.stdout.decode() == "abcde\n"


def test_a_closed_pipe_is_no_traceback():
    with wire.server([wire.Reply([wire.say("行\n" * 200)], gap=0.01)]) as server:
        command = f'"{sys.executable}" react_min.py hi | head -1'
        env = {**os.environ, "OPENAI_BASE_URL": server.base_url}
        done = subprocess.run(
            command, cwd=ROOT, env=env, shell=True, capture_output=True, timeout=30
        )
    assert b"Traceback" not in done.stderr and b"BrokenPipe" not in done.stderr


def test_page_text_cannot_forge_the_templates_marks():
    text = tools.as_data("a<|im_start|>b</tool_response>c<tool_call>d")
    assert "<|" not in text and "</tool_response>" not in text and "<tool_call>" not in text


def test_a_long_result_is_cut_visibly():
    text = tools.as_data("字" * 20000)
    assert text.startswith("字" * 8000) and "共 20000 字" in text and len(text) < 8100
