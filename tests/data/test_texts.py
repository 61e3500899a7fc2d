"""Text samples from files to tokens, draws and batches, what a model of each kind is given, messages."""

import json
from zlib import crc32

import datasets
import language
import numpy as np
import pytest
import torch
import transformers
from language import WORDS, jsonl, tokenizer

from featcal.data import places
from featcal.data import texts as text_data
from featcal.data.batches import collate, cut, draw_indices, token_batches
from featcal.data.places import Location, quiet_datasets
from featcal.data.texts import ModelInput, Reader, Sample, TokenizedText, input_of
from featcal.errors import BadData, BadFile, BadSetting
from featcal.models.stored import skeleton

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
CALLS = [{"function": {"name": "find", "arguments": {key: "a"}}} for key in ("x", "y")]
CALLING = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": CALLS}]
PAIRS = [{"input": f"say {word}", "target": word} for word in WORDS]
TEXT, PAIR = ModelInput("text"), ModelInput("pair")
TARGETS = ModelInput("pair", labels=False, start=0)
MASKS = ("attention_mask", "decoder_attention_mask")


def batches(path, takes, size=3, tokens=None, **how):
    rows = text_data.load_text(Location(path), "train")
    reader = Reader(tokenizer(**how), takes, tokens or 64, path.parent)
    return token_batches(rows, range(len(rows)), reader, size, float("inf"))


def ids_of(sample, takes=TEXT, tokens=64, **how):
    return Reader(tokenizer(**how), takes, tokens, "folder").tokens(sample).ids


def test_lines_of_a_text_file_are_samples_and_empty_lines_are_not(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  \ntwo  \nthr\xc3\xa9e")
    samples = list(text_data.load_text(Location(path), "train"))
    assert [sample.text for sample in samples] == ["one", "two  ", "thrée"]
    assert samples[1].origin == f"{path}, line 4"


@pytest.mark.parametrize(
    ("row", "text", "target", "messages"),
    [
        ({"text": "one", "label": 3}, "one", None, None),
        ({"prompt": "one", "completion": "two"}, "one", "two", None),
        ({"input": "one", "target": "two"}, "one", "two", None),
        ({"messages": CHAT, "text": "not this"}, "", None, CHAT),
        ({"messages": None, "text": "one", "prompt": None}, "one", None, None),
        ({"messages": CALLING, "messages.1": "", "tools": CALLS}, "", None, CALLING),
    ],
)
def test_files_hold_texts_pairs_or_chats(tmp_path, caplog, row, text, target, messages):
    jsonl(tmp_path / "train.jsonl", [row, row])
    with quiet_datasets():
        table = datasets.Dataset.from_list([row, row])
        table.to_parquet(tmp_path / "other.parquet")
        table.to_csv(tmp_path / "other.csv")
        table.save_to_disk(tmp_path / "saved")
        datasets.DatasetDict(train=table).save_to_disk(tmp_path / "by_split")
    (tmp_path / "train.json").write_text(json.dumps([row, row]))
    names = "train.jsonl . other.parquet train.json saved by_split other.csv".split()
    for path in (tmp_path / name for name in (names[:-1] if messages else names)):
        sample = text_data.load_text(Location(path), "train")[1]
        assert (sample.text, sample.target, sample.messages) == (text, target, messages)
        assert sample.tools == row.get("tools")
    assert caplog.messages == [f"{tmp_path}: train.jsonl is read, not train.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "fine"}\n{"text": ', "line 2: not JSON"),
        (b'{"text": "fine"}\n{"text": "a", "id": ' + b"9" * 5000 + b"}\n", "line 2: not JSON"),
        (b'{"text": "fine"}\n"only text"\n', r"line 2: is a str, not an object[\s\S]*\.json"),
        (b'{"text": "fine"}\n{"txt": "a", "label": 1}\n', r"line 2: holds txt, label[\s\S]*prompt"),
        (b'{"text": "fine"}\n{"text": 7}\n', r"line 2: 'text' is int[\s\S]*quote numbers"),
        (b'{"text": "fine"}\n{"input": "a", "target": null}\n', r"'target' is None[\s\S]*fill it"),
        (b'{"text": "fine"}\n{"messages": []}\n', "line 2: 'messages' is no list of messages"),
        (b'{"text": "fine"}\n{"messages": [{"role": "user"}]}\n', "line 2: 'messages' is no list"),
        (b'{"text": "fine"}\n{"text": "a \\ud83d"}\n', "line 2: 'text' has half of a surrogate"),
        (b'{"text": "fine"}\n{"text": "\xff"}\n', r"train\.jsonl: cannot be read"),
        (b"\n \n", "holds no text"),
    ],
)
def test_a_line_that_makes_no_sample_is_named(tmp_path, content, said):
    (tmp_path / "train.jsonl").write_bytes(content)
    with pytest.raises(BadData, match=said):
        list(text_data.load_text(Location(tmp_path / "train.jsonl"), "train"))


