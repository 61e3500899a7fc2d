"""Text samples from files to batches: what is read, what a model of each kind is given, and one
clear message for bad input.
"""

import datasets
import language
import pytest
import torch
from language import WORDS, jsonl, tokenizer

from featcal.cli.model_folders import skeleton
from featcal.data.calibration import Draw, drawn
from featcal.data.inputs import Input, input_of
from featcal.data.place import Place, place_of
from featcal.data.sampling import draw_indices
from featcal.data.splits import quiet
from featcal.data.text import load_text
from featcal.data.tokens import Reader, Tokens, batch, cut, reader_for, token_batches
from featcal.errors import BadData, BadFile, BadSetting, HubUnreachable, MissingPath, TruncatedFile

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
PAIRS = [{"input": f"say {word}", "target": word} for word in WORDS]


def samples(path, split="train"):
    read = load_text(Place(path), split)
    return [read[i] for i in range(len(read))]


TARGETS = Input("pair", labels=False, start=0)


def batches(path, takes, size=3, tokens=None, **how):
    """All samples of a file in batches."""
    read = load_text(Place(path), "train")
    reader = Reader(tokenizer(**how), takes, tokens or 64, path.parent)
    return token_batches(read, range(len(read)), reader, size, float("inf"))


def test_lines_of_a_text_file_are_samples_and_empty_ones_are_none(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n  \ntwo  \nthr\xc3\xa9e")
    assert [sample.text for sample in samples(tmp_path / "a.txt")] == ["one", "two  ", "thrée"]
    assert samples(tmp_path / "a.txt")[1].place == f"{tmp_path / 'a.txt'}, line 4"


@pytest.mark.parametrize(
    ("row", "text", "target", "messages"),
    [
        ({"text": "one", "label": 3}, "one", None, None),
        ({"prompt": "one", "completion": "two"}, "one", "two", None),
        ({"input": "one", "target": "two"}, "one", "two", None),
        ({"messages": CHAT, "text": "not this"}, "", None, CHAT),
    ],
)
def test_json_lines_and_parquet_hold_texts_pairs_or_chats(tmp_path, row, text, target, messages):
    jsonl(tmp_path / "train.jsonl", [row, row])
    with quiet():
        datasets.Dataset.from_list([row, row]).to_parquet(tmp_path / "other.parquet")
    for path in (tmp_path / "train.jsonl", tmp_path, tmp_path / "other.parquet"):
        sample = samples(path)[1]
        assert (sample.text, sample.target, sample.messages) == (text, target, messages)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "fine"}\n{"text": ', "line 2: not JSON"),
        (b'{"text": "fine"}\n"only text"\n', "line 2: is a str, not an object"),
        (b'{"text": "fine"}\n{"txt": "a", "label": 1}\n', r"line 2: holds txt, label[\s\S]*prompt"),
        (b'{"text": "fine"}\n{"text": 7}\n', "line 2: 'text' is int"),
        (b'{"text": "fine"}\n{"input": "a", "target": null}\n', "line 2: 'target' is NoneType"),
        (b'{"text": "fine"}\n{"messages": []}\n', "line 2: 'messages' is no list of messages"),
        (
            b'{"text": "fine"}\n{"messages": [{"role": "user"}]}\n',
            "line 2: 'messages' is no list of messages",
        ),
        (b'{"text": "fine"}\n{"text": "\xff"}\n', "line 2: not text in UTF-8"),
        (b"\n \n", "holds no text"),
    ],
)
def test_a_line_that_makes_no_sample_is_named(tmp_path, content, said):
    (tmp_path / "train.jsonl").write_bytes(content)
    with pytest.raises(BadData, match=said):
        samples(tmp_path / "train.jsonl")


def test_a_parquet_file_without_text_names_its_columns(tmp_path):
    with quiet():
        datasets.Dataset.from_dict({"sentence1": ["a"], "label": [0]}).to_parquet(
            tmp_path / "train.parquet"
        )
    with pytest.raises(BadData, match="sentence1, label, which makes no text sample"):
        samples(tmp_path)


def test_what_is_no_text_file_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("text\n")
    with pytest.raises(BadFile, match=r"a\.csv: is no file of text"):
        samples(tmp_path / "a.csv")
    with pytest.raises(MissingPath, match=r"the folder has: a\.csv"):
        samples(tmp_path)
    (tmp_path / "a.parquet").write_text("text\n")
    with pytest.raises(TruncatedFile, match=r"a\.parquet"):
        samples(tmp_path / "a.parquet")


