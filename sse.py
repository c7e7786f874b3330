r"""From bytes to the pieces of a message: the stream of a model server, read (article §4.2).

    bytes --read_bytes--> chunks --iter_events--> events --parse_sse_stream--> JSON objects
          --iter_deltas--> deltas --split_thinking--> deltas --tools.split_calls--> deltas
    and ToolCalls joins the pieces of calls

A round with one call, without the fields that nobody reads here; an empty line after each:

    data: {"choices":[{"index":0,"delta":{"role":"assistant","reasoning_content":"先查天气。"}}]}
    data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_a","type":"function",
           "function":{"name":"get_weather","arguments":""}}]}}]}
    data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,
           "function":{"arguments":"{\"city\": \"北"}}]}}]}
    data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,
           "function":{"arguments":"京\"}"}}]}}]}
    data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}
    data: {"choices":[],"usage":{"total_tokens":157}}
    data: [DONE]

The outer `index` is the reply's, the inner one the call's: all that a later piece of a call must
have. `[DONE]` is OpenAI's, not the standard's; `reasoning_content` is other servers'.

`iter_events` follows the WHATWG standard (HTML 9.2.5 and 9.2.6) to the letter and knows nothing of
models. Above it, each rule answers something that a real server sends; none asks who the server is.

But:
- there is no EventSource: no reconnecting, `retry` and `id` are only reported
- one reply is read: of n > 1 choices only the first
- token usage is not kept
"""

from __future__ import annotations

import codecs
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import requests
import urllib3

Json = dict[str, Any]


class ModelError(RuntimeError):
    """The model's side failed: unreachable, an HTTP error, an error in the stream, a stream cut
    short, nothing in the reply. The text is one line that a person can act on."""


class ConnectionLost(ModelError):
    """The connection to the model broke, or was silent for too long."""


# ------------------------------------------------------------------ bytes -> events (HTML 9.2.6)


class Event(NamedTuple):
    """One server-sent event; `id` is the last one seen in the stream, `retry` is milliseconds."""

    event: str = "message"
    data: str = ""
    id: str = ""
    retry: int | None = None