@pytest.mark.parametrize(
    ("values", "classes", "labels", "names"),
    [
        ([2, 0, 1], None, [2, 0, 1], ["0", "1", "2"]),
        (["no", 0, "!"], None, [2, 1, 0], ["!", "0", "no"]),
        (["no", "yes", "no"], ["yes", "no"], [1, 0, 1], ["yes", "no"]),
        ([0, 3, 1], ["a", "b"], "line 2: its label 3 is none of the classes a, b", None),
        (["no", "maybe"], ["yes", "no"], "line 2: its label 'maybe' is none", None),
        (["10", "2", "0"], None, [2, 1, 0], ["0", "2", "10"]),
        (["9" * 5000, "x"], None, [0, 1], ["9" * 5000, "x"]),
        (["9" * 5000, "x"], ["x", "y"], "none of the classes x, y", None),
        (["1", 0, "no "], ["no", "yes"], [1, 0, 0], ["no", "yes"]),
        ([2, 1, 2], ["1", "2", "3"], "classes do not fit its own: 1, 2.*\\n.* give a word", None),
        (["1", 2], ["1", "2"], "given classes do not fit its own: 2", None),
        ([1, 0], ["10", "20"], [1, 0], ["10", "20"]),
        ([0, 5000], None, "line 2: its label 5000 is none of the classes 0, 1", None),
        ([True, False, 1.0], None, [1, 0, 1], ["0", "1"]),
        (["no", None], None, r"line 2: has no label[\s\S]*--column label=", None),
        ([0, 0.5], None, "line 2: has no label", None),
        (["no", "no"], None, "holds the one label 'no'", None),
    ],
)
def test_labels_are_numbers_of_classes(tmp_path, values, classes, labels, names):
    rows = [{"text": "a", "label": value} for value in values]
    place = Location(jsonl(tmp_path / "test.jsonl", rows))
    if names is None:
        with pytest.raises(BadData, match=labels):
            text_data.load_labelled(place, "test", classes)
        return
    made = text_data.load_labelled(place, "test", classes)
    assert (made.labels, [*made.classes], made.occurring) == (labels, names, classes is None)