@pytest.mark.parametrize("most", [1.0, 1.2, float("inf")])
def test_batches_end_before_they_compute_more_than_was_allowed_for_each_token_that_counts(most):
    lengths = [(9, 2), (9, 1), (8, 4), (5, 1), (4, 1), (4, 1), (4, 1)]
    texts = [Tokens([1] * length, [1] * target) for length, target in lengths]
    parts = cut(texts, 3, most)
    assert [text for part in parts for text in part] == texts
    made = [batch(part, 0, TARGETS) for part in parts]
    for part, each, following in zip(parts, made, [*parts[1:], []], strict=True):
        masks = [each[name] for name in ("attention_mask", "decoder_attention_mask")]
        real = sum(text.count for text in part)
        assert len(part) <= 3 and real == sum(int(mask.sum()) for mask in masks)
        assert sum(mask.numel() for mask in masks) <= most * real
        longer = batch([*part, *following[:1]], 0, TARGETS)  # and not a text earlier
        computed = sum(
            longer[name].numel() for name in ("attention_mask", "decoder_attention_mask")
        )
        assert not following or len(part) == 3 or computed > most * (real + following[0].count)


def test_batches_equal_what_the_tokenizer_pads_itself_longest_first(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(WORDS))
    made = batches(tmp_path / "a.txt", Input("text"))
    ordered = sorted(WORDS, key=lambda text: -len(text))
    own = tokenizer()
    for i, each in enumerate(made):
        want = own(
            ordered[3 * i : 3 * i + 3], padding=True, padding_side="right", return_tensors="pt"
        )
        assert all(torch.equal(each[name], want[name]) for name in ("input_ids", "attention_mask"))
    again = list(made)
    assert len(again) == 3 and torch.equal(again[0]["input_ids"], next(iter(made))["input_ids"])
    assert (made.samples, made.longest) == (9, len(ordered[0]) + 1)


def test_a_model_with_a_decoder_is_given_targets_that_are_ignored_at_padding(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", PAIRS)
    labels = [batch["labels"] for batch in batches(path, Input("pair"))]
    ordered = sorted(WORDS, key=lambda text: -len(text))
    want = tokenizer()(text_target=ordered[:3], padding=True, return_tensors="pt")
    assert torch.equal(labels[0], want["input_ids"].masked_fill(want["attention_mask"] == 0, -100))
    bare = next(iter(batches(path, Input("pair", labels=False, start=0))))
    assert torch.equal(bare["decoder_input_ids"][:, 0], torch.zeros(3, dtype=torch.long))
    assert torch.equal(bare["decoder_input_ids"][0, 1:], labels[0][0, :-1])
    assert torch.equal(bare["decoder_attention_mask"], want["attention_mask"])


def test_a_decoder_without_targets_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(BadData, match=r"line 1: has no target[\s\S]*input"):
        batches(tmp_path / "a.txt", Input("pair"))


def test_a_causal_model_reads_prompt_and_completion_as_one_text_and_an_encoder_the_prompt_alone(
    tmp_path,
):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "two and ", "completion": "three"}])
    for continued, text in ((True, "two and three"), (False, "two and ")):
        (batch,) = batches(path, Input("text", continued=continued))
        assert batch["input_ids"][0].tolist() == tokenizer()(text)["input_ids"]


