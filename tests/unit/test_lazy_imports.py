"""What libraries import while an agent runs is imported once for those after it; what its own code imports is not."""

import json
import sys

import pytest

from mrl.acting import lazy_imports
from mrl.acting.agent import AGENT
from mrl.acting.environment_pool import EnvironmentPool
from mrl.acting.tool import ToolsSpec
from mrl.reward.items import OK

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked so on Linux alone")
LIBRARIES = {
    "mrl_try_lazy": "import importlib\n"
    "def used():\n    import mrl_try_part\n    import mrl_try_missing\n"
    "def by_name(name):\n    importlib.import_module(name)\n",
    "mrl_try_part": "import mrl_try_below\ndef more():\n    import mrl_try_at_once\nmore()\n",
    "mrl_try_below": "",
    "mrl_try_at_once": "",
    "mrl_try_named": "",
    "mrl_try_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
}
OWN = """
def run():
    import mrl_try_lazy
    try:
        mrl_try_lazy.used()
    except ImportError:
        pass
    mrl_try_lazy.by_name("mrl_try_named")
    mrl_try_lazy.by_name("mrl_try_beside")
"""


@pytest.fixture
def later(tmp_path, monkeypatch):
    """The receiving end; this process is seen as an agent. A folder of libraries, and one of the agent's own."""
    for folder, files in (("libraries", LIBRARIES), ("own", {"mrl_try_agent": OWN, "mrl_try_beside": ""})):
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(lazy_imports, "_LIBRARIES", (f"{tmp_path}/libraries/",))
    monkeypatch.setattr(sys, "path", [f"{tmp_path}/libraries", f"{tmp_path}/own", *sys.path])
    receiving = lazy_imports.LaterImports()
    monkeypatch.setattr(sys, "meta_path", [lazy_imports.ImportWitness(receiving._channel), *sys.meta_path])
    yield receiving
    forgotten()


def forgotten() -> set[str]:
    """Unloads the modules of this test, and returns their names."""
    names = {name for name in sys.modules if name.startswith("mrl_try_")}
    for name in names:
        del sys.modules[name]
    return names


def test_it_is_what_functions_of_libraries_import(later):
    import mrl_try_agent

    mrl_try_agent.run()
    assert forgotten() >= {"mrl_try_agent", "mrl_try_beside", "mrl_try_lazy"}
    later.made()
    assert forgotten() == {"mrl_try_part", "mrl_try_below", "mrl_try_at_once", "mrl_try_named"}


def test_what_begins_a_thread_is_left_to_each(later):
    later._told = lambda: ["mrl_try_thread", "mrl_try_named"]
    later.made()
    assert not forgotten()


FUNCTION = """
import json, os, sys, urllib.request


def run(url, key, row, seconds):
    there = [name in sys.modules for name in ("mimetypes", "wave")]
    urllib.request.urlopen("file://" + __file__).close()  # which imports mimetypes
    import wave
    with open(os.path.join({folder!r}, str(row["number"])), "w") as file:
        json.dump(there, file)
"""


@pytest.mark.parametrize("kind", ["function", "program"])
def test_a_later_agent_has_what_a_library_imported_in_an_earlier_one(tmp_path, kind):
    text = FUNCTION.format(folder=str(tmp_path))
    given = {"folders": (str(tmp_path),)}
    if kind == "function":
        spec = ToolsSpec((), str(tmp_path / "agent.py"), agent="run", **given)
    else:
        spec = ToolsSpec((), command=(sys.executable, str(tmp_path / "agent.py")), **given)
        text += "\n\nrun(None, None, json.load(sys.stdin)['row'], None)\n"
    (tmp_path / "agent.py").write_text(text)
    with EnvironmentPool(spec, 1, 60.0, tmp_path / "tools.log") as pool:
        for number in range(2):
            told = {"url": "http://127.0.0.1:1", "key": "k", "row": {"number": number}, "seconds": 9.0}
            answer = pool.call(AGENT, told | {"reward_key": "r"}).result()
            assert answer.reason == OK, (tmp_path / "tools.log").read_text()
    assert [json.loads((tmp_path / str(number)).read_text()) for number in range(2)] == [[False, False], [True, False]]
