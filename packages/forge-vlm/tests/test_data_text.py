"""Text of conversations: templates, special tokens, weights of messages, documents."""

import base64
import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge_testing.problems import ANY, rejects

pytestmark = pytest.mark.lane("test")

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
tokenizers = pytest.importorskip("tokenizers")

from forge_vlm.data import InvalidSample, Prompts, VisionChatSource, check_labels  # noqa: E402
from forge_vlm.data.formats import open_records  # noqa: E402
from forge_vlm.data.index import sample_fingerprint  # noqa: E402
from forge_vlm.data.prepare import prepare  # noqa: E402
from forge_vlm.data.prepared import MANIFEST, Prepared  # noqa: E402
from forge_vlm.data.records import EncodedImage, Span  # noqa: E402
from forge_vlm.data.source import open_source, options_of  # noqa: E402

SPECIALS = ["<unk>", "<s>", "</s>", "<image>", "<|im_start|>", "<|im_end|>"]
OPTIONS = dict(resolution={"fixed": {"size": 8}}, tokens_per_tile=3)
SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. "  # prose: published
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)


def png(color=(9, 9, 9)):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A byte-level BPE with merges, as those of most models."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [SYSTEM, " USER: what is this? ASSISTANT: a red square", "user\nassistant\nsystem\n"]
    tokenizer.train_from_iterator(text * 20, trainer)
    path = str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    tokenizer.save(path)
    return tokenizer, path


def talks(folder, messages, **options):
    image = {"type": "image", "base64": base64.b64encode(png()).decode()}
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = [
                image if part is None else {"type": "text", "text": part}
                for part in message["content"]
            ]
    (folder / "t.jsonl").write_text(json.dumps({"messages": messages}))
    return VisionChatSource(folder / "t.jsonl", **{**OPTIONS, **options})


def turns():
    return [
        {"role": "user", "content": [None, "\nwhat is this?"]},
        {"role": "assistant", "content": "a red square"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "é yes"},
    ]


VICUNA = (
    f"{SYSTEM} USER: <image>\nwhat is this? ASSISTANT: a red square</s>"
    "USER: sure? ASSISTANT: é yes</s>"
)
CHATML = (
    "<|im_start|>user\n<image>\nwhat is this?<|im_end|>\n<|im_start|>assistant\na red square<|im_end|>\n"
    "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\né yes<|im_end|>\n"
)


@pytest.mark.parametrize(
    ("template", "text", "end"),
    [
        ("vicuna", f"<s>{VICUNA}", "</s>"),
        ("chatml", f"<s>{CHATML}", "<|im_end|>"),
        ("plain", "<s><image>a red square</s>é yes</s>", "</s>"),
    ],
)
def test_ids_are_those_of_the_full_text(template, text, end, made, tmp_path):
    """What a model's own processor gives: one text, encoded once, the mark repeated for each token of the picture."""
    tokenizer, path = made
    sample = talks(tmp_path, turns(), tokenizer=path, template=template, bos="<s>").sample(0)
    wanted = tokenizer.encode(text).ids
    place = wanted.index(3)
    assert sample.tokens.tolist() == [*wanted[:place], 3, 3, 3, *wanted[place + 1 :]]
    learnt = sample.labels[sample.labels >= 0].tolist()
    answers = " a red square{} é yes{}" if template == "vicuna" else "a red square{}é yes{}"
    assert tokenizer.decode(learnt, skip_special_tokens=False) == answers.format(end, end)
    if template == "plain":
        assert sample.labels[3] >= 0  # the picture's last token predicts the first of the answer


@pytest.mark.parametrize("template", ["vicuna", "chatml", "plain"])
@pytest.mark.parametrize("mark", ["<image>", "</s>", "<|im_end|>", "<|im_start|>system\n"])
def test_marks_in_text_are_text(template, mark, made, tmp_path):
    """Neither questions nor answers can hold a picture, an end, or another role."""
    tokenizer, path = made
    options = {"tokenizer": path, "template": template}
    clean = talks(tmp_path, turns(), **options).sample(0)
    messages = turns()
    messages[0]["content"][1] += mark
    messages[1]["content"] = f"a {mark} b"
    sample = talks(tmp_path, messages, **options).sample(0)
    for special in range(len(SPECIALS)):
        assert (sample.tokens == special).sum() == (clean.tokens == special).sum()
    assert mark in tokenizer.decode(
        [i for i in sample.labels.tolist() if i >= 0], skip_special_tokens=True
    )


