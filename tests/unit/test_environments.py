"""Environments: sessions in processes that can be killed; what fails is repeated once, or over, and rewards nothing."""

import re
import time
from pathlib import Path

import environment_classes
import pytest

from mrl.acting.answering import Acting
from mrl.acting.builtin import GuessTheNumber
from mrl.acting.environment import LONGEST, Environment, Reply, actions_of, reply_of
from mrl.acting.environment_pool import EnvironmentPool, Session, check_tools, try_environments
from mrl.acting.offer import Offer, UnknownChoice, name_of
from mrl.acting.tool import ToolsSpec
from mrl.errors import ConfigError

FILE = str(Path(environment_classes.__file__))
KINDS = ("Stairs", "Forgetful", "Trouble", "Drifting")


def row(**extra_info) -> dict:
    return {"data_source": "here", "ground_truth": "", "extra_info": extra_info}


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs") / "tools.log"


@pytest.fixture(scope="module")
def pool(log):
    spec = ToolsSpec(("calculator",), FILE, max_memory_gib=4.0, environments=KINDS)
    with EnvironmentPool(spec, 2, 20.0, log) as pool:
        yield pool


@pytest.fixture
def short_of_time(request, pool, monkeypatch):
    """Where something hangs it is waited for 0.7 s."""
    if "hangs" in request.node.callspec.params.values():
        monkeypatch.setattr(pool, "timeout_s", 0.7)


def steps(session: Session, *actions: tuple[str, dict]) -> list:
    return [answer.result(60) for answer in [session.step(*action) for action in actions]]


def test_an_action_is_a_tool_of_the_class_without_its_self():
    schema = actions_of(environment_classes.Stairs, "Stairs")["climb"].schema["function"]
    assert (schema["name"], schema["description"]) == ("climb", "Goes up.")
    assert schema["parameters"]["properties"] == {"steps": {"type": "integer", "description": "how many"}}
    assert schema["parameters"]["required"] == ["steps"]


def test_sessions_of_one_process_know_nothing_of_each_other(pool):
    """By hand: stairs of heights 2 to 7, climbed by 1, by 2 and by whatever is left."""
    sessions = [pool.session("Stairs", row(height=height), height) for height in range(2, 8)]
    for height, session in enumerate(sessions, start=2):
        ready = session.ready.result(60)
        assert ready.reason == "ok" and not ready.failed
        one, two = steps(session, ("climb", {"steps": 1}), ("climb", {"steps": 2}))
        assert one[:4] == ("ok", f"{height - 1} to go, seed {height}", 0.25, {"left": float(height - 1)})
        assert not one.end and two.end == (height <= 3)
        if height > 3:
            (last,) = steps(session, ("climb", {"steps": height - 3}))
            assert last.end and last.reward == (height - 3) / 4
        assert steps(session, ("climb", {"steps": 1}))[0][:2] == ("refused", "Error: climb: it is over")
        session.close()


def test_a_call_that_does_not_fit_is_answered_and_nothing_is_done(pool):
    session = pool.session("Stairs", row(), 0)
    wrong, unknown, right = steps(
        session, ("climb", {"steps": "two"}), ("calculator", {"expression": "1"}), ("climb", {"steps": 1})
    )
    assert wrong[:2] == ("refused", "Error: climb: 'steps' is not of the kind integer: two") and not wrong.failed
    assert unknown[:2] == ("refused", "Error: there is no tool 'calculator'; there are: climb")
    assert right.text == "2 to go, seed 0"


def test_closing_tells_the_environment(pool, log):
    session = pool.session("Stairs", row(height=40), 0)
    steps(session, ("climb", {"steps": 2}))
    session.close()
    for _ in range(100):
        if "closed at 38" in log.read_text():
            return
        time.sleep(0.1)
    raise AssertionError("nobody closed it")


def noted(path: Path, count: int) -> list[str]:
    """What an environment noted, once there are so many lines; closing is not waited for by who asks for it."""
    for _ in range(100):
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(0.1)
    raise AssertionError(f"no more than {lines}")


