"""The shell reader against the shell itself: what it says a command line is, is what bash makes of it;
what it cannot know, it says.
"""

import subprocess
from pathlib import Path

import pytest

from mrl.errors import ConfigError
from mrl.tools.import_verl.expansion import calculate, why_unknown
from mrl.tools.import_verl.shell import read_script
from mrl.tools.import_verl.shell_syntax import parse_text

# Each ends with a call of `show`, whose arguments are compared. No line of them runs a program.
SCRIPTS = {
    "variables": 'a=1\nb="$a $a"\nc=\'$a\'\nshow $a "$b" $b "${c}x" d"$a"e',
    "a name in a variable": 'a=1\nb=a\nc=none\nshow ${!b} "${!b}x" ${!b:-no} ${!c:-no} ${!b/1/2}',
    "defaults": 'y=set\nshow ${x:-one} "${x:-two words}" ${y:-no} ${x:-"${y}/in"} ${x-"q"} "${y:+yes}" ${x:+no} end',
    "assigning default": "show ${n:=8}\nshow $n",
    "empty against unset": 'e=\nshow "${e:-colon}" "${e-plain}" "[$e]" $e last',
    "arithmetic": "p=$((1024 * 2))\nr=$((1024*8)) # comment\nshow $(((p + r) / 3)) $((p - r)) $((p > r))",
    "negative arithmetic": "show $((-7 / 2)) $((-7 % 3)) $((7 / -2)) $((7 % -3)) $((2 ** 10))",
    "arithmetic with dollars": "p=4\nshow $(( $p * ${p} )) $((p*1))",
    "arrays": 'A=(x=1 "y=a b" z=$((1+1))  # comment\n  last)\nA+=(more)\nshow "${A[@]}" ${#A[@]} ${A[1]} "${A[0]}"',
    "empty array and arguments": 'A=()\nshow a "${A[@]}" $@ "$@" b',
    "arguments of a function": 'f() { show "$*" "$@" $1; }\nf a "b c"',
    "array beside text": 'A=(1 2)\nshow "x${A[@]}y"',
    "a calculation as a default": "show ${x:-$((2 * (3 + 1)))} ${y:-$((1024*2))}",
    "a sum in brackets as a default": 'a=1\nb=2\nshow ${x:-$(((a + b) * 2))} "${y:-$(((a + b) * (2 + 1)))}/z"',
    "a probe for NPUs": "show $(command -v npu-smi >/dev/null 2>&1 && echo npu || echo gpu)",
    "the working directory": 'PWD=/here\nshow $PWD/a "${PWD}"',
    "the home folder": 'HOME=/here\na=~/d\nb=${b:-~/m}\nc="${c:-~/q}"\nd="~/q"\ne=${e:-"~/q"}\nf=\\~/x\ng=~\nh=${h-~}\n'
    "export i=~/i\nshow $a $b $c $d $e $f $g $h $i j=~/k a.b=~/l ${k:=~/m} ${l:+~/no}${a:+~/yes} ~/n a~/b ~",
    "continued inside a word": "a=1\nshow a\\\nb${a}\\\nc",
    "continued at the end": "show a \\\n",
    "blanks in quotes": 'a=1\nshow " $a  $a " "\n$a\n" "a\n b" \'  c \'',
    "escapes": 'a=1\nshow \\$a "\\$a" "\\x" x=\\[1\\] "\\\\" \\"q\\"',
    "words behind redirects": "show a > /dev/null b 2>&1 c",
    "what follows a here-document": "cat <<EOF && show a\nx $b\nEOF\ncat <<EOF | show b\nx\nEOF\n",
    "function with a body in brackets": 'f() ( show $1 )\nfunction g { show "$@"; }\nf a\ng b "c d"',
    "slashes in a pattern": "p=a/b/c\nn=2\nshow ${p//\\//_} ${p/\\/b/x} ${p:n:1} ${p:0:-1} ${p: -1}",
    "pattern with a variable": 'p=/a/b.tar\ns=.tar\nq=\nshow ${p%$s} ${p#/a$q/} ${p%"$s"} ${p/$s/$q}',
    "continued lines": "show a \\\n  b=$((1+1)) \\\n  'c d' \\\n  e",
    "if": 'm=vllm\nif [ "$m" = "vllm" ]; then k=yes; else k=no; fi\nshow $k',
    "if elif": "m=3\nif [ $m -lt 2 ]; then k=a\nelif [ $m -ge 3 ]; then k=b\nelse k=c\nfi\nshow $k",
    "arithmetic condition": "t=2\nn=3\nif (( t <= 0 || n % t != 0 )); then k=bad; else k=good; fi\n(( n > t "
    ")) && j=more\nshow $k $j",
    "truth values": "t=2\nshow $(( !t && 1 )) $(( t && 1 )) $(( 0 || t ))",
    "arguments that are not there": "n=4\nwhile [[ $# -gt 0 ]]; do case $1 in --n) n=$2; shift "
    "2 ;; esac; done\nshow $n",
    "items by expression": 'A=(a b c)\ni=1\nshow ${A[i]} ${A[$i + 1]} ${A[-1]} "${A[0]}"',
    "colon that assigns": ': "${n:=8}"\n: ${m:=x}\nshow $n $m',
    "double brackets": 'm=sglang\nif [[ "$m" == sg* && -n "$m" ]]; then k=1; else k=2; fi\nshow $k',
    "case": "m=b\ncase $m in\n a) k=1 ;;\n b|c) k=2 ;;\n *) k=3 ;;\nesac\nshow $k",
    "and or": 'a=1\n[ "$a" = 1 ] && b=yes || b=no\n[ "$a" = 2 ] && c=yes || c=no\nshow $b $c',
    "for": 'for i in 1 2 3; do last=$i; all="$all$i"; done\nshow $last',
    "function": 'f() {\n  local z=$1\n  out="got $z"\n}\nf here\nshow "$out"',
    "subshell": "a=1\n(a=2)\n{ b=3; }\nshow $a $b",
    "cut": "p=/a/b/model.tar.gz\nshow ${p##*/} ${p%/*} ${p%%.*} ${p#/a} ${p/b/c} ${p//a/A} ${p:1:3} ${#p}",
    "names behind names": "A=a\nB=b\nC=c\nd=$A/$B/$C/end\nD=($A/$B/x y$A-$B.z)\n"
    'show $d $A/$B/c x=$A,$B,$C "$A/$B/c" \'$A/$B/c\' $A/\\$B/c "${D[@]}" $A"$"B',
    "basename": 'P=XX/Qwen25-3B-Instruct\nn=$(basename $P)\nshow "$n" "$(basename a/b.sh .sh)" '
    "$(dirname /x/y) `basename q/r`",
    "quotes in quotes": "f=/d/t.parquet\nshow \"['$f', '$f']\" '[\"console\",\"wandb\"]' ['a','b'] \"a\\\"b\"",
    "plus equals": 'a=x\na+=y\nA=(1)\nA+=(2 3)\nshow $a "${A[*]}"',
    "here-document": "cat <<EOF >/dev/null\nshow not this $a\nEOF\nshow this",
    "several on a line": "a=1; b=2; show $a$b",
    "comment characters": "show a#b 'c # d' # no\n",
    "redirects": "show a b 2>&1 >/dev/stdout",
}


