"""What the README shows is true: its diagram, its code, its commands."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from taskstore.task import TRANSITIONS, TaskStatus

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str, document: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document, re.DOTALL)


def test_the_state_diagram_shows_the_transition_table():
    """The table in task.py is the one place that says what may become what."""
    arrows = set(re.findall(r"(\w+|\[\*\]) --> (\w+)", blocks("mermaid")[0]))

    assert arrows == {("[*]", "working")} | {
        (str(source), str(target)) for source in TaskStatus for target in TRANSITIONS[source]
    }


def test_the_server_of_the_readme_can_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}

    exec(blocks("python")[0], names)

    assert names["server"].name == "reports"  # type: ignore[attr-defined]


async def test_the_server_of_the_fastmcp_page_can_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}

    for block in blocks("python", (ROOT / "docs" / "fastmcp.md").read_text()):
        exec(block, names)
    tools = {tool.name: tool.task_config for tool in await names["mcp"].get_tasks()}

    assert {name: config.mode for name, config in tools.items()} == {
        "generate_report": "optional",
        "render": "required",
    }


async def run(block: str, names: dict[str, object], result: str) -> Any:
    """Run code that awaits, and return one of its variables."""
    imports, body = block.split("\n\n", 1)
    exec(f"{imports}\n\nasync def main():\n{textwrap.indent(body, '    ')}\n    return {result}", names)
    main: Any = names["main"]
    return await main()


async def test_the_client_of_the_readme_runs_against_its_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(blocks("python")[0], names)

    result = await run(blocks("python")[2].replace('"http://127.0.0.1:8000/mcp"', "server"), names, "result")

    assert result.structured_content == {"result": "All about tides"}


async def test_the_store_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    outcome = await run(blocks("python")[3], {}, "outcome")

    assert outcome.result == {"pages": 10}


@pytest.mark.parametrize(
    "command", ["pip install '.[cli,mcp]' && taskstore demo", "pip install -e '.[test]' && pytest"]
)
def test_two_commands_do_all_the_set_up(command):
    assert f"```sh\n{command}\n```" in README


def test_every_file_that_the_documents_link_to_is_there():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
