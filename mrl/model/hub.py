"""Models with names of the Hugging Face hub instead of folders. They are fetched into the cache of the asking node.

A name is `ORG/NAME` of a model that is known here, or `hf://ORG/NAME` of any model. `@REVISION` may follow either. Only
configuration, tokenizer and safetensors files are fetched, never code or pickles. Cache, endpoint, token and offline
mode are those of huggingface_hub (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mrl.errors import EnvironmentFault
from mrl.model.hf_files import HF_FILES
from mrl.model.registry import known_name

_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w.-]+))?")
_SNAPSHOT = re.compile(r".*/models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})/?")
_EXPLICIT = "hf://"


@dataclass(frozen=True)
class HubName:
    """A repository on the hub. `revision`: branch, tag or commit; None for its default branch."""

    repo: str
    revision: str | None = None

    @property
    def command(self) -> str:
        """The command that fetches it manually."""
        revision = ""
        if self.revision:
            revision = f" --revision {self.revision}"
        return f"hf download {self.repo}{revision} --local-dir FOLDER"


def hub_name(path: str) -> HubName | None:
    """Returns the hub name of a path; None for a local folder, and for anything that is no name.

    A folder of another node's cache (.../models--ORG--NAME/snapshots/COMMIT) means that commit.
    """
    if os.path.isdir(path):
        return None
    if match := _SNAPSHOT.fullmatch(path):
        return HubName(f"{match['org']}/{match['name']}", match["revision"])
    explicit = path.startswith(_EXPLICIT)
    match = _NAME.fullmatch(path.removeprefix(_EXPLICIT))
    if match is None or not (explicit or _published(match["repo"])):
        return None
    return HubName(match["repo"], match["revision"])


def _published(repo: str) -> bool:
    """Tells whether a plain ORG/NAME is a name on the hub.

    It is if the model is known and the path is not below an existing folder.
    """
    return known_name(repo) is not None and not os.path.exists(Path(repo).parent)


def local_folder(path: str) -> str:
    """Returns the local folder of `path`: itself, or a snapshot of the hub, fetched if the cache lacks it.

    Processes of one node that ask at once wait for each other's files. Raises EnvironmentFault, with the command for
    manual fetching, if it is not available.
    """
    name = hub_name(path)
    if name is None:
        return path
    from huggingface_hub import snapshot_download  # here, as it takes a quarter of a second and most runs name a folder

    try:
        wanted = [*HF_FILES, "*.safetensors"]
        return snapshot_download(name.repo, revision=name.revision, allow_patterns=wanted, ignore_patterns="*/*")
    except Exception as error:  # errors of network, hub or disk have dozens of types
        raise EnvironmentFault(
            f"{path} is not on this machine and cannot be fetched from the Hugging Face hub: {_reason(error)}. "
            f"Where the network allows, {name.command}, and give that FOLDER, which every node must see"
        ) from error


def cached_folder(path: str) -> str:
    """Returns the folder of `local_folder` without fetching anything. Weights may be missing.

    Returns `path` itself if the cache has no config.json of the model.
    """
    name = hub_name(path)
    if name is None:
        return path
    from huggingface_hub import snapshot_download

    try:
        wanted = list(HF_FILES)
        folder = snapshot_download(
            name.repo, revision=name.revision, allow_patterns=wanted, ignore_patterns="*/*", local_files_only=True
        )
    except Exception:  # it is missing; whoever fetches reports any other problem of the cache
        return path
    if (Path(folder) / "config.json").is_file():
        return folder
    return path


def _reason(error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "the cache does not have it, and HF_HUB_OFFLINE forbids fetching"
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"