def by_bash(script: str) -> list[list[str]]:
    program = "set +o posix\nshow() { printf '%s\\0' CALL \"$@\" >&3; }\n" + script
    command = ["bash", "--norc", "-c", f"exec 3>&1 >/dev/null\n{program}"]
    done = subprocess.run(command, capture_output=True, timeout=20, env={"PATH": "/usr/bin:/bin"}, check=True)
    calls: list[list[str]] = []
    for field in done.stdout.decode().split("\0")[:-1]:
        if field == "CALL":
            calls.append([])
        else:
            calls[-1].append(field)
    return calls


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_read_as_bash_runs_it(name):
    read = read_script(SCRIPTS[name], "s", {})
    shown = [c for c in read.commands if c.words[0].text == "show"]
    assert [[w.text for w in c.words[1:]] for c in shown] == by_bash(SCRIPTS[name])
    assert all(w.known for c in shown for w in c.words)


@pytest.mark.parametrize(
    "folder",
    [
        '$(cd "$(dirname "$0")" && pwd)',
        '$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd )',
        '$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd -P)/..',
        '$(dirname "$(readlink -f "$0")")/$(basename -- "$0" .sh)',
        '$(realpath "$(dirname "$BASH_SOURCE")/..")',
        "${0%/*}",
    ],
)
def test_the_folder_of_a_script_is_read_as_bash_gives_it(tmp_path, monkeypatch, folder):
    text = f'D="{folder}"\necho "$D/x"\n'
    monkeypatch.chdir(tmp_path)
    Path("a/b").mkdir(parents=True)
    for script in ("a/b/run.sh", str(tmp_path / "a/b/run.sh")):
        Path(script).write_text(text)
        by_shell = subprocess.run(["bash", script], capture_output=True, text=True, check=True).stdout.strip()
        (told,) = read_script(text.replace("echo", "show"), script, {"PWD": str(tmp_path)}).commands
        assert told.words[1].known and told.words[1].text == by_shell


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("show $HERE/x", "HERE, which the script does not set"),
        ("N=$(date +%s)\nshow a_$N", "N, which is set by a command that is not run"),
        (
            "N=$(date +%s)\nshow $M/a_$N",
            "M, which the script does not set and N, which is set by a command that is not run",
        ),
        ("show $(date)", "$(date), a command that is not run"),
        ("show $((2 * N))", "N, which the script does not set"),
    ],
)
def test_what_is_unknown_says_whether_a_command_would_give_it(text, said):
    word = only_command(text).words[1]
    assert why_unknown(word.text, word.missing) == f"depends on {said}"