def test_a_token_that_any_text_becomes_is_rejected(tmp_path, made):
    content = json.loads(Path(made[1]).read_text())
    for token in content["added_tokens"]:
        token["special"] = token["content"] != "<image>"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    messages = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "a"}]
    with rejects("text", "<image>", "special", InvalidSample, where="record 0"):
        talks(tmp_path, messages, tokenizer=str(other), template="vicuna")
    sample = talks(tmp_path, turns(), tokenizer=str(other), template="vicuna").sample(0)
    assert (sample.tokens == 3).sum() == 3


def test_F172_a_text_that_a_tokenizer_without_unknown_token_lacks_is_named(tmp_path, made):
    content = json.loads(Path(made[1]).read_text())
    words = {token["content"]: token["id"] for token in content["added_tokens"]}
    content["model"] = {"type": "WordLevel", "vocab": words, "unk_token": "?"}
    (tmp_path / "other.json").write_text(json.dumps(content))
    with rejects("text", ANY, "encode", InvalidSample):
        talks(tmp_path, turns(), tokenizer=str(tmp_path / "other.json"), template="vicuna").sample(
            0
        )


def test_a_name_that_the_tokenizer_does_not_have(made, tmp_path):
    for options in ({"image": "<picture>"}, {"eos": "<end>"}, {"bos": "<begin>"}):
        with rejects("tokenizer", made[1], "no_token") as caught:
            talks(tmp_path, turns(), tokenizer=made[1], **options)
        assert next(iter(options.values())) in caught.value.problems[0].rule


@pytest.fixture
def begun(made, tmp_path):
    """The folder of a tokenizer whose post-processor writes <s> before a text, as LLaVA's."""
    (tmp_path / "begun").mkdir()
    tokenizer = tokenizers.Tokenizer.from_file(made[1])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(tmp_path / "begun/tokenizer.json"))
    return tokenizer, tmp_path / "begun"


@pytest.mark.parametrize(("template", "text"), [("vicuna", VICUNA), ("chatml", CHATML)])
def test_F142_a_sample_begins_as_the_tokenizer_begins_a_text(template, text, begun, tmp_path):
    tokenizer, folder = begun
    options = {"tokenizer": str(folder), "template": template, "tokens_per_tile": 1}
    source = talks(tmp_path, turns(), **options)
    assert source.sample(0).tokens.tolist() == tokenizer.encode(text).ids
    assert source.tokenizer["bos"] == ["<s>"]
    none = talks(tmp_path, turns(), **options, bos="none")
    assert none.sample(0).tokens.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    assert "bos" not in none.tokenizer
    assert none.stream(64, 0).fingerprint() != source.stream(64, 0).fingerprint()
    prompts = Prompts(**options)
    asked = prompts(open_records("chat", tmp_path / "t.jsonl", asks=True)[0])
    whole = tokenizer.encode(text).ids
    assert asked.tokens.tolist() == whole[: len(asked.tokens)]


def test_F142_a_prepared_folder_keeps_how_its_samples_begin(begun, tmp_path):
    """Also one that was written before samples began as the tokenizer says: its questions have no first token."""
    options = {"tokenizer": str(begun[1]), "tokens_per_tile": 1}
    source = talks(tmp_path, turns(), **options)
    given = {**OPTIONS, **options}
    prepare(tmp_path / "t.jsonl", tmp_path / "set", options_of(str(tmp_path), given))
    found = Prepared(tmp_path / "set")
    assert (found.sample(0).tokens == source.sample(0).tokens).all()
    assert found.stream(64, 0).fingerprint() == source.stream(64, 0).fingerprint()
    assert found.about["given"]["bos"] is None
    about = json.loads((tmp_path / "set" / MANIFEST).read_text())
    del about["tokenizer"]["bos"], about["options"]["begin"]
    (tmp_path / "set" / MANIFEST).write_text(json.dumps(about))
    before = Prepared(tmp_path / "set")
    assert before.about["given"]["bos"] == "none"
    unasked = talks(tmp_path, turns(), **options, bos="none")
    assert "begin" not in unasked.reader.identity