def iter_events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """Parse an event stream; how the bytes are cut into chunks makes no difference.

    An event is out as soon as its blank line is in. What is pending at the end is dropped, as the
    standard wants; a caller that knows the end to be clean may add a blank line of its own.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")  # -sig: one BOM, at the start
    pending: list[str] = []  # text since the last blank line; joined once, so a huge line is linear
    half = ""  # a line end at the end of that text: perhaps half of a blank line
    last_id, after_cr = "", False
    for chunk in chunks:
        text = decoder.decode(chunk)
        if after_cr and text:
            text = text[1:] if text[0] == "\n" else text  # the CR has already ended that line
            after_cr = False
        if not text:
            continue
        if "\r" in text:
            after_cr = text[-1] == "\r"
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        *blocks, rest = (half + text).split("\n\n")
        if blocks:
            blocks[0] = "".join([*pending, blocks[0]])
            pending = []
        half = "\n" if rest.endswith("\n") else ""
        pending.append(rest[: len(rest) - len(half)])
        for block in blocks:
            field, _, value = block.partition(": ")
            if field == "data" and "\n" not in value:  # nearly all of a model's events
                yield Event("message", value, last_id)
                continue
            event, data, retry = "", [], None
            for line in block.split("\n"):
                field, _, value = line.partition(":")  # a comment has the empty field name
                value = value[1:] if value.startswith(" ") else value
                if field == "data":
                    data.append(value)
                elif field == "event":
                    event = value
                elif field == "id" and "\0" not in value:
                    last_id = value
                elif field == "retry" and value.isascii() and value.isdigit() and len(value) < 1000:
                    retry = int(value)
            if data:
                yield Event(event or "message", "\n".join(data), last_id, retry)


# ------------------------------------------------------------------ events -> JSON objects

_MAX_EVENT = 64 << 20  # bytes; a body that goes on without an event is not read for ever
_MAX_REPLY = 8 << 20  # bytes that are looked at where a body has no event at all
END_WAIT = 2.0  # seconds for [DONE] and usage after a whole message


class Body:
    """The bytes of a reply, watched over as they arrive, and what is known of them so far."""

    def __init__(self, response: requests.Response) -> None:
        self.response = response
        self.since_event = bytearray()
        self.final = False  # the message is whole: only usage and [DONE] may still come
        self.deadline = float("inf")  # when nobody waits for them any longer
        sock = _socket(response)
        self.usual_wait: float | None = sock and sock.gettimeout()  # seconds for the next bytes
        self.ended = self.done = False  # all bytes are here; [DONE] has come

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in read_bytes(self.response):
                self.since_event += chunk
                if len(self.since_event) > _MAX_EVENT:
                    raise ModelError("模型服务发来的数据没有尽头，请检查 OPENAI_BASE_URL")
                yield chunk
                if time.monotonic() > self.deadline:  # comments alone would go on for ever
                    raise ConnectionLost("服务器在回答之后没有结束")
        except (urllib3.exceptions.ReadTimeoutError, requests.ConnectionError) as error:
            why = f"等不到模型的后续输出，连接超时，可用 --timeout 放宽：{innermost(error)}"
            raise ConnectionLost(why) from error
        except (urllib3.exceptions.HTTPError, requests.RequestException, OSError) as error:
            why = f"回答在中途断开，没有收完，请重试：{innermost(error)}"
            raise ConnectionLost(why) from error
        self.ended = True
        yield b"\n\n"  # only a clean end comes here: let go of an event without its blank line

    def expect_end(self, final: bool) -> None:
        """Wait only a little for the rest of the body; or as usual, if the message goes on."""
        if final != self.final:
            self.final = final
            self.deadline = time.monotonic() + END_WAIT if final else float("inf")
            wait_at_most(self.response, END_WAIT if final else self.usual_wait)

    def drain(self) -> None:
        """Take what follows `[DONE]` if it is already here, so that the next round finds the
        connection free; a server that stays silent is not waited for."""
        sock = _socket(self.response)
        wait_at_most(self.response, 0.05)
        with suppress(urllib3.exceptions.HTTPError, OSError):  # then the connection is closed
            for _, _ in zip(range(8), read_bytes(self.response)):
                pass
            if sock:
                sock.settimeout(self.usual_wait)


def parse_sse_stream(response: requests.Response | Body) -> Iterator[Json]:
    """The JSON object of each event (§4.2 parseSSEStream), up to `[DONE]` or the end of the body.

    A body that has no event but is one JSON object, the reply of a server that does not stream
    (nashsu/llm_wiki#619), is yielded as that object. Raises ModelError for an error that the server
    reports (apache/rocketmq-dashboard#2178) and for data that is no JSON. What is learnt of the
    body on the way is in a Body; who wants to know it hands one in.
    """
    body = response if isinstance(response, Body) else Body(response)
    event = None
    for event in iter_events(body):
        body.since_event.clear()
        for text in _json_texts(event.data):
            if text == "[DONE]":
                body.done = True
                body.drain()
                return
            if not text or text.startswith(":"):  # a keep-alive as data (mnfst/llm-gateway#2053)
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                cut = "回答在中途断开，最后一段不完整"
                what = cut if body.ended else "模型服务发来的数据不是 JSON"
                raise ModelError(f"{what}：{one_line(text)}") from None
            if event.event == "error" or _is_error(value):
                raise ModelError(f"模型服务报错：{server_words(text)}")
            if isinstance(value, dict):
                yield value
    reply = body.since_event[:_MAX_REPLY].decode("utf-8", "replace")
    if event is None and reply.strip():
        value = json_or_none(reply)
        if not isinstance(value, dict) or _is_error(value):
            hint = "若地址不对，请检查 OPENAI_BASE_URL，末尾是否少了 /v1"
            raise ModelError(f"模型服务返回的不是流式回答：{server_words(reply)}（{hint}）")
        yield value


def _json_texts(data: str) -> list[str]:
    """What an event holds: one text, or one a line where the blank lines between events lack."""
    if "\n" not in data or json_or_none(data) is not None:
        return [data.strip()]
    return [line.strip() for line in data.split("\n")]


class PlainSession(requests.Session):
    """A session that sends no password from ~/.netrc (psf/requests#3929) and follows no redirect by
    itself, which would turn a POST into a GET (psf/requests#5494).

    subtle: requests reads the whole body of a redirect, even where it is told not to follow it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.auth = lambda request: request  # with an `auth`, requests asks no ~/.netrc

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


def read_bytes(response: requests.Response) -> Iterator[bytes]:
    """The body as it arrives, decompressed: each read returns what is there.

    subtle: `iter_content(n)` waits for n bytes unless the body is chunked, so a stream ended by
    closing would arrive in bursts (LostRuins/koboldcpp#1411). `read1` does not wait, but urllib3
    before 2.1 has none.
    """
    packed = "Content-Encoding" in response.headers  # urllib3's decoder costs even where it is idle
    if isinstance(response.raw, urllib3.HTTPResponse) and hasattr(response.raw, "read1"):
        while chunk := response.raw.read1(16384, decode_content=packed):
            yield chunk
    else:
        yield from response.iter_content(1)


def wait_at_most(response: requests.Response, seconds: float | None) -> None:
    """From now on, wait no longer than this for the next bytes of a response."""
    if sock := _socket(response):
        sock.settimeout(seconds)


def _socket(response: requests.Response) -> Any:
    """The socket that a response comes through; None where there is none, and after its end."""
    return getattr(getattr(response.raw, "connection", None), "sock", None)


# ------------------------------------------------------------------ what a server says of errors


def json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_error(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict) and _is_error(item) for item in value)
    if not isinstance(value, dict):
        return False
    return bool(value.get("error")) or "choices" not in value and _is_text(value.get("message"))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def server_words(body: str) -> str:
    """What a server says in the body of an error, in whatever shape, as one short line."""
    return one_line(_words(json_or_none(body)) or re.sub(r"<[^<>]*>", " ", body))


def _words(value: Any, depth: int = 6) -> str:
    """The text of an error object; "" if there is none at a reasonable depth."""
    if isinstance(value, list) and depth:
        return "; ".join(_words(item, depth - 1) for item in value)
    if isinstance(value, dict) and depth:
        where = (
            ".".join(map(str, value["loc"])) + ": " if isinstance(value.get("loc"), list) else ""
        )
        for key in ("error", "message", "detail", "msg"):
            if value.get(key):
                return where + _words(value[key], depth - 1)
    return value if isinstance(value, str) else ""


def innermost(error: BaseException) -> str:
    """What lies at the bottom of wrapped exceptions, as one line."""
    wrapped = [getattr(error, "reason", None), *reversed(error.args)]
    cause = next((item for item in wrapped if isinstance(item, BaseException)), None)
    return innermost(cause) if cause else one_line(str(error) or type(error).__name__)


def one_line(text: str, limit: int = 300) -> str:
    """`text` with its white space folded, and cut visibly after `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[:limit] + "…"


# ------------------------------------------------------------------ JSON objects -> deltas

# every server has its own name for it (vllm-project/vllm#27755)
THINKING_FIELDS = ("reasoning_content", "reasoning", "reasoning_details")


class Delta(NamedTuple):
    """What one chunk adds to the message; null, missing and foreign things are gone."""

    content: str = ""
    reasoning: str = ""
    thinking: Json = {}  # field -> the same thinking as it came; as all defaults, never changed
    tool_calls: list[Json] = []
    finish_reason: str = ""
    misfiled: bool = False  # a closing tag has come: the content so far was thinking, forget it


def iter_deltas(response: requests.Response) -> Iterator[Delta]:
    """The deltas of one streamed reply.

    The protocol ends a message with `finish_reason`, and a stream with usage and `[DONE]`; servers
    leave out the one or the other. So a message is whole when either has come, and only then: else
    ModelError (CommandCodeAI/command-code#785).
    """
    body = Body(response)
    ended = False  # a finish_reason has come
    some_without = False  # it says nothing where every chunk has one
    went_on = False  # nor where text or calls come after it
    try:
        for delta, finish_reason in _one_choice(parse_sse_stream(body)):
            piece = _read_delta(delta, finish_reason)
            yield piece
            went_on = went_on or ended and any((piece.content, piece.reasoning, piece.tool_calls))
            ended = ended or bool(finish_reason)
            some_without = some_without or not finish_reason
            body.expect_end(ended and some_without and not went_on)
    except ConnectionLost:  # after a whole message it costs nothing
        if not body.final:
            raise
    if not body.done and not ended:
        raise ModelError("回答在中途断开：既没有 finish_reason 也没有 [DONE]，内容不完整，请重试")


def _one_choice(chunks: Iterable[Json]) -> Iterator[tuple[Json, str]]:
    """(delta, finish_reason) of each chunk, as far as it belongs to the first of n > 1 choices."""
    first_index, streamed = None, False
    for number, choice in enumerate(filter(None, map(_first_choice, chunks))):
        index = choice.get("index")
        index = index if isinstance(index, int) and index > 0 else 0
        first_index = index if first_index is None else first_index
        if index not in (first_index, first_index + number):  # some servers count the chunks here
            continue
        finish_reason = _text(choice.get("finish_reason"))
        finish_reason = "" if finish_reason in ("null", "None") else finish_reason
        if finish_reason == "error":
            raise ModelError(f"模型服务报错：{one_line(_words(choice))}")
        delta = choice.get("delta")
        if isinstance(delta, dict):
            streamed = True
        elif not streamed:  # a reply in one piece; after deltas it is their text once more
            delta = choice.get("message")
        # "tool" is the result of a tool that the server itself has run
        if not isinstance(delta, dict) or delta.get("role") == "tool":
            delta = {}
        yield delta, finish_reason


def broken_off(finish_reason: str) -> bool:
    """Whether a message did not end by itself. Each server has words of its own for that."""
    words = "length|max_tokens|context|filter|sensitive|safety|network|resource|abort|cancel|error"
    return bool(re.search(words, finish_reason.lower()))


def _first_choice(chunk: Json) -> Json | None:
    choices = chunk.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else None


def _read_delta(delta: Json, finish_reason: str) -> Delta:
    content = delta.get("content") or delta.get("refusal") or ""
    thinking = {field: delta[field] for field in THINKING_FIELDS if delta.get(field)}
    reasoning = next(filter(None, map(_text, thinking.values())), "")
    if not isinstance(content, str):  # a list of parts, some of them thinking
        parts = content if isinstance(content, list) else [content]
        thoughts = [p["thinking"] for p in parts if isinstance(p, dict) and p.get("thinking")]
        reasoning += _text(thoughts)
        content = _text(parts)
    calls = delta.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    return Delta(content, reasoning, thinking, calls, finish_reason)


def _text(value: Any, depth: int = 6) -> str:
    """The text in a string, a part, or a list of parts."""
    if isinstance(value, list) and depth:
        return "".join(_text(part, depth - 1) for part in value)
    if isinstance(value, dict) and depth:
        return _text(value.get("text") or value.get("summary"), depth - 1)
    return value if isinstance(value, str) else ""


def split_thinking(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Move thinking that stands in the content to where it belongs.

    That is `<think>…</think>` at the head of a reply, and, where the server's template has already
    opened the block (amd/gaia#3945), all that precedes a bare closing tag. Any other tag is the
    answer's own text.
    """
    where, held, ticks = "head", "", 0  # head, thinking, answer, done; half a tag; ` seen
    for delta in deltas:
        if where in ("answer", "done") and not held and "<" not in delta.content:  # nearly always
            ticks += delta.content.count("`")
            yield delta
            continue
        *whole, last = re.split("(</?think>)", held + delta.content)
        held = _tag_start(last)
        content, thought, misfiled = "", "", False
        for text in (*whole, last[: len(last) - len(held)]):
            if text == "<think>" and where == "head":
                where = "thinking"
            elif text == "</think>" and where != "done" and ticks % 2 == 0:  # not inside code
                where, misfiled = "done", True
                content, thought = "", content + thought
            elif where == "thinking":
                thought += text
            else:
                content += text
                ticks += text.count("`")
                where = "answer" if where == "head" and text.strip() else where
        yield delta._replace(
            content=content, reasoning=delta.reasoning + thought, misfiled=misfiled
        )
    if held:
        yield Delta(reasoning=held) if where == "thinking" else Delta(content=held)


def _tag_start(text: str) -> str:
    """The end of `text` that may be the beginning of a tag (MihaiBuilds/memory-vault#152)."""
    tail = text[text.rfind("<") :] if "<" in text else ""
    return tail if "<think>".startswith(tail) or "</think>".startswith(tail) else ""


# ------------------------------------------------------------------ pieces -> tool calls


class _Call:
    """One call in the making."""

    def __init__(self) -> None:
        self.id = self.name = ""
        self.pieces: list[str] = []  # of its arguments
        self.others: Json = {}  # unknown keys, such as a thought signature (langroid/langroid#969)

    def is_complete(self) -> bool:
        """Whether the arguments are a whole object; to join them is seldom worth while."""
        ends = "".join(self.pieces[:1] + self.pieces[-1:]).strip()
        return ends[:1] + ends[-1:] == "{}" and is_json_object("".join(self.pieces))

    def add_name(self, name: str) -> None:
        """A name may come in pieces before the arguments, whole again, or longer each time."""
        if name.startswith(self.name):
            self.name = name
        elif not self.pieces and name:
            self.name += name

    def arguments(self) -> str:
        """The pieces one after the other, unless they are repetitions (lidge-jun/opencodex#361), or
        follow an empty object that stood for what was to come."""
        joined = "".join(self.pieces)
        if self.pieces[:1] == ["{}"] and is_json_object(joined[2:]):
            return joined[2:]
        if len(self.pieces) > 1 and is_json_object(self.pieces[-1]):
            *before, last = self.pieces
            if "".join(before) == last or all(map(last.startswith, before)):
                return last
        return joined


class ToolCalls:
    """The tool calls of one message in the making (§4.2: toolCalls).

    By the protocol `index` says to which call a piece belongs. Servers leave it out
    (ollama/ollama#7881), repeat it (ollama/ollama#15457) or change it (agno-agi/agno#8880); they do
    the same with ids (spring-projects/spring-ai#6000) and names (NousResearch/hermes-agent#11984).
    So where they contradict `index`, what can only mean one thing decides: a known id, a new id
    with a name, arguments that are already complete.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []  # by first piece
        self._at: dict[Any, _Call] = {}  # index -> the call it means now
        self._by_id: dict[str, _Call] = {}

    def add(self, piece: Json) -> None:
        """Add one element of `delta.tool_calls`; null and "" mean absent."""
        if not isinstance(piece, dict):
            return
        function = function_of(piece)
        name, arguments = _text(function.get("name")), function.get("arguments")
        call_id, index = piece.get("id") or "", piece.get("index")
        call_id = call_id if isinstance(call_id, str) else str(call_id)
        index = index if isinstance(index, (int, float, str)) else None
        if arguments is not None and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = self._owner(call_id, index, name, arguments)
        if call is None:
            call = _Call()
            self._calls.append(call)
        if index is not None:
            self._at[index] = call
        if call_id:
            call.id = call.id or call_id  # an id that changes half-way: the first one counts
            self._by_id[call_id] = call
        call.add_name(name)
        if arguments:
            call.pieces.append(arguments)
        for key, value in piece.items():
            if value and key not in ("index", "id", "type", "function"):
                call.others.setdefault(key, value)

    def _owner(self, call_id: str, index: Any, name: str, arguments: Any) -> _Call | None:
        """The call that a piece continues, or None if it opens one; the first rule that fits.

        The protocol's whole rule is `self._at.get(index)`; the others are for servers whose index
        cannot be trusted. In the examples a piece is `index id name arguments`, - what it lacks.
        """
        newest = self._calls[-1] if self._calls else None
        at_index = self._at.get(index)
        # ids that are repeated (0 x f, 1 x g) are told apart by their index, the rest by id
        by_id = self._by_id.get(call_id)
        by_id = at_index if by_id and at_index and at_index.id == call_id else by_id
        call = by_id or (newest if index is None else at_index)
        if not name and call:  # the normal case: 0 x f -, 0 - - {"a", 0 - - :1}
            return call
        if not name:  # a new index: with an id a call whose name comes late, else a stray tail
            return None if call_id else newest
        if call is None:  # the normal case: 0 x f, 1 y g
            return None
        # from here on: a piece with a name, where its id or index already has a call
        if by_id and (index is None or at_index is call):  # all repeated: 0 x f {"a", 0 x f :1}
            return call
        if name == call.name and (by_id or call.pieces) and not call.is_complete():
            return call  # the id or the index changes: 0 x f {"a", 0 y f :1
        if call_id:  # one id for all: 0 x f, 1 x g; the index is stuck: 0 x f, 0 y g
            return None if call.id else call  # but an id may come late: 0 - f, 0 x f
        if not call.name:  # the name comes late (vercel/ai#14722): 0 x - {"a":1}, 0 - f
            return call
        if index is None or call.is_complete() and (arguments or name != call.name):
            return None  # 0 - f {}, 0 - g {}
        return call  # the name in pieces: 0 x get_, 0 - time

    def finished(self, cut: bool) -> list[Json]:
        """The calls as a reply without streaming would hold them, each with an id of its own
        (HKUDS/nanobot#3943).

        cut: the reply ended at the output limit (mastra-ai/mastra#15717), so a call that still
        lacks its arguments must not pass for one that needs none.
        """
        calls: dict[str, Json] = {}
        for call in self._calls:
            arguments = call.arguments()
            if not call.name and not arguments:
                continue
            if cut and arguments.strip() in ("", "null"):
                arguments = "…"  # no JSON, so it will not run
            call_id = new_id() if not call.id or call.id in calls else call.id
            function = {"name": call.name, "arguments": arguments}
            calls[call_id] = {"id": call_id, "type": "function", "function": function}
            calls[call_id].update(call.others)
        return list(calls.values())


def function_of(call: Json) -> Json:
    function = call.get("function")
    return function if isinstance(function, dict) else {}


def is_json_object(text: str) -> bool:
    return text.rstrip().endswith("}") and isinstance(json_or_none(text), dict)


def new_id() -> str:
    """An id for a call that came without one; nine letters or digits suit every known server
    (karthink/gptel#1203)."""
    return os.urandom(5).hex()[:9]
