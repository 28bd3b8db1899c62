"""`mrl compare`: what differs between runs, and whether their held-out scores do by more than chance."""

import json

import pytest
from report_run import World, write_run

from mrl.cli.main import main
from mrl.tools.report.comparison import compare

LOW, HIGH = [0.0] * 8 + [1.0] * 8, [0.0] * 2 + [1.0] * 14


@pytest.fixture
def runs(tmp_path):
    """Writes runs by name, from what each is to hold."""

    def write(**worlds: World):
        return [write_run(tmp_path / name, world).path for name, world in worlds.items()]

    return write


def test_settings_that_differ_are_told_and_places_are_none(runs):
    found = compare(runs(a=World(), b=World(settings=["actor.optim.lr=5e-7", "trainer.run_dir=elsewhere"])))
    assert found.settings == {"actor.optim.lr": ("8.0e-05", "5.0e-07")}


def test_scores_after_the_same_step_are_tested_prompt_by_prompt(runs):
    a, b = World(held_out={0: LOW, 3: LOW, 6: LOW}), World(held_out={0: LOW, 3: HIGH})
    (test,) = compare(runs(a=a, b=b)).tests
    assert (test.other, test.step, test.difference.prompts) == ("b", 3, 16)
    assert test.difference.mean == 6 / 16 and test.difference.significant(test.level)


def test_several_tests_share_the_level(runs):
    """Of three tests each has to pass at a third of the 5 %."""
    slightly = [0.0] * 3 + [1.0] * 13
    mixed = [1.0, 0.0] * 2 + [0.0] * 4 + [1.0] * 8
    alone = compare(runs(a=World(held_out={6: LOW}), b=World(held_out={6: slightly})))
    many = compare(
        runs(
            c=World(held_out={6: LOW}),
            d=World(held_out={6: mixed}),
            e=World(held_out={6: mixed}),
            f=World(held_out={6: slightly}),
        )
    )
    assert [t.level for t in alone.tests] == [0.05] and {t.level for t in many.tests} == {0.05 / 3}
    assert alone.tests[0].difference.p == many.tests[-1].difference.p < 0.05 / 3
    assert not many.tests[0].difference.significant(many.tests[0].level)


def test_runs_that_were_not_validated_alike_are_not_tested(runs):
    found = compare(runs(a=World(held_out={6: LOW}), b=World(held_out={5: HIGH}), c=World(steps=4)))
    assert not found.tests and len([note for note in found.notes if "never validated after the same step" in note]) == 2
    assert any(note == "c has 4 steps, a 6." for note in found.notes)


def test_a_bonus_makes_no_run_worse_at_equal_accuracy(runs):
    """The second run's reward pays less for the same right answers, and its answers are as right."""
    less = [score - 0.5 for score in HIGH]
    a = World(held_out={6: HIGH}, held_out_acc={6: HIGH})
    b = World(held_out={6: less}, held_out_acc={6: HIGH}, settings=["reward.bonus_rules={think_format: 0.1}"])
    found = compare(runs(a=a, b=b))
    (test,) = found.tests
    assert (test.difference.quantity, test.difference.mean) == ("acc", 0.0) and "acc 0.875 to 0.875" in test.words()
    assert any("different rewards (reward.bonus_rules" in note for note in found.notes)


def test_where_one_run_has_no_accuracy_the_rewards_are_compared(runs):
    a = World(held_out={6: LOW}, held_out_acc={6: LOW})
    (test,) = compare(runs(a=a, b=World(held_out={6: HIGH}))).tests
    assert (test.difference.quantity, test.difference.mean) == ("reward", 6 / 16)


def test_other_answers_before_training_are_said(runs, tmp_path):
    found = runs(a=World(held_out={0: LOW, 6: LOW}), b=World(held_out={0: LOW, 6: LOW}))
    file = tmp_path / "b" / "validation" / "step-0.jsonl"
    file.write_text(file.read_text().replace('"output": "0 ', '"output": "7 '))
    assert ["before training" in note for note in compare(found).notes] == [True]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    paths = [write_run(tmp_path / place / "run").path for place in ("one", "two")]
    assert list(compare(paths).runs) == ["one/run", "two/run"]


def test_one_object_for_programs(runs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = runs(a=World(held_out={6: LOW}), b=World(held_out={6: HIGH}))
    main(["compare", *map(str, paths), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["held_out"][0]["significant"] and said["held_out"][0]["mean"] == 6 / 16 and said["settings"] == {}
    assert not (tmp_path / "compare.html").exists()
    main(["compare", *map(str, paths)])
    assert "b beats a" in capsys.readouterr().out and (tmp_path / "compare.html").stat().st_size < 5e6


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a"], "at least two run directories"),
        (["a", "a"], "named twice"),
        (["a", "nothing"], "is not a folder"),
        (["a", "empty"], "holds no run"),
    ],
)
def test_what_cannot_be_compared_ends_with_one_message(runs, tmp_path, capsys, given, words):
    runs(a=World())
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["compare", *(str(tmp_path / name) for name in given), "-o", str(tmp_path / "page.html")])
    out = capsys.readouterr()
    assert (
        ended.value.code == 2
        and words in out.err
        and out.err.count("\n") == 1
        and not (tmp_path / "page.html").exists()
    )
