"""The article, section by section: what it says of the protocol is what goes over the wire."""

import json
import threading

import pytest

import react_min
import tools
import wire
from react_min import execute_tool_call, run_agent
from tools import Tool

NEWS = "帮我看看今天 AI 新闻里第一条的正文。"
LINK = "https://www.thepaper.cn/newsDetail_forward_123"


def tool(name, execute, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": name, "parameters": parameters}
    return Tool({"type": "function", "function": function}, execute)


TEXT = {"type": "string"}
ECHO = tool("echo", lambda text: f"got {text}", text=TEXT)
A_AND_B = [("echo", {"text": "a"}, "A"), ("echo", {"text": "b"}, "B")]
ONLY_C = [("echo", {"text": "c"}, "C")]


def walk(replies, question="hi", **options):
    """Run the agent against scripted rounds: (answer, bodies of the requests, messages)."""
    messages = []
    with wire.server(replies) as server:
        use = {"tools": [ECHO], "base_url": server.base_url, "model": "m", "messages": messages}
        answer = run_agent(question, **{**use, **options})
        return answer, [request.body for request in server.requests], messages


@pytest.fixture(scope="module")
def two_rounds():
    return walk([wire.calls(A_AND_B), wire.calls(ONLY_C), wire.say("最终回答")])


# ------------------------------------------------------------------ 2: the protocol


def test_2_the_list_of_tools_goes_in_the_tools_parameter_of_every_request(two_rounds):
    _, bodies, _ = two_rounds
    assert len(bodies) == 3
    assert all(body["tools"] == [ECHO.definition] for body in bodies)


def test_2_arguments_are_a_string_of_json_that_is_parsed_here(two_rounds):
    _, bodies, _ = two_rounds
    arguments = bodies[1]["messages"][2]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(arguments, str) and json.loads(arguments) == {"text": "a"}
    assert bodies[1]["messages"][3]["content"] == "got a"


def test_2_tool_results_are_paired_by_tool_call_id(two_rounds):
    _, bodies, _ = two_rounds
    results = [m for m in bodies[2]["messages"] if m["role"] == "tool"]
    assert results == [
        {"role": "tool", "tool_call_id": "A", "content": "got a"},
        {"role": "tool", "tool_call_id": "B", "content": "got b"},
        {"role": "tool", "tool_call_id": "C", "content": "got c"},
    ]


def test_2_the_assistants_message_goes_back_as_it_came():
    given = [("echo", '{ "text" :"a" }', "A")]  # the blanks too
    _, bodies, _ = walk([wire.calls(given, content="我看看。"), wire.say("好")])
    call = {"name": "echo", "arguments": '{ "text" :"a" }'}
    assert bodies[1]["messages"][2] == {
        "role": "assistant",
        "content": "我看看。",
        "tool_calls": [{"id": "A", "type": "function", "function": call}],
    }


def test_2_the_messages_array_has_the_articles_shape(two_rounds):
    answer, bodies, messages = two_rounds
    roles = ["system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [m["role"] for m in messages] == roles
    assert [c["id"] for c in messages[2]["tool_calls"]] == ["A", "B"]
    assert [c["id"] for c in messages[5]["tool_calls"]] == ["C"]
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ["A", "B", "C"]
    assert "tool_calls" not in messages[7]
    assert answer == messages[7]["content"] == "最终回答"
    assert bodies[2]["messages"] == messages[:-1]


# ------------------------------------------------------------------ 3: ReAct


def played_tools(log):
    def get_news(topic):
        log.append(("get_news", topic))
        return json.dumps([{"title": "国产大模型", "link": LINK}], ensure_ascii=False)

    def read_url(url):
        log.append(("read_url", url))
        return json.dumps({"title": "国产大模型", "summary": "今日"}, ensure_ascii=False)

    return [tool("get_news", get_news, topic=TEXT), tool("read_url", read_url, url=TEXT)]


def small_model(request):
    """Reads the link out of the observation, as the article's model does."""
    last = request.body["messages"][-1]
    if last["role"] == "user":
        return wire.calls([("get_news", {"topic": "人工智能"}, "1")])
    value = json.loads(last["content"])
    if isinstance(value, list):
        return wire.calls([("read_url", {"url": value[0]["link"]}, "2")])
    return wire.say(f"第一条是《{value['title']}》")


def test_3_3_three_rounds_list_then_page_then_answer():
    log = []
    answer, bodies, messages = walk(small_model, NEWS, tools=played_tools(log))
    assert log == [("get_news", "人工智能"), ("read_url", LINK)]
    assert [len(body["messages"]) for body in bodies] == [2, 4, 6]  # each adds call and result
    assert messages[2]["tool_calls"][0]["function"]["name"] == "get_news"
    assert LINK in messages[3]["content"]
    assert messages[4]["tool_calls"][0]["function"]["name"] == "read_url"
    assert answer == "第一条是《国产大模型》"


def test_3_4_an_error_is_an_observation_too():
    def refuse(text):
        raise ValueError("服务不可用")

    _, bodies, _ = walk(
        [wire.calls(ONLY_C), wire.say("好")], tools=[tool("echo", refuse, text=TEXT)]
    )
    assert bodies[1]["messages"][-1]["content"] == "工具执行失败: 服务不可用"


# ------------------------------------------------------------------ 4.1: the registry


def test_4_1_four_tools_in_the_articles_order():
    names = [tool.definition["function"]["name"] for tool in tools.TOOLS]
    assert names == ["get_weather", "get_news", "get_time", "read_url"]
    assert list(tools.TOOLS) == [tools.TOOL_MAP[name] for name in names]
    assert (tools.TOOLS[0], tools.TOOLS[3]) == (tools.get_weather, tools.read_url)


def test_4_1_the_map_finds_a_tool_by_its_name():
    assert list(tools.TOOL_MAP) == ["get_weather", "get_news", "get_time", "read_url"]
    for name, found in tools.TOOL_MAP.items():
        assert found.definition["function"]["name"] == name and callable(found.execute)


@pytest.mark.parametrize("found", tools.TOOLS, ids=list(tools.TOOL_MAP))
def test_4_1_a_definition_says_what_the_model_needs_to_choose_and_fill(found):
    assert found.definition["type"] == "function"
    function = found.definition["function"]
    assert len(function["description"]) > 5
    schema = function["parameters"]
    assert schema["type"] == "object" and set(schema.get("required", [])) <= set(
        schema["properties"]
    )
    for described in schema["properties"].values():
        assert described["type"] and described["description"]


def test_4_1_the_city_of_the_weather_is_declared_as_in_the_article():
    function = tools.get_weather.definition["function"]
    assert function["description"].startswith("查询指定城市的实时天气")
    assert function["parameters"]["required"] == ["city"]
    assert function["parameters"]["properties"]["city"]["type"] == "string"


# ------------------------------------------------------------------ 4.2: the request


def test_4_2_the_request_has_the_articles_fields():
    _, bodies, _ = walk([wire.say("好")], model="qwen3-1.7b")
    body = dict(bodies[0])
    assert [m["role"] for m in body.pop("messages")] == ["system", "user"]
    assert body == {
        "model": "qwen3-1.7b",
        "tools": [ECHO.definition],
        "tool_choice": "auto",
        "stream": True,
        "temperature": 0.3,
        "max_tokens": 4096,
        "enable_thinking": True,
    }


def test_4_2_it_is_a_post_to_chat_completions_with_a_bearer_key():
    with wire.server([wire.say("好")]) as server:
        run_agent("hi", base_url=server.base_url, model="m", api_key="sk-1")
        request = server.requests[0]
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.headers["authorization"] == "Bearer sk-1"
    assert request.headers["content-type"] == "application/json"


def test_4_2_thinking_and_text_are_forwarded_as_they_come():
    heard = []
    walk(
        [wire.say("你好", reasoning="想想")],
        on_reasoning=lambda text: heard.append(("reasoning", text)),
        on_content=lambda text: heard.append(("content", text)),
    )
    assert heard == [
        ("reasoning", "想"),
        ("reasoning", "想"),
        ("content", "你"),
        ("content", "好"),
    ]


def test_4_2_white_space_alone_is_not_forwarded_but_kept_before_text():
    heard = []
    walk([wire.calls(ONLY_C, content="\n\n"), wire.say("好 了\n")], on_content=heard.append)
    assert "".join(heard) == "好 了\n"
    heard.clear()
    walk([wire.say("\n\n好")], on_content=heard.append)
    assert "".join(heard).strip() == "好"


def test_4_2_the_streamed_message_is_the_one_of_a_reply_without_streaming():
    with wire.server([wire.calls(A_AND_B), wire.say("好")]) as server:
        use = {"base_url": server.base_url, "model": "m", "tools": [ECHO]}
        first = react_min.call_model_stream([{"role": "user", "content": "hi"}], **use)
        second = react_min.call_model_stream([{"role": "user", "content": "hi"}], **use)
    functions = [{"name": "echo", "arguments": json.dumps({"text": text})} for text in "ab"]
    calls = [{"id": name, "type": "function", "function": f} for name, f in zip("AB", functions)]
    assert first == {"role": "assistant", "content": "", "tool_calls": calls}
    assert second == {"role": "assistant", "content": "好"}


# ------------------------------------------------------------------ 4.3: errors are results


def fail(text):
    raise RuntimeError(f"no {text}")


FOUR = {"echo": ECHO, "fail": tool("fail", fail, text=TEXT), "now": tool("now", lambda: 3)}
FOUR["quiet"] = tool("quiet", lambda: " \n")


@pytest.mark.parametrize(
    "name, arguments, first_line",
    [
        ("nobody", "{}", "未找到工具 nobody。可用的工具：echo、fail、now、quiet"),
        ("echo", '{"text": ', '工具参数不是合法 JSON: {"text": '),
        ("fail", '{"text": "luck"}', "工具执行失败: no luck"),
        ("now", "{}", "3"),  # what a tool returns becomes a string
        ("quiet", "{}", "（工具没有返回内容）"),
        ("now", "", "3"),  # no arguments are an empty object
    ],
)
def test_4_3_whatever_happens_is_a_result(name, arguments, first_line):
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    assert execute_tool_call(call, FOUR).split("\n")[0] == first_line


# ------------------------------------------------------------------ 4.4: the loop


def test_4_4_calls_are_told_before_the_tools_start_and_results_as_they_finish():
    log, second_told = [], threading.Event()

    def run(text):
        log.append(f"run {text}")
        assert text == "b" or second_told.wait(5)  # a can finish only after b
        return text

    def on_result(line):
        log.append(line)
        second_told.set()

    run_tool = tool("echo", run, text=TEXT)
    replies = [wire.calls(A_AND_B), wire.say("好")]
    use = {"tools": [run_tool], "on_tool_call": log.append, "on_tool_result": on_result}
    _, bodies, _ = walk(replies, **use)
    assert log[:2] == ['调用工具 echo({"text": "a"})', '调用工具 echo({"text": "b"})']
    assert {"run a", "run b"} < set(log[2:])
    results = [line for line in log if line.startswith("工具结果")]
    assert results == ["工具结果 echo → b", "工具结果 echo → a"]
    paired = [(m["tool_call_id"], m["content"]) for m in bodies[1]["messages"][3:]]
    assert paired == [("A", "a"), ("B", "b")]  # in call order all the same


def test_4_4_without_calls_the_first_reply_is_the_answer():
    answer, bodies, messages = walk([wire.say("你好")])
    assert answer == "你好" and len(bodies) == 1 and len(messages) == 3


@pytest.mark.parametrize("options, limit", [({}, 5), ({"max_rounds": 2}, 2)])
def test_4_4_the_fuse_blows_after_five_rounds_or_as_many_as_the_caller_wants(options, limit):
    rounds = [wire.calls([("echo", {"text": str(n)})]) for n in range(9)]
    answer, bodies, _ = walk(rounds, **options)
    assert answer == f"工具调用超过 {limit} 轮，未能完成任务" and len(bodies) == limit
    assert react_min.MAX_TOOL_ROUNDS == 5


# ------------------------------------------------------------------ 5: parallel and sequential


def test_5_1_calls_of_one_round_run_at_the_same_time():
    meeting = threading.Barrier(3, timeout=2)  # broken, unless three tools are in it at once

    def meet(text):
        meeting.wait()
        return text

    three = wire.calls([("echo", {"text": text}) for text in "abc"])
    _, _, messages = walk([three, wire.say("好")], tools=[tool("echo", meet, text=TEXT)])
    assert [m["content"] for m in messages[3:6]] == ["a", "b", "c"]


def test_5_2_the_next_round_begins_when_the_results_are_there():
    log = []

    def answer(request):
        log.append(f"request {len(request.body['messages'])}")
        return small_model(request)

    walk(answer, NEWS, tools=played_tools(log))
    news, page = ("get_news", "人工智能"), ("read_url", LINK)
    assert log == ["request 2", news, "request 4", page, "request 6"]


# ------------------------------------------------------------------ 6: the prompt


def test_6_the_system_prompt_is_the_articles():
    assert react_min.SYSTEM_PROMPT.split("\n") == [
        "你是一个会使用工具的中文助手。",
        "1. **涉及天气、新闻、当前时间等实时信息，必须先调用对应工具，禁止凭空编造。**",
        "2. **需要看某条新闻的正文时，先用 get_news 获取链接，再用 read_url 读取该链接。**",
        "3. **拿到工具结果后，用简洁的中文整理出回答。**",
        "4. **不需要工具的问题直接回答。**",
    ]


def test_6_the_prompt_comes_first_and_only_once():
    messages = []
    walk([wire.say("一")], messages=messages)
    walk([wire.say("二")], messages=messages)
    assert messages[0] == {"role": "system", "content": react_min.SYSTEM_PROMPT}
    assert [m["role"] for m in messages].count("system") == 1