def test_a_chat_goes_through_the_tokenizer_s_own_template(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    (batch,) = batches(path, Input("text", continued=True))
    want = tokenizer().apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert batch["input_ids"][0].tolist() == want
    with pytest.raises(BadFile, match="no chat template"):
        batches(path, Input("text"), template=None)
    with pytest.raises(BadData, match="line 1: the chat template refuses it"):
        batches(path, Input("text"), template="{{ raise_exception('system first') }}")


def test_a_tokenizer_without_padding_pads_with_the_end_of_a_text_behind_the_mask(tmp_path):
    (tmp_path / "a.txt").write_text("one\nlonger\n")
    (batch,) = batches(tmp_path / "a.txt", Input("text"), pad=None)
    assert batch["input_ids"][1].tolist() == [*tokenizer()("one")["input_ids"], 1, 1, 1]
    assert batch["attention_mask"][1].tolist() == [1, 1, 1, 1, 0, 0, 0]


def test_texts_are_cut_to_the_length_asked_for(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh\n")
    (batch,) = batches(tmp_path / "a.txt", Input("text"), tokens=4)
    assert batch["input_ids"].tolist() == [
        tokenizer()("abcdefgh", truncation=True, max_length=4)["input_ids"]
    ]


@pytest.mark.parametrize(
    ("positions", "asked", "length"),
    [(None, None, 512), (64, None, 64), (2048, None, 512), (64, 10, 10)],
)
def test_without_a_number_texts_have_512_tokens_or_what_the_model_has_positions_for(
    tmp_path, positions, asked, length
):
    tokenizer().save_pretrained(tmp_path)
    assert reader_for([tmp_path], Input("text", positions=positions), asked).length == length


def test_more_tokens_than_positions_are_refused(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(BadSetting, match="at most 64"):
        reader_for([tmp_path], Input("text", positions=64), 65)


def test_a_tokenizer_of_another_model_is_told_from_its_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(BadFile, match="but the model has 20 tokens"):
        batches(tmp_path / "a.txt", Input("text", vocabulary=20))


KINDS = {
    "llama": Input("text", True, True, language.VOCABULARY, 64),
    "bert": Input("text", False, True, language.VOCABULARY, 64),
    "t5": Input("pair", False, True, language.VOCABULARY, None, 0),
    "t5_bare": Input("pair", False, False, language.VOCABULARY, None, 0),
    "t5_encoder": Input("text", False, True, language.VOCABULARY, None),
    "clip_text": Input("text", False, True, language.VOCABULARY, 16),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_a_model_is_given_is_told_by_its_class(tmp_path, kind):
    assert input_of(skeleton(language.folder(tmp_path / kind, kind))) == KINDS[kind]


def test_a_model_that_talks_about_pictures_is_given_text_alone():
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": 99,
            "max_position_embeddings": 7,
            "num_hidden_layers": 1,
        }
    )
    with torch.device("meta"):
        assert input_of(LlavaForConditionalGeneration(config)) == Input("text", True, True, 99, 7)


def test_rows_for_padding_are_no_positions(tmp_path):
    model = language.MODELS["roberta"]()
    longest = input_of(model).positions
    model(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))


@pytest.mark.parametrize("name", ["WhisperModel", "Wav2Vec2Model", "SiglipModel", "VideoMAEModel"])
def test_sound_video_and_two_inputs_at_once_are_refused(name):
    import transformers

    kind = getattr(transformers, name)
    with torch.device("meta"), pytest.raises(BadData, match=name):
        input_of(kind(kind.config_class()))


def test_the_draw_of_a_task_is_the_one_that_images_have_too(tmp_path):
    folder = language.folder(tmp_path / "bert", "bert")
    (tmp_path / "a.txt").write_text("\n".join(WORDS))
    made = drawn(skeleton(folder), [folder], {"x": Place(tmp_path / "a.txt")}, Draw(4, 7, 4))["x"]
    want = {tuple(tokenizer()(WORDS[i])["input_ids"]) for i in draw_indices("x", len(WORDS), 4, 7)}
    rows = [
        row for each in made for row in zip(each["input_ids"], each["attention_mask"], strict=True)
    ]
    assert {tuple(ids[mask == 1].tolist()) for ids, mask in rows} == want
    with pytest.raises(BadSetting, match="at most 9, the number of samples of x"):
        drawn(skeleton(folder), [folder], {"x": Place(tmp_path / "a.txt")}, Draw(10, 7, 4))


def test_a_place_is_a_path_where_there_is_one_and_else_a_data_set_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    assert not place_of("--data", "owner/name").on_hub
    assert place_of("--data", "owner/other") == Place("owner/other", "main", None)
    assert place_of("--data", "owner/other@v1:digits") == Place("owner/other", "v1", "digits")
    for wrong in ("nowhere", "/no/where", "../no/where", "a/b/c", "../x", ""):
        with pytest.raises(MissingPath, match="owner/name"):
            place_of("--data", wrong)


def test_a_hub_data_set_of_text_without_network_is_one_error_that_says_no_such_file_is_here_either(
    monkeypatch,
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(
        HubUnreachable, match=r"nobody/nothing@main[\s\S]*no file or folder of this name is here"
    ):
        load_text(place_of("--data", "nobody/nothing"), "train")


@pytest.mark.parametrize("split", ["../train", "/train", "a/b", "..", "", "*"])
def test_a_split_that_is_a_path_is_refused(tmp_path, split):
    jsonl(tmp_path / "train.jsonl", [{"text": "one"}])
    (tmp_path / "data").mkdir()
    with pytest.raises(BadSetting, match="split"):
        load_text(Place(tmp_path / "data"), split)
