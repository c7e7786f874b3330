# /// script
# requires-python = ">=3.9"
# dependencies = ["requests"]
# ///
"""The ReAct tool loop over the OpenAI `tools` protocol, by hand and blocking (article §2 to §6).

    python react_min.py "北京和上海今天哪里更热？"

The order is the article's: the prompt (§6), one streamed request (§4.2), the calls of one round in
parallel (§4.3, §5.1), the loop (§4.4). Then the command line. How a stream becomes a message is in
sse.py, how a call becomes a result in tools.py. In all three, vllm-project/vllm#19839 means the
public report on GitHub in which the trouble that a guard is against can be seen.

But:
- no asyncio: reading blocks, and threads take the place of Promise.all
- no cutting of a long history: what does not fit the model's window is for the caller to drop
- fields that a server refuses are dropped, not translated into its own words
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from ipaddress import ip_address
from itertools import takewhile
from queue import SimpleQueue
from typing import Any, Callable, Optional, TextIO
from urllib.parse import unquote, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth
from urllib3.exceptions import HTTPError, InvalidHeader, MaxRetryError, ReadTimeoutError
from urllib3.util.retry import Retry

from sse import (
    THINKING_FIELDS,
    Json,
    ModelError,
    PlainSession,
    ToolCalls,
    broken_off,
    function_of,
    innermost,
    iter_deltas,
    json_or_none,
    one_line,
    read_bytes,
    server_words,
    split_thinking,
    wait_at_most,
)
from tools import (
    TOOL_MAP,
    TOOLS,
    Tool,
    call_key,
    execute_in_time,
    execute_tool_call,
    read_arguments,
    split_calls,
)

__all__ = ["ModelError", "call_model_stream", "execute_tool_call", "main", "run_agent"]
__all__ += ["BASE_URL", "MODEL", "SYSTEM_PROMPT", "MAX_TOOL_ROUNDS", "TOOLS", "TOOL_MAP"]

# §6: four short sentences; the second shows a small model the way from get_news to read_url.
SYSTEM_PROMPT = """你是一个会使用工具的中文助手。
1. **涉及天气、新闻、当前时间等实时信息，必须先调用对应工具，禁止凭空编造。**
2. **需要看某条新闻的正文时，先用 get_news 获取链接，再用 read_url 读取该链接。**
3. **拿到工具结果后，用简洁的中文整理出回答。**
4. **不需要工具的问题直接回答。**"""

# extensions, as is the reasoning_content that they switch: OpenAI's protocol has neither
THINKING_ON: Json = {"enable_thinking": True}  # else there is no reasoning_content (§4.2)
THINKING_OFF: Json = {  # every server has its own switch; one that it refuses is dropped
    "enable_thinking": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "none",
}

MAX_TOOL_ROUNDS = 5  # §4.4: a fuse; small models sometimes repeat one call for ever
TOOL_TIMEOUT = 30.0  # seconds for one tool
CONNECT_TIMEOUT = 10.0  # seconds
LONGEST_WAIT = 1e6  # seconds; more than that the operating system may not take
READ_TIMEOUT = 300.0  # seconds of silence: a cold model loads for minutes (cline/cline#12839)
EXPLANATION_TIME = 5.0  # seconds for the body of an error

Callback = Optional[Callable[[str], object]]


def _is_dashscope(url: str) -> bool:
    try:
        host = urlsplit(url.strip()).hostname or ""
    except ValueError:
        return False
    return bool(re.fullmatch(r"dashscope(-\w+)?\.aliyuncs\.com", host))


BASE_URL = os.environ.get("OPENAI_BASE_URL", "").strip() or (
    "https://dashscope.aliyuncs.com/compatible-mode/v1"
    if os.environ.get("DASHSCOPE_API_KEY", "").strip()
    else "http://localhost:11434/v1"
)
MODEL = os.environ.get("OPENAI_MODEL", "").strip() or (
    "qwen3-1.7b" if _is_dashscope(BASE_URL) else "qwen3:1.7b"
)


# ------------------------------------------------------------------ one streamed round (§4.2)


class Message(dict[str, Any]):
    """An assistant message as a reply without streaming would hold it; beside calls its content is
    "" rather than null, which fewer servers take back. `finish_reason`, which is no part of the
    protocol's message, is kept beside it."""

    finish_reason = ""