def only_command(text: str, **given: str):
    (command,) = (c for c in read_script(text, "s", given).commands if c.words[0].text == "show")
    return command


def test_nothing_of_a_script_is_run(tmp_path):
    mark = tmp_path / "mark"
    text = (
        f"touch {mark}\nx=$(touch {mark})\n`touch {mark}`\ncat <<EOF\n$(touch {mark})\nEOF\nf() {{ touch "
        f"{mark}; }}\nf\nshow $x {{a}}"
    )
    read_script(text, "s", {})
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("show $NOBODY", {"NOBODY"}),
        ("show ${ROOT}/data", {"ROOT"}),
        ("stamp=$(date +%s)\nshow run-$stamp", {"stamp"}),
        ("show $(date +%s)", {"$(date +%s)"}),
        ("a=$ROOT/x\nb=$a/y\nshow $b", {"ROOT"}),
        ("show $((NODES * 8))", {"NODES"}),
        ("n=$(nvidia-smi -L | wc -l)\nshow $((n * 2))", {"n"}),
        ("[ -f here.sh ] && a=1 || a=2\nshow $a", {"a"}),
        ('if [ -n "$X" ]; then a=1; fi\nshow $a', {"a"}),
        ("a=0\nwhile true; do a=1; done\nshow $a", {"a"}),
        ("a=0\nfor ((i=0;i<3;i++)); do a=$i; done\nshow $a", {"a"}),
        ("i=0\nfor ((i = 0, j = 1; i < 1; i++)); do show $i$j; done", {"i", "j"}),
        ("p=a/b\nshow ${p%$q}", {"q"}),
        ("p=a/b\nshow ${p/$q/x}", {"q"}),
        ("p=a/b\nshow ${p/a*/x}", {"${p/a*/x}"}),
        ("p=a/b\nshow ${p:$n}", {"n"}),
        ("A=(1 2)\nA[1]=5\nshow ${A[1]}", {"A"}),
        ("declare -A M=([x]=1)\nshow ${M[x]}", {"M[x]"}),
    ],
)
def test_what_cannot_be_known_is_named_by_what_would_tell_it(text, missing):
    assert only_command(text).words[1].missing == missing


