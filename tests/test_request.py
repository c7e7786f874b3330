"""The request: what servers refuse, what they answer instead, and who gets to see the key."""

import json
import re
import socket
import time
from email.utils import formatdate

import pytest

import react_min
import wire
from react_min import ModelError, call_model_stream, run_agent
from tools import Tool

KEY = "sk-secret-1"
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
FUNCTION = {"name": "echo", "description": "echo", "parameters": PARAMETERS}
ECHO = Tool({"type": "function", "function": FUNCTION}, lambda text: text)
CALL = wire.calls([("echo", {"text": "A"}, "a")])
GOOD = wire.say("好")


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Waiting before a repetition takes no time here; the list of what would have been waited."""
    waited = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", waited.append)
    return waited


def ask(server, question="hi", **options):
    use = {"base_url": server.base_url, "model": "m", "api_key": KEY, "tools": [ECHO]}
    return run_agent(question, **{**use, **options})


def sent(server, number):
    return server.requests[number].body["messages"]


def plain(text, status, kind="application/json", **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    headers["Content-Type"] = kind
    return wire.Reply([text.encode()], status, headers, framing="length")


def error(message, status=400, **headers):
    return plain(json.dumps({"error": {"message": message}}), status, **headers)


def failure(replies, **options):
    """(the text of the ModelError, the requests)"""
    with wire.server(replies) as server:
        with pytest.raises(ModelError) as caught:
            ask(server, **options)
    text = str(caught.value)
    assert "\n" not in text and KEY not in text
    return text, server.requests


def all_different(requests):
    bodies = [json.dumps(request.body, sort_keys=True) for request in requests]
    return len(set(bodies)) == len(bodies)


def refusing(*fields, status=400):
    """A server that knows none of `fields` and names all that it finds."""

    def answer(request):
        found = [field for field in fields if field in request.body]
        if found and status == 400:
            return error(f"Unrecognized request argument supplied: {found[0]}")
        if found:
            message = "Extra inputs are not permitted"
            detail = [
                {"type": "extra_forbidden", "loc": ["body", field], "msg": message}
                for field in found
            ]
            return plain(json.dumps({"detail": detail}), 422)
        return GOOD if request.body["messages"][-1]["role"] == "tool" else CALL

    return answer


# ------------------------------------------------------------------ refused fields


@pytest.mark.parametrize("field", ["enable_thinking", "max_tokens", "temperature", "tool_choice"])
def test_a_refused_field_is_dropped_once_and_for_the_run(field, capsys):
    with wire.server(refusing(field)) as server:
        assert ask(server) == "好"
        assert [field in r.body for r in server.requests] == [True, False, False]
        assert set(server.requests[0].body) - set(server.requests[1].body) == {field}
    assert capsys.readouterr().err.count(field) == 1


def test_several_refused_fields_one_after_the_other():
    with wire.server(refusing("enable_thinking", "temperature", "max_tokens")) as server:
        assert ask(server) == "好"
        assert len(server.requests) == 5 and all_different(server.requests)


def test_several_refused_fields_in_fastapis_form_are_one_repetition():
    with wire.server(refusing("enable_thinking", "temperature", status=422)) as server:
        assert ask(server) == "好"
        assert len(server.requests) == 3
        assert {"max_tokens", "tool_choice", "stream"} <= set(server.requests[1].body)


def test_all_the_switches_of_no_thinking_can_be_refused():
    fields = ["enable_thinking", "chat_template_kwargs", "reasoning_effort"]
    with wire.server(refusing(*fields)) as server:
        assert ask(server, thinking=False) == "好"
        assert not set(fields) & set(server.requests[-1].body)


def test_a_field_with_a_longer_name_is_another_field():
    text, requests = failure(lambda request: error("unknown field: max_tokens_per_day"))
    assert len(requests) == 1 and "max_tokens_per_day" in text


def test_a_server_that_refuses_for_ever_never_gets_the_same_request_twice():
    text, requests = failure(lambda request: error("I like neither temperature nor max_tokens"))
    assert len(requests) == 2 and all_different(requests)
    assert "HTTP 400" in text and "neither temperature" in text


@pytest.mark.parametrize(
    "status, words",
    [
        (400, "no such thing"),
        (422, "no such thing"),
        *((status, "temperature") for status in (401, 403, 404, 500)),  # no refusal of a field
    ],
)
def test_what_refuses_no_field_is_an_error_after_one_request(status, words, waits):
    text, requests = failure([error(words, status), GOOD])
    assert len(requests) == 1 and waits == []
    assert f"HTTP {status}" in text and words in text


def test_the_next_run_asks_the_server_anew():
    with wire.server(refusing("temperature")) as server:
        ask(server)
        ask(server)
        assert ["temperature" in r.body for r in server.requests] == [True, False, False] * 2


# ------------------------------------------------------------------ thinking sent back


def thinking_call(field="reasoning_content"):
    function = {"name": "echo", "arguments": '{"text": "A"}'}
    delta = {field: "想", "tool_calls": [{"index": 0, "id": "a", "function": function}]}
    return wire.sse(wire.chunk(delta), wire.chunk({}, "tool_calls"))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_that_is_refused_is_left_out_for_the_run(field):
    def answer(request):
        calling = [m for m in request.body["messages"] if m.get("tool_calls")]
        if any(field in m for m in calling):
            return error(f"messages.2: property '{field}' is unsupported", 422)
        return GOOD if len(calling) == 2 else thinking_call(field)

    with wire.server(answer) as server:
        assert ask(server) == "好"
        assert len(server.requests) == 4  # refused once, not once a round


def test_thinking_stays_when_an_empty_reply_is_asked_for_once_more():
    with wire.server([thinking_call(), wire.say(""), GOOD]) as server:
        assert ask(server) == "好"
        thoughts = [sent(server, number)[2].get("reasoning_content") for number in (1, 2)]
    assert thoughts[0] and thoughts[0] == thoughts[1]


def test_thinking_that_is_demanded_is_added_to_all_assistant_messages():
    def answer(request):
        said = [m for m in request.body["messages"] if m["role"] == "assistant"]
        if any("reasoning_content" not in m for m in said):
            return error("The reasoning_content in the thinking mode must be passed back")
        return GOOD if request.body["messages"][-1]["role"] == "tool" else CALL

    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with wire.server(answer) as server:
        assert ask(server, messages=history) == "好"
        assert sent(server, 1)[1]["reasoning_content"] == ""
        assert len(server.requests) == 3
    assert "reasoning_content" not in history[1]


@pytest.mark.parametrize(
    "words", ["missing reasoning_content", "reasoning_content is unsupported", "both"]
)
def test_a_server_that_is_never_content_with_the_thinking_is_no_endless_loop(words):
    turn = iter(["missing reasoning_content", "reasoning_content is unsupported"] * 9)

    def answer(request):
        if len(request.body["messages"]) == 2:
            return thinking_call()
        return error(next(turn) if words == "both" else words)

    _, requests = failure(answer)
    assert len(requests) <= 4 and all_different(requests)


# ------------------------------------------------------------------ the address


@pytest.mark.parametrize(
    "form", ["{}", "{}/", "{}//", "{}/chat/completions", "{}/chat/completions/", "  {} \n", "{}#x"]
)
def test_an_address_may_be_written_in_many_ways(form):
    with wire.server([GOOD]) as server:
        assert ask(server, base_url=form.format(server.base_url)) == "好"
        assert server.requests[0].path == "/v1/chat/completions"


def test_a_query_in_the_address_stays():
    with wire.server([GOOD]) as server:
        ask(server, base_url=server.base_url + "?api-version=1")
        assert server.requests[0].path == "/v1/chat/completions?api-version=1"


def test_an_address_without_v1_gets_a_hint():
    with wire.server(lambda request: plain("404 page not found", 404, "text/plain")) as server:
        with pytest.raises(ModelError, match="HTTP 404.*404 page not found.*/v1"):
            ask(server, base_url=server.base_url[: -len("/v1")])
        assert server.requests[0].path == "/chat/completions"


@pytest.mark.parametrize("url", ["", "localhost:11434", "ftp://a/v1", "http://", "http://a:b/v1"])
def test_what_is_no_address_is_said(url):
    with pytest.raises(ModelError, match="OPENAI_BASE_URL") as caught:
        run_agent("hi", base_url=url, model="m")
    assert "\n" not in str(caught.value)


def test_a_password_in_the_address_is_not_shown():
    with wire.server([error("no", 500)]) as server:
        with pytest.raises(ModelError) as caught:
            ask(server, base_url=server.base_url.replace("//", "//me:hidden@"))
    assert "hidden" not in str(caught.value) and "127.0.0.1" in str(caught.value)


# ------------------------------------------------------------------ the key


@pytest.mark.parametrize("key", ["", "  \n", None])
def test_without_a_key_none_is_sent(key, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with wire.server([GOOD]) as server:
        ask(server, api_key=key)
        assert "authorization" not in server.requests[0].headers


def test_the_key_of_the_environment_is_sent_without_blanks(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", " sk-env \r\n")
    with wire.server([GOOD]) as server:
        ask(server, api_key=None)
        assert server.requests[0].headers["authorization"] == "Bearer sk-env"


@pytest.mark.parametrize(
    "start, letter",
    [("sk-", "\n"), ("sk-", " "), ("sk-", "，"), ("sk-", "\u200b"), ("sk-", "\x00"), ("", "“")],
)
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(start, letter):
    use = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
    with pytest.raises(
        ModelError, match=f"第 {len(start) + 1} 个字符.*{ord(letter):04X}"
    ) as caught:
        run_agent("hi", api_key=f"{start}{letter}hidden", **use)
    assert "hidden" not in str(caught.value)


def test_a_key_that_the_server_repeats_in_an_error_is_not_shown():
    text, _ = failure(lambda request: error(f"bad: {request.headers['authorization']}", 401))
    assert "HTTP 401" in text and "***" in text and "OPENAI_API_KEY" in text


def test_a_key_that_the_server_repeats_in_the_stream_is_not_shown():
    stream = wire.sse(wire.chunk({"content": "a"}), {"error": {"message": f"bad key {KEY}"}})
    text, _ = failure([stream])
    assert "bad key ***" in text


@pytest.mark.parametrize(
    "url, key",
    [
        ("https://dashscope.aliyuncs.com/compatible-mode/v1", "sk-d"),
        ("https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "sk-d"),
        ("https://dashscope.aliyuncs.com", "sk-d"),
        ("http://localhost:11434/v1", "sk-o"),
        ("https://api.openai.com/v1", "sk-o"),
        ("https://dashscope.aliyuncs.com.evil.test/v1", "sk-o"),
        ("https://evil.test/https://dashscope.aliyuncs.com/v1", "sk-o"),
        ("https://evil.test/?dashscope.aliyuncs.com", "sk-o"),
        ("https://evil-dashscope.aliyuncs.com.test/v1", "sk-o"),
        ("https://dashscope-x.oss-cn.aliyuncs.com/v1", "sk-o"),
        ("https://dashscope.aliyuncs.com@evil.test/v1", "sk-o"),
        ("https://dashscope.aliyuncs.com:443@evil.test/v1", "sk-o"),
    ],
)
def test_the_key_of_dashscope_goes_to_dashscope_only(url, key, monkeypatch):
    monkeypatch.setenv("DASHSCOPE_API_KEY", "sk-d")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-o")
    assert react_min._key_for(url) == key


def test_neither_netrc_nor_a_proxy_has_a_say_about_loopback(monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password hidden\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with wire.server([GOOD, GOOD]) as server:
        assert ask(server) == "好"
        assert ask(server, api_key="") == "好"
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
        assert "authorization" not in server.requests[1].headers


def test_another_host_is_asked_through_the_proxy_and_gets_no_password_of_netrc(
    monkeypatch, tmp_path
):
    netrc = tmp_path / "netrc"
    netrc.write_text("default login me password hidden\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with wire.server([GOOD]) as proxy:
        monkeypatch.setenv("http_proxy", proxy.base_url[: -len("/v1")])
        assert ask(proxy, base_url="http://model.test/v1", api_key="") == "好"
        assert proxy.requests[0].path == "http://model.test/v1/chat/completions"
        assert "authorization" not in proxy.requests[0].headers


# ------------------------------------------------------------------ the body


def test_without_tools_neither_tools_nor_tool_choice_is_sent():
    with wire.server([GOOD]) as server:
        assert ask(server, tools=[]) == "好"
        assert not {"tools", "tool_choice"} & set(server.requests[0].body)


def test_no_thinking_is_said_in_the_ways_that_servers_understand():
    with wire.server([GOOD, GOOD]) as server:
        ask(server, thinking=False)
        ask(server)
        off, on = server.requests[0].body, server.requests[1].body
    assert off["enable_thinking"] is False and off["reasoning_effort"] == "none"
    assert off["chat_template_kwargs"] == {"enable_thinking": False}
    assert on["enable_thinking"] is True
    assert not {"chat_template_kwargs", "reasoning_effort"} & set(on)


@pytest.mark.parametrize(
    "question, received",
    [("天\udc97气", "天\ufffd气"), ("\ud83c\udf1e", "🌞"), ("\ud83c", "\ufffd"), ("晴🌞", "晴🌞")],
)
def test_no_lone_surrogate_reaches_the_server(question, received):
    with wire.server([GOOD]) as server:
        ask(server, question)
        assert sent(server, 0)[-1]["content"] == received


def history_call(arguments="{}", **changes):
    function = {"name": "echo", "arguments": arguments}
    return {"id": "a", "type": "function", "function": function, **changes}


def mended(*history):
    """What a server gets of a history, without the question at its end."""
    history, before = list(history), json.dumps(history)
    with wire.server([GOOD]) as server:
        ask(server, messages=history)
        assert json.dumps(history[:-2]) == before  # the caller's messages stay as they are
        return sent(server, 0)[:-1]


USER = {"role": "user", "content": "q"}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "x"}


@pytest.mark.parametrize("arguments", ['{"text": ', "[1]", "", "null", None, "text", '"{"'])
def test_arguments_of_the_history_that_are_no_object_become_an_empty_one(arguments):
    calling = {"role": "assistant", "content": "", "tool_calls": [history_call(arguments)]}
    _, assistant, _ = mended(USER, calling, RESULT)
    assert assistant["tool_calls"][0]["function"]["arguments"] == "{}"


def test_arguments_of_the_history_that_are_an_object_become_a_string():
    calling = {"role": "assistant", "content": "", "tool_calls": [history_call({"text": "A"})]}
    arguments = mended(USER, calling, RESULT)[1]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(arguments, str) and json.loads(arguments) == {"text": "A"}


def test_arguments_that_only_a_lenient_parser_reads_go_back_as_strict_json():
    call = history_call('{"text": "a\nb"}')
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    arguments = mended(USER, calling, RESULT)[1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"text": "a\nb"}


def test_null_content_index_and_unknown_keys_of_the_history():
    call = history_call(index=0, thought_signature="s", extra=None)
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    _, assistant, _ = mended(USER, calling, RESULT)
    assert assistant["content"] == ""
    assert assistant["tool_calls"] == [history_call(thought_signature="s")]


def test_an_empty_list_of_calls_and_an_empty_message_are_left_out():
    answered = {"role": "assistant", "content": "a", "tool_calls": []}
    empty = {"role": "assistant", "content": "", "tool_calls": []}
    null = {"role": "assistant", "content": None}
    bare = {"role": "assistant", "content": "a"}
    assert mended(USER, answered, empty, null) == [USER, bare]


@pytest.mark.parametrize("ids", [["", ""], ["a", "a"]])
def test_a_history_without_proper_ids_is_no_endless_loop(ids):
    calls = [history_call(id=ids[0]), history_call(id=ids[1])]
    history = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    with wire.server(lambda request: error("no", 401)) as server:
        with pytest.raises(ModelError, match="401"):
            ask(server, messages=history)
        assert len(server.requests) == 1
        made_up = [call["id"] for call in sent(server, 0)[1]["tool_calls"]]
    assert len(set(made_up)) == 2 and all(made_up)


def test_a_history_that_was_cut_is_paired():
    calls = [history_call(), history_call(id="b")]
    calling = {"role": "assistant", "content": "", "tool_calls": calls}
    strange = {"role": "tool", "tool_call_id": "z", "content": "x"}
    second = {"role": "tool", "tool_call_id": "b", "content": ""}
    messages = mended(strange, USER, calling, second, strange)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
    assert [m["tool_call_id"] for m in messages[2:]] == ["a", "b"]
    assert all(m["content"] for m in messages[2:])


def test_a_server_that_refuses_empty_content_beside_calls_gets_null():
    def answer(request):
        if any(m.get("content") == "" for m in request.body["messages"]):
            return error("messages.2.content: text must be non-empty")
        return GOOD if request.body["messages"][-1]["role"] == "tool" else CALL

    with wire.server(answer) as server:
        assert ask(server) == "好"
        assert sent(server, 2)[2]["content"] is None


# ------------------------------------------------------------------ errors in one line

BODIES = {
    "json": '{"error": {"message": "so sorry", "code": null}}',
    "string": '{"error": "so sorry"}',
    "message": '{"code": "X", "message": "so sorry", "request_id": "1"}',
    "detail": '{"detail": "so sorry"}',
    "place": '{"detail": [{"loc": ["body", "so sorry"], "msg": "field required"}]}',
    "html": "<html>\n<h1>so</h1>\n\n<b>sorry</b></html>",
    "list": '[{"error": {"message": "so sorry"}}]',
    "text": "so\nsorry\n",
}


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 502, 503])
@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
def test_an_http_error_is_one_line_with_its_status_and_words(status, body):
    text, _ = failure(lambda request: plain(body, status, "text/html"))
    assert f"HTTP {status}" in text and "so sorry" in text and "<" not in text
    assert "127.0.0.1" in text and len(text) < 500


def test_an_error_without_a_body_has_the_reason():
    text, _ = failure([plain("", 500)])
    assert "HTTP 500" in text and "Internal Server Error" in text


def test_an_endless_error_is_cut():
    text, _ = failure([plain("very " * 100_000, 500)])
    assert len(text) < 500 and "…" in text


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("body", ["json", "string", "message", "list", "html"])
def test_an_error_with_status_200_is_an_error(body, kind):
    text, requests = failure([plain(BODIES[body], 200, kind), GOOD])
    assert "so sorry" in text and len(requests) == 1


def test_user_and_password_of_the_address_are_sent_where_there_is_no_key():
    with wire.server([GOOD, GOOD]) as server:
        address = server.base_url.replace("//", "//me:p%40w@")
        ask(server, base_url=address, api_key="")
        ask(server, base_url=address, api_key="sk-1")
        sent_with = [request.headers["authorization"] for request in server.requests]
    assert sent_with == ["Basic bWU6cEB3", "Bearer sk-1"]


def test_the_password_of_a_proxy_is_never_shown(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://me:S3cret#x@10.0.0.1:8080")
    with pytest.raises(ModelError, match="HTTP_PROXY") as caught:
        run_agent("hi", base_url="http://gw.invalid/v1", api_key="")
    assert "S3cret" not in str(caught.value)


def test_the_query_of_an_address_is_never_shown():
    with pytest.raises(ModelError, match="地址不对") as caught:
        run_agent("hi", base_url="http//gw/v1?api-key=S3cret", api_key="")
    assert "S3cret" not in str(caught.value)


def test_a_redirect_is_reported_and_not_followed():
    with wire.server([GOOD]) as other:
        to = other.base_url + "/chat/completions"
        text, requests = failure([plain("", 307, Location=to)])
        assert "HTTP 307" in text and to in text and "OPENAI_BASE_URL" in text
        assert len(requests) == 1 and other.requests == []


def test_a_refused_connection_names_three_ways_on():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can answer there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(ModelError, match="连接被拒绝") as caught:
            run_agent("hi", base_url=url, model="m")
    text = str(caught.value)
    assert "\n" not in text and url in text
    for way in ("ollama pull qwen3:1.7b", "DASHSCOPE_API_KEY", "--demo"):
        assert way in text


def test_an_unknown_host_is_said(monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ModelError, match="http://model.invalid/v1.*找不到这个主机") as caught:
        run_agent("hi", base_url="http://model.invalid/v1", model="m")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ repetitions


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_asked_again(status, waits, capsys):
    with wire.server([error("busy", status), error("busy", status), GOOD]) as server:
        assert ask(server) == "好"
        assert len(server.requests) == 3 and not all_different(server.requests)
    assert sum(waits) > 0
    assert f"HTTP {status}" in capsys.readouterr().err


def test_a_busy_server_is_not_asked_for_ever(waits):
    text, requests = failure(lambda request: error("busy", 503))
    assert "HTTP 503" in text and "busy" in text
    assert 2 <= len(requests) <= 10 and sum(waits) < 120


def test_retry_after_in_seconds_is_obeyed(waits):
    with wire.server([error("later", 429, Retry_After="7"), GOOD]) as server:
        assert ask(server) == "好"
    assert waits == [7]


def test_retry_after_as_a_date_is_obeyed(waits):
    date = formatdate(time.time() + 20, usegmt=True)
    with wire.server([error("later", 503, Retry_After=date), GOOD]) as server:
        assert ask(server) == "好"
    assert len(waits) == 1 and 15 < waits[0] <= 21


@pytest.mark.parametrize("value", ["soon", "-5", "1e9", "", "Mon, 99 Foo 2026", "٣"])
def test_retry_after_that_says_nothing_is_no_obstacle(value, waits):
    with wire.server(
        [error("later", 503, Retry_After=value.encode().decode("latin-1")), GOOD]
    ) as s:
        assert ask(s) == "好"
    assert sum(waits) < 10


@pytest.mark.parametrize("value", ["3600", "9" * 400, "Fri, 31 Dec 2999 23:59:59 GMT"])
def test_a_server_that_asks_for_too_long_a_wait_is_not_waited_for(value, waits):
    text, requests = failure([error("come back later", 429, Retry_After=value), GOOD])
    assert len(requests) == 1 and waits == []
    assert "HTTP 429" in text and "come back later" in text


def test_a_connection_dropped_before_the_first_byte_is_tried_once_more():
    drop = wire.Reply(framing="drop")
    with wire.server([drop, GOOD]) as server:
        assert ask(server) == "好"
    _, requests = failure([drop, drop, GOOD])
    assert len(requests) == 2


def test_silence_is_not_asked_again():
    begun = time.monotonic()
    text, requests = failure([wire.Reply([GOOD], wait=5), GOOD], timeout=0.2)
    assert len(requests) == 1 and "等待超时" in text and "--timeout" in text
    assert time.monotonic() - begun < 3


HALF = wire.sse(wire.chunk({"content": "半"}), done=False)
FAILED = HALF + b'event: error\ndata: {"message": "so sorry"}\n\n'


@pytest.mark.parametrize(
    "reply, words",
    [
        (wire.Reply([HALF], end="reset"), ""),
        (wire.Reply([HALF], end="hang"), "超时"),
        (FAILED, "so sorry"),
    ],
    ids=["reset", "silence", "error"],
)
def test_nothing_is_repeated_after_the_first_byte(reply, words):
    heard = []
    text, requests = failure([reply, GOOD], timeout=0.2, on_content=heard.append)
    assert len(requests) == 1 and heard == ["半"] and words in text


def test_five_rounds_use_one_connection():
    rounds = [wire.calls([("echo", {"text": str(n)})]) for n in range(4)]
    with wire.server([*rounds, GOOD]) as server:
        assert ask(server) == "好"
        assert len(server.requests) == 5 and server.connections == 1


def test_a_round_can_be_asked_for_alone():
    with wire.server([CALL]) as server:
        use = {
            "base_url": server.base_url,
            "model": "m",
            "tools": [ECHO],
            "tool_choice": "required",
        }
        message = call_model_stream([USER], **use)
        assert server.requests[0].body["tool_choice"] == "required"
        assert server.requests[0].body["messages"] == [USER]
    assert message["tool_calls"] == [history_call('{"text": "A"}')]


def test_a_400_about_content_that_was_sent_is_no_refusal_of_a_field(capsys):
    text, requests = failure([error("Input data may contain inappropriate content."), GOOD])
    assert len(requests) == 1 and "inappropriate content" in text
    assert not re.search("不接受 content", capsys.readouterr().err)
