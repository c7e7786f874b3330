"""Records what a model server streams, byte for byte, and plays it again without one.

    python tests/replay.py record FOLDER "question"     the real server of the environment
    python tests/replay.py play FOLDER                  then: OPENAI_BASE_URL=http://127.0.0.1:…/v1

A folder holds `index.json`, one `.sse` file per round of the model, and under `web/` the bodies
that the tools got from the web. The index says of each file whether it was recorded, from which
server and model, or constructed by hand. Needs the project's modules only for recording.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import threading
import time
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Union
from urllib.parse import quote, urlsplit, urlunsplit

Json = Dict[str, Any]
Folder = Union[str, Path]
EVENT_STREAM = "text/event-stream"


class ReplayError(Exception):
    """A recording cannot be read or made; one line for the person at the terminal."""


class Played(NamedTuple):
    """A server that plays a recording: where it is, and the bodies it was sent so far."""

    base_url: str
    requests: List[Json]


def read_index(folder: Folder) -> Json:
    path = Path(folder) / "index.json"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return {"about": "", "streams": [], "web": [], **index}
    except FileNotFoundError:
        raise ReplayError(f"没有这个录音：{path}") from None
    except (OSError, ValueError, TypeError) as error:
        raise ReplayError(f"录音的目录读不出来：{path}（{error}）") from None


# ------------------------------------------------------------------ playing the model


@contextlib.contextmanager
def serve(folder: Folder, pace: float = 0.0, port: int = 0) -> Iterator[Played]:
    """Play the streams of a recording over real HTTP, `pace` seconds between two events.

    Which stream a request gets is decided by its last question and by how many rounds of calls
    came after it, so that an agent with other tools' results still gets its next round.
    """
    index = read_index(folder)
    bodies: List[Json] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "GET":
            names = sorted({str(s.get("model", "")) for s in index["streams"]})
            models = [{"id": name, "object": "model"} for name in names]
            return _send_json(handler, 200, {"object": "list", "data": models})
        body = _read_json(handler)
        if not handler.path.split("?")[0].endswith("/chat/completions") or body is None:
            return _send_error(handler, 404, "录音只会回答 POST …/chat/completions")
        bodies.append(body)
        stream = _find_stream(index, body)
        if stream is None:
            return _send_error(handler, 404, _what_there_is(index, body))
        raw = (Path(folder) / stream["file"]).read_bytes()
        _start_chunked(handler, 200, stream.get("content_type") or EVENT_STREAM)
        for at, event in enumerate(_events(raw)):
            time.sleep(pace if at else 0)
            _send_chunk(handler, event)
        if stream.get("cut"):  # so it was when it was recorded
            handler.close_connection = True
        else:
            _send_chunk(handler, b"")

    with _listening(answer, port) as base_url:
        yield Played(base_url, bodies)


def _events(raw: bytes) -> List[bytes]:
    """The bytes of a stream, cut after each blank line."""
    return [part for part in re.split(rb"(?<=\n\n)|(?<=\n\r\n)|(?<=\r\r)", raw) if part]


def _question_and_round(body: Json) -> Any:
    """(text of the last question, how many rounds the model has had since).

    A user message right after a tool's result or after the question itself is no new question but
    the loop asking for an answer, after a reply that was empty.
    """
    question, rounds, before = "", 0, ""
    for message in body.get("messages") or []:
        role = message.get("role")
        if role == "user" and before not in ("user", "tool"):
            question, rounds = _text_of(message.get("content")), 0
        elif role == "user" or role == "assistant" and message.get("tool_calls"):
            rounds += 1
        before = role
    return question, rounds


def _text_of(content: Any) -> str:
    if isinstance(content, list):  # parts: [{"type": "text", "text": ...}]
        content = "".join(str(part.get("text", "")) for part in content)
    return str(content or "").strip()


def _find_stream(index: Json, body: Json) -> Optional[Json]:
    """The latest stream for this question and round, if possible of the model that is asked for."""
    wanted = _question_and_round(body)
    found = [s for s in index["streams"] if (s["question"].strip(), s["round"]) == wanted]
    same_model = [s for s in found if s.get("model") == body.get("model")]
    return (same_model or found or [None])[-1]


def _what_there_is(index: Json, body: Json) -> str:
    question, rounds = _question_and_round(body)
    known = questions(index)
    if question in known:
        return f"这个问题的录音没有第 {rounds + 1} 轮：{question}"
    return f"没有这个问题的录音；有：{' / '.join(known) or '（空）'}"


def questions(index: Json) -> List[str]:
    return list(dict.fromkeys(s["question"].strip() for s in index["streams"]))


# ------------------------------------------------------------------ playing the web


@contextlib.contextmanager
def played_web(tools_module: Any, folder: Folder) -> Iterator[None]:
    """Let the tools find the recorded web replies where they would otherwise go to the network."""
    index = read_index(folder)

    def fetch(url: str, *, method: str = "GET", json: Any = None, **ignored: Any) -> Any:
        entry = _find_web(index, method, url, json)
        if entry is None:
            raise tools_module.ToolError(f"录音里没有这个网页：{method} {url}")
        if entry.get("error"):
            raise tools_module.ToolError(entry["error"])
        body = (Path(folder) / entry["file"]).read_bytes()
        final = entry.get("final_url", entry["url"])  # after redirects
        return tools_module.Page(final, entry["status"], entry["content_type"], body)

    with _replaced_fetch(tools_module, fetch):
        yield


def _find_web(index: Json, method: str, url: str, body: Any) -> Optional[Json]:
    """The latest reply for this request; an entry without "json" fits every body."""
    found = [
        entry
        for entry in index["web"]
        if (entry["method"], entry["url"]) == (method.upper(), url)
        and ("json" not in entry or entry["json"] == body)
    ]
    return found[-1] if found else None


@contextlib.contextmanager
def _replaced_fetch(tools_module: Any, fetch: Callable[..., Any]) -> Iterator[None]:
    before = tools_module.fetch
    tools_module.fetch = fetch
    try:
        yield
    finally:
        tools_module.fetch = before


# ------------------------------------------------------------------ recording


def record(
    folder: Folder,
    question: str,
    *,
    web: Optional[Folder] = None,
    note: str = "",
    **callbacks: Any,
) -> List[str]:
    """Ask the real server `question` with the real loop; keep all it streams and what tools read.

    Returns the names of the files that were added, also when the run fails half-way: what was kept
    until then is worth something, the error is raised afterwards.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import react_min
    import tools

    path = Path(folder)
    index = read_index(path) if (path / "index.json").exists() else read_empty(path)
    web_index = read_index(web) if web else None
    server, secrets = react_min.BASE_URL, _secrets(react_min.BASE_URL)
    streams: List[Json] = []
    pages: List[Json] = []
    real_fetch = tools.fetch

    def keeping_fetch(url: str, *, method: str = "GET", json: Any = None, **rest: Any) -> Any:
        entry: Json = {"method": method.upper(), "url": url, "kind": "recorded", "note": ""}
        if json is not None:
            entry["json"] = json
        source = _find_web(web_index, method, url, json) if web_index else None
        if source:
            entry.update(kind=source["kind"], note=source.get("note", ""))
        pages.append(entry)
        try:
            page = web_fetch(url, method=method, json=json, **rest)
        except tools.ToolError as error:
            entry["error"] = str(error)
            raise
        entry.update(status=page.status, content_type=page.content_type, body=page.body)
        if page.url != url:
            entry["final_url"] = page.url
        return page

    with contextlib.ExitStack() as stack:
        if web:
            stack.enter_context(played_web(tools, web))
        web_fetch = tools.fetch if web else real_fetch
        stack.enter_context(_replaced_fetch(tools, keeping_fetch))
        local = stack.enter_context(_listening(lambda h: _forward(h, server, streams, secrets)))
        added: List[str] = []
        try:
            react_min.run_agent(
                question,
                base_url=local,
                model=react_min.MODEL,
                # decided for the real server, since the loop only sees the local one
                api_key=react_min._key_for(server),
                **callbacks,
            )
        finally:
            facts = {"server": _without_secrets(server), "model": react_min.MODEL, "note": note}
            added += _keep(path, index, streams, pages, facts, secrets)
    return added