def call_model_stream(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Tool] = TOOLS,
    base_url: str = BASE_URL,
    model: str = MODEL,
    api_key: str | None = None,
    tool_choice: str = "auto",
    thinking: bool = True,
    timeout: float = READ_TIMEOUT,
    server: Server | None = None,
    on_reasoning: Callback = None,
    on_content: Callback = None,
) -> Message:
    """One request and its streamed reply (§4.2).

    The pieces go to `on_reasoning` and `on_content` as they come; the return value is the whole
    assistant message. `timeout` is in seconds without a byte. `server` keeps the connection, and
    what was learnt about the server, from one round to the next. Raises ModelError.
    """
    server = server or Server(base_url, api_key, timeout)
    body = {
        "model": model,
        "messages": messages,
        "tools": [tool.definition for tool in tools],
        "tool_choice": tool_choice,  # auto: the model decides whether to call
        "stream": True,
        "temperature": 0.3,
        "max_tokens": 4096,  # thinking counts too: too few, and the content stays empty
        **(THINKING_ON if thinking else THINKING_OFF),
    }
    content, finish_reason = "", ""
    thoughts: dict[str, list[Any]] = {}
    calls = ToolCalls()
    with server.stream(body) as response:
        deltas = split_thinking(iter_deltas(response))
        for delta in split_calls(deltas, tools, messages[-1:]):
            if delta.misfiled:
                content = ""
            _tell(on_reasoning, delta.reasoning)
            if content or delta.content.strip():  # blanks beside tool calls are not shown
                _tell(on_content, delta.content)
            content += delta.content
            for field, piece in delta.thinking.items():
                thoughts.setdefault(field, []).append(piece)
            for part in delta.tool_calls:
                calls.add(part)
            finish_reason = delta.finish_reason or finish_reason
    # the same as a reply without streaming: the loop need not know how it came
    message = Message(role="assistant", content=_whole_letters(content), **_joined(thoughts))
    message.finish_reason = finish_reason
    if tool_calls := calls.finished(cut=broken_off(finish_reason)):
        message["tool_calls"] = tool_calls
    elif finish_reason == "length" and not content.strip():
        raise ModelError("输出到达上限（max_tokens）时还没有正文：试试 --no-thinking，或把问题问小")
    return message


def _tell(listener: Callback, text: str) -> None:
    if listener and text:
        listener(_whole_letters(text))


def _joined(thoughts: Mapping[str, list[Any]]) -> Json:
    """Thinking, in the fields in which it came: some servers demand it back so."""
    joined: Json = {}
    for field, pieces in thoughts.items():
        texts = [piece for piece in pieces if isinstance(piece, str)]
        details = [item for piece in pieces if isinstance(piece, list) for item in piece]
        joined[field] = "".join(texts) or details or pieces[-1]
    return joined


# ------------------------------------------------------------------ the calls of one round (§5.1)


def run_tool_calls(
    calls: Sequence[Json],
    repeats: Sequence[int],
    tool_map: Mapping[str, Tool] = TOOL_MAP,
    tool_timeout: float = TOOL_TIMEOUT,
    on_tool_call: Callback = None,
    on_tool_result: Callback = None,
) -> list[Json]:
    """Run the calls of one round in parallel; returns their tool messages, in call order (§2).

    `repeats` tells how often each call has been made before in this run; the third time it is not
    run any more. The callbacks are called here, on the caller's thread: every call before the
    first tool starts, the results as they come.
    """
    # a tool runs on a thread of its own and puts its result into a box; the pool's thread only
    # waits there (see execute_in_time), and whoever puts something in first ends the wait
    boxes: list[SimpleQueue[str]] = [SimpleQueue() for _ in calls]

    def result_of(number: int) -> str:
        if repeats[number] > 1:
            return "同样的调用已经执行过两次，不再执行。请直接根据已有的结果回答"
        seconds = min(tool_timeout, LONGEST_WAIT)
        note = "\n（这个调用和之前的完全相同，请直接根据结果回答）" if all(repeats) else ""
        return execute_in_time(calls[number], tool_map, seconds, boxes[number]) + note

    for call in calls:
        _tell(on_tool_call, f"调用工具 {call['function']['name']}({call['function']['arguments']})")
    with ThreadPoolExecutor(min(len(calls), 64)) as pool:
        try:
            # in a copy of the caller's context, so that tools see its context variables
            runs = (copy_context().run for _ in calls)
            futures = [pool.submit(run, result_of, number) for number, run in enumerate(runs)]
            for future in as_completed(futures):
                name = calls[futures.index(future)]["function"]["name"]
                _tell(on_tool_result, f"工具结果 {name} → {future.result()}")
        finally:  # after Ctrl-C, or a callback that raised, leaving the pool must not take long
            pool.shutdown(wait=False, cancel_futures=True)
            for box in boxes:
                box.put("已取消")
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": future.result()}
        for call, future in zip(calls, futures)
    ]


