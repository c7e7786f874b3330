"""The README says what is true: its line numbers, quotations, numbers, commands and links.

python tests/test_readme.py --fix     rewrites the numbers, the quoted code and the table
"""

import ast
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MODULES = ("react_min.py", "tools.py", "sse.py")
PLACE = re.compile(r"`(\w+\.py):(\d+) (\w+)`")
QUOTE = re.compile(r"(<!-- quote: (\w+\.py) (\w+) -->\n```python\n)(.*?)(```)", re.S)
TABLE = re.compile(r"(<!-- table: tests/bench.json -->\n)(.*?)(<!-- end -->)", re.S)
STOP = re.compile(r"(`(?P<file>\w+\.py)` (?:的 (?P<names>(?:`\w+`、?)+)|其余)) \d+ 分钟")
LINES_PER_MINUTE = 25


def readme():
    return README.read_text(encoding="utf-8")


def lines_of(file):
    return (ROOT / file).read_text(encoding="utf-8").split("\n")


def definitions(file):
    """name -> the node of what a module defines at its top level"""
    found = {}
    for node in ast.parse("\n".join(lines_of(file))).body:
        names = [getattr(node, "name", None)]
        names += [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        for name in filter(None, names):
            found.setdefault(name, node)
    return found


def statements_of(file, name):
    """The body of a function as it stands in the file, without its docstring."""
    body = definitions(file)[name].body
    first, last = body[1].lineno, body[-1].end_lineno
    return "\n".join(lines_of(file)[first - 1 : last]) + "\n"


def with_minutes(text):
    """The reading order with the minutes that each stop takes, for the rest of a file as well."""
    read = Counter()

    def lines(stop):
        if stop["names"] is None:
            return len(lines_of(stop["file"])) - read[stop["file"]]
        found = definitions(stop["file"])
        nodes = [found[name] for name in re.findall(r"\w+", stop["names"])]
        count = sum(node.end_lineno - node.lineno + 1 for node in nodes)
        read[stop["file"]] += count
        return count

    return STOP.sub(lambda m: f"{m[1]} {math.ceil(lines(m) / LINES_PER_MINUTE)} 分钟", text)


def performance():
    """The saved table of the benchmark, a line for each thing that is measured."""
    saved = json.loads((ROOT / "tests/bench.json").read_text(encoding="utf-8"))
    rows = {}
    for row in saved["rows"]:
        goal = f" ≤ {row['goal']:g}" if row["goal"] is not None else ""
        mark = {"yes": " ✓", "NO": " ✗"}.get(row["reached"], "")
        unit = f" {row['unit']}" if row["unit"] else ""
        value = "-" if row["value"] is None else f"**{row['value']:.3g}{unit}**"
        rows.setdefault(row["what"], []).append(f"{row['against']} {value}{goal}{mark}")
    lines = [f"| {what} | {'；'.join(cells)} |" for what, cells in rows.items()]
    return "\n".join(
        ["| 测什么 what | 比什么、结果、目标 against, result, goal |", "|---|---|", *lines, ""]
    )


def corrected(text):
    text = PLACE.sub(lambda m: f"`{m[1]}:{definitions(m[1])[m[3]].lineno} {m[3]}`", text)
    text = QUOTE.sub(lambda m: m[1] + statements_of(m[2], m[3]) + m[5], text)
    text = TABLE.sub(lambda m: m[1] + performance() + m[3], text)
    return with_minutes(text)


def test_each_place_in_the_map_is_where_the_name_is_defined():
    places = PLACE.findall(readme())
    assert len(places) > 8
    for file, line, name in places:
        assert definitions(file)[name].lineno == int(line), f"{file} {name}: run --fix"


def test_the_quoted_loop_the_numbers_and_the_table_are_those_of_the_source():
    assert [quote[2] for quote in QUOTE.findall(readme())] == ["run_agent"]
    assert f"每分钟 {LINES_PER_MINUTE} 行" in readme() and len(STOP.findall(readme())) == 6
    assert readme().count(" 分钟") == 6
    assert TABLE.search(readme())
    assert readme() == corrected(readme()), "run: python tests/test_readme.py --fix"


def test_the_limits_that_it_names_are_those_of_the_code():
    import react_min  # here: as a script, this file finds no module of the project
    import tools

    waits = f"先等 {react_min.Terminal.LONGEST:g} 秒（或来得慢时 {react_min.Terminal.PAUSE:g} 秒）"
    for words in (waits, f"超过 {tools.MAX_RESULT} 字", f"解析到 {tools.FAKE_IPS} 时放行"):
        assert words in readme(), words


def test_the_command_that_corrects_it_works_from_anywhere(tmp_path):
    for name in (*MODULES, "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=lambda *_: ["__pycache__"])
    copy = tmp_path / "README.md"
    copy.write_text(PLACE.sub(r"`\1:1 \3`", readme()), encoding="utf-8")
    fix = [sys.executable, str(tmp_path / "tests/test_readme.py"), "--fix"]
    subprocess.run(fix, check=True, cwd=tmp_path / "tests")
    assert copy.read_text(encoding="utf-8") == readme()


def test_every_link_and_file_named_exists():
    text = readme()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:tests|\.ci)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_every_test_named_exists():
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", readme())
    assert len(named) > 20
    for file, name in named:
        assert re.search(rf"^def {name}\(", "\n".join(lines_of(f"tests/{file}")), re.M), name


def test_the_demo_prints_the_transcript_and_the_messages(demo):
    printed = demo[2].decode("utf-8")
    transcript, messages = re.findall(r"```text\n(.*?)```", readme(), re.S)
    assert transcript in printed
    array = printed[printed.rindex("\n[\n") + 3 :].split("\n")
    shown = messages.rstrip("\n").split("\n")
    assert len(array) == len(shown) + 2  # the closing bracket, and the end of the last line
    for real, line in zip(array, shown):
        pattern = ".*".join(map(re.escape, line.split("…")))  # … stands for what is left out
        assert re.fullmatch(pattern, real), line


def exercises():
    section = readme().partition("## 练习")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d \|(.*)\|$", section, re.M)
    return [re.findall(r"`([^`]+)`", row) for row in rows]


@pytest.mark.parametrize("file, old, new, test", exercises(), ids=range(1, len(exercises()) + 1))
def test_each_exercise_turns_its_test_red(file, old, new, test, tmp_path):
    for name in (*MODULES, ".pytest.ini"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=lambda *_: ["__pycache__"])
    changed = tmp_path / file
    source = changed.read_text(encoding="utf-8")
    assert source.count(old) == 1
    changed.write_text(source.replace(old, new), encoding="utf-8")
    name, _, function = test.partition("::")
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{name}", "-k", function]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 1 and f"FAILED tests/{test}" in done.stdout.decode()


def test_there_are_five_exercises():
    assert len(exercises()) == 5


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
        assert server.requests[1].body["messages"][-1]["content"] == "12.5 + 30 = 42.5"
    assert len(code.strip().split("\n")) <= 11


def test_the_limits_named_are_those_of_the_code():
    import tools
    from react_min import Terminal

    assert f"{tools.MAX_RESULT} 字" in readme()
    assert f"{Terminal.LONGEST:g} 秒（或来得慢时 {Terminal.PAUSE:g} 秒）" in readme()
    assert len(readme().split("\n")) <= 201


if __name__ == "__main__" and sys.argv[1:] == ["--fix"]:
    README.write_text(corrected(readme()), encoding="utf-8")