def test_a_given_variable_wins_over_the_script():
    words = only_command("stamp=$(date)\nn=${n:-2}\nshow $stamp $n", stamp="now", n="4").words
    assert [(w.text, w.known) for w in words[1:]] == [("now", True), ("4", True)]


def test_branches_that_agree_leave_no_doubt():
    words = only_command("if [ -d /x ]; then a=1; b=1; else a=1; b=2; fi\nshow $a $b").words
    assert (words[1].text, words[1].known, words[2].known) == ("1", True, False)


def test_a_branch_that_ends_the_script_is_not_the_one_that_was_taken():
    text = "if [ $# -lt 1 ]; then echo usage; exit 1; fi\nn=2\nshow $n"
    assert only_command(text).words[1].text == "2"


def texts(script: str, **given: str) -> list[tuple[str, set[str]]]:
    return [(w.text, set(w.missing)) for w in only_command(script, **given).words[1:]]


def test_a_text_with_one_unknown_part_is_cut_where_the_shell_would_cut_it():
    script = 'A="a.b=1 c.d=$ROOT/x e.f=$((NODES * 2)) g=$(date +%d %m) h=2"\nshow $A "$A"'
    *cut, whole = texts(script)
    assert cut == [
        ("a.b=1", set()), ("c.d=${ROOT}/x", {"ROOT"}), ("e.f=$((NODES * 2))", {"NODES"}), ("g=$(date +%d %m)", {"A"}),
        ("h=2", set()),
    ]  # fmt: skip
    assert whole[1] == {"ROOT", "NODES", "A"}
    assert [text for text, _ in texts(script, ROOT="/r", NODES="2")][:3] == ["a.b=1", "c.d=/r/x", "e.f=4"]


def test_branches_leave_of_an_array_what_they_share_and_one_item_for_the_rest():
    script = 'A=(a=1 b=2)\nif [ "$KL" = 1 ]; then A+=(k=1 l=2); else A+=(m=$X); fi\nA+=(z=9)\nshow "${A[@]}"'
    assert texts(script) == [("a=1", set()), ("b=2", set()), ("${A: k=1 l=2 m=${X}}", {"KL"}), ("z=9", set())]
    assert texts(script, KL="1") == [(text, set()) for text in ("a=1", "b=2", "k=1", "l=2", "z=9")]


@pytest.mark.parametrize(
    ("branch", "missing"),
    [
        ('[ "$KL" = 1 ] && A="$A k=1"', {"KL"}),
        ("case $M in x) A+=' k=1' ;; esac", {"M"}),
        ("case $M in x) A+=' k=1' ;; *) ;; esac", {"M"}),
        ("[ -f here ] && A+=' k=1'", {"a condition that decides about A"}),
    ],
)
def test_branches_leave_of_a_text_what_was_there_before_and_one_word_for_what_was_added(branch, missing):
    assert texts(f"A='a=1 b=2'\n{branch}\nshow $A") == [("a=1", set()), ("b=2", set()), ("${A: k=1}", missing)]


def test_a_loop_that_counts_does_not_keep_the_rest_from_being_read():
    read = read_script("n=2\nfor ((i=0; i<n; i++)); do sleep 1; done\nshow $n", "s", {})
    assert [w.text for w in read.commands[-1].words] == ["show", "2"] and any(
        "s:2: a loop whose end" in r for r in read.remarks
    )


def test_a_file_that_is_sourced_is_reported():
    (remark,) = read_script("\nsource env.sh\nshow a", "s.sh", {}).remarks
    assert remark.startswith("s.sh:2: source env.sh")