# ------------------------------------------------------------------ the loop (§4.4)


def run_agent(
    user_message: str,
    *,
    tools: Sequence[Tool] = TOOLS,
    base_url: str = BASE_URL,
    model: str = MODEL,
    api_key: str | None = None,
    messages: list[Any] | None = None,
    max_rounds: int = MAX_TOOL_ROUNDS,
    tool_timeout: float = TOOL_TIMEOUT,
    timeout: float = READ_TIMEOUT,
    thinking: bool = True,
    on_tool_call: Callback = None,
    on_tool_result: Callback = None,
    on_reasoning: Callback = None,
    on_content: Callback = None,
) -> str:
    """Ask the model, run the tools it calls, and ask again, until it answers (§4.4).

    `messages` is the caller's list: the system prompt (if it is empty), the question, each round
    and the answer are appended, and it can be handed in again. `tool_timeout` and `timeout` are in
    seconds. Raises ModelError; what went wrong with a tool is told to the model instead.
    """
    messages = [] if messages is None else messages
    if not messages:
        messages.append({"role": "system", "content": SYSTEM_PROMPT})
    messages.append({"role": "user", "content": user_message})
    tool_map = {tool.name: tool for tool in tools}
    made: Counter[str] = Counter()  # the calls of this run
    tool_choice = "auto"
    with closing(Server(base_url, api_key, timeout)) as server:
        ask = partial(call_model_firmly, tools=tools, server=server, model=model, thinking=thinking)
        for _ in range(max_rounds):
            message = ask(messages, tool_choice, on_reasoning=on_reasoning, on_content=on_content)
            # no calls: what was streamed is the answer, whatever finish_reason says
            if not message.get("tool_calls"):
                messages.append(message)
                return str(message["content"]) + mark_of_cut(message, on_content)
            # the calls of a round do not depend on each other, so they run in parallel
            calls = message["tool_calls"]
            repeats = count_repeats(made, calls)
            results = run_tool_calls(
                calls, repeats, tool_map, tool_timeout, on_tool_call, on_tool_result
            )
            # ★ the assistant's message as it came (`_wire_message` has the exceptions), then each
            # result, paired by tool_call_id; only together, so that no call is left without one
            messages += [message, *results]
            tool_choice = "none" if all(repeats) else "auto"  # nothing new: next it shall answer
    fuse = f"工具调用超过 {max_rounds} 轮，未能完成任务"
    messages.append({"role": "assistant", "content": fuse})
    return fuse


NUDGE: Json = {"role": "user", "content": "请根据以上内容，直接用中文回答我的问题。"}


def call_model_firmly(messages: list[Any], tool_choice: str, **ask: Any) -> Message:
    """One round; a reply with neither text nor call is asked for once more, now for an answer.

    Small models and servers that misfile the answer send such replies (vllm-project/vllm#19839).
    With "none" alone the model stays silent again, so the second request also says what to do; that
    sentence does not stay in the conversation.
    """
    for choice, nudge in ((tool_choice, []), ("none", [NUDGE])):
        message = call_model_stream([*messages, *nudge], tool_choice=choice, **ask)
        if message.get("tool_calls") or message["content"].strip():
            return message
    raise ModelError("模型没有给出回答：回复里既没有正文，也没有工具调用，请换个问法或换个模型")


def count_repeats(made: Counter[str], calls: Sequence[Json]) -> list[int]:
    """For each call, how often it has been made before in this run; all are noted in `made`.

    A small model seldom leaves such a circle by itself (§4.4, HKUDS/nanobot#2298). So the third
    time a call does not run; the results of a round without anything new say so, and `tool_choice`
    then asks for an answer.
    """
    repeats = []
    for call in calls:
        repeats.append(made[call_key(call)])
        made[call_key(call)] += 1
    return repeats


def mark_of_cut(message: Message, on_content: Callback) -> str:
    """Show and return what an answer that did not end by itself ends with, since half an answer
    looks whole (Hal0ai/hal0#1598).

    For the person only: in `messages` the model would take it for its own words.
    """
    if not broken_off(message.finish_reason):
        return ""
    reasons = {"length": "到达输出上限", "content_filter": "被内容过滤"}
    mark = f"\n（回答{reasons.get(message.finish_reason, message.finish_reason)}，在此处被截断）"
    _tell(on_content, mark)
    return mark


# ------------------------------------------------------------------ the request

