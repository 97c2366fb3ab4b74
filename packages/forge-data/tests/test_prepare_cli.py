"""forge-data as a user types it, with the extras `cli` and `tokenizers` installed."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.lane("test")

pytest.importorskip("tyro")
library = pytest.importorskip("tokenizers")

from forge_data import InvalidData, TokenFiles, load_tokenizer  # noqa: E402
from forge_data.cli import main  # noqa: E402
from forge_data.commands import run  # noqa: E402
from forge_testing.problems import rejects  # noqa: E402


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the cat sat on mat {i}\n" for i in range(20)))
    return path


@pytest.fixture
def words(tmp_path):
    names = ["<|endoftext|>", "<unk>", "the", "cat", "sat", "on", "mat"]
    tokenizer = library.Tokenizer(
        library.models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(names[:2])
    path = tmp_path / "words.json"
    tokenizer.save(str(path))
    return path


def forge_data(*arguments):
    return main([str(a) for a in arguments])


def test_prepare_inspect_verify(text, tmp_path, capsys):
    out = tmp_path / "tokens"
    options = ("--document", "line", "--validation_every", "5")
    assert forge_data("prepare", text, "--output", out, *options) == 0
    printed = capsys.readouterr()
    assert "validation: 86 tokens in 4 documents" in printed.out
    assert [line.split()[0] for line in printed.err.splitlines()] == ["read", "merged"]
    assert forge_data("inspect", out) == 0
    assert "the cat sat on mat 4" in capsys.readouterr().out
    assert forge_data("verify", out) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 430 tokens, ")


def test_F50_documents_end_with_the_tokenizers_end_token_though_its_id_is_0(text, words, tmp_path):
    out = tmp_path / "tokens"
    assert (
        forge_data("prepare", text, "--output", out, "--tokenizer", words, "--document", "line")
        == 0
    )
    source = TokenFiles(out)
    assert source.read(0, 8).tolist() == [2, 3, 4, 5, 6, 1, 0, 2]
    assert (source.vocab_size, source.num_documents) == (7, 20)
    words.unlink()  # the folder has its own copy
    tokenizer = load_tokenizer(source.tokenizer)
    assert tokenizer.encode("cat on mat") == [3, 5, 6]
    assert json.loads((out / "tokens.json").read_text())["tokenizer"]["path"] == "tokenizer.json"
    assert forge_data("verify", out) == 0


def test_a_json_tokenizer_gets_complete_documents(words, tmp_path, monkeypatch):
    from forge_data.prepare import read

    (tmp_path / "a.txt").write_text("the cat sat")
    monkeypatch.setattr(read, "SLICE", 2)
    assert (
        forge_data("prepare", tmp_path / "a.txt", "--output", tmp_path / "o", "--tokenizer", words)
        == 0
    )
    assert TokenFiles(tmp_path / "o").read(0, 4).tolist() == [2, 3, 4, 0]


def test_F142_and_F143_begin_and_end_tokens_are_named_and_may_be_chosen(
    text, words, tmp_path, capsys
):
    tokenizer = library.Tokenizer.from_file(str(words))
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 1)]
    )
    tokenizer.save(str(words))
    found = {}
    for number, chosen in enumerate([[], ["--bos", "none"], ["--bos", "mat"], ["--eos", "none"]]):
        out = tmp_path / str(number)
        options = ("--tokenizer", words, "--document", "line")
        assert forge_data("prepare", text, "--output", out, *options, *chosen) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if "begin with" in line]
        assert forge_data("inspect", out) == 0
        said += [line for line in capsys.readouterr().out.splitlines() if "begin with" in line]
        found[" ".join(chosen)] = (
            TokenFiles(out).read(0, 9).tolist(),
            [line.split("begin with ")[1].split()[0] for line in said],
        )
    assert found == {
        "": ([1, 2, 3, 4, 5, 6, 1, 0, 1], ["<unk>", "<unk>"]),
        "--bos none": ([2, 3, 4, 5, 6, 1, 0, 2, 3], ["no", "no"]),
        "--bos mat": ([6, 2, 3, 4, 5, 6, 1, 0, 6], ["mat", "mat"]),
        "--eos none": ([1, 2, 3, 4, 5, 6, 1, 1, 2], ["<unk>", "<unk>"]),
    }


def test_another_end_token_may_be_named(text, words, tmp_path):
    out = tmp_path / "o"
    assert forge_data("prepare", text, "--output", out, "--tokenizer", words, "--eos", "mat") == 0
    assert TokenFiles(out).read(0, TokenFiles(out).num_tokens)[-1] == 6


def test_shards_merge_statistics_and_duplicates(text, tmp_path, capsys):
    out = tmp_path / "tokens"
    text.write_text(text.read_text() * 2)
    options = ("--document", "line", "--deduplicate", "--validation_fraction", "0.3")
    for shard in ("1/2", "0/2"):
        assert forge_data("prepare", text, "--output", out, *options, "--shard", shard) == 0
    printed = capsys.readouterr().out
    assert "shard 0/2: " in printed
    assert "shard 1/2: " in printed
    assert f"wrote {out}.parts" in printed
    assert forge_data("merge", out) == 0
    printed = capsys.readouterr().out
    assert "duplicates dropped: 20 documents, 430 tokens" in printed
    assert f"wrote {out}\n" in printed
    assert {p.name for p in out.iterdir()} == {"train", "validation", "statistics.json"}
    assert forge_data("inspect", out) == 0
    printed = capsys.readouterr().out
    assert "duplicates dropped: 20 documents" in printed
    assert " 0% 21, 1% 21" in printed
    assert forge_data("merge", out) == 65
    assert f"{out}.parts: " in capsys.readouterr().err


def test_on_a_terminal_there_is_a_bar_with_counts(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert forge_data("prepare", text, "--output", tmp_path / "o", "--document", "line") == 0
    printed = capsys.readouterr().err
    assert "merge" in printed
    assert "20 documents, " in printed
    assert "tokens/s" in printed


BAD = {
    "bad shard": (78, ["prepare", "text.txt", "--output", "o", "--shard", "1"], "shard '1' "),
    "shard too high": (
        78,
        ["prepare", "text.txt", "--output", "o", "--shard", "8/8"],
        "shard (8, 8) ",
    ),
    "merge nothing": (65, ["merge", "o"], "o.parts: "),
    "missing input": (65, ["prepare", "nowhere.txt", "--output", "o"], "inputs 'nowhere.txt' "),
    "a variable that is empty": (78, ["prepare", "", "--output", "o"], "inputs '' "),
    "no input": (78, ["prepare", "--output", "o"], ": inputs "),
    "unknown flag": (78, ["prepare", "text.txt", "--outptu", "o"], "outptu"),
    "no output": (78, ["prepare", "text.txt"], "output"),
    "wrong type": (
        78,
        ["prepare", "text.txt", "--output", "o", "--validation_every", "1.9"],
        "1.9",
    ),
    "bad kind": (78, ["prepare", "text.txt", "--output", "o", "--document", "page"], "page"),
    "exists": (78, ["prepare", "text.txt", "--output", "there"], "output 'there' "),
    "bad eos": (78, ["prepare", "text.txt", "--output", "o", "--eos", "x"], "eos 'x' "),
    "bad tokenizer": (
        65,
        ["prepare", "text.txt", "--output", "o", "--tokenizer", "text.txt"],
        "tokenizer 'text.txt' ",
    ),
    "unwritable": (78, ["prepare", "text.txt", "--output", "text.txt/o"], "text.txt/o' "),
    "inspect a file": (65, ["inspect", "text.txt"], "path 'text.txt' "),
    "verify a file": (65, ["verify", "text.txt"], "path 'text.txt' "),
    "inspect nothing": (65, ["inspect", "nowhere"], "path 'nowhere' "),
    "verify nothing": (65, ["verify", "nowhere"], "path 'nowhere' "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_message_and_a_code(name, text, tmp_path, monkeypatch, capsys):
    code, arguments, message = BAD[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main(arguments) == code
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert {p.name for p in tmp_path.iterdir()} == {"text.txt", "there"}


def test_what_a_command_rejects_itself(text):
    with rejects("shard", "1", "format"):
        run(["prepare", str(text), "--output", "o", "--shard", "1"])
    with rejects("path", str(text), "not_a_folder", InvalidData):
        run(["inspect", str(text)])
    with rejects("path", f"{text}.none", "not_found", InvalidData):
        run(["verify", f"{text}.none"])


def test_help_lists_every_option(capsys):
    assert main(["prepare", "--help"]) == 0
    printed = capsys.readouterr().out
    for option in (
        "output",
        "tokenizer",
        "eos",
        "validation_every",
        "document",
        "text_field",
        "overwrite",
        "workers",
        "shard",
        "deduplicate",
        "validation_fraction",
    ):
        assert f"--{option}" in printed


def test_without_the_extra_the_error_names_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "forge_data.commands", raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["verify", "x"]) == 78
    assert "'forge-data[cli]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    assert forge_data("prepare", tmp_path / "a.txt", "--output", tmp_path / "o") == 0
    script = "import sys; from forge_data.cli import main; sys.stdin.read(1); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "inspect", str(tmp_path / "o")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        process.stdin.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")


@pytest.mark.slow
def test_the_command_as_a_process(text, tmp_path):
    command = [sys.executable, "-m", "forge_data.cli", "verify", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 65
    assert done.stderr.count("\n") == 1
