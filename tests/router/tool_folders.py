"""A model folder whose chat template knows tools, and a cluster that says a given text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.harness.router import RouterCluster, cluster, model_folder
from tests.waiting import until

from ferryman_router.routing.routing_policy import longest_request

ROOM = 60_000  # the tests' tokenizer has a token for almost each character

# As Hermes has it, with a thought that the template may begin.
TOOL_TEMPLATE = (
    "{% if tools %}<|user|>Call <tool_call> with one of {{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}"
    "{% for call in m.tool_calls or () %}<tool_call>"
    "{{ call.function.name }}({{ call.function.arguments.items() | list | tojson }})"
    "{% endfor %}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def tool_folder(folder: Path, template: str = TOOL_TEMPLATE) -> Path:
    """A folder as the router's other tests have it, with a template of its own."""
    model_folder(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


def says(cluster: RouterCluster, text: str) -> None:
    """From now on the model says this text, and ends."""
    tokenizer = cluster.router.components.frontend.ctx.model.tokenizer
    script = tuple(tokenizer.encode(text + "</s>", parse_special=True).tolist())
    for worker in (*cluster.prefills, *cluster.decodes):
        worker.script = script


@asynccontextmanager
async def tool_cluster(nats_url: str, folder: Path, text: str) -> AsyncIterator[RouterCluster]:
    """A pair of workers that say `text`."""
    async with cluster(nats_url, folder) as made:
        says(made, text)
        yield made


@asynccontextmanager
async def roomy_cluster(
    nats_url: str, folder: Path, text: str, template: str = TOOL_TEMPLATE
) -> AsyncIterator[RouterCluster]:
    """The same, with room for the prompts of agents."""
    tool_folder(folder, template)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": ROOM}))
    async with tool_cluster(nats_url, folder, text) as made:
        for worker in (*made.prefills, *made.decodes):
            worker.max_len = ROOM
        await until(lambda: longest_request(made.fleet) == ROOM)
        yield made


def prompt_text(cluster: RouterCluster, order: int = -1) -> str:
    """The prompt of an order as the worker got it, control tokens too."""
    request = cluster.prefills[0].orders[order].request
    tokenizer = cluster.router.components.frontend.ctx.model.tokenizer
    return tokenizer.decode(request.token_ids.tolist(), skip_special_tokens=False)


def joined_message(frames: list[Any]) -> dict[str, Any]:
    """The message that a stream's deltas make up, as a client puts it together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for frame in frames:
        for choice in frame["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"id": call["id"], "arguments": ""})
                mine = message["tool_calls"][call["index"]]
                mine["arguments"] += call["function"]["arguments"]
                if "name" in call["function"]:
                    mine["name"] = call["function"]["name"]
    return message