OPTIONAL_FIELDS = [*THINKING_OFF, "max_tokens", "temperature", "tool_choice", "content"]
OPTIONAL_FIELDS += THINKING_FIELDS
DEMAND = r"(?i)missing|must be (?:passed|provided|included|set)|pass(?:ed)? back|requir"


class Server:
    """A model server during one run: the connection to it, and the fields that it has refused."""

    def __init__(self, base_url: str, api_key: str | None, timeout: float = READ_TIMEOUT) -> None:
        parts = _split_base_url(base_url)
        path = parts.path.rstrip("/")
        path = path if path.endswith("/chat/completions") else path + "/chat/completions"
        self.url = parts._replace(path=path, fragment="").geturl()
        shown = parts._replace(path=path, netloc=parts.netloc.rpartition("@")[2], query="")
        self.shown_url = shown.geturl()  # without user and password
        self.key = _checked_key(_key_for(base_url) if api_key is None else api_key)
        self.login = (unquote(parts.username or ""), unquote(parts.password or ""))
        self.timeout = (CONNECT_TIMEOUT, min(timeout, LONGEST_WAIT))
        self.wanted: dict[str, bool] = {}  # field -> demanded or refused, as far as it said so
        self.session = PlainSession()
        # neither a proxy (run-llama/llama_index#13526) nor ~/.netrc has a say on this machine
        self.session.trust_env = not _is_loopback(parts.hostname or "")
        self.session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        self.session.auth = self._authorize
        self.session.headers["Content-Type"] = "application/json"
        self.session.headers["Accept"] = "text/event-stream, application/json"
        self.session.headers["Accept-Encoding"] = "identity"
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=Patience.for_model()))

    def close(self) -> None:
        self.session.close()

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.key:
            request.headers["Authorization"] = f"Bearer {self.key}"
        elif any(self.login):  # in the address, as for a server behind a proxy of one's own
            request = HTTPBasicAuth(*self.login)(request)
        return request

    @contextmanager
    def stream(self, body: Json) -> Iterator[requests.Response]:
        """The response to a request; ModelErrors that come up while it is read lose the key."""
        try:
            with self._send(body) as response:
                yield response
        except ModelError as error:
            raise ModelError(_without_key(str(error), self.key)) from None

    def _send(self, body: Json) -> requests.Response:
        """POST the body; leave out what the server refuses, until it accepts or has refused this
        very request before."""
        payload, tried = self._payload(body), set()
        while payload not in tried:
            tried.add(payload)
            response = self._post(payload)
            if response.status_code == 200:
                return response
            with response:
                text = _error_body(response)
            if response.status_code in (400, 422):
                self._learn(text)
            payload = self._payload(body)
        raise _http_error(response, text, self.shown_url)

    def _post(self, payload: bytes) -> requests.Response:
        try:
            return self.session.post(self.url, data=payload, timeout=self.timeout, stream=True)
        except Exception as error:  # a proxy's odd address makes requests raise nearly anything
            raise ModelError(_why_unreachable(error, self.shown_url)) from error

    def _payload(self, body: Json) -> bytes:
        """The body without what the server has refused, its messages in the form servers take.

        The same bytes each time, until something is learnt: that ends `_send`.
        """
        kept = {key: value for key, value in body.items() if self.wanted.get(key, True)}
        if not kept["tools"]:  # an empty list is refused (vllm-project/vllm#39780)
            kept = {key: kept[key] for key in kept if key not in ("tools", "tool_choice")}
        messages = _paired([_wire_message(message) for message in body["messages"]])
        questions = [n for n, m in enumerate(messages) if m.get("role") == "user" and m != NUDGE]
        asked = max(questions, default=0)
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                self._fit(message, of_this_run=number > asked)
        return _to_json({**kept, "messages": messages})

    def _fit(self, message: Json, of_this_run: bool) -> None:
        """Thinking belongs to its run, with the next question it goes, if the server has no other
        wish; beside calls servers refuse a content of null, some gateways one of ""
        (lmstudio-ai/lmstudio-bug-tracker#261)."""
        for field in THINKING_FIELDS:
            if not self.wanted.get(field, of_this_run):
                message.pop(field, None)
            elif field in self.wanted:
                message.setdefault(field, "")
        if not self.wanted.get("content", True) and message.get("tool_calls"):
            message["content"] = message["content"] or None

    def _learn(self, text: str) -> None:
        """Note the optional fields that a refusal names: does it want them gone (janhq/jan#8136),
        or there (langchain-ai/langchain#37713)?"""
        for field in OPTIONAL_FIELDS:
            if not re.search(rf"(?<![\w-]){field}(?![\w-])", text):
                continue
            if field == "content" and not re.search(r"(?i)empty|null|blank|at least", text):
                continue  # the word, not the field
            demanded = field in THINKING_FIELDS and bool(re.search(DEMAND, text))
            if not demanded and self.wanted.get(field, True):
                notice(f"服务器不接受 {field}，本次运行不再发送它")
            self.wanted[field] = demanded