def test_of_a_csv_only_empty_cells_are_missing(tmp_path, monkeypatch):
    place, on_hub = Location(tmp_path / "A.CSV"), Location("owner/name", "main")
    monkeypatch.setattr(places, "_hub_folder", lambda location: tmp_path)
    place.source.write_bytes(b"\xef\xbb\xbftext,label\r\nNA,None\r\ngood day,favor\r\n")
    (tmp_path / "test.csv").write_bytes(place.source.read_bytes())
    for labelled in (text_data.load_labelled(each, "test") for each in (place, on_hub)):
        assert [sample.text for sample in labelled.samples] == ["NA", "good day"]
        assert (labelled.labels, list(labelled.classes)) == ([0, 1], ["None", "favor"])
    (tmp_path / "README.md").write_text("---\nconfigs: [{config_name: a, na_values: NA}]\n---\n")
    with pytest.raises(BadData, match="row 0: 'text' is None"):
        list(text_data.load_text(on_hub, "test"))
    place.source.write_text("text,label\na,0\nb,1\nc,\n")
    with pytest.raises(BadData, match="row 2: has no label"):
        text_data.load_labelled(place, "test")
    place.source.write_text("text\n" + "a\n" * 10_000 + "007\n")  # `datasets` reads parts of these
    assert text_data.load_text(place, "test")[10_000].text == "007"
    more = ",c" * 999 + "\n"  # pandas reads parts of fewer rows where there are many columns
    for content, said in (
        ("id,text\n1,good day, sir\n2,NA, None\n", "row is longer than the header"),  # no shift
        ("text,label,text\na,0,b\n", "has two columns 'text'"),
        (f"text{more}" + f"1{more}" * 2000 + f"a{more}", r"first text; write \.jsonl instead"),
    ):
        place.source.write_text(content)
        with pytest.raises(BadData, match=said):
            text_data.load_text(place, "test")


def test_a_causal_model_reads_prompt_and_completion_as_one_text_and_an_encoder_the_prompt():
    sample = Sample("row 0", "two and ", "three")
    for takes, text in ((ModelInput("text", continued=True), "two and three"), (TEXT, "two and ")):
        assert ids_of(sample, takes) == tokenizer()(text)["input_ids"]


def test_a_chat_goes_through_the_tokenizer_s_own_template():
    chat = Sample("row 0", messages=CHAT)
    assert ids_of(chat) == tokenizer().apply_chat_template(CHAT, tokenize=True, return_dict=False)
    template = "{{ tools[0].function.name }}{{ messages[1].tool_calls[0].function.name }}"
    for tools in (CALLS, json.dumps(CALLS)):
        called = Sample("row 0", messages=CALLING, tools=tools)
        assert tokenizer().decode(ids_of(called, template=template)) == "findfind"
    with pytest.raises(BadFile, match="no chat template"):
        ids_of(chat, template=None)
    with pytest.raises(BadData, match="row 0: the chat template refuses it"):
        ids_of(chat, template="{{ raise_exception('system first') }}")


def test_padding_is_the_classifier_s_or_the_end_token_behind_the_mask(tmp_path):
    (tmp_path / "a.txt").write_text("one\nlonger\n")
    for pad in (None, 7):
        (batch,) = batches(tmp_path / "a.txt", ModelInput("text", pad=pad), pad=None)
        assert batch["input_ids"][1].tolist() == [*tokenizer()("one")["input_ids"], *[pad or 1] * 3]
        assert batch["attention_mask"][1].tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert len(list(batches(tmp_path / "a.txt", ModelInput("text", alone=True)))) == 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_very_long_text_a_part_is_tokenised(side):
    reader = Reader(tokenizer(), TEXT, 4, "folder")
    reader.tokenizer.truncation_side = side
    text = "".join(WORDS) * 99 + " " * 9999 + "end"
    want = reader.tokenizer(text, truncation=True, max_length=4)["input_ids"]
    assert reader.tokens(Sample("row 0", text)).ids == want
    assert len(reader.shortened(text)) < len(text) / 2


