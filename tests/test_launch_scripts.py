"""Launch scripts are read, not run: against bash itself where that is harmless, and what is refused."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_scalevec import ScaleVecError
from megatron_scalevec.explain.launch_line import launch_in_command, launch_in_script
from megatron_scalevec.explain.shell import commands_of, is_unknown, readable

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path.name for path in (ROOT / "examples/megatron").glob("*.sh") if path.name != "slurm.sh")
MINE = "--num-layers 2 --hidden-size 8"


def what_bash_starts(folder: Path, script: str, *arguments: str, **environment: str) -> list[list[str]]:
    """The command lines that a script hands to torchrun, python and srun, in this test's own scripts only."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    log = folder / "started"
    log.unlink(missing_ok=True)
    for name in ("torchrun", "python", "srun"):
        stub = stubs / name
        stub.write_text(f'#!/bin/bash\nprintf "%s\\0" {name} "$@" $\'\\n\' >> "{log}"\n')
        stub.chmod(0o755)
    path = folder / "script.sh"
    path.write_text(script)
    done = subprocess.run(
        [shutil.which("bash"), str(path), *arguments],
        env={"PATH": f"{stubs}{os.pathsep}/usr/bin{os.pathsep}/bin", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    text = log.read_text() if log.exists() else ""
    return [line.split("\0")[:-1] for line in text.split("\n\0") if line]


@pytest.mark.parametrize(
    ("script", "arguments", "environment"),
    [
        ('torchrun a "b c" \'d $e\' f\\ g "h\\"i" # comment\n', [], {}),
        (
            "A=1 B='x y'\ntorchrun $A $B \"$B\" ${A}b ${A:-no} ${C:-d e}\n"
            'torchrun "${C:-d e}" ${C-} ${A:+set} ${C:+set}\n',
            [],
            {},
        ),
        (
            'ARGS=(\n  --a 1 # why\n  --b "x y"\n)\nARGS+=(--c)\n'
            'torchrun "${ARGS[@]}" ${#ARGS[@]} "${ARGS[1]}" ${ARGS[*]}\n',
            [],
            {},
        ),
        ('EMPTY=()\ntorchrun a "${EMPTY[@]}" b ${EMPTY[@]} c\n', [], {}),
        ("torchrun --n \\\n  2 \\\n  --m\n", [], {}),
        ("N=4; torchrun $((N * 2)) $((N / 3)) $(( (N+1) % 3 )) $((N == 4 && 1 < 2))\n", [], {}),
        ("if [[ ${X:-a} == a && -n ${X:-a} ]]; then torchrun yes; else torchrun no; fi\n", [], {}),
        (
            'if [ "$X" -gt 3 ] || [ -z "$X" ]; then torchrun big\nelif [ $X = 2 ]; then torchrun two; fi\n',
            [],
            {"X": "2"},
        ),
        (
            "case $1 in\n  a|b) torchrun ab;;\n  c*)\n    torchrun c\n    ;;\n  *) torchrun other ;;\nesac\n",
            ["cd"],
            {},
        ),
        ('for i in 1 2 "3 4"; do torchrun $i; [[ $i == 2 ]] && continue; python "$i"; done\n', [], {}),
        (
            'run() { local first=$1; shift; torchrun "$first" "$@"; return; torchrun never; }\n'
            "run a b 'c d'\n",
            [],
            {},
        ),
        ('set -euo pipefail\nset -- x \'y z\'\ntorchrun "$@" $# $2 "$*"\n', [], {}),
        ('shift\ntorchrun "$@"\n', ["a", "b c"], {}),
        ("P=a/b/c.txt; torchrun ${P##*/} ${P%/*} ${P%.txt} ${P#a/} ${P^^}\n", [], {}),
        ("export A=1; readonly B=$A$A; A+=2; torchrun $A $B\n", [], {}),
        ('CMD="torchrun a b"; $CMD c; eval "$CMD \'d e\'"\n', [], {}),
        ("srun -n 2 bash -c true; bash -c \"torchrun $X 'b c'\"\n", [], {"X": "1 2"}),
        ("cat <<EOF > out\ntorchrun not this\nEOF\ntorchrun a > log 2>&1 < /dev/null\n", [], {}),
        ("true || torchrun a; false || torchrun b; true && torchrun c; ! false && torchrun d\n", [], {}),
        ("A=1 torchrun $A; (B=2; torchrun ${B}); { torchrun x; }\n", [], {"A": "0"}),
        ("if ((2 > 1)); then torchrun a; fi\nexit 0\ntorchrun b\n", [], {}),
        (': "${X:=5}"; torchrun $X ${Y:=6} $Y\n', [], {}),
        ("torchrun a | tee log\npython b &\nwait\n", [], {}),
    ],
)
def test_as_bash_does_it(tmp_path, script, arguments, environment):
    expected = what_bash_starts(tmp_path, script, *arguments, **environment)
    started, unknown = commands_of(script, arguments, environment)
    ours = [list(one.words) for one in started if one.words[0] in ("torchrun", "python", "srun")]
    # bash -c under a stub of srun runs nothing.
    ours = [words for words in ours if words[:3] != ["srun", "-n", "2"]]
    expected = [words for words in expected if words[0] != "srun"]
    assert ours == expected and expected
    assert all(one.certain for one in started)


@pytest.mark.parametrize(
    ("script", "known"),
    [
        ("L=2; (L=5); torchrun $L", True),
        ("L=2; (exit 1); L=3 & torchrun $L; wait", True),
        ("L=2; echo 5 | L=5; torchrun $L", True),
        ("L=2; f() { local L=9 M; M=3; }; f; torchrun $L ${M:-none}", True),
        ("L=2; f() { declare L=9; K=4; }; f; torchrun $L $K", True),
        ("L=2; let L=7; torchrun $L", True),
        ("L=2; ((L=7)); ((L++)); torchrun $L", True),
        ("L=2; ((L *= 3 + 1)); torchrun $L $((-7 / 2)) $((-7 % 2))", True),
        ("L=2; K=$((L++)); torchrun $L $K", False),
        ("L=2; printf -v L %d 6; torchrun $L", False),
        ("L=2; : $((L=9)); torchrun $L", True),
        ("L=2; : $((L=9, L+1)); torchrun $L", False),
        ("declare -i L=2+3; L=3*4; torchrun $L", True),
        ("declare -u L=abc; torchrun $L", False),
        ('if [[ abc == "a*" ]]; then torchrun 1; else torchrun 2; fi', True),
        ("if [[ abc == a* && abc != 'a*' ]]; then torchrun 1; else torchrun 2; fi", True),
        ('if [ abc = "a*" ]; then torchrun 1; else torchrun 2; fi', True),
        ("case abc in 'a*') torchrun 1;; a*) torchrun 2;; esac", True),
        ("A=(1 2 3); unset A[0]; torchrun x ${A[0]}", False),
        ('A=(1 2 3); unset "A[0]"; torchrun "${A[@]}"', False),
        ("A=([1]=a [0]=b); torchrun ${A[@]}", False),
        ("torchrun {1..3} {2..-1} a{b,c}d '{1..2}' \"{1,2}\"", True),
        ("for i in {1..3}; do torchrun $i; done", True),
        ("torchrun {01..03}", False),
        ("if cat x | grep -q H100; then TP=8; else TP=1; fi; torchrun $TP", False),
        ("if cat x | grep -q H100; then TP=8; else TP=8; fi; torchrun $TP", True),
        ("if ! ls x; then TP=8; fi; torchrun ${TP:-1}", False),
        ("TP=1; grep -q x y && TP=8; torchrun $TP", False),
        ("TP=1; grep -q x y || TP=8; torchrun $TP", False),
        ("L=1; f() { ls x || return 0; L=2; }; f; torchrun $L", False),
        ("L=1; mkdir -p x && torchrun $L", True),
        ("L=1; for i in 1 2 3; do ls /x && break; L=$i; done; torchrun $L", False),
        ("L=1; for i in 1 2; do L=5; ls / && break; L=1; done; torchrun $L", False),
        ("L=1; f() { ls / && return; L=2; }; f; torchrun $L", False),
        ("i=0; while ((i++ < 3)); do :; done; torchrun $i", False),
        (
            "L=1; i=0; while [ $i -lt 3 ]; do if [ $i = 0 ]; then L=1; else L=2; fi; i=$((i+1)); done\n"
            "torchrun $L",
            False,
        ),
        ("f() { return 1; }; f && L=2; torchrun ${L:-1}", True),
        ("set -- a b; if ls /x; then shift; fi; torchrun $1", False),
    ],
)
def test_what_is_set_is_as_in_bash_or_unknown(tmp_path, script, known):
    expected = what_bash_starts(tmp_path, script)
    started, _ = commands_of(script, [], {})
    ours = [["torchrun", *one.words[1:]] for one in started if one.words[0] == "torchrun"]
    assert any(is_unknown(word) for words in ours for word in words) is not known
    assert not known or (ours == expected and expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("smoke", ["0", "1"])
def test_the_recipes_are_read_as_bash_runs_them(tmp_path, recipe, smoke):
    text = (ROOT / "examples/megatron" / recipe).read_text()
    environment = {"CPU_SMOKE": smoke, "DATA_PATH": "my/data", "TOKENIZER_MODEL": "my tokenizer"}
    [expected] = what_bash_starts(tmp_path, text, **environment)
    found = launch_in_script(ROOT / "examples/megatron" / recipe, [], environment)
    assert list(found.arguments) == expected[-len(found.arguments) :]
    rest = expected[: -len(found.arguments)]
    assert rest[-1] == ("pretrain" if smoke == "1" else "Megatron-LM/pretrain_gpt.py")
    assert "--scalevec-strategy" in found.arguments and found.notes == ()


def found_in(tmp_path, script, *arguments, **environment):
    path = tmp_path / "train.sh"
    path.write_text(script)
    return launch_in_script(path, arguments, environment)


@pytest.mark.parametrize(
    ("script", "world_size"),
    [
        (f"torchrun --nproc-per-node 8 pretrain_gpt.py {MINE}", 8),
        (f"torchrun --nproc_per_node=4 --nnodes=2 -m megatron_scalevec launch p.py {MINE}", 8),
        (f"python -m torch.distributed.run --nproc-per-node 4 p.py {MINE}", 4),
        (f"torchrun --nproc-per-node gpu p.py {MINE}", None),
        (
            "#SBATCH --nodes=4 --gpus-per-node=8\n"
            f"srun torchrun --nnodes $SLURM_NNODES --nproc-per-node gpu p.py {MINE}",
            32,
        ),
        (f"#SBATCH -N 2\n#SBATCH --ntasks-per-node=8\nsrun python -u p.py {MINE}", 16),
        (f"#SBATCH --nodes 2\nsrun --ntasks 6 python p.py {MINE}", 6),
        (f"#SBATCH --nodes=2\nsrun bash -c 'torchrun --nnodes 2 --nproc-per-node 3 p.py {MINE}'", 6),
        (f"python p.py {MINE}", None),
        (f"scalevec pretrain {MINE}", None),
    ],
)
def test_number_of_ranks(tmp_path, script, world_size):
    found = found_in(tmp_path, script)
    assert found.world_size == world_size
    assert found.arguments == tuple(MINE.split())


def test_what_only_the_cluster_knows_is_let_through_where_it_does_not_matter(tmp_path):
    found = found_in(tmp_path, f'torchrun p.py {MINE} --save "$(date +%F)/x" --data-path 0.5 $A 0.5 $B')
    assert found.arguments[-6:] == ("<$(date +%F)>/x", "--data-path", "0.5", "<$A>", "0.5", "<$B>")
    assert len(found.notes) == 3 and "line 1: $A is not set here" in found.notes[1]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "starts no Megatron run"),
        (f"echo torchrun p.py {MINE}", "starts no Megatron run"),
        (f"torchrun p.py {MINE}\ntorchrun p.py {MINE}", "starts 2 runs (lines 1, 2)"),
        (
            "torchrun p.py --hidden-size $H",
            "line 1: the value of --hidden-size is not known here (line 1: $H is not",
        ),
        (f"torchrun p.py {MINE} $(cat args)", "is not known here (line 1: $(cat args)"),
        (f"torchrun p.py {MINE} --swiglu $EXTRA", "$EXTRA is not set here"),
        (
            f"if [ -f x ]; then torchrun p.py {MINE}; fi",
            "whether this run starts depends on something else (line 1",
        ),
        (
            "if [ -f x ]; then L=2; fi\ntorchrun p.py --hidden-size 8 --num-layers ${L:-4}",
            "$L is set under a condition",
        ),
        ("A=(1 2\n", "line 2: the array A that is never closed, which is not understood here"),
        ('torchrun "p.py\n', 'train.sh, line 2: a " that is never closed'),
        ("f() { f; }; f", "calls itself too often"),
        ("A=$'x\\ty'\n", "quoting"),
    ],
)
def test_refusals(tmp_path, script, message):
    with pytest.raises(ScaleVecError) as caught:
        found_in(tmp_path, script)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_is_executed(tmp_path):
    """Every way in which bash would start something."""
    mark = tmp_path / "mark"
    script = f"""
    touch {mark}; $(touch {mark}); `touch {mark}`; eval "touch {mark}"; bash -c 'touch {mark}'
    X=$(touch {mark}); A=($(touch {mark})); echo "${{Y:-$(touch {mark})}}" > {mark}; : $((`touch {mark}`))
    python - <<-END > {mark}
    open("{mark}", "w")
\tEND
    source {mark}; . {mark}; [ -n "$(touch {mark})" ] && touch {mark}; trap 'touch {mark}' EXIT
    torchrun p.py {MINE}
    """
    assert found_in(tmp_path, script).arguments == tuple(MINE.split())
    assert not mark.exists()


def test_a_command_line_given_as_words():
    words = ["torchrun", "--nproc-per-node", "2", "-m", "megatron_scalevec", "launch", "p.py", *MINE.split()]
    assert launch_in_command(words) == launch_in_command(words[:3] + words[6:])
    assert launch_in_command(words).world_size == 2
    assert launch_in_command(["launch", "p.py", "--a"]).arguments == ("--a",)
    assert launch_in_command(MINE.split()).script == ""


def test_unknown_values_keep_their_reasons():
    started, unknown = commands_of("A=$(hostname)\ntorchrun $A:1 $A", [], {})
    assert [is_unknown(word) for word in started[0].words] == [False, True, True]
    assert [readable(word, unknown) for word in started[0].words[1:]] == ["<$(hostname)>:1", "<$(hostname)>"]
    assert json.dumps(unknown) == '["line 1: $(hostname) is known only where the script runs"]'
