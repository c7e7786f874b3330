"""The README says what is true: its line numbers, quotations, commands and links are checked.

python tests/test_readme.py --fix     rewrites the line numbers and the quoted code
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PLACE = re.compile(r"`(\w+\.py):(\d+) (\w+)`")
QUOTE = re.compile(r"(<!-- quote: (\w+\.py) (\w+) -->\n```python\n)(.*?)(```)", re.S)


def definitions(file):
    """name -> (first line, last line) of what a module defines at its top level"""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        names = [getattr(node, "name", None)]
        names += [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        for name in filter(None, names):
            found.setdefault(name, (node.lineno, node.end_lineno))
    return found


def source_of(file, name):
    first, last = definitions(file)[name]
    lines = (ROOT / file).read_text(encoding="utf-8").split("\n")
    return "\n".join(lines[first - 1 : last]) + "\n"


def corrected(text):
    text = PLACE.sub(lambda m: f"`{m[1]}:{definitions(m[1])[m[3]][0]} {m[3]}`", text)
    return QUOTE.sub(lambda m: m[1] + source_of(m[2], m[3]) + m[5], text)


def readme():
    return README.read_text(encoding="utf-8")


def test_each_place_in_the_map_is_where_the_name_is_defined():
    places = PLACE.findall(readme())
    assert len(places) > 8
    for file, line, name in places:
        assert definitions(file)[name][0] == int(line), f"{file} {name}: run --fix"


def test_the_quoted_loop_is_the_source():
    quotes = QUOTE.findall(readme())
    assert [quote[2] for quote in quotes] == ["run_agent"]
    assert readme() == corrected(readme()), "run: python tests/test_readme.py --fix"


def test_every_link_and_file_named_exists():
    text = readme()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:tests|\.ci)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_every_test_named_exists():
    for file, name in re.findall(r"`(test_\w+\.py)::(\w+)`", readme()):
        assert re.search(
            rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.M
        )


def test_the_demo_prints_the_transcript():
    demo = [sys.executable, "react_min.py", "--demo"]
    done = subprocess.run(demo, cwd=ROOT, capture_output=True, timeout=60)
    shown = re.search(r"```text\n(.*?)```", readme(), re.S)[1]
    assert done.returncode == 0
    assert shown in done.stderr.decode("utf-8").replace("\r\n", "\n")


def test_the_tool_of_ones_own_runs(monkeypatch):
    import react_min
    import wire

    code = re.search(r"```python\n(from react_min.*?)```", readme(), re.S)[1]
    calls, asked = wire.calls([("add", {"a": 12.5, "b": 30})]), {}
    with wire.server([calls, wire.say("42.5")]) as server:
        run = react_min.run_agent
        use = {"base_url": server.base_url, "model": "m"}
        monkeypatch.setattr(
            react_min, "run_agent", lambda q, **k: asked.update(k) or run(q, **k, **use)
        )
        exec(compile(code, "README.md", "exec"), {})
        assert server.requests[1].body["messages"][-1]["content"] == "42.5"
    assert len(code.strip().split("\n")) <= 11


def test_the_limits_named_are_those_of_the_code():
    import tools

    assert f"{tools.MAX_RESULT} 字" in readme()
    assert len(readme().split("\n")) <= 201


if __name__ == "__main__" and sys.argv[1:] == ["--fix"]:
    README.write_text(corrected(readme()), encoding="utf-8")
