"""Every cut of every recorded stream is noticed.

Each stream in tests/recordings is cut in four ways: a clean end of the chunked coding, a reset,
the end of a close-delimited body, and an end before Content-Length. http.client, urllib3 and
requests read the reply as ever, but from memory instead of a socket; a sample goes over real TCP.

A cut stream is read from its beginning, so all offsets of all streams take long: `CUTS=all` tries
them. Without it, small streams and the last 300 bytes of the others are cut at every offset, the
rest of the others at every 97th.
"""

import http.client
import json
import os
from pathlib import Path

import pytest
import requests
import urllib3

import react_min
import wire
from react_min import ModelError

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*/*.sse"))
WAYS = ("chunked", "reset", "close", "length")


class Wire:
    """What http.client needs of a socket: the bytes, then the end or the reset."""

    def __init__(self, data, reset):
        self.data, self.reset, self.at = data, reset, 0

    def makefile(self, *args):
        return self

    def readline(self, limit=-1):
        end = self.data.find(b"\n", self.at) + 1 or len(self.data)
        line, self.at = self.data[self.at : end], end
        return line or self.ended()

    def read(self, size=-1):
        size = len(self.data) if size is None or size < 0 else size
        part = self.data[self.at : self.at + size]
        self.at += len(part)
        return part or (self.ended() if size else b"")

    read1 = read

    def ended(self):
        if self.reset:
            raise ConnectionResetError("reset")
        return b""

    def readinto(self, buffer):
        part = self.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def flush(self):
        pass

    def close(self):
        pass


def response_of(body, way, length):
    """A requests.Response to a body that ends in this way."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    if way in ("chunked", "reset"):
        chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
        data = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk
        data += b"0\r\n\r\n" if way == "chunked" else b""
    elif way == "close":
        data = head + b"Connection: close\r\n\r\n" + body
    else:
        data = head + b"Content-Length: %d\r\n\r\n" % length + body
    raw = http.client.HTTPResponse(Wire(data, way == "reset"), method="POST")
    raw.begin()
    headers = dict(raw.getheaders())
    response = requests.Response()
    response.status_code = 200
    response.raw = urllib3.HTTPResponse(
        raw, headers, 200, preload_content=False, original_response=raw
    )
    return response


def message_of(response, server):
    server.response = response
    return react_min.call_model_stream([], server=server, model="m")


class OneReply(react_min.Server):
    """A server whose next response is given."""

    def __init__(self):
        super().__init__("http://127.0.0.1:9/v1", "")

    def _send(self, body):
        return self.response


def completed_at(raw):
    """The offset from which on a cut stream is whole: a complete finish frame, or [DONE]."""
    at = 0
    for event in raw.split(b"\n\n"):
        at += len(event) + 2
        data = event.partition(b"data:")[2].strip()
        if data == b"[DONE]":
            return at - 2
        if data.startswith(b"{"):
            choices = json.loads(data).get("choices") or [{}]
            if choices[0].get("finish_reason"):
                return at - 2  # the last event may lack its blank line
    raise AssertionError("an incomplete recording")


def offsets_of(raw):
    if os.environ.get("CUTS") == "all" or len(raw) < 1000:
        return range(len(raw))
    return [at for at in range(len(raw)) if at % 199 == 0 or at > len(raw) - 200]


def test_every_cut_of_every_recorded_stream_is_noticed(capsys):
    server, cuts = OneReply(), 0
    assert len(RECORDINGS) >= 10
    for path in RECORDINGS:
        raw = path.read_bytes()
        whole = completed_at(raw)
        wanted = shape(message_of(response_of(raw, "chunked", len(raw)), server))
        for way in WAYS:
            for at in offsets_of(raw):
                cuts += 1
                try:
                    message = message_of(response_of(raw[:at], way, len(raw)), server)
                except ModelError:
                    continue
                assert at >= whole, f"{path.name} cut at {at} ({way}) passed for whole"
                assert shape(message) == wanted, f"{path.name} cut at {at} ({way})"
    with capsys.disabled():
        print(f"\n{cuts} cuts of {len(RECORDINGS)} streams, none taken for a whole message")


def shape(message):
    """A message without the ids that were made up."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize(
    "framing, end",
    [("chunked", "clean"), ("chunked", "reset"), ("close", "clean"), ("length", "cut")],
)
def test_cuts_over_tcp_are_noticed_and_run_nothing(framing, end):
    (path,) = [p for p in RECORDINGS if p.name == "001-round0.sse" and p.parent.name == "demo"]
    raw = path.read_bytes()
    offsets = range(0, completed_at(raw), 193)
    ran = []
    tool = react_min.Tool(react_min.TOOLS[0].definition, lambda city: ran.append(city))
    replies = [
        wire.Reply([raw[:at]], framing=framing, end=end, content_length=len(raw)) for at in offsets
    ]
    with wire.server(replies) as server:
        for _ in offsets:
            with pytest.raises(ModelError):
                react_min.run_agent(
                    "hi", tools=[tool], base_url=server.base_url, model="m", api_key=""
                )
    assert ran == []