def _wire_message(message: Any) -> Json:
    """A message as servers accept it, {} if it says nothing; the list of the caller stays as it is.

    An assistant's message that says nothing is refused (OpenHands/OpenHands#8685). Calls go back as
    they came (§4.4), but for what makes a server refuse all that follows: arguments that are no
    JSON object (OpenHands/software-agent-sdk#2887); the tool message tells the model.
    """
    wire = dict(message) if isinstance(message, Mapping) else {}
    calls = wire.pop("tool_calls", None)
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    silent = not calls and not wire.get("content") and not wire.get("function_call")
    if wire.get("role") == "assistant" and silent:
        return {}
    if wire.get("role") == "tool" and not wire.get("content"):
        wire["content"] = "（工具没有返回内容）"
    if wire and wire.get("content") is None:
        wire["content"] = ""
    if calls:
        wire["tool_calls"] = [_wire_call(call) for call in calls]
    return wire


def _wire_call(call: Json) -> Json:
    function = dict(function_of(call))
    function["name"] = function.get("name") or "unknown"
    raw = function.get("arguments")
    if not isinstance(raw, str) or not isinstance(json_or_none(raw), dict):
        function["arguments"] = json.dumps(read_arguments(raw) or {}, ensure_ascii=False)
    kept = {key: value for key, value in call.items() if value is not None and key != "index"}
    return {"type": "function", **kept, "id": str(call.get("id") or ""), "function": function}


def _paired(messages: Sequence[Json]) -> list[Json]:
    """Each call followed by its result, and no result without its call (§2), also in a history
    that was interrupted (langchain-ai/langchainjs#6621) or cut (microsoft/semantic-kernel#12708);
    messages that say nothing are gone."""
    paired = []
    for at, message in enumerate(messages):
        if not message or message.get("role") == "tool":
            continue
        paired.append(message)
        following = list(takewhile(lambda m: m.get("role") == "tool", messages[at + 1 :]))
        ids: set[str] = set()
        for number, call in enumerate(message.get("tool_calls", [])):
            nothing = {"role": "tool", "content": "（调用被中断，没有结果）"}
            found = [r for r in following if str(r.get("tool_call_id") or "") == call["id"]]
            if found:
                following.remove(found[0])
            if not call["id"] or call["id"] in ids:
                call["id"] = f"m{at:04}c{number:03}"  # nine characters: see new_id
            ids.add(call["id"])
            paired.append({**(found or [nothing])[0], "tool_call_id": call["id"]})
    return paired


def _to_json(body: Json) -> bytes:
    """UTF-8 without lone surrogates, as they come from a command line (simonw/llm#768) or from
    half an emoji."""
    return _whole_letters(json.dumps(body, ensure_ascii=False, default=str)).encode("utf-8")