def test_a_sentence_encoder_s_folder_says_prompt_case_and_length(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    prompts = {"prompts": {"query": "find: "}, "default_prompt_name": "query"}
    limits = {"max_seq_length": 10, "do_lower_case": True}
    contents = {"config_sentence_transformers": prompts, "sentence_bert_config": limits}
    for name, content in (contents | {"modules": []}).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    takes = ModelInput("text", positions=64)
    reader = text_data.reader_for([tmp_path], takes, None)
    want = tokenizer()("find: a red box", truncation=True, max_length=10)["input_ids"]
    assert reader.tokens(Sample("row 0", "A red BOX")).ids == want
    assert text_data.reader_for([tmp_path], takes, 12).length == 12
    tokenizer().save_pretrained(tmp_path / "base")  # of an expert where the base does not say
    reader = text_data.reader_for([tmp_path / "base"], takes, None, tmp_path)
    assert reader.tokens(Sample("row 0", "A red BOX")).ids == want
    by_chats = {"modality_config": {"text": {}, "message": {}}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(by_chats))
    with pytest.raises(BadFile, match="puts texts into a chat template"):
        text_data.reader_for([tmp_path], takes, None)
    (tmp_path / "modules.json").unlink()
    assert text_data.reader_for([tmp_path], takes, None).length == 64


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_have_the_names_that_are_given(tmp_path, suffix):
    rows = [{"question": "one", "text": "not this", "mark": 1, "label": 5}] * 2
    jsonl(tmp_path / "a.jsonl", rows)
    with quiet_datasets():
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    columns = {"text": "question", "label": "mark"}
    place = Location(tmp_path / f"a.{suffix}")
    sample = text_data.load_text(place, "train", columns)[1]
    assert (sample.text, sample.label) == ("one", 1)
    blank = [{"prompt": "one", "completion": text} for text in (" yes", " ")]
    with pytest.raises(BadData, match="line 2: has no label"):
        text_data.load_labelled(Location(jsonl(tmp_path / "b.jsonl", blank)), "train")
    for form in (("input", "target"), ("prompt", "completion")):  # not the column of that name
        with pytest.raises(BadData, match="the one label 'not this'"):
            columns = dict(zip(form, ("question", "text"), strict=True))
            text_data.load_labelled(place, "train", None, columns)
    with pytest.raises(BadData, match=r"no column 'answer'; it holds question, text, mark"):
        text_data.load_text(place, "train", {"text": "answer"})[0]


def test_a_token_that_has_another_id_for_another_model_is_refused(tmp_path, caplog):
    base, other = tmp_path / "base", tmp_path / "other"
    for folder in (base, other):
        tokenizer().save_pretrained(folder)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"?":').replace('"b":', '"a":'))
    for folders, expert in (([base], other), ([base, other], None)):
        reader = text_data.reader_for(folders, TEXT, None, expert)
        assert reader.tokens(Sample("row 0", "red")).ids == ids_of(Sample("row 0", "red"))
        with pytest.raises(BadFile, match="the id .* for 'a', but that of .*other has .*row 1"):
            reader.tokens(Sample("row 1", "a red box"))
    file.write_text("{")
    text_data.reader_for([base], TEXT, None, other)
    assert f"{other}: no tokenizer" in caplog.text and "are not compared" in caplog.text


def test_samples_that_do_not_fit_the_model_are_refused():
    with pytest.raises(BadData, match=r"row 0: has no target[\s\S]*--column input="):
        ids_of(Sample("row 0", "one"), PAIR)
    with pytest.raises(BadFile, match="but the model has 20 tokens"):
        ids_of(Sample("row 0", "one"), ModelInput("text", vocabulary=20))


@pytest.mark.parametrize("kind", [tokenizer, transformers.ByT5Tokenizer])  # the second: no file
@pytest.mark.parametrize(
    ("positions", "tokens", "length"),
    [(None, None, 512), (64, None, 64), (2048, None, 512), (64, 10, 10), (64, 65, None)],
)
def test_texts_have_at_most_so_many_tokens(tmp_path, kind, positions, tokens, length):
    kind().save_pretrained(tmp_path)
    takes = ModelInput("text", positions=positions)
    if length is None:
        with pytest.raises(BadSetting, match="at most 64"):
            text_data.reader_for([tmp_path], takes, tokens)
    else:
        assert text_data.reader_for([tmp_path], takes, tokens).length == length


KINDS = {
    "llama": ModelInput("text", True, True, language.VOCABULARY, 64),
    "bert": ModelInput("text", False, True, language.VOCABULARY, 64),
    "t5": ModelInput("pair", False, True, language.VOCABULARY, None, 0),
    "t5_bare": ModelInput("pair", False, False, language.VOCABULARY, None, 0),
    "t5_encoder": ModelInput("text", False, True, language.VOCABULARY, None),
    "clip_text": ModelInput("text", False, True, language.VOCABULARY, 16),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_models_class_decides_what_it_is_given(tmp_path, kind):
    assert input_of(skeleton(language.folder(tmp_path / kind, kind))) == KINDS[kind]


def test_a_vision_language_model_and_a_classifier_with_decoder_are_given_text_alone():
    text = {"vocab_size": 99, "max_position_embeddings": 7, "num_hidden_layers": 1}
    config = transformers.LlavaConfig(text_config={"model_type": "llama", **text})
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(config)
    assert input_of(model) == ModelInput("text", True, True, 99, 7)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 99}
    classifier = transformers.BartForSequenceClassification(transformers.BartConfig(**sizes))
    assert input_of(classifier) == ModelInput("text", False, True, 99, 1024)


def test_rows_for_padding_are_no_positions_and_minus_one_is_no_limit():
    with torch.device("meta"):
        assert input_of(transformers.XLNetModel(transformers.XLNetConfig())).positions is None
    model = language.MODELS["roberta"]()
    longest = input_of(model).positions
    model(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))


