"""A real browser, headless: Debian's chromium with its driver, where both are installed. Without them tests are skipped
with a word.
"""

import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))  # report_run: a run directory to look at

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,1000",
)  # fmt: skip
READY_S = 60.0
# axe-core 4.12.1, as a package for another driver ships it: that package needs what no test here does
AXE = (
    "axe-playwright-python==0.1.8 --hash=sha256:fdd263c998388f1a8e67cad02677e612d946248bd44d163be5e8650ea31f95f8\n",
    "axe_playwright_python/axe.min.js",
)


class Browser:
    """What these tests ask of a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, where: Path | str) -> float:
        """Opens a file or an address; seconds until its charts stand."""
        self.requests()
        began = time.perf_counter()
        self.driver.get(where.as_uri() if isinstance(where, Path) else where)
        self.until("return window.mrlReport && window.mrlReport.ready === true")
        return time.perf_counter() - began

    def ask(self, script: str, *arguments: Any) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str) -> Any:
        """Waits for a script to return something."""
        deadline = time.monotonic() + READY_S
        while not (answer := self.ask(script)):
            assert time.monotonic() < deadline, f"in vain: {script}; the console says {self.driver.get_log('browser')}"
            time.sleep(0.05)
        return answer

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call, but for the browser's own new tab (chrome://)."""
        entries = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("chrome")]

    def complaints(self) -> list[str]:
        """Errors that the page or the policy gave since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


def start(folder: Path, preferences: dict[str, Any] | None = None) -> Browser:
    """A browser with a profile of its own. Skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no browser here: chromium and chromium-driver are Debian's packages")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if preferences:
        options.add_experimental_option("prefs", preferences)
    return Browser(webdriver.Chrome(options=options, service=Service(driver)))


@pytest.fixture(scope="session")
def browsers(tmp_path_factory) -> Iterator[Callable[..., Browser]]:
    """Starts browsers, and ends them all."""
    started: list[Browser] = []

    def new(preferences: dict[str, Any] | None = None) -> Browser:
        started.append(start(tmp_path_factory.mktemp("profile"), preferences))
        return started[-1]

    yield new
    for browser in started:
        with suppress(Exception):  # one that has crashed is gone already, and its test has said so
            browser.driver.quit()


@pytest.fixture(scope="session")
def axe(tmp_path_factory) -> str:
    """The script of the accessibility checker axe-core. Skips the test where no package index is reached."""
    folder = tmp_path_factory.mktemp("axe")
    pin, name = AXE
    (folder / "pin.txt").write_text(pin)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*pip, "--require-hashes", "-r", folder / "pin.txt", "-d", folder], capture_output=True, text=True, timeout=120
    )
    if done.returncode and "HASH" not in done.stderr:
        pytest.skip(f"axe-core cannot be had here: {done.stderr[-200:]}")
    assert not done.returncode, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        return files.read(name).decode()


@pytest.fixture(scope="session")
def browser(browsers) -> Browser:
    """One for all tests."""
    return browsers()
