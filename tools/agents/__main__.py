"""The command `python -m tools.agents`: which agents run unchanged against this tree?

It needs npm and PyPI or their mirrors, and 3 GB below `--folder`, which may be used again. The exit
status is 1 if a session went wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.harness.cluster import up
from tools.agents.guide import guide_of
from tools.agents.npm import NpmFolder
from tools.agents.pypi import PypiFolder
from tools.agents.scripted_model import save_scripted_model
from tools.agents.session import SessionResult, run_session
from tools.campaigns.published_tokenizers import packed
from tools.markdown_table import short_table

# By the titles of their sections in docs/clients.md; the first package's version is shown.
FROM_NPM = {
    "Claude Code": ("@anthropic-ai/claude-code",),
    "Claude Agent SDK": ("@anthropic-ai/claude-agent-sdk",),
    "Codex": ("@openai/codex",),
    "opencode": ("opencode-ai",),
    "Qwen Code": ("@qwen-code/qwen-code",),
    "pi": ("@mariozechner/pi-coding-agent",),
    "Continue": ("@continuedev/cli",),
    "Cline": ("cline",),
    "AI SDK": ("ai", "@ai-sdk/openai-compatible", "zod"),
    "AI SDK, OpenAI's chat": ("ai", "@ai-sdk/openai", "zod"),
    "AI SDK, OpenAI's responses": ("ai", "@ai-sdk/openai", "zod"),
    "AI SDK, Anthropic's messages": ("ai", "@ai-sdk/anthropic", "zod"),
}
FROM_PYPI = {
    "Claude Agent SDK, Python": ("claude-agent-sdk",),
    "OpenAI Agents SDK": ("openai-agents",),
    "LangGraph": ("langgraph", "langchain", "langchain-openai"),
    "LlamaIndex": ("llama-index-llms-openai-like",),
    "aider": ("aider-chat",),
    "mini-swe-agent": ("mini-swe-agent",),
    "smolagents": ("smolagents", "smolagents[openai]"),
    "smolagents, ToolCallingAgent": ("smolagents", "smolagents[openai]"),
    "LiteLLM's proxy": ("litellm", "litellm[proxy]", "anthropic"),
    "LiteLLM's proxy, Messages": ("litellm", "litellm[proxy]", "anthropic"),
}
AGENTS = (*FROM_NPM, *FROM_PYPI)
MODEL = "ferryman-demo"  # the folder's name is the served one, and the page has this


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.agents", description=__doc__)
    parser.add_argument("agents", nargs="*", help=f"all, or some of {', '.join(AGENTS)}")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "agents")
    choice = parser.parse_args()
    agents = choice.agents or list(AGENTS)
    if unknown := [agent for agent in agents if agent not in AGENTS]:
        parser.error(f"no agent {', '.join(unknown)}; there are {', '.join(AGENTS)}")
    folder = choice.folder.resolve()
    npm, pypi = NpmFolder(folder / "npm"), PypiFolder(folder / "pypi")
    _install(agents, npm, pypi)
    with tempfile.TemporaryDirectory(prefix="ferryman-agents-") as scratch:
        results = _sessions(agents, npm, pypi, Path(scratch))
    rows = [_row(agent, _version(agent, npm, pypi), results[agent]) for agent in agents]
    print("\n".join(short_table(_HEADING, rows, long=0)))
    wrong = {agent: result for agent, result in results.items() if not result.is_right}
    for agent, result in wrong.items():
        print(f"\n{agent} ended with {result.status}:\n{result.last_words}", file=sys.stderr)
    return bool(wrong)


def _install(agents: list[str], npm: NpmFolder, pypi: PypiFolder) -> None:
    npm.prepare()
    for agent in agents:
        if agent in FROM_NPM:
            npm.install(*FROM_NPM[agent])
        else:
            pypi.install(*FROM_PYPI[agent])


def _sessions(
    agents: list[str], npm: NpmFolder, pypi: PypiFolder, scratch: Path
) -> dict[str, SessionResult]:
    """Runs the agents, one after the other, against one cluster."""
    model = save_scripted_model(scratch / MODEL, packed("qwen3", scratch))
    state_dir = scratch / "state"
    results = {}
    with up(state_dir, "--model", str(model), "--memory-bytes", "512M") as cluster:
        for agent in agents:
            folder = scratch / agent.replace(" ", "-")
            path = npm.path if agent in FROM_NPM else pypi.path(FROM_PYPI[agent][0])
            guide, log = guide_of(agent, cluster.doors[0]), state_dir / "logs" / "router.log"
            results[agent] = run_session(guide, path, npm.modules, folder, log)
            shutil.rmtree(folder, ignore_errors=True)
    return results


_HEADING = ("agent", "version", "answers", "requests", "prompt tokens", "of the others' cached")


def _version(agent: str, npm: NpmFolder, pypi: PypiFolder) -> str:
    if agent in FROM_NPM:
        return npm.version(FROM_NPM[agent][0])
    return pypi.version(FROM_PYPI[agent][0])


def _row(agent: str, version: str, result: SessionResult) -> list[str]:
    first, *others = result.requests or (None,)
    prompt_len = sum(request.prompt_len for request in others)
    cached_len = sum(request.cached_len for request in others)
    return [
        agent,
        version,
        f"{result.num_right} of 2 right",
        str(len(result.requests)),
        f"{first.prompt_len:,}" if first else "–",
        f"{cached_len:,} of {prompt_len:,}",
    ]


if __name__ == "__main__":
    sys.exit(main())
