"""The pages of docs/: each stands in the site, no link leads nowhere, and every command of the tutorial is one."""

import json
import re
import runpy
import shlex
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from plain_words import odd_words
from test_turns_config import MODEL

from mrl.acting.environment_pool import EnvironmentPool
from mrl.acting.tool import ToolsSpec
from mrl.cli.main import make_parser
from mrl.config.load import load_config
from mrl.config.rules import violations

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TUTORIAL = sorted((DOCS / "tutorial").glob("*.md"))
WITH_COMMANDS = [page for page in (ROOT / "README.md", *PAGES) if re.search(r"^mrl ", page.read_text(), re.MULTILINE)]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def leaves(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for item in nav for entry in item.values() for leaf in leaves(entry)]


def test_every_page_stands_once_in_the_site():
    listed = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_no_link_leads_nowhere_or_out_of_the_site(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).resolve().is_relative_to(DOCS) and (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_the_fields_words_and_none_of_our_own(page):
    assert not odd_words(page.read_text()), "tests/unit/plain_words.py says what to write instead"


def commands(page: Path) -> list[list[str]]:
    """Commands of mrl in the page's blocks, without what here-documents hold."""
    text = "\n".join(BLOCK.findall(page.read_text()))
    text = re.sub(r"<<'(\w+)'.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    return [shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("mrl ")]


def test_every_page_of_the_tutorial_has_commands_and_they_run_in_its_order():
    assert set(TUTORIAL) < set(WITH_COMMANDS)
    (nav,) = [
        entry["Tutorial"] for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] if "Tutorial" in entry
    ]
    runs = runpy.run_path(str(ROOT / "tests/proofs/test_tutorial.py"))
    assert [f"tutorial/{page}.md" for page in runs["PAGES"]] == leaves(nav)
    per_page = Counter(block.page for block in runs["blocks"](ROOT))
    assert per_page == {page.stem: len(BLOCK.findall(page.read_text())) for page in TUTORIAL}


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_every_command_of_a_page_is_one(page):
    for words in commands(page):
        if words != ["--version"]:
            options = make_parser().parse_args(words)  # exits for what is no command
            config = getattr(options, "config", None) or ""
            assert not config.startswith("parallel_configs/") or (ROOT / config).is_file()


def test_the_configuration_of_the_tutorial_for_a_cluster_is_written_as_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in commands(DOCS / "tutorial" / "to_a_cluster.md"):
        if words[0] in ("init", "validate"):
            options = make_parser().parse_args(words)
            options.run(options)
    assert (tmp_path / "cluster.yaml").is_file()


def test_the_script_of_the_tutorial_comes_from_verl_without_a_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "tutorial" / "from_verl.md").read_text()
    (tmp_path / "run_verl.sh").write_text(re.search(r"<<'SH'\n(.*?)^SH$", page, re.MULTILINE | re.DOTALL)[1])
    for words in commands(DOCS / "tutorial" / "from_verl.md"):
        options = make_parser().parse_args(words)
        options.run(options)
    assert "  valid\n" in capsys.readouterr().out


def written(page: str, name: str, folder: Path) -> str:
    """The file that a block of the page writes, there."""
    text = (DOCS / "tutorial" / f"{page}.md").read_text()
    (folder / name).write_text(re.search(rf"cat > {name} <<'PY'\n(.*?)^PY$", text, re.MULTILINE | re.DOTALL)[1])
    return str(folder / name)


@pytest.mark.parametrize("page", ["own_tool", "own_agent"])
def test_what_the_tutorial_trains_with_tools_and_agents_is_legal(page, tmp_path):
    (words,) = [words for words in commands(DOCS / "tutorial" / f"{page}.md") if words[0] == "train"]
    own = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    found = violations(load_config(ROOT / words[1], overrides=own), MODEL)
    assert not [each for each in found if not each.field.startswith(("model.", "data."))]
    assert len(own) >= 2


def test_the_tool_of_the_tutorial_answers_as_it_says(tmp_path):
    file = written("own_tool", "my_tools.py", tmp_path)
    with EnvironmentPool(ToolsSpec(("calculator",), file), 1, 20.0) as pool:
        right, wrong = (pool.call("calculator", {"expression": each}).result(60) for each in ("12*34", "12+34"))
        (schema,) = pool.offer.tools
    assert (right.reason, right.text) == ("ok", "408")
    assert wrong.reason == "raised" and wrong.text.startswith("Error: calculator: ValueError")
    assert schema["function"]["description"] == "Multiplies."


class Said(SimpleNamespace):
    """A message as the package openai has it."""

    def model_dump(self, exclude_none):
        return {"role": "assistant", "content": self.content}


@pytest.mark.parametrize(("expression", "answer"), [("12*34", "408"), ("12+34", "?")])
def test_the_agent_of_the_tutorial_calls_for_the_model_until_nothing_is_called(
    expression, answer, tmp_path, monkeypatch
):
    """With a client in the place of the package's, which takes seconds to import."""
    call = SimpleNamespace(id="c", function=SimpleNamespace(arguments=json.dumps({"expression": expression})))
    answers = [Said(content="", tool_calls=[call]), Said(content="408", tool_calls=None)]
    asked = []

    def create(model, messages, tools):
        asked.append(list(messages))
        return SimpleNamespace(choices=[SimpleNamespace(message=answers[len(asked) - 1])])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=lambda: client))
    run = runpy.run_path(written("own_agent", "my_agent.py", tmp_path))["run"]
    prompt = {"role": "user", "content": "12*34="}
    run("http://127.0.0.1:1", "key", {"prompt": [prompt]}, 60.0)
    told = {"role": "tool", "tool_call_id": "c", "content": answer}
    assert asked == [[prompt], [prompt, {"role": "assistant", "content": ""}, told]]