def read_empty(folder: Path) -> Json:
    """The index of a folder that does not have one yet."""
    if folder.exists() and not folder.is_dir():
        raise ReplayError(f"不是文件夹：{folder}")
    about = "Recorded by tests/replay.py, byte for byte; see the kind of each entry."
    return {"about": about, "streams": [], "web": []}


def _forward(
    handler: BaseHTTPRequestHandler, server: str, streams: List[Json], secrets: List[str]
) -> None:
    """Pass a request on to the real server and its reply back as it comes, keeping a copy."""
    import requests

    length = int(handler.headers.get("Content-Length") or 0)
    sent = handler.rfile.read(length)
    base = urlsplit(server)
    path, suffix = base.path.rstrip("/"), handler.path[len("/v1") :]
    url = urlunsplit(base._replace(path=path if path.endswith(suffix) else path + suffix))
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    authorization = handler.headers.get("Authorization")
    if authorization:
        headers["Authorization"] = authorization
        secrets.extend(_spellings(authorization.split()[-1]))
    kept = bytearray()
    with requests.Session() as session:
        session.trust_env = not _is_here(base.hostname)  # no proxy for the own machine
        session.auth = lambda request: request  # no password from ~/.netrc either
        try:
            reply = session.request(
                handler.command,
                url,
                data=sent,
                headers=headers,
                stream=True,
                timeout=(10, 600),
                allow_redirects=False,  # the loop decides what a redirect means
            )
        except requests.RequestException as error:
            text = f"连不上 {_without_secrets(server)}（{type(error).__name__}）"
            return _send_error(handler, 523, text)  # 502 would be tried again, for a minute
        kind = reply.headers.get("Content-Type", "")
        passed = {k: v for k, v in reply.headers.items() if k in ("Location", "Retry-After")}
        _start_chunked(handler, reply.status_code, kind, passed)
        cut = False
        try:
            for piece in _arriving(reply):
                kept += piece
                _send_chunk(handler, piece)
        except (requests.RequestException, _urllib3_error()):
            cut = True
            handler.close_connection = True
        if reply.status_code == 200 and handler.command == "POST":
            question, rounds = _question_and_round(json.loads(sent))
            date = datetime.now(timezone.utc).date().isoformat()
            entry = {"question": question, "round": rounds, "kind": "recorded", "date": date}
            entry.update(content_type=kind, body=bytes(kept))
            streams.append({**entry, "cut": True} if cut else entry)
        if not cut:
            _send_chunk(handler, b"")