def _whole_letters(text: str) -> str:
    """Two halves of a letter joined, one half alone replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Patience(Retry):
    """Repeats a request that was never answered: the model is loading, the server is busy. All of
    that is before the first byte of a reply, since what was shown cannot be taken back
    (HKUDS/nanobot#4038). 400 and the like are never repeated unchanged."""

    LONGEST = 60.0  # seconds; a server that asks for more is not waited for

    @classmethod
    def for_model(cls) -> Patience:
        """Waits of 0, 2, 4, 8, 16 and 32 seconds, or what Retry-After says."""
        return cls(
            total=6,
            connect=0,
            read=1,  # the server has closed a connection that we kept
            other=0,
            status=6,
            backoff_factor=1,
            status_forcelist=(429, 502, 503, 504),  # 500: local servers mean it
            allowed_methods=None,
            raise_on_status=False,
        )

    def get_retry_after(self, response: Any) -> float | None:
        try:
            return super().get_retry_after(response)
        except (InvalidHeader, OverflowError, ValueError):
            return None

    def increment(self, *args: Any, **kwargs: Any) -> Patience:
        response, error = kwargs.get("response"), kwargs.get("error")
        if isinstance(error, ReadTimeoutError):  # silence, unlike a dropped connection, is an end
            raise error
        if response is not None and (self.get_retry_after(response) or 0) > self.LONGEST:
            raise MaxRetryError(kwargs["_pool"], "", None)
        retry = super().increment(*args, **kwargs)
        if response is not None:
            response.close()  # else urllib3 reads its body to the end, if it has one
            notice(f"模型服务暂时不可用（HTTP {response.status}），稍后重试")
        return retry


# ------------------------------------------------------------------ the request's errors, in a line


def _split_base_url(base_url: str) -> Any:
    try:
        parts = urlsplit(base_url.strip())
        parts.port  # noqa: B018 - raises for what is no port
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts
    except ValueError:
        pass
    shown = one_line(_without_password(base_url).partition("?")[0])
    raise ModelError(
        f"模型服务的地址不对：{shown!r}。OPENAI_BASE_URL 应当像 http://localhost:11434/v1"
    )


def _without_password(text: str) -> str:
    """A text in which addresses have lost user and password."""
    return re.sub(r"\S*:\S*@", "***@", text)


def _without_key(text: str, key: str) -> str:
    """A text without the key, also where white space was folded into it or it was cut off (…)."""
    for end in range(len(key), min(len(key), 8) - 1, -1):
        pattern = r"\s*".join(map(re.escape, key[:end])) + (
            "" if end == len(key) else r"(?=…|\.\.\.)"
        )
        text = re.sub(pattern, "***", text) if key else text
    return text


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _key_for(base_url: str) -> str:
    if _is_dashscope(base_url) and os.environ.get("DASHSCOPE_API_KEY", "").strip():
        return os.environ["DASHSCOPE_API_KEY"]
    return os.environ.get("OPENAI_API_KEY", "")


def _checked_key(key: str) -> str:
    """The key without white space; a letter that no header may hold (openai/openai-python#961) is
    named, the key is not."""
    key = key.strip()
    for at, letter in enumerate(key, 1):
        if not "!" <= letter <= "~":
            raise ModelError(
                f"API key 的第 {at} 个字符（U+{ord(letter):04X}）不合法，请重新复制 key"
            )
    return key


def _error_body(response: requests.Response) -> str:
    body, deadline = b"", time.monotonic() + EXPLANATION_TIME
    wait_at_most(response, EXPLANATION_TIME)
    try:
        for chunk in read_bytes(response):
            body += chunk
            if len(body) > 65536 or time.monotonic() > deadline:
                break
    except (requests.RequestException, HTTPError, OSError):
        pass  # what came before is better than nothing
    return body.decode("utf-8", "replace")


def _http_error(response: requests.Response, text: str, url: str) -> ModelError:
    status = response.status_code
    hints = {
        401: "请检查 API key（OPENAI_API_KEY 或 DASHSCOPE_API_KEY）",
        403: "请检查 API key 的权限（OPENAI_API_KEY 或 DASHSCOPE_API_KEY）",
        404: "请检查模型名（OPENAI_MODEL）和地址（OPENAI_BASE_URL，末尾是否少了 /v1）",
        429: "请求太多或额度用完，请稍后再试",
        503: "模型可能还在加载，请稍后再试",
    }
    hint = hints.get(status, "")
    if 300 <= status < 400:
        hint = f"被重定向到 {one_line(response.headers.get('Location', '?'))}，请改 OPENAI_BASE_URL"
    words = server_words(text) or one_line(response.reason or "")
    return ModelError(
        f"模型服务返回 HTTP {status}（{url}）：{words}" + (f"。{hint}" if hint else "")
    )


def _why_unreachable(error: Exception, url: str) -> str:
    text, inner = str(error), _without_password(innermost(error))
    if isinstance(error, requests.exceptions.ReadTimeout):
        return f"模型服务一直没有回答（{url}）：等待超时，模型可能还在加载，可用 --timeout 放宽"
    if isinstance(error, requests.exceptions.SSLError):
        return f"与模型服务的安全连接（TLS）失败（{url}）：{inner}"
    if "Failed to parse" in text or isinstance(error, requests.exceptions.InvalidProxyURL):
        return "代理的地址不对，请检查 HTTP_PROXY/HTTPS_PROXY"  # not shown: it may hold a password
    if isinstance(error, requests.exceptions.ProxyError):
        return f"连不上代理（要访问 {url}）：{inner}。请检查 HTTP_PROXY/HTTPS_PROXY"
    if isinstance(error, requests.exceptions.ConnectTimeout):
        why = "连接超时"
    elif "refused" in text:
        why = "连接被拒绝，服务是否在运行？"
    elif re.search(r"NameResolution|getaddrinfo|Name or service|resolve", text):
        why = "找不到这个主机"
    else:
        why = inner
    return (
        f"连不上模型服务 {url}（{why}）。三个办法：装好 Ollama 后 `ollama pull qwen3:1.7b`；"
        "设置 DASHSCOPE_API_KEY 用阿里云百炼；或先看演示 `python react_min.py --demo`"
    )


def notice(text: str) -> None:
    """Something that a person should know, on standard error."""
    with suppress(OSError):  # it must not cost the answer
        print(printable(text), file=sys.stderr, flush=True)


# ------------------------------------------------------------------ the terminal

# strings, compiled at their first use, so that the module is imported fast
# subtle: of the controls beyond 127 only a colour's is read on to its end: text in a wrong
# character set is full of them, and one that opens a string would swallow what follows
ESCAPE = (
    r"(?:\x1b\[|\x9b(?=[0-?]))[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b]{0,999}(?:\x07|\x1b\\)"  # titles, clipboard, links
    r"|\x1b[ -/]*[0-Z\\^-~]"
)
UNFINISHED = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*\Z|\x1b[\]PX^_][^\x07\x1b]{0,999}\x1b?\Z|\x1b[ -/]*\Z"
CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"


