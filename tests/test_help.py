"""What `kvlab --help` and `kvlab VERB --help` say, that examples in them parse, and what the shell completes."""
import os
import re
import shlex
import subprocess
import sys
import time

import pytest
import typer

from kvlab import cli
from kvlab.catalog.gpus import gpu
from kvlab.verbs import _help
from kvlab.verbs._complete import NAMES, names, words

ROOT = typer.main.get_command(cli.app)
VERBS = list(ROOT.commands)


def shown(*arguments):
    """The help of a verb (or of all), and its lines."""
    context = ROOT.make_context("kvlab", [], resilient_parsing=True, max_content_width=100, terminal_width=100)
    if not arguments:
        return ROOT.get_help(context)
    verb = ROOT.commands[arguments[0]]
    return verb.get_help(typer.Context(verb, info_name=arguments[0], parent=context, terminal_width=100))


def test_every_verb_stands_once_in_one_group_with_its_whole_first_sentence_on_one_line():
    listed = [name for group in _help.GROUPS.values() for name in group]
    assert sorted(listed) == sorted(VERBS)
    text = shown()
    assert "Others:" not in text and max(map(len, text.splitlines())) <= 100
    for name in VERBS:
        first = ROOT.commands[name].help.partition("\n")[0]
        assert first.endswith(".") and re.search(rf"  {name} +{re.escape(first)}\n", text), name


@pytest.mark.parametrize("name", VERBS)
def test_help_of_a_verb_says_what_each_option_is_and_fits_the_page(name):
    text = shown(name)
    assert max(map(len, text.splitlines())) <= 100 and "\nExamples:\n" in text
    for one in ROOT.commands[name].params:
        if one.name != "help":
            assert one.help.endswith("."), (name, one.name, one.help)
        if one.param_type_name == "option":
            written = (one.opts or one.secondary_opts)[-1].strip() or one.secondary_opts[-1]
            assert len(re.findall(rf"^  {written}\b", text, re.MULTILINE)) == 1, (name, written)


@pytest.mark.parametrize("name", VERBS)
def test_groups_name_options_that_are_there_and_examples_parse(name):
    verb = ROOT.commands[name]
    grouped = [one for group in verb.GROUPS.values() for one in group]
    assert len(grouped) == len(set(grouped)) and set(grouped) <= {one.name for one in verb.params} | {"help"}
    for example in verb.EXAMPLES:
        program, said, *arguments = shlex.split(example)
        assert (program, said) == ("kvlab", name)
        given = verb.make_context(name, arguments).params           # refuses what is no option, or is missing
        assert given.keys() == {one.name for one in verb.params if one.name != "help"}
        for value, known in ((given.get("model"), NAMES["models"]), (given.get("study"), NAMES["studies"])):
            assert value is None or value == "smollm2-135m" or value in known(), (example, value)


def completed(line, shell="bash"):
    """What a shell is told to complete at the end of the line, and how long that took."""
    env = dict(os.environ, _KVLAB_COMPLETE=f"complete_{shell}", COMP_WORDS=line, COMP_CWORD=str(line.count(" ")),
               _TYPER_COMPLETE_ARGS=line, _TYPER_COMPLETE_FISH_ACTION="get-args")
    code = "import sys; sys.argv = ['kvlab']; from kvlab.cli import main; main()"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split("\n")[:-1], time.perf_counter() - began


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_a_shell_completes_the_name_of_a_study(shell):
    (said,), _ = completed("kvlab run mem", shell)
    assert said in ("memory_wall", """_arguments '*: :(("memory_wall"))'""")


@pytest.mark.parametrize("line, some", [
    ("kvlab va", ["validate-gpu"]), ("kvlab claims C0", ["C01", "C09"]),
    ("kvlab score m --kv-format int8/token,fp1", ["int8/token,fp16"])])
def test_a_shell_completes_verbs_claims_and_the_last_of_several(line, some):
    said, _ = completed(line)
    assert set(some) <= set(said) and all(one.startswith(line.split(" ")[-1]) for one in said)


def test_no_completion_imports_what_is_slow_to_import():
    code = ("import sys; from kvlab.verbs._complete import NAMES; import kvlab.cli; "
            "assert all(list(some()) for some in NAMES.values()); "
            "print({'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_names_of_a_list_are_those_of_its_registry():
    from kvlab.attention import variants
    from kvlab.figures import figures
    from kvlab.probes import probes
    from kvlab.studies._run import studies
    for what, registry in (("variants", variants), ("figures", figures), ("probes", probes), ("studies", studies)):
        assert names(what)("") == list(registry) != []
    assert words("cpu", "cuda")("cu") == ["cuda"] and words("png", "pdf")("png,p") == ["png,png", "png,pdf"]
    gpus = names("gpus")("")
    assert len(gpus) > 30 and all(" " not in name and gpu(name).name.replace(" ", "-") == name for name in gpus)


def test_the_script_for_the_shell_is_shown():
    env = dict(os.environ, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    code = ("import sys; sys.argv = ['kvlab', '--show-completion', 'bash']; from kvlab.cli import main; main()")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "_KVLAB_COMPLETE=complete_bash" in done.stdout and "complete -o default -F" in done.stdout