@pytest.mark.parametrize("how", ["raises", "words", "nan"])
def test_one_that_fails_is_closed_before_it_is_begun_anew_and_at_last(pool, how, tmp_path):
    """A repeatable environment has two instances here, one after the other."""
    session = pool.session("Trouble", row(notes=str(tmp_path / "notes")), 0)
    (act,) = steps(session, ("act", {"how": how}))
    assert act.failed
    session.close()
    assert pool.session("Trouble", row(), 0).ready.result(60).reason == "ok"
    assert noted(tmp_path / "notes", 4) == ["begun", "closed"] * 2


def test_one_that_does_not_begin_is_closed(pool, tmp_path):
    session = pool.session("Trouble", row(notes=str(tmp_path / "notes"), begins=False), 0)
    assert session.ready.result(60).failed
    assert noted(tmp_path / "notes", 4) == ["begun", "closed"] * 2


# what an action does -> the reason, and how what is said of it begins
FAULTS = {
    "raises": ("raised", "Error: act: KeyError: 'no such field'"),
    "leaves": ("raised", "Error: act: SystemExit: 3"),
    "hangs": ("timeout", "Error: act: no answer within 0.7 s"),
    "dies": ("died", "Error: act: the scoring process was killed by SIGKILL"),
    "fills": ("out_of_memory", "Error: act: out of memory"),
    "nan": ("not_a_number", "Error: act: 'reward' is nan"),
    "words": ("wrong_type", "Error: act: 'reward' is str 'much'"),
    "maybe": ("wrong_type", "Error: act: `end` is str"),
    "many": ("wrong_type", "Error: act: `parts` have to be at most"),
}


@pytest.mark.parametrize("how", FAULTS)
def test_whatever_goes_wrong_twice_is_the_end_of_the_session_alone(pool, short_of_time, how):
    reason, said = FAULTS[how]
    session = pool.session("Trouble", row(), 0)
    count, act, after = steps(session, ("count", {}), ("act", {"how": how}), ("count", {}))
    assert count[:2] == ("ok", "1")
    assert act.failed and act.reason == reason and act.text.startswith(said) and act.reward == 0
    assert after == act
    session.close()
    other = pool.session("Trouble", row(), 0)
    assert steps(other, ("count", {}))[0][:2] == ("ok", "1")


@pytest.mark.parametrize("how", ["raises", "hangs", "dies"])
def test_what_goes_wrong_once_is_repeated_where_it_was(pool, short_of_time, how, tmp_path):
    session = pool.session("Trouble", row(once=str(tmp_path / "once")), 0)
    *_, act, after = steps(session, ("count", {}), ("count", {}), ("act", {"how": how}), ("count", {}))
    assert act[:3] == ("ok", "well, after 2", 1.0) and not act.failed
    assert after.text == "3"


def test_a_flood_is_cut(pool):
    (flood,) = steps(pool.session("Trouble", row(), 0), ("act", {"how": "floods"}))
    assert flood.reason == "ok" and len(flood.text) == LONGEST


def test_an_environment_that_does_not_begin_has_failed(pool):
    session = pool.session("Trouble", row(begins=False), 0)
    ready = session.ready.result(60)
    assert ready.failed and ready[:2] == ("raised", "Error: reset: OSError: no board")
    assert steps(session, ("count", {})) == [ready]


def test_an_environment_that_does_not_say_so_is_not_begun_anew():
    assert not Environment.repeatable


def test_sessions_that_lose_their_process_go_on_where_they_may():
    spec = ToolsSpec((), FILE, environments=KINDS)
    with EnvironmentPool(spec, 1, 20.0) as pool:
        again = pool.session("Stairs", row(height=9), 5)
        fresh = pool.session("Forgetful", row(height=9), 5)
        lost = pool.session("Forgetful", row(height=9), 5)
        steps(again, ("climb", {"steps": 1}), ("climb", {"steps": 2}))
        steps(lost, ("climb", {"steps": 1}))
        fresh.ready.result(60)
        steps(pool.session("Trouble", row(), 0), ("act", {"how": "dies"}))
        assert steps(again, ("climb", {"steps": 1}))[0].text == "5 to go, seed 5"
        assert steps(fresh, ("climb", {"steps": 1}))[0].text == "8 to go, seed 5"
        (gone,) = steps(lost, ("climb", {"steps": 1}))
        assert gone.failed and gone.reason == "fell" and "not repeatable" in gone.text