def printable(text: str) -> str:
    """Text without what a terminal would obey: escape sequences (UKGovernmentBEIS/inspect_ai#4854),
    controls and bidi overrides (Growth-Circle/cadis#1723)."""
    return re.sub(CONTROL, "", re.sub(ESCAPE, "", text))


class Terminal:
    """Writes a run as it comes: the answer to standard output, all else to standard error.

    Into a pipe goes the answer alone. But whether text is the answer is known only when no call
    follows it (§4.2). So there the text of a round waits for a call, which would make it a remark:
    LONGEST seconds, or until it comes slowly, PAUSE seconds between two pieces. Then it flows,
    since a reader of the pipe wants to see it live.
    """

    LONGEST, PAUSE = 2.0, 0.2

    def __init__(self) -> None:
        self.piped = not sys.stdout.isatty()
        self.dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._kind = ""  # of what is being written: reasoning, content, or none
        self._since = self._last = 0.0  # when it began, when its last piece came
        self._open: TextIO | None = None  # where a line was begun and not ended
        self._held = ""  # the beginning of an escape sequence
        self._waiting = ""  # text that may be a remark
        self._streamed = False  # whether text of this round has reached standard output

    def on_reasoning(self, text: str) -> None:
        if printable(text) == self._waiting:  # it was thinking after all: see Delta.misfiled
            self._waiting = ""
        self._begin("reasoning")
        text = self._clean(text)
        self._write(f"\x1b[2m{text}\x1b[0m" if self.dim and text else text, sys.stderr)

    def on_content(self, text: str) -> None:
        self._begin("content")
        self._waiting += self._clean(text)
        now, last = time.monotonic(), self._last
        self._last = now
        if not self.piped or now - self._since > self.LONGEST or now - last > self.PAUSE:
            self._streamed = self._streamed or bool(self._waiting)
            self._write_waiting(sys.stdout)

    def on_tool_call(self, line: str) -> None:
        self._write_waiting(sys.stderr)
        self._begin("")
        self._streamed = False
        self._write(printable(line) + "\n", sys.stderr)

    def on_tool_result(self, line: str) -> None:
        line = line if len(line) <= 600 else f"{line[:600]}…（共 {len(line)} 字）"
        self._write(printable(line) + "\n", sys.stderr)

    def finish(self, answer: str = "") -> None:
        """End the open line. Without an answer (an error, Ctrl-C) what still waits is half of one,
        and dropped; an answer that was not streamed (the fuse's sentence) is written."""
        rest = self._waiting + printable(self._held)
        self._waiting = rest if answer and self._streamed else printable(answer)
        self._write_waiting(sys.stdout)
        self._end_line()

    def _begin(self, kind: str) -> None:
        """What follows is of another kind, and begins on a line of its own."""
        if kind != self._kind:
            if not (self.piped and self._open is sys.stdout):  # there nothing else comes between
                self._end_line()
            self._kind, self._held = kind, ""
            self._since = self._last = time.monotonic()

    def _end_line(self) -> None:
        if self._open:
            self._write("\n", self._open)

    def _clean(self, text: str) -> str:
        text = self._held + text
        found = re.search(UNFINISHED, text)
        self._held = text[found.start() :] if found else ""
        return printable(text[: len(text) - len(self._held)])

    def _write_waiting(self, stream: TextIO) -> None:
        self._write(self._waiting, stream)
        self._waiting = ""

    def _write(self, text: str, stream: TextIO) -> None:
        if text:
            self._open = None if text.endswith("\n") else stream
            with suppress(OSError) if stream is sys.stderr else nullcontext():
                print(text, end="", file=stream, flush=True)


