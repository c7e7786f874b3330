"""The event-stream parser against the rules of HTML 9.2.6, and the layer above it."""

import threading

import pytest
import requests

import wire
from react_min import call_model_stream
from sse import Event, ModelError, ToolCalls, iter_events, parse_sse_stream

TABLE = [  # name, bytes, events
    ("one event", b"data: a\n\n", [Event(data="a")]),
    ("two data lines", b"data: a\ndata: b\n\n", [Event(data="a\nb")]),
    ("no space", b"data:a\n\n", [Event(data="a")]),
    ("one space only", b"data:  a\n\n", [Event(data=" a")]),
    ("bare data", b"data\n\ndata:\n\n", [Event(), Event()]),
    ("type", b"event: x\ndata: a\n\ndata: b\n\n", [Event("x", "a"), Event(data="b")]),
    ("type without data", b"event: x\n\ndata: b\n\n", [Event(data="b")]),
    ("comment", b": hi\n\ndata: a\n:b\n\n", [Event(data="a")]),
    ("unknown field", b"foo: 1\nDATA: x\ndata: a\n\n", [Event(data="a")]),
    (
        "id stays",
        b"id: 1\ndata: a\n\ndata: b\n\n",
        [Event(data="a", id="1"), Event(data="b", id="1")],
    ),
    ("id without data", b"id: 1\n\ndata: b\n\n", [Event(data="b", id="1")]),
    ("id with NUL", b"id: a\0\ndata: b\n\n", [Event(data="b")]),
    ("retry", b"retry: 10\ndata: a\n\n", [Event(data="a", retry=10)]),
    ("retry not digits", b"retry: -1\nretry: 1_0\ndata: a\n\n", [Event(data="a")]),
    ("CRLF", b"data: a\r\n\r\ndata: b\r\n\r\n", [Event(data="a"), Event(data="b")]),
    ("CR", b"data: a\rdata: b\r\r", [Event(data="a\nb")]),
    ("mixed", b"data: a\r\n\ndata: b\n\r\n", [Event(data="a"), Event(data="b")]),
    (
        "other separators",
        "data: a\u2028b\x85c\x0bd\n\n".encode(),
        [Event(data="a\u2028b\x85c\x0bd")],
    ),
    ("BOM", b"\xef\xbb\xbfdata: a\n\n", [Event(data="a")]),
    ("second BOM", b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
    ("bad UTF-8", b"data: \xff\xe6\xb8\n\n", [Event(data="\ufffd\ufffd")]),
    ("Chinese", "data: 温度🌞\n\n".encode(), [Event(data="温度🌞")]),
    ("end inside a block", b"data: a\n\ndata: b\n", [Event(data="a")]),
    ("leading blanks", b"\n\n\ndata: a\n\n", [Event(data="a")]),
]


@pytest.mark.parametrize("name, raw, events", TABLE, ids=[row[0] for row in TABLE])
def test_events_do_not_depend_on_the_chunks(name, raw, events):
    assert list(iter_events([raw])) == events
    assert list(iter_events(raw[i : i + 1] for i in range(len(raw)))) == events
    for at in range(len(raw)):
        assert list(iter_events([raw[:at], b"", raw[at:]])) == events


def test_an_event_is_out_with_its_blank_line():
    for raw in (b"data: a\n\n", b"data: a\r\r", b"data: a\r\n\r"):
        fed = []
        chunks = (fed.append(i) or raw[i : i + 1] for i in range(len(raw)))
        assert next(iter_events(chunks)).data == "a" and len(fed) == len(raw)


def test_a_huge_line_and_a_huge_event():
    line = b"data: " + b"x" * (4 << 20)
    chunks = [line[i : i + 1024] for i in range(0, len(line), 1024)] + [b"\n\n"]
    assert len(next(iter_events(chunks)).data) == 4 << 20
    assert len(next(iter_events([b"data: x\n"] * 100_000 + [b"\n"])).data) == 199_999


# ------------------------------------------------------------------ the layer above


def objects(body, **reply):
    reply = {"headers": {"Content-Type": "text/event-stream"}, **reply}
    with wire.server([wire.Reply([body], **reply)]) as server:
        return list(parse_sse_stream(requests.post(server.base_url, stream=True, timeout=5)))


@pytest.mark.parametrize(
    "body, found",
    [
        (b'data: {"a":1}\n\ndata: [DONE]\n\n', [{"a": 1}]),
        (b'data: {"a":1}\n\ndata: [DONE]', [{"a": 1}]),
        (b'data: {"a":1}', [{"a": 1}]),
        (b'data: {"a":1}\n\ndata: [DONE] \n\ndata: {"b":1}\n\n', [{"a": 1}]),
        (b'data: : PING\n\ndata:\n\ndata: {"a":1}\n\n', [{"a": 1}]),
        (b'data: {"a":1}\ndata: {"b":2}\n\n', [{"a": 1}, {"b": 2}]),
        (b'data: {"a":\ndata: 1}\n\n', [{"a": 1}]),
        (b"data: null\n\ndata: 3\n\n", []),
        (b'{"choices": []}', [{"choices": []}]),
    ],
)
def test_the_objects_of_a_stream(body, found):
    assert objects(body) == found


@pytest.mark.parametrize(
    "body, words",
    [
        (b'data: {"a', "中途断开"),
        (b"data: [DONE]x\n\n", "不是 JSON"),
        (b'data: {"t":"a\nb"}\n\n', "不是 JSON"),
        (b'data: {"error": {"message": "overloaded"}}\n\n', "overloaded"),
        (b'event: error\ndata: {"type": "busy", "message": "later"}\n\n', "later"),
        (b'data: {"object": "error", "message": "too long"}\n\n', "too long"),
        (b'event: error\ndata: {"code": 5, "detail": "later"}\n\n', "later"),
        (b'data: [{"error": {"message": "bad key"}}]\n\n', "bad key"),
        (b'{"error": "unexpected endpoint"}', "unexpected endpoint"),
        (b"<html><p>Please log in</p></html>", "Please log in"),
        (b'[{"error": {"message": "bad key"}}]', "bad key"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "不是 JSON"),
    ],
)
def test_what_is_no_stream_is_an_error_with_the_servers_words(body, words):
    with pytest.raises(ModelError, match=words) as caught:
        objects(body)
    assert "\n" not in str(caught.value) and "<" not in str(caught.value)


def test_nothing_is_flushed_after_a_transport_error():
    with pytest.raises(ModelError, match="中途断开"):
        objects(b'data: {"a":1}', end="reset")


@pytest.mark.parametrize("framing, gzip", [("chunked", False), ("close", False), ("chunked", True)])
def test_each_event_is_read_as_it_arrives(framing, gzip):
    first_read = threading.Event()

    def pieces():
        yield b'data: {"a":1}\n\n'
        assert first_read.wait(5), "the first event was held back"
        yield b"data: [DONE]\n\n"

    with wire.server([wire.Reply(pieces(), framing=framing, gzip=gzip)]) as server:
        stream = parse_sse_stream(requests.post(server.base_url, stream=True, timeout=8))
        assert next(stream) == {"a": 1}
        first_read.set()
        assert list(stream) == []


def test_a_server_that_stays_silent_after_done_is_not_waited_for():
    with wire.server([wire.Reply([b"data: [DONE]\n\n"], end="hang")]) as server:
        response = requests.post(server.base_url, stream=True, timeout=5)
        assert list(parse_sse_stream(response)) == []  # a ModelError after 5 s otherwise


# ------------------------------------------------------------------ what belongs to the message


def message(*chunks):
    """(content, what was shown, thinking) of the message of a stream."""
    shown, thought = [], []
    with wire.server([wire.sse(*chunks)]) as server:
        use = {"base_url": server.base_url, "on_content": shown.append}
        whole = call_model_stream([], model="m", on_reasoning=thought.append, **use)
    return whole["content"], "".join(shown), "".join(thought)


def letters(text, indices=(0, 0, 0)):
    """A chunk for each letter, of the choice with the index in its place."""
    return [{"choices": [{"index": i, "delta": {"content": c}}]} for i, c in zip(indices, text)]


@pytest.mark.parametrize(
    "chunks",
    [
        letters("abxc", [0, 0, 1, 0]),
        letters("abc", [7, 8, 9]),  # it counts the chunks
        letters("abc") + [wire.chunk({"role": "tool", "content": "x"})],
        letters("abc") + [{"choices": [{"index": 0, "message": {"content": "abc"}}]}],
    ],
    ids=["several choices", "index counts", "result of the server's own tool", "all again"],
)
def test_only_the_models_first_choice_is_read(chunks):
    assert message(*chunks)[0] == "abc"


def test_an_error_as_finish_reason_is_an_error():
    with pytest.raises(ModelError, match="报错"):
        message(*letters("a"), wire.chunk({}, "error"))


def in_two_pieces(text):
    for at in range(len(text)):
        yield [wire.chunk({"content": part}) for part in (text[:at], text[at:]) if part]


@pytest.mark.parametrize(
    "text, answer, thinking",
    [
        ("<think>想</think>答", "答", "想"),
        ("写作 `</think>` 即可", "写作 `</think>` 即可", ""),
        ("<think>`</think>a</thi", "a</thi", "`"),
    ],
)
def test_think_tags_may_be_cut_anywhere_and_are_text_in_code(text, answer, thinking):
    for pieces in in_two_pieces(text):
        assert message(*pieces) == (answer, answer, thinking), pieces


@pytest.mark.parametrize("thought", ["想\n", '{"city": "北京"}\n', "```json\n{}\n```\n"])
def test_all_before_a_bare_closing_tag_is_thinking(thought):
    for pieces in in_two_pieces(thought + "</think>\n\n答"):
        content, _, thinking = message(*pieces)
        assert (content.strip(), thinking) == ("答", thought), pieces


# ------------------------------------------------------------------ joining the pieces of calls


def piece(index=None, id=None, name=None, arguments=None, **more):
    return {"index": index, "id": id, "function": {"name": name, "arguments": arguments}, **more}


A, B = '{"a":1}', '{"b":2}'
FOLDS = {
    "two calls share an id": (
        [
            piece(0, "x", "f", ""),
            piece(1, "x", "g", ""),
            piece(0, "x", arguments=A),
            piece(1, "x", arguments=B),
        ],
        [("x", "f", A), (None, "g", B)],
    ),
    "index as float": (
        [
            piece(0.0, "x", "f", ""),
            piece(1.0, "y", "g", ""),
            piece(0.0, arguments=A),
            piece(1.0, arguments=B),
        ],
        [("x", "f", A), ("y", "g", B)],
    ),
    "no ids, name before arguments, index stuck": (
        [
            piece(0, name="f"),
            piece(0, arguments=A),
            piece(0, name="g"),
            piece(0, arguments=B),
        ],
        [(None, "f", A), (None, "g", B)],
    ),
    "an empty object first": ([piece(0, "x", "f", "{}"), piece(0, arguments=A)], [("x", "f", A)]),
    "pieces by index": (
        [
            piece(0, "x", "f", ""),
            piece(1, "y", "g", ""),
            piece(0, arguments=A),
            piece(1, arguments=B),
        ],
        [("x", "f", A), ("y", "g", B)],
    ),
    "no index": (
        [piece(id="x", name="f", arguments=A), piece(id="y", name="f", arguments=B)],
        [("x", "f", A), ("y", "f", B)],
    ),
    "index stuck at 0": (
        [piece(0, "x", "f", A), piece(0, "y", "f", B)],
        [("x", "f", A), ("y", "f", B)],
    ),
    "index of the tail differs": (
        [piece(0, "x", "f", A), piece(0, "y", "f", ""), piece(1, arguments=B)],
        [("x", "f", A), ("y", "f", B)],
    ),
    "index starts at 1": ([piece(1, "x", "f", ""), piece(1, arguments=A)], [("x", "f", A)]),
    "id empty later": ([piece(0, "x", "f", ""), piece(0, "", arguments=A)], [("x", "f", A)]),
    "id changes": ([piece(0, "x", "f", '{"a"'), piece(0, "z", arguments=":1}")], [("x", "f", A)]),
    "id late": ([piece(0, None, "f", '{"a"'), piece(0, "x", arguments=":1}")], [("x", "f", A)]),
    "name late": ([piece(0, "x", "", A), piece(0, name="f")], [("x", "f", A)]),
    "name repeated": ([piece(0, "x", "f", '{"a"'), piece(0, "x", "f", ":1}")], [("x", "f", A)]),
    "name in pieces": (
        [piece(0, "x", "get_"), piece(0, name="time"), piece(0, arguments=A)],
        [("x", "get_time", A)],
    ),
    "name in pieces, the last with arguments": (
        [piece(0, "x", "get_"), piece(0, name="time", arguments=A)],
        [("x", "get_time", A)],
    ),
    "name growing": (
        [piece(0, "x", "get_"), piece(0, name="get_time", arguments=A)],
        [("x", "get_time", A)],
    ),
    "arguments an object": ([piece(0, "x", "f", {"a": 1})], [("x", "f", '{"a": 1}')]),
    "arguments never": ([piece(0, "x", "f")], [("x", "f", "")]),
    "arguments twice": ([piece(0, "x", "f", A), piece(0, arguments=A)], [("x", "f", A)]),
    "arguments growing": ([piece(0, "x", "f", '{"a"'), piece(0, arguments=A)], [("x", "f", A)]),
    "a prefix that is JSON": (
        [piece(0, "x", "f", "{}"), piece(0, arguments=" ")],
        [("x", "f", "{} ")],
    ),
    "function null": (
        [{"index": 0, "id": "x", "function": None}, piece(0, name="f", arguments=A)],
        [("x", "f", A)],
    ),
    "no index, pieces by id": (
        [
            piece(id="x", name="f"),
            piece(id="y", name="g"),
            piece(id="x", arguments=A),
            piece(id="y", arguments=B),
        ],
        [("x", "f", A), ("y", "g", B)],
    ),
    "no index, name repeated": (
        [piece(id="x", name="f", arguments='{"a"'), piece(name="f", arguments=":1}")],
        [("x", "f", A)],
    ),
    "only names": (
        [piece(name="f"), piece(name="g", arguments=B)],
        [(None, "f", ""), (None, "g", B)],
    ),
    "id first, name late": (
        [piece(0, "x", "f", A), piece(1, "y"), piece(1, name="g", arguments=B)],
        [("x", "f", A), ("y", "g", B)],
    ),
    "all repeated": (
        [piece(0, "x", "f", ""), piece(0, "x", "f", '{"a"'), piece(0, "x", "f", ":1}")],
        [("x", "f", A)],
    ),
    "all repeated, index counts": (
        [piece(0, "x", "f", '{"a"'), piece(1, "x", "f", ":1}")],
        [("x", "f", A)],
    ),
    "id changes, name repeated": (
        [piece(0, "x", "f", '{"a"'), piece(0, "z", "f", ":1}")],
        [("x", "f", A)],
    ),
    "id late, name repeated": ([piece(0, None, "f", ""), piece(0, "x", "f", A)], [("x", "f", A)]),
    "name once more at the end": (
        [piece(0, None, "f", A), piece(0, None, "f", "")],
        [(None, "f", A)],
    ),
    "no ids, index stuck": (
        [piece(0, None, "f", A), piece(0, None, "f", B)],
        [(None, "f", A), (None, "f", B)],
    ),
    "whole again at the end": (
        [piece(0, "x", "f", '{"a"'), piece(0, arguments=":1}"), piece(0, arguments=A)],
        [("x", "f", A)],
    ),
    "another name after the arguments have begun": (
        [piece(0, "x", "f", '{"a"'), piece(0, "x", "g", ":1}")],
        [("x", "f", A)],
    ),
    "no index, all repeated at the end": (
        [piece(id="x", name="f", arguments=A), piece(id="x", name="f", arguments="")],
        [("x", "f", A)],
    ),
    "all repeated at the end": (
        [piece(0, "x", "f", A), piece(0, "x", "f", "")],
        [("x", "f", A)],
    ),
    "all repeated, index counts, arguments late": (
        [piece(0, "x", "f", ""), piece(1, "x", "f", A)],
        [("x", "f", A)],
    ),
    "index stuck, the first without arguments": (
        [piece(0, "x", "f", ""), piece(0, "y", "f", B)],
        [("x", "f", ""), ("y", "f", B)],
    ),
    "nothing at all": ([{"index": 0}, None, "x", {"index": [], "function": 3}], []),
}


@pytest.mark.parametrize("case", FOLDS)
def test_the_pieces_of_calls_are_joined(case):
    pieces, wanted = FOLDS[case]
    calls = ToolCalls()
    for one in pieces:
        calls.add(one)
    found = calls.finished(cut=False)
    assert len({call["id"] for call in found}) == len(found)
    for call, (call_id, name, arguments) in zip(found, wanted):
        assert call["id"] == call_id or call_id is None  # None: made up
        assert call["function"] == {"name": name, "arguments": arguments}
    assert len(found) == len(wanted)


def test_ids_are_made_up_and_made_unique():
    calls = ToolCalls()
    for one in (piece(0, "x", "f", A), piece(1, "x", "f", B), piece(2, None, "g", A)):
        calls.add(one)
    ids = [call["id"] for call in calls.finished(cut=False)]
    assert ids[0] == "x" and len(set(ids)) == 3
    assert all(len(i) == 9 and i.isalnum() for i in ids[1:])


def test_unknown_keys_of_a_call_are_kept():
    calls = ToolCalls()
    calls.add(
        piece(0, "x", "f", A, extra_content={"google": {"thought_signature": "s"}}, custom={})
    )
    (call,) = calls.finished(cut=False)
    assert call["extra_content"] == {"google": {"thought_signature": "s"}} and "custom" not in call
