"""A loopback server that misbehaves on demand, for tests about what happens on the wire.

    with wire.server([Reply(pieces=[wire.sse(...)], end="reset"), wire.say("好")]) as s:
        ...  # s.base_url, s.requests, s.connections

A reply is a Reply, a dict of its fields, or bytes: a whole, faultless event stream.
"""

import contextlib
import json
import socket
import struct
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Union,
)


class Reply(NamedTuple):
    """What the server sends, piece by piece, and how it ends.

    framing: "chunked" | "close" (the end of the connection is the end of the body) | "length"
             | "drop" (nothing at all, the connection is closed)
    end: "clean" | "cut" (closed without the end of the framing) | "reset" (TCP RST) | "hang"
    """

    pieces: Iterable[bytes] = ()
    status: int = 200
    headers: Optional[Dict[str, str]] = None  # None: an event stream
    framing: str = "chunked"
    wait: float = 0.0  # seconds before the status line
    gap: float = 0.0  # seconds before each piece but the first
    end: str = "clean"
    gzip: bool = False
    content_length: Optional[int] = None  # a false one, for framing "length"


class Request(NamedTuple):
    method: str
    path: str
    headers: Dict[str, str]  # names in lower case
    body: Any  # the JSON value, or None


class Server:
    """What a test sees of the server."""

    def __init__(self, replies: Any) -> None:
        self.base_url = ""
        self.requests: List[Request] = []
        self.connections = 0
        self.closing = threading.Event()
        self._replies = replies if callable(replies) else iter(list(replies))
        self._lock = threading.Lock()

    def next_reply(self, request: Request) -> Reply:
        with self._lock:
            self.requests.append(request)
            reply = self._replies(request) if callable(self._replies) else next(self._replies, None)
        if reply is None:
            text = b'{"error": {"message": "the test has no more replies"}}'
            return Reply([text], 500, {"Content-Type": "application/json"})
        if isinstance(reply, bytes):
            return Reply([reply])
        return Reply(**reply) if isinstance(reply, dict) else reply


Replies = Union[Sequence[Union[Reply, Dict[str, Any], bytes]], Callable[[Request], Any]]


@contextlib.contextmanager
def server(replies: Replies) -> Iterator[Server]:
    """Serve `replies` in turn, or what the function `replies` returns for each request."""
    shown = Server(replies)
    listener = ThreadingHTTPServer(("127.0.0.1", 0), _handler(shown))
    listener.daemon_threads = True
    shown.base_url = f"http://127.0.0.1:{listener.server_address[1]}/v1"
    threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield shown
    finally:
        shown.closing.set()
        listener.shutdown()
        listener.server_close()


def _handler(shown: Server) -> Any:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            shown.connections += 1

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # a client that hangs up is what some tests want
                super().handle()

        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                body = json.loads(raw)
            except ValueError:
                body = None
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = shown.next_reply(Request(self.command, self.path, headers, body))
            shown.closing.wait(reply.wait)
            _send(self, reply, shown.closing)

        do_GET = do_POST

    return Handler


def _send(handler: BaseHTTPRequestHandler, reply: Reply, closing: threading.Event) -> None:
    if reply.framing == "drop":
        handler.close_connection = True
        return
    pieces = _zipped(reply.pieces) if reply.gzip else reply.pieces
    headers = dict(
        {"Content-Type": "text/event-stream"} if reply.headers is None else reply.headers
    )
    if reply.gzip:
        headers["Content-Encoding"] = "gzip"
    if reply.framing == "chunked":
        headers["Transfer-Encoding"] = "chunked"
    elif reply.framing == "length":
        pieces = list(pieces)
        length = sum(map(len, pieces)) if reply.content_length is None else reply.content_length
        headers["Content-Length"] = str(length)
    else:
        headers["Connection"] = "close"
    handler.send_response(reply.status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    for at, piece in enumerate(pieces):
        if at and closing.wait(reply.gap):
            break
        framed = b"%x\r\n%s\r\n" % (len(piece), piece) if reply.framing == "chunked" else piece
        if piece:  # an empty chunk would be the end
            handler.wfile.write(framed)
    _end(handler, reply, closing)


def _end(handler: BaseHTTPRequestHandler, reply: Reply, closing: threading.Event) -> None:
    if reply.end == "clean" and reply.framing == "chunked":
        handler.wfile.write(b"0\r\n\r\n")
    if reply.end == "hang":
        closing.wait(60)
    if reply.end == "reset":
        time.sleep(0.05)  # a reset overtakes bytes that were not read yet
        no_linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        socket.close(handler.connection.detach())
    if reply.end != "clean" or reply.framing == "close" or reply.content_length is not None:
        handler.close_connection = True


def _zipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Each piece compressed so far that it can be read when it arrives, as servers do it."""
    packer = zlib.compressobj(wbits=31)
    for piece in pieces:
        yield packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH)
    yield packer.flush()


# ------------------------------------------------------------------ bodies


def sse(*objects: Any, done: bool = True) -> bytes:
    """An event stream of JSON values; a str or bytes goes in as it is."""
    events = [
        item
        if isinstance(item, (str, bytes))
        else f"data: {json.dumps(item, ensure_ascii=False)}\n\n"
        for item in objects
    ]
    raw = b"".join(item.encode() if isinstance(item, str) else item for item in events)
    return raw + (b"data: [DONE]\n\n" if done else b"")


def chunk(delta: Optional[Dict[str, Any]] = None, finish: Optional[str] = None) -> Dict[str, Any]:
    """One chunk of a streamed completion."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]}


def say(text: str, reasoning: str = "", finish: str = "stop") -> bytes:
    """The stream of a round that answers, one chunk per character."""
    deltas: List[Dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": character} for character in reasoning]
    deltas += [{"content": character} for character in text]
    return sse(*map(chunk, deltas), chunk({}, finish))


def calls(wanted: Sequence[Sequence[Any]], content: str = "", finish: str = "tool_calls") -> bytes:
    """The stream of a round of calls: (name, arguments) or (name, arguments, id) each.

    Arguments that are a str are sent as they are, others as JSON, in two pieces.
    """
    deltas: List[Dict[str, Any]] = [{"role": "assistant", "content": content or None}]
    for index, call in enumerate(wanted):
        name, arguments = call[0], call[1]
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        call_id = call[2] if len(call) > 2 else f"call_{index + 1}"
        half = len(text) // 2
        first = {"name": name, "arguments": text[:half]}
        head = {"index": index, "id": call_id, "type": "function", "function": first}
        deltas.append({"tool_calls": [head]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text[half:]}}]})
    return sse(*map(chunk, deltas), chunk({}, finish))
