"""The calls that an engine may get in each state, and the state to which each leads. Pure: no vLLM, no clock.

              pause                    sleep                wake_weights                wake_cache
    AWAKE ----------> PAUSED     (*) -------> ASLEEP ----------------> WEIGHTS_AWAKE -----------> FENCED
     ^ ^ |   resume    |  |                                               ^    | update             | ^
     | | | <-----------+  | update                                        +----+                    | | update
     | | |                v                                                                         | |
     | | |             HOLDING <--+ update                                                          | |
     | | |                |  +----+                                                                 | |
     | +-|---- commit ----+                                                                         | |
     |   +-------------------------- update -----------> FENCED <-----------------------------------+-+
     +------------------------------ commit --------------+          (*) AWAKE, PAUSED, HOLDING, FENCED

* AWAKE serves one committed version. An update takes it away before the first byte; only `commit` gives another.
* PAUSED holds its requests, and new ones wait at the door. A pause ends by itself, so no request is lost.
* HOLDING is a pause during which new weights came. It has no version, and its requests continue with the next one. The
  caller that paused an engine for an update has promised the commit, so new requests wait too.
* ASLEEP and WEIGHTS_AWAKE lack memory, whose content is then no valid weight.
* FENCED has all its memory and no version. Its weights may be half new, forgotten after a sleep, or have wrong digests.
  So they are never sampled from.
* ASLEEP, WEIGHTS_AWAKE and FENCED refuse requests, which would wait for a sync that may never come.
* A sleeping engine takes `wake_weights`, `give_up` and `memory`.
* What only asks (`check_there`, `reading`: engine_worker.py) and an engine's end are taken in any state, so VERBS does
  not have them.
* `give_up` ends the requests and the version of a living engine in any state; missing memory stays missing. The engine
  can then be handed to other ranks.
* An engine that loaded no weights of its own is FENCED from its start on.
* DEAD: vLLM's processes below it are gone.

Facts behind it: vLLM takes a weight update into a sleeping engine and crashes (issue 57853 of vllm-project/vllm). It
generates on sleeping memory when it is told to resume. Version 0.23 resumes by itself after any wake.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from mrl.errors import LostProcess


class EngineState(Enum):
    """The state of an engine. The value says what brings it back to serving."""

    AWAKE = "it serves requests"
    PAUSED = "resume it, or bring weights and commit"
    HOLDING = "bring weights, commit: requests wait for it"
    ASLEEP = "wake_weights, bring weights, wake_cache, commit"
    WEIGHTS_AWAKE = "bring weights, wake_cache, commit"
    FENCED = "bring weights, commit"
    DEAD = "end the run and start it with --resume"


# the parts of an engine's memory, by vLLM's names
WEIGHTS = "weights"
CACHE = "kv_cache"

SYNCS_TOWER = "mrl_syncs_tower"  # key in vLLM's hf_overrides: weight syncs bring the vision tower, too (tower.py)
TEXT_FOLDER = "text"  # argument of that load format: folder of the text model's weights, which no sync will bring
AWAITED = "mrl-awaited"  # load format of an engine that gets its weights only by a sync (awaited_weights.py)

AWAKE, PAUSED, HOLDING, ASLEEP, WEIGHTS_AWAKE, FENCED, DEAD = EngineState

_IN_UPDATE = {state: state for state in (HOLDING, FENCED, WEIGHTS_AWAKE)}
_UPDATE = {AWAKE: FENCED, PAUSED: HOLDING, **_IN_UPDATE}
_LOOK = {state: state for state in (AWAKE, PAUSED, HOLDING, FENCED, WEIGHTS_AWAKE)}  # only reads weights

_WITHOUT_VERSION = {state: state for state in (FENCED, ASLEEP, WEIGHTS_AWAKE)}

VERBS: Mapping[str, Mapping[EngineState, EngineState]] = MappingProxyType(
    {
        "generate": {AWAKE: AWAKE, PAUSED: PAUSED, HOLDING: HOLDING},
        "end_requests": {AWAKE: AWAKE, PAUSED: PAUSED, HOLDING: HOLDING},
        "pause": {AWAKE: PAUSED},
        "pause_for_update": {AWAKE: PAUSED},
        "resume": {PAUSED: AWAKE},
        "sleep": {AWAKE: ASLEEP, PAUSED: ASLEEP, HOLDING: ASLEEP, FENCED: ASLEEP},
        "give_up": {AWAKE: FENCED, PAUSED: FENCED, HOLDING: FENCED, **_WITHOUT_VERSION},
        "wake_weights": {ASLEEP: WEIGHTS_AWAKE},
        "wake_cache": {WEIGHTS_AWAKE: FENCED},
        # fast path
        "agree_on_sync": _LOOK,
        "connect_sync": _LOOK,
        "release_arenas": _LOOK,
        "receive_weights": _UPDATE,
        # slow path
        "begin_update": _UPDATE,
        "load_bucket": _IN_UPDATE,
        "finish_update": _IN_UPDATE,
        "commit": {HOLDING: AWAKE, FENCED: AWAKE},
        "fingerprints": _LOOK,
        "memory": {state: state for state in EngineState if state is not DEAD},
    }
)

CONTROL_VERBS = tuple(verb for verb in VERBS if verb != "generate")  # called one after the other, one answer each

# states in which a living engine refuses requests
REFUSES_REQUESTS = frozenset(EngineState) - VERBS["generate"].keys() - {DEAD}


class EngineMachine:
    """State and version of one engine. It starts FENCED, with no weights received."""

    def __init__(self, name: str):
        self._name = name
        self.state = FENCED
        self.version: int | None = None  # served in AWAKE, kept in PAUSED; None in every other state
        # its parameters hold numbers that can be read back: false from a sleep to the next whole update
        self.holds_weights = False
        self.has_received = False  # a whole update has come since it last had a version

    def check(self, verb: str) -> None:
        """Raises RuntimeError when `verb` is not legal now, LostProcess when the engine is dead."""
        legal = VERBS[verb]
        if self.state is DEAD:
            raise LostProcess(f"{self._name}: {verb} was asked, but vLLM's processes below it died; {DEAD.value}")
        if self.state not in legal:
            states = ", ".join(state.name for state in legal)
            raise RuntimeError(
                f"{self._name} is {self.state.name} and refuses {verb}, legal in {states}; first: {self.state.value}"
            )
        if verb == "commit" and not self.has_received:
            raise RuntimeError(
                f"{self._name} refuses commit: no whole update has reached it since it held a "
                "version; first bring weights"
            )

    def enter(self, verb: str) -> None:
        """Enters the state to which `verb` leads. Raises as `check` does."""
        self.check(verb)
        self.state = VERBS[verb][self.state]
        if self.state not in (AWAKE, PAUSED):
            self.version = None
        if verb == "sleep":
            self.holds_weights = False
        if verb in ("sleep", "give_up", "receive_weights", "begin_update"):
            self.has_received = False

    def received(self) -> None:
        """Notes that a whole update has come."""
        self.holds_weights = self.has_received = True

    def serve(self, version: int) -> None:
        """Enters AWAKE with `version`: at the end of `commit`, and at a start where vLLM itself loaded the weights."""
        self.state = AWAKE
        self.version = version
        self.holds_weights = True
        self.has_received = False

    def await_weights(self) -> None:
        """Enters FENCED with placeholder weights: at the end of a start where vLLM loaded no weights."""
        self.state = FENCED
        self.version = None
        self.has_received = False

    def die(self) -> None:
        """Notes that vLLM's processes are gone, in whatever state."""
        self.state = DEAD
        self.version = None