def test_a_session_that_is_lost_costs_the_others_of_its_slot_nothing():
    """A process dies with two sessions that cannot be begun anew; one that begins before they are told of it is well,
    and goes on when they are.
    """
    with EnvironmentPool(ToolsSpec((), FILE, environments=KINDS), 1, 20.0) as pool:
        lost = [pool.session("Forgetful", row(height=9), 5) for _ in range(2)]
        for session in lost:
            steps(session, ("climb", {"steps": 1}))
        pool._slots[0].process.kill()
        while pool._slots[0].process.alive():
            time.sleep(0.05)
        later = pool.session("Forgetful", row(height=9), 6)
        assert steps(later, ("climb", {"steps": 1}))[0].text == "8 to go, seed 6"
        answers = [steps(session, ("climb", {"steps": 1}))[0] for session in lost]
        assert [(answer.failed, answer.reason) for answer in answers] == [(True, "died")] * 2, "by itself, or by theirs"
        assert steps(later, ("climb", {"steps": 1}))[0].text == "7 to go, seed 6"


def test_a_tool_that_hangs_takes_no_session_along():
    spec = ToolsSpec(("hangs",), FILE, environments=("Forgetful",))
    with EnvironmentPool(spec, 1, 1.0) as pool:
        session = pool.session("Forgetful", row(height=9), 5)
        steps(session, ("climb", {"steps": 1}))
        assert pool.call("hangs", {}).result(60).reason == "timeout"
        assert steps(session, ("climb", {"steps": 1}))[0].text == "7 to go, seed 5"


def test_one_that_replies_otherwise_when_it_is_begun_anew_has_failed(pool, tmp_path):
    session = pool.session("Drifting", row(notes=str(tmp_path / "notes")), 0)
    _, died = steps(session, ("where", {}), ("dies", {}))
    assert died.failed and died.reason == "differs" and "begun anew it replied" in died.text
    session.close()
    assert noted(tmp_path / "notes", 1) == ["closed"]


def test_a_pool_whose_processes_are_all_killed_goes_on(pool):
    session = pool.session("Stairs", row(height=9), 5)
    steps(session, ("climb", {"steps": 1}))
    for slot in pool._slots:
        if slot.process is not None:
            slot.process.kill()
            while slot.process.alive():
                time.sleep(0.05)
    assert steps(session, ("climb", {"steps": 1}))[0].text == "7 to go, seed 5"
    assert pool.call("calculator", {"expression": "2*3"}).result(60)[:2] == ("ok", "6")


def test_closing_ends_sessions_that_hang():
    pool = EnvironmentPool(ToolsSpec((), FILE, environments=("Trouble",)), 1, 3600.0)
    session = pool.session("Trouble", row(), 0)
    hanging = session.step("act", {"how": "hangs"})
    session.ready.result(60)
    time.sleep(0.2)
    process = pool._slots[0].process
    pool.close()
    assert not process.alive()
    assert hanging.exception(10) is not None or hanging.result().failed


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (ToolsSpec((), environments=("Chess",)), "'Chess' is not shipped; shipped: guess_the_number"),
        (ToolsSpec((), FILE, environments=("Chess",)), "no function 'Chess'"),
        (
            ToolsSpec((), FILE, environments=("Plain",)),
            "Plain is not a subclass of mrl.acting.environment.Environment",
        ),
        (ToolsSpec((), FILE, environments=("Still",)), "environment 'Still' has no actions"),
        (ToolsSpec((), FILE, environments=("Wordy",)), "'Wordy' declares invalid `parts`: 'left' is str 'many'"),
        (ToolsSpec((), FILE, environments=("Huge",)), "'Huge' declares invalid `parts`: 'left' is too large"),
        (ToolsSpec((), FILE, environments=("Unreadable",)), "RuntimeError: not now .at .*environment_classes.py"),
        (ToolsSpec((), FILE, environments=("Vague",)), "'where' has no type"),
        (ToolsSpec((), FILE, environments=("Missing",)), "environment 'Missing' has no method 'fly'"),
        (ToolsSpec((), FILE, environments=("Misnamed",)), "schema of 'act' is named 'do'"),
        (ToolsSpec((), FILE, environments=("Unsaid",)), "schema of 'act' needs `properties` and `required`"),
        (ToolsSpec((), FILE, environments=("Typeless",)), "parameter 'what' of 'act' needs a type"),
    ],
)
def test_environments_that_cannot_be_loaded_are_refused_by_key(spec, why):
    with pytest.raises(ConfigError, match=why):
        check_tools(spec)