def _arriving(reply: Any) -> Iterator[bytes]:
    """The body as it arrives; urllib3 1 has no read1, there it goes byte by byte."""
    if not hasattr(reply.raw, "read1"):
        yield from reply.iter_content(1)
        return
    try:
        yield from iter(lambda: reply.raw.read1(65536, decode_content=True), b"")
    except AttributeError:  # the method is there, but not beneath it
        yield from reply.iter_content(1)


def _urllib3_error() -> Any:
    from urllib3.exceptions import HTTPError

    return HTTPError


def _keep(
    folder: Path, index: Json, streams: List[Json], pages: List[Json], facts: Json, secrets: Any
) -> List[str]:
    """Write the new files and then the index; earlier files are never written over."""
    added = []
    for entry in streams:
        body = _redact(entry.pop("body"), secrets)
        name = _write_new(folder, "", f"-round{entry['round']}.sse", body)
        index["streams"].append({"file": name, **entry, **facts})
        added.append(name)
    for entry in pages:
        if "body" in entry:
            kinds = {"json": "json", "html": "html", "xml": "xml"}
            kind = next((e for k, e in kinds.items() if k in entry["content_type"]), "bin")
            body = _redact(entry.pop("body"), secrets)
            entry["file"] = _write_new(folder, "web/", f".{kind}", body)
            added.append(entry["file"])
        if "status" in entry or "error" in entry:
            index["web"].append(entry)
    if streams or added:
        text = json.dumps(index, ensure_ascii=False, indent=1) + "\n"
        draft = folder / "index.json.new"
        draft.write_bytes(_redact(text.encode(), secrets))
        draft.replace(folder / "index.json")
    return added


def _write_new(folder: Path, under: str, ending: str, body: bytes) -> str:
    (folder / under).mkdir(parents=True, exist_ok=True)
    numbers = [int(p.name[:3]) for p in (folder / under).iterdir() if p.name[:3].isdecimal()]
    name = f"{under}{max(numbers, default=0) + 1:03}{ending}"
    with open(folder / name, "xb") as file:
        file.write(body)
    return name


# ------------------------------------------------------------------ keys stay out of recordings


def _secrets(server: str) -> List[str]:
    found = [os.environ.get(name, "") for name in ("OPENAI_API_KEY", "DASHSCOPE_API_KEY")]
    found.append(urlsplit(server).password or "")
    return [spelling for secret in found for spelling in _spellings(secret)]


def _spellings(secret: str) -> List[str]:
    """A key as it may stand in a text. "x" or "-" is a placeholder and would ruin the recording."""
    if len(secret) < 4:
        return []
    return [secret, json.dumps(secret)[1:-1], quote(secret, safe="")]


def _redact(raw: bytes, secrets: List[str]) -> bytes:
    for secret in sorted(set(secrets), key=len, reverse=True):
        raw = raw.replace(secret.encode(), b"***")
    return raw