# ------------------------------------------------------------------ the command line

USAGE = """例子：
  python react_min.py "北京和上海今天哪里更热？"
  echo "帮我看看今天 AI 新闻里第一条的正文。" | python react_min.py

环境变量：OPENAI_BASE_URL、OPENAI_MODEL、OPENAI_API_KEY、DASHSCOPE_API_KEY
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0, 1 (ModelError), 2 (usage), 130 (Ctrl-C), 141
    (the reader of the pipe has gone)."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - none was handed to us
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr, sys.stdin):
        # a console that cannot print 🌞 prints ? instead (HKUDS/CLI-Anything#418)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        return _command(_parser().parse_args(argv))
    except SystemExit as error:
        return int(error.code or 0)
    except ModelError as error:
        notice(f"错误：{error}")
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `| head -1` has seen enough
            return 141
        notice(f"错误：读不了问题或写不出回答：{error}")
        return 1


def _parser() -> Any:
    import argparse

    parser = argparse.ArgumentParser(
        prog="react_min.py",
        description="向模型提问；它可以调用四个工具：天气、新闻、时间、读网页。",
        epilog=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("question", nargs="?", help="问题；不写就从标准输入（管道）读取")
    parser.add_argument("--demo", action="store_true", help="不需要模型、key 和网络的演示")
    parser.add_argument("--messages", action="store_true", help="最后打印 messages 数组（§2）")
    parser.add_argument("--no-thinking", action="store_true", help="关闭模型的思考")
    parser.add_argument(
        "--timeout",
        type=float,
        default=READ_TIMEOUT,
        metavar="秒",
        help=f"模型最多沉默多久，默认 {READ_TIMEOUT:g}",
    )
    return parser


def _command(options: Any) -> int:
    if not 0 < options.timeout <= LONGEST_WAIT:
        notice(f"--timeout 应当是大于 0、不超过 {LONGEST_WAIT:g} 的秒数")
        return 2
    if options.demo:
        return demo(options)
    question = options.question
    if question is None and sys.stdin is not None and not sys.stdin.isatty():
        question = sys.stdin.read()
    if not (question or "").strip():
        notice('没有问题。用法：python react_min.py "问题"（--help 看说明，--demo 看演示）')
        return 2
    converse(question.strip(), options, base_url=BASE_URL, model=MODEL)
    return 0


def converse(question: str, options: Any, **server: Any) -> None:
    """One question, written to the terminal as it is answered."""
    terminal, messages = Terminal(), []  # type: ignore[var-annotated]
    answer = ""
    try:
        answer = run_agent(
            question,
            messages=messages,
            timeout=options.timeout,
            thinking=not options.no_thinking,
            on_tool_call=terminal.on_tool_call,
            on_tool_result=terminal.on_tool_result,
            on_reasoning=terminal.on_reasoning,
            on_content=terminal.on_content,
            **server,
        )
    finally:
        terminal.finish(answer)
    if options.messages:  # §2: a line for each message, together one JSON array
        lines = (json.dumps(message, ensure_ascii=False) for message in messages)
        notice("[\n " + ",\n ".join(lines) + "\n]")


def demo(options: Any) -> int:
    """§5: the parallel and the sequential case, with the real loop over real HTTP, but played."""
    import importlib.util

    import tools

    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests")
    spec = importlib.util.spec_from_file_location("replay", os.path.join(folder, "replay.py"))
    if spec is None or spec.loader is None or not os.path.exists(os.path.join(folder, "replay.py")):
        notice("演示要用到 tests/ 文件夹里的 replay.py 和录音，这里没有。请使用完整的项目")
        return 1
    replay = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(replay)
    notice(
        "【演示】模型的话是预先写好的录音（recording），不是现场生成。用真实模型："
        '`ollama pull qwen3:1.7b`，或设置 DASHSCOPE_API_KEY，然后 python react_min.py "问题"'
    )
    recording = os.path.join(folder, "recordings", "demo")
    with replay.serve(recording, pace=0.03) as server, replay.played_web(tools, recording):
        for question in DEMO_QUESTIONS:
            notice(f"\n问：{question}")
            converse(question, options, base_url=server.base_url, model="qwen3-1.7b", api_key="")
    return 0


DEMO_QUESTIONS = ("北京和上海今天哪里更热？", "帮我看看今天 AI 新闻里第一条的正文。")

if __name__ == "__main__":
    sys.exit(main())
