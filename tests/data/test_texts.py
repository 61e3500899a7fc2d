"""Text samples from files to batches: what is read, what a model of each kind is given, and one
clear message for bad input.
"""

import datasets
import language
import pytest
import torch
from language import WORDS, jsonl, tokenizer

from featcal.cli.models import skeleton
from featcal.data.batches import Draw, batch, cut, draw_indices, drawn, token_batches
from featcal.data.places import Place, place_of, quiet
from featcal.data.texts import Input, Reader, Tokens, input_of, load_text, reader_for
from featcal.errors import BadData, BadFile, BadSetting, HubUnreachable, MissingPath, TruncatedFile

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
PAIRS = [{"input": f"say {word}", "target": word} for word in WORDS]


def samples(path, split="train"):
    read = load_text(Place(path), split)
    return [read[i] for i in range(len(read))]


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
        (b'{"text": "fine"}\n{"text": "a \\ud83d"}\n', "line 2: 'text' has half of a surrogate"),
        (b'{"text": "fine"}\n{"text": "\xff"}\n', "a\.jsonl|train.jsonl: cannot be read"),
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


def test_only_the_beginning_of_a_very_long_text_is_tokenised(tmp_path):
    for long in ("abcdefgh" * 999, " " * 5000 + "one"):
        (tmp_path / "a.jsonl").write_text(f'{{"text": "{long}"}}\n')
        (batch,) = batches(tmp_path / "a.jsonl", Input("text"), tokens=4)
        want = tokenizer()(long, truncation=True, max_length=4)["input_ids"]
        assert batch["input_ids"].tolist() == [want]


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