def test_a_here_document_is_reported():
    assert any("s:2: a here-document" in r for r in read_script("cat <<EOF\nx\nEOF\n", "s", {}).remarks)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("f() { f; }\nf", "calls itself without end"),
        ("x" * 600_000, "no launch script"),
        ("for a in " + " ".join("1" * 200) + "; do for b in " + " ".join("1" * 200) + "; do c=1; done; done",
            "no launch script"),
        ("select x in a b; do show $x; done", "s:1: select asks a person"),
        ("( " * 5000 + "a" + " )" * 5000, "nested too deeply"),
        ("a=xxxxxxxx\n" + 'a="$a$a"\n' * 60, "grows over 1000000 characters"),
        ("A=(1 2)\n" + 'A+=("${A[@]}")\n' * 60, "grows over 10000 items"),
    ],
)  # fmt: skip
def test_text_that_is_no_script_is_refused_with_its_line(text, problem):
    with pytest.raises(ConfigError) as caught:
        read_script(text, "s", {})
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("show 'a", ["s:1: no closing ': 'a"]),
        ('a=1\nshow "b', ['s:2: no closing "']),
        ("a=1\nshow ${a", ["s:2: no closing }"]),
        ("show $((1", ["s:1: cannot be read as shell: $((1"]),
        ("A=(1 2", ["s:1: no closing )"]),
        ("if true; then a=1", ["s:1: cannot be read as shell: if true; then a=1"]),
        ("a=1\nif x; then\n  show y\n", ["s:4: fi is missing"]),
        ("while x; do\n  show y\n", ["s:3: done is missing"]),
        ("show a\nfi", ["s:2: fi without its beginning"]),
        ("show a | | show b\nshow x\necho )", ["s:1: cannot be read as shell: |", "s:3: cannot be read as shell: )"]),
        ("( " * 5000, ["s:1: cannot be read as shell: " + ("( " * 30)]),
    ],
)
def test_every_place_that_the_grammar_cannot_read_is_told_with_line_and_text(text, faults):
    assert list(read_script(text, "s", {}).faults) == faults


def test_what_stands_around_a_fault_is_read():
    read = read_script("a=1\nshow $a | | show b\nshow c", "s", {})
    assert [[w.text for w in c.words] for c in read.commands] == [["show", "1"], ["show", "b"], ["show", "c"]]


def test_text_that_closes_its_own_expansion_is_refused():
    with pytest.raises(ConfigError, match="s:3: cannot be read as shell: a}b"):
        parse_text("a}b", 3, "s")


def test_no_script_that_bash_reads_has_faults():
    assert not any(read_script(text, "s", {}).faults for text in SCRIPTS.values())


@pytest.mark.parametrize(
    "text", ["9**9**9**9", "1/0", "__import__('os')", "a.b", "[1]", "2**70", "(" * 300, "1 if 1 else 2", "'a'*9"]
)
def test_arithmetic_calculates_integers_and_nothing_else(text):
    with pytest.raises(ValueError):
        calculate(text, lambda name: 3)


def test_every_fixture_is_read_as_bash_reads_it():
    """The words behind the module, over all fixtures: python3,
    ray and uv are replaced by a function that shows its arguments.
    """
    for file in sorted((Path(__file__).parent / "verl_scripts").glob("*.sh")):
        text = (
            file.read_text()
            .replace("set -xeuo pipefail", "set -e")
            .replace("cd /opt/verl", ":")
            .replace('"${PWD}"', "here")
        )
        fake = (
            'python3() { show python3 "$@"; }\nray() { show ray "$@"; }\nuv() { [ "$1" = sync ] || show '
            'uv "$@"; }\ntee() { :; }\n'
        )
        (expected,) = by_bash(fake + text)
        launch = next(
            c
            for c in read_script(text, "s", {}).commands
            if c.words[0].text == expected[0] and "-m" in [w.text for w in c.words]
        )
        assert [w.text for w in launch.words if w.known] == [
            word for word, ours in zip(expected, launch.words, strict=True) if ours.known
        ], file.name