@pytest.mark.parametrize("bos", ["", "none"])
def test_F142_without_a_first_token_a_source_is_that_of_before(bos, begun, tmp_path):
    """A run that began before samples began as the tokenizer says goes on: its fingerprint had no bos, and no begin."""
    options = {"tokenizer": str(begun[1]), "tokens_per_tile": 1}
    begins = talks(tmp_path, turns(), **options).reader.identity
    before = {key: value for key, value in begins.items() if key != "begin"}
    source = talks(tmp_path, turns(), **options, bos=bos)
    assert before["bos"] is None
    assert source.fingerprint() == sample_fingerprint(before, source.counted, source.content)
    assert talks(tmp_path, turns(), bos="").reader.identity["bos"] == ""  # of bytes, as ever


@pytest.mark.parametrize("writes", ["", "{{ bos_token }}"])
def test_F142_a_template_that_writes_the_first_token_gets_no_second(writes, begun, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer, folder = begun
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>"
    )
    saved.chat_template = writes + (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
        "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
        "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    saved.save_pretrained(str(folder))
    options = {"tokenizer": str(folder), "template": "tokenizer", "tokens_per_tile": 1}
    text = (
        "<s>[user]<image>\nwhat is this?[assistant]a red square</s>[user]sure?[assistant]é yes</s>"
    )
    wanted = tokenizer.encode(text, add_special_tokens=False).ids  # as processors of transformers
    assert talks(tmp_path, turns(), **options).sample(0).tokens.tolist() == wanted


CHATML_OF = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)
NEXT_ROLE = (
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "end", "wanted"),
    [
        (NEXT_ROLE, "<|im_start|>", "a red square<|im_start|>é yes"),
        (CHATML_OF, "<|im_end|>", "a red square<|im_end|>é yes<|im_end|>"),
    ],
)
def test_F202_the_special_token_after_an_answer_is_its_end(
    template, end, wanted, made, tmp_path, capsys
):
    """Whatever the tokenizer's own end is; GLM ends an answer by the mark of the next role, and the last one by nothing."""
    transformers = pytest.importorskip("transformers")
    saved = transformers.PreTrainedTokenizerFast(tokenizer_file=made[1], eos_token="</s>")
    saved.chat_template = template
    saved.save_pretrained(str(tmp_path / "model"))
    options = {"tokenizer": str(tmp_path / "model"), "template": "tokenizer"}
    source = talks(tmp_path, turns(), **options)
    learnt = [i for i in source.sample(0).labels.tolist() if i >= 0]
    assert made[0].decode(learnt, skip_special_tokens=False) == wanted
    assert source.tokenizer["eos"] == end
    told = [line for line in capsys.readouterr().err.splitlines() if "end token" in line]
    assert len(told) == (template is NEXT_ROLE)
    with rejects("eos", "</s>", "end", InvalidSample):
        talks(tmp_path, turns(), **options, eos="</s>")


def test_F143_the_end_of_an_answer_is_that_of_the_tokenizer_and_special(made, tmp_path):
    """</s> of Gemma is a tag of HTML; its end is <eos>."""
    content = json.loads(Path(made[1]).read_text().replace("<|im_end|>", "<eos>"))
    for token in content["added_tokens"]:
        token["special"] = token["content"] != "</s>"
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    options = {"tokenizer": str(path), "template": "plain"}
    source = talks(tmp_path, turns(), **options)
    assert source.sample(0).labels[-2] == SPECIALS.index("<|im_end|>")
    assert source.tokenizer["eos"] == "<eos>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    assert talks(tmp_path, turns(), **options).tokenizer["eos"] == "<s>"
    (tmp_path / "tokenizer_config.json").unlink()
    for names, code in ((("</s>", "<eos>"), "several"), ((), "missing")):
        for token in content["added_tokens"]:
            token["special"] = token["content"] in names
        path.write_text(json.dumps(content))
        with rejects("eos", code=code):
            talks(tmp_path, turns(), **options)
        assert talks(tmp_path, turns(), **options, eos="</s>").tokenizer["eos"] == "</s>"