def test_a_reply_is_a_text_or_becomes_one():
    assert reply_of("so").text == "so" and reply_of({"a": [1]}).text == '{"a": [1]}'
    assert reply_of(Reply({"a": 1}, True, {"won": False}, end=True)) == Reply('{"a": 1}', 1.0, {"won": 0.0}, True)


@pytest.mark.parametrize("seed", range(20))
def test_a_bisection_finds_the_hidden_number(seed):
    """Of 1 to 100 in at most 7 guesses; all responses to a row, whose seed it is, look for the same one."""
    found = set()
    for _ in range(2):
        game, low, high = GuessTheNumber(), 1, 100
        game.reset(row(), seed)
        for guess in range(1, 8):
            middle = (low + high) // 2
            reply = game.guess(middle)
            assert reply.parts == {"guesses": guess, "won": float(reply.end)} and reply.reward == float(reply.end)
            assert reply.parts.keys() == game.parts.keys()
            if reply.end:
                break
            low, high = (middle + 1, high) if "higher" in reply.text else (low, middle - 1)
        assert reply.end
        found.add(middle)
    assert len(found) == 1


def test_numbers_differ_by_row_and_lie_between_those_that_it_names():
    hidden = set()
    for seed in range(200):
        game = GuessTheNumber()
        game.reset(row(low=4, high=6), seed)
        hidden.add(game._hidden)
    assert hidden == {4, 5, 6}
    game.reset(row(low=None, high=None, guesses=None), 0)  # parquet gives every row the keys of all
    assert 1 <= game._hidden <= 100
    with pytest.raises(ValueError, match="there is no number between low 2 and high 1"):
        GuessTheNumber().reset(row(low=2, high=1), 0)


@pytest.mark.parametrize("most", [1, 3])
def test_a_game_ends_after_as_many_guesses_as_its_row_allows(most):
    game = GuessTheNumber()
    game.reset(row(low=1, high=9, guesses=most), 0)
    replies = [game.guess(10 + number) for number in range(most)]
    assert [reply.end for reply in replies] == [False] * (most - 1) + [True]
    assert not any(reply.reward for reply in replies) and "lower than" in replies[-1].text
    with pytest.raises(ValueError, match="guesses 0: must be at least 1"):
        GuessTheNumber().reset(row(guesses=0), 0)


SCHEMAS = [{"type": "function", "function": {"name": name}} for name in ("add", "find", "climb", "guess")]


@pytest.mark.parametrize("given", [{}, {"task": None}])
def test_an_agents_row_of_parquet_without_a_task_has_none(given):
    assert Offer((), of_tasks=("repository",), agent=True).schemas(given) == ()


OFFER = Offer((SCHEMAS[0], SCHEMAS[1]), {"stairs": (SCHEMAS[2],), "numbers": (SCHEMAS[3],)})


@pytest.mark.parametrize(
    ("extra_info", "names"),
    [
        ({"environment": "stairs"}, ["add", "find", "climb"]),
        ({"environment": "numbers", "tool_selection": ["find"]}, ["find", "guess"]),
        ({"environment": "numbers", "tool_selection": []}, ["guess"]),
        ({"environment": ""}, ["add", "find"]),
    ],
)
def test_a_row_names_its_environment_and_tools(extra_info, names):
    assert [name_of(schema) for schema in OFFER.schemas(extra_info)] == names


@pytest.mark.parametrize(
    ("offer", "extra_info", "why"),
    [
        (OFFER, {}, "extra_info.environment is missing; it has to be one of stairs, numbers, or empty"),
        (OFFER, {"environment": "chess"}, "names 'chess'; rollout.turns.environments has stairs, numbers"),
        (OFFER, {"environment": "stairs", "tool_selection": ["fly"]}, "names 'fly'; rollout.turns.tools has add, find"),
        (OFFER, {"environment": "stairs", "tool_selection": "add"}, "is 'add', expected a list of names"),
        (Offer((SCHEMAS[0],), {"sums": (SCHEMAS[0],)}), {}, "'add' is a tool, and an action of the environment 'sums'"),
        (Offer(()), {"environment": "stairs"}, "names 'stairs'; rollout.turns.environments has none"),
    ],
)
def test_what_a_row_may_not_name_is_said(offer, extra_info, why):
    with pytest.raises(UnknownChoice, match=why):
        offer.schemas(extra_info)


