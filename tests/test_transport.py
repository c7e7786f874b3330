"""What happens below HTTP: each is one line in words, and never a Python object's inside."""

import contextlib
import socket
import threading

import pytest

from react_min import ModelError, run_agent

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def raw_server(reply):
    """Answers every connection with these bytes and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(reply)

    threading.Thread(target=serve, daemon=True).start()
    with contextlib.closing(listener):
        yield f"127.0.0.1:{listener.getsockname()[1]}/v1"


@pytest.mark.parametrize(
    "scheme, reply, words",
    [
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "TLS"),
        ("http", b"SSH-2.0-OpenSSH_9.0\r\n", "SSH-2.0-OpenSSH_9.0"),
        ("http", b"", "连不上模型服务"),
        ("http", HEAD + b"X: " + b"a" * 70000 + b"\r\n\r\n", "65536 bytes"),
        ("http", HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello", "没有收完"),
        ("http", HEAD + b"Content-Encoding: gzip\r\n\r\ndata: {}\n\n", "没有收完.*decompressing"),
        ("http", b"HTTP/1.1 204 No Content\r\n\r\n", "HTTP 204"),
        ("http", b"HTTP/1.0 200 OK\r\n\r\n", "中途断开"),
    ],
    ids=["no TLS", "no HTTP", "hangs up", "endless header", "chunks", "gzip", "204", "no body"],
)
def test_what_breaks_below_http_is_said_in_one_line_of_words(scheme, reply, words):
    with raw_server(reply) as place, pytest.raises(ModelError, match=words) as caught:
        run_agent("hi", base_url=f"{scheme}://{place}", model="m", api_key="")
    text = str(caught.value)
    assert "\n" not in text and "('" not in text and "object at 0x" not in text