def test_a_message_of_weight_0_is_not_trained(tmp_path):
    messages = turns()
    messages[1]["weight"], messages[3]["weight"] = 0, 0.5
    source = talks(tmp_path, messages)
    sample = source.sample(0)
    learnt = sample.labels >= 0
    assert bytes(sample.labels[learnt].tolist()[:-1]).decode() == "é yes"
    assert set(sample.weights[learnt]) == {0.5}
    assert "weights" in source.stream(300).arrays(np.arange(1))
    assert "weights" not in talks(tmp_path, turns()).stream(300).arrays(np.arange(1))
    messages = turns()
    messages[1]["weight"] = -1
    with rejects("weight", -1, "range", InvalidSample):
        talks(tmp_path, messages)


def test_F68_labels_that_copy_are_rejected(tmp_path):
    """Unshifted labels are the tokens themselves."""
    tokens = np.arange(20)
    with rejects("labels", 20, "unshifted", InvalidSample):
        check_labels(tokens, tokens)
    check_labels(tokens, np.where(tokens < 18, tokens + 1, tokens))
    check_labels(tokens, np.full(20, -100))
    rows = np.stack([tokens, tokens + 1])
    with rejects("labels", 40, "unshifted", InvalidSample):
        check_labels(rows, rows)


def test_F169_answers_of_one_repeated_token_are_learned(tmp_path):
    """The next token is the token itself, and the labels are shifted none the less."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "0" * 99}]
    source = talks(tmp_path, messages)
    sample = source.sample(0)
    learned = sample.labels[sample.labels != -100]
    assert learned.tolist() == [ord("0")] * 99 + [256]
    check_labels(sample.tokens, sample.labels)
    config = SimpleNamespace(path=str(tmp_path / "t.jsonl"))
    stream = open_source(config, **OPTIONS, streaming=True).stream(200)
    assert (stream.arrays(np.arange(1))["labels"] == ord("0")).sum() == 99
    prepare(tmp_path / "t.jsonl", tmp_path / "out", options_of("", OPTIONS))
    assert len(Prepared(tmp_path / "out").lengths) == 1


def test_documents_with_images_among_their_text(tmp_path):
    """Interleaved: all text is learnt, pictures stand where null does, whatever the template."""
    members = {
        "json": json.dumps({"texts": ["one ", None, "two", None, None, "three"]}).encode(),
        "0.png": png((1, 0, 0)),
        "1.png": png((2, 0, 0)),
        "2.png": png((3, 0, 0)),
    }
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for ending, content in members.items():
            member = tarfile.TarInfo(f"d.{ending}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    source = VisionChatSource(tmp_path / "a.tar", format="webdataset", **OPTIONS)
    sample = source.sample(0)
    image = [257] * 3
    assert sample.tokens.tolist() == [*b"one ", *image, *b"two", *image * 2, *b"three", 256]
    learnt = sample.labels[sample.labels >= 0].tolist()
    assert learnt == [*b"ne two", *b"three", 256]
    arrays = source.stream(40).arrays(np.arange(1))
    assert arrays["images"].values[:, 0, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "key", "found", "code"),
    [
        ({"texts": ["a", None]}, "texts", 1, "number"),
        ({"texts": [None]}, "texts", [None], "type"),
        ({"caption": "a"}, "caption", 0, "number"),
        ({"other": "a"}, "caption", 0, "number"),
        ([], "caption", 0, "number"),
    ],
)
def test_wrong_members_of_a_tar_are_named(value, key, found, code, tmp_path):
    write_tar(tmp_path / "a.tar", ["d.json"], json.dumps(value).encode())
    with rejects(key, found, code, InvalidSample, where="a.tar"):
        VisionChatSource(tmp_path / "a.tar", format="webdataset", **OPTIONS)


@pytest.mark.parametrize(
    ("name", "content", "key", "value", "code"),
    [
        ("d.txt", b"\xff", "", ..., "not_utf8"),
        ("d.png", b"a", "", ..., "no_text"),
        ("d.json", b"{", "", ..., "not_json"),
        (
            "d.json",
            b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            *("content", {"type": "image"}, "no_value"),
        ),
    ],
)
def test_wrong_content_of_a_tar_is_named(name, content, key, value, code, tmp_path):
    write_tar(tmp_path / "a.tar", [name], content)
    with rejects(key, value, code, InvalidSample, where="a.tar"):
        VisionChatSource(tmp_path / "a.tar", format="webdataset", **OPTIONS)


def test_a_file_that_has_become_shorter_is_named(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    with rejects("", ..., "truncated", InvalidSample, where=tmp_path / "a"):
        EncodedImage("picture", Span(tmp_path / "a", 1, 3)).read()


def write_tar(path, names, content=b"a"):
    with tarfile.open(path, "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_F133_samples_of_one_name_are_not_one(tmp_path):
    """As of two tars that were joined: the pictures of the first would be lost without a word."""
    write_tar(tmp_path / "a.tar", ["d/x.txt", "d/x.png", "d/x.txt", "d/x.png"])
    with rejects("", "d/x.txt", "duplicate", InvalidSample, where="a.tar"):
        VisionChatSource(tmp_path / "a.tar", format="webdataset", **OPTIONS)


def test_side_files_of_macos_are_left_out(tmp_path):
    write_tar(tmp_path / "a.tar", ["d/._x.txt", "d/x.txt", "._d", "d/._y.txt", "d/y.txt"])
    assert len(open_records("webdataset", tmp_path / "a.tar")) == 2


def test_a_packed_tar_is_rejected(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with rejects("", ..., "bad_tar", InvalidSample, where="a.tar"):
        VisionChatSource(tmp_path / "a.tar", format="webdataset", **OPTIONS)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}"
    "<s><image><unk>{% else %}{{ p.text FILTER }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)


def folder_of(made, folder, template):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=made[1], eos_token="<|im_end|>", additional_special_tokens=SPECIALS
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("cut", ["", "| trim"])
def test_the_template_of_a_tokenizer(cut, made, tmp_path):
    """Ids are those of apply_chat_template, the mark repeated; marks in text are text."""
    own = folder_of(made, tmp_path / "model", TEMPLATE.replace("FILTER", cut))
    options = {"tokenizer": str(tmp_path / "model"), "template": "tokenizer"}
    messages = turns()
    messages[2]["content"] = " sure? "
    rendered = [
        {
            "role": m["role"],
            "content": [
                {"type": "image"} if p is None else {"type": "text", "text": p}
                for p in m["content"]
            ]
            if isinstance(m["content"], list)
            else [{"type": "text", "text": m["content"]}],
        }
        for m in messages
    ]
    wanted = own.apply_chat_template(rendered, return_dict=True)["input_ids"]
    sample = talks(tmp_path, messages, **options).sample(0)
    place = wanted.index(3)
    assert sample.tokens.tolist() == [*wanted[:place], 3, 3, 3, *wanted[place + 1 :]]
    learnt = [i for i in sample.labels.tolist() if i >= 0]
    assert (
        made[0].decode(learnt, skip_special_tokens=False) == "a red square<|im_end|>é yes<|im_end|>"
    )
    messages = turns()
    messages[0]["content"][1] += "<image><|im_end|>"
    marked = talks(tmp_path, messages, **options).sample(0)
    for special in range(len(SPECIALS)):
        assert (marked.tokens == special).sum() == (sample.tokens == special).sum()


@pytest.mark.parametrize(
    ("template", "options", "key", "value", "code"),
    [
        (TEMPLATE.replace("FILTER", "| upper"), {}, "template", ..., "changes_text"),
        (TEMPLATE.replace("FILTER", ""), {"eos": "</s>"}, "eos", "</s>", "end"),
        (
            TEMPLATE.replace("FILTER", "").replace("<image>", ""),
            *({}, "image", "<image>", "missing"),
        ),
        (
            TEMPLATE.replace("FILTER", "").replace("<unk>", "<image>"),
            *({}, "image", "<image>", "too_many"),
        ),
        ("{{ raise_exception('no') }}", {}, "template", ..., "rejects"),
        ("a", {}, "template", ..., "order"),
    ],
)
def test_templates_that_do_not_fit_are_rejected(
    template, options, key, value, code, made, tmp_path
):
    folder_of(made, tmp_path / "model", template)
    options = {"tokenizer": str(tmp_path / "model"), "template": "tokenizer", **options}
    with rejects(key, value, code, InvalidSample, where="record 0"):
        talks(tmp_path, turns(), **options)


def test_a_tokenizer_without_a_template_is_rejected(made, tmp_path):
    folder_of(made, tmp_path / "model", None)
    for tokenizer, code in ((str(tmp_path / "model"), "no_template"), (made[1], "not_found")):
        with rejects("tokenizer", tokenizer, code):
            talks(tmp_path, turns(), tokenizer=tokenizer, template="tokenizer")