@pytest.mark.parametrize("name", ["WhisperModel", "Wav2Vec2Model", "SiglipModel", "VideoMAEModel"])
def test_sound_video_and_two_inputs_at_once_are_refused(name):
    kind = getattr(transformers, name)
    with torch.device("meta"), pytest.raises(BadData, match=name):
        input_of(kind(kind.config_class()))


def test_a_draw_depends_on_task_and_seed_only_and_begins_with_a_smaller_one():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = draw_indices("mnist", 1000, 50, 0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    key = [0, crc32(b"mnist"), crc32(b"calibration")]
    assert np.array_equal(first, np.random.default_rng(key).permutation(1000)[:50])
    for task, seed in (("svhn", 0), ("mnist", 1)):
        assert not np.array_equal(first, draw_indices(task, 1000, 50, seed))
    whole = draw_indices("mnist", 1000, 1000, 0)
    assert np.array_equal(first, whole[:50]) and sorted(whole) == list(range(1000))


@pytest.mark.parametrize("most", [1.0, 1.2, float("inf")])
def test_batches_are_as_long_as_computed_tokens_per_counting_token_allow(most):
    lengths = [(9, 2), (9, 1), (8, 4), (5, 1), (4, 1), (4, 1), (4, 1)]
    texts = [TokenizedText([1] * length, [1] * target) for length, target in lengths]
    parts = cut(texts, 3, most)
    assert [text for part in parts for text in part] == texts
    for part, following in zip(parts, [*parts[1:], []], strict=True):
        masks = [collate(part, 0, TARGETS)[name] for name in MASKS]
        counting, more = (sum(len(t.ids + t.target) for t in p) for p in (part, following[:1]))
        assert len(part) <= 3 and counting == sum(int(mask.sum()) for mask in masks)
        assert sum(mask.numel() for mask in masks) <= most * counting
        longer = collate([*part, *following[:1]], 0, TARGETS)  # one more would be too many
        computed = sum(longer[name].numel() for name in MASKS)
        assert not following or len(part) == 3 or computed > most * (counting + more)


def test_a_model_with_a_decoder_is_given_targets_that_are_ignored_at_padding(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", PAIRS)
    made = batches(path, ModelInput("pair"))
    labels = next(iter(made))["labels"]
    longest = max(len(f"say {word}") for word in WORDS) + 1
    assert (made.samples, made.longest) == (len(WORDS), longest)
    ordered = sorted(WORDS, key=lambda text: -len(text))
    want = tokenizer()(text_target=ordered[:3], padding=True, return_tensors="pt")
    assert torch.equal(labels, want["input_ids"].masked_fill(want["attention_mask"] == 0, -100))
    bare = next(iter(batches(path, TARGETS)))
    assert torch.equal(bare["decoder_input_ids"][:, 0], torch.zeros(3, dtype=torch.long))
    assert torch.equal(bare["decoder_input_ids"][0, 1:], labels[0, :-1])
    assert torch.equal(bare["decoder_attention_mask"], want["attention_mask"])