def test_without_a_choice_a_row_has_all_tools_and_the_only_environment():
    one = Offer((SCHEMAS[0],), {"stairs": (SCHEMAS[2],)})
    assert [name_of(schema) for schema in one.schemas({})] == ["add", "climb"] and one.needs_row({})
    clash = Offer((SCHEMAS[0],), {"sums": (SCHEMAS[0],)})
    assert clash.schemas({"tool_selection": []}) == clash.schemas({"environment": ""}) == (SCHEMAS[0],)
    none = Offer((SCHEMAS[0],))
    assert none.environment({}) is None and not none.needs_row({}) and none.needs_row({"tool_selection": ["add"]})


def test_calls_go_to_the_rows_environment_or_to_its_tools(pool):
    acting = Acting(pool, row(environment="Stairs", tool_selection=[], height=3), 7)
    acting.begin()
    assert list(acting.functions) == ["climb"]
    assert acting.call("climb", {"steps": 1}).result(60).text == "2 to go, seed 7"
    refused = acting.call("calculator", {"expression": "1"}).result(60)
    assert refused[:2] == ("refused", "Error: there is no tool 'calculator'; there are: climb")
    acting.close()
    both = Acting(pool, row(environment="Stairs"), 7)
    assert both.call("calculator", {"expression": "6*7"}).result(60).text == "42"
    both.close()


BEGINS = '''
from mrl.acting.environment import Environment, Reply

class Own(Environment):
    "d"
    actions = ("go",)
    repeatable = {repeatable}
    {body}

    def go(self, x: int) -> Reply:
        """d

        Args:
            x: y
        """
        return Reply("x")
'''


@pytest.mark.parametrize(
    ("body", "repeatable", "words"),
    [
        ("def reset(self, row, seed): assert row.keys() == {'data_source', 'ground_truth', 'extra_info'}", True, None),
        ("def __init__(self, z): pass", True, "missing 1 required positional argument: 'z'"),
        ("def __init__(self): 1 / 0", False, "ZeroDivisionError"),
        ("def reset(self, row): pass", False, "takes 2 positional arguments but 3 were given"),
        ("def reset(self, row, seed): row['truth']", True, "KeyError"),
        ("x = 1", "'no'", "`repeatable` is 'no', and has to be True or False"),
    ],
)
def test_an_environment_that_cannot_begin_is_told_before_a_run(tmp_path, body, repeatable, words):
    """It is begun by the first row that wants it, as a reward is asked about the first row."""
    file = tmp_path / "own.py"
    file.write_text(BEGINS.replace("{body}", body).replace("{repeatable}", str(repeatable)))
    spec = ToolsSpec((), str(file), environments=("Own",))
    row = {"data_source": "d", "ground_truth": "1", "extra_info": {}, "more": 1}

    def tried() -> None:
        try_environments(spec, check_tools(spec), [row | {"extra_info": {"environment": "unknown"}}, row])

    if words is None:
        tried()
    else:
        with pytest.raises(ConfigError, match=re.escape(words)):
            tried()


def test_an_asynchronous_environment_is_awaited(tmp_path):
    log = tmp_path / "log"
    with EnvironmentPool(ToolsSpec((), FILE, environments=("Later", "LaterStep")), 1, 20.0, log) as pool:
        for name, word in (("Later", ""), ("LaterStep", "Well: ")):
            session = pool.session(name, row(height=2), 0)
            first, last = steps(session, ("climb", {"steps": 1}), ("climb", {"steps": 1}))
            assert first[:3] == ("ok", f"{word}1 to go", 0.0) and last[:3] == ("ok", f"{word}0 to go", 1.0)
            assert last.end
            session.close()
        assert pool.session("Later", row(), 0).ready.result(60).reason == "ok"
    assert log.read_text().count("closed at 0") == 2


def test_an_environment_whose_method_is_a_generator_is_refused():
    with pytest.raises(ConfigError, match="environment 'ByPart': reset is a generator, whose call runs nothing"):
        actions_of(environment_classes.ByPart, "ByPart")