def _without_secrets(url: str) -> str:
    """The address without user, password and query, any of which may be a key."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def _is_here(host: Optional[str]) -> bool:
    return host in ("localhost", "::1") or (host or "").startswith("127.")


# ------------------------------------------------------------------ a small HTTP server


@contextlib.contextmanager
def _listening(answer: Callable[[BaseHTTPRequestHandler], None], port: int = 0) -> Iterator[str]:
    """A server on the loopback address that lets `answer` answer; gives its base URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # chunked bodies need it
        disable_nagle_algorithm = True  # each event leaves at once

        def do_POST(self) -> None:
            answer(self)

        do_GET = do_POST

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a client that hangs up is no error here
                super().handle()

        def log_message(self, *args: Any) -> None:
            pass

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ReplayError(f"端口 {port} 用不了：{error.strerror}") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def _read_json(handler: BaseHTTPRequestHandler) -> Optional[Json]:
    raw = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _start_chunked(
    handler: BaseHTTPRequestHandler,
    status: int,
    content_type: str,
    others: Optional[Dict[str, str]] = None,
) -> None:
    handler.send_response(status)
    for name, value in (others or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Type", content_type)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()


def _send_chunk(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    """One chunk in one write; an empty one ends the body."""
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


def _send_json(handler: BaseHTTPRequestHandler, status: int, value: Json) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json; charset=utf-8")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _send_error(handler: BaseHTTPRequestHandler, status: int, text: str) -> None:
    _send_json(handler, status, {"error": {"message": text}})


# ------------------------------------------------------------------ the command line


def main(argv: Optional[List[str]] = None) -> int:
    options = _parser().parse_args(argv)
    try:
        return _record(options) if options.command == "record" else _play(options)
    except (ReplayError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay.py", description="录下模型服务器的流，一个字节也不少；之后离线回放。"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="record|play")
    one = commands.add_parser(
        "record",
        help="向真实的模型提一个问题并录下来",
        description="用 react_min 的循环向真实的模型提一个问题，录下每一轮的流和工具读到的网页。"
        "服务器由 OPENAI_BASE_URL、OPENAI_MODEL、OPENAI_API_KEY 决定；密钥不会写进录音。",
    )
    one.add_argument("folder", metavar="FOLDER", help="录音文件夹；没有就新建，已有的文件不会覆盖")
    one.add_argument("question", type=_filled, help="问题")
    one.add_argument("--web", metavar="FOLDER2", help="网页不上网取，用另一个录音里的")
    one.add_argument("--note", default="", help="写进目录的说明")
    two = commands.add_parser(
        "play",
        help="回放一个录音，直到按下 Ctrl-C",
        description="在本机回放一个录音，让 OPENAI_BASE_URL 指向它就能离线测试。",
    )
    two.add_argument("folder", metavar="FOLDER", help="录音文件夹")
    two.add_argument("--port", type=_port, default=0, help="端口（缺省：随便一个空闲的）")
    two.add_argument("--pace", type=_pace, default=0.0, help="事件之间的秒数（缺省：0）")
    return parser


def _filled(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("问题是空的")
    return text


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 65536):
        raise argparse.ArgumentTypeError("端口是 0 到 65535 的整数")
    return int(text)


def _pace(text: str) -> float:
    try:
        pace = float(text)
    except ValueError:
        pace = -1
    if not 0 <= pace <= 60:
        raise argparse.ArgumentTypeError("秒数在 0 到 60 之间")
    return pace


def _record(options: argparse.Namespace) -> int:
    def show(text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)

    def show_line(text: str) -> None:
        print(f"\n{text}", file=sys.stderr, flush=True)

    failed = ""
    before = _files(options.folder)
    try:
        record(
            options.folder,
            options.question,
            web=options.web,
            note=options.note,
            on_reasoning=show,
            on_content=show,
            on_tool_call=show_line,
            on_tool_result=show_line,
        )
    except RuntimeError as error:  # react_min.ModelError
        failed = str(error)
    finally:
        added = sorted(_files(options.folder) - before)
        print(f"\n录到 {len(added)} 个文件，在 {options.folder}", flush=True)
        for name in added:
            size = (Path(options.folder) / name).stat().st_size
            print(f"  {name}（{size} 字节）", flush=True)
    if failed:
        print(failed, file=sys.stderr)
    return 1 if failed else 0


def _files(folder: Folder) -> Any:
    found = (p for p in Path(folder).rglob("*") if p.is_file() and p.name != "index.json")
    return {p.relative_to(folder).as_posix() for p in found}


def _play(options: argparse.Namespace) -> int:
    known = questions(read_index(options.folder))
    with serve(options.folder, options.pace, options.port) as played:
        print(f"正在回放 {options.folder}，按 Ctrl-C 结束")
        print(f"OPENAI_BASE_URL={played.base_url}")
        for question in known:
            print(f"  {question}")
        sys.stdout.flush()
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main())
