"""Experts with other vocabularies: rows by token, rows that stay the base's."""

import families
import pytest
import tiny
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from featcal import calibrate, compare
from featcal.errors import warn_once
from featcal.merging.merge import merge
from featcal.models.load import save_model


def llama(words, seed, kind="Llama"):
    config, model = (getattr(families.tf, f"{kind}{end}") for end in ("Config", "ForCausalLM"))
    sizes = families.GROUPED | {"vocab_size": words}
    return tiny.make(lambda: model(config(**sizes)), seed, torch.float32)


@pytest.mark.parametrize("table", ["model.embed_tokens.weight", "gpt_neox.embed_in.weight"])
def test_rows_that_an_expert_lacks_are_the_bases(table):
    kind = "GPTNeoX" if "neox" in table else "Llama"
    models = [llama(words, seed, kind) for seed, words in enumerate((97, 100, 90))]
    merged = merge("average", models[0], models[1:])
    for name in (table, "lm_head.weight"):
        own, code, maths = (model.get_parameter(name) for model in models)
        want = (code[:97] + torch.cat([maths, own[90:]])) / 2
        assert torch.allclose(merged.get_parameter(name), want, rtol=0, atol=1e-7)


def folder_with_words(path, words, seed, rows=None, model=None):
    """A model's folder with a tokenizer of these words, in this order."""
    numbers = {word: row for row, word in enumerate(words)}
    own = Tokenizer(models.WordLevel(numbers, unk_token=words[0]))
    folder = save_model(model or llama(rows or len(words), seed), path)
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(folder)
    return folder


def tables(folder):
    state = load_file(folder / "model.safetensors")
    return [state[name] for name in ("model.embed_tokens.weight", "lm_head.weight")]


def merged_tables(tmp_path, base, **experts):
    """Tables of base, experts and their average, which is also what is said of them."""
    given = enumerate(experts.items(), 1)
    folders = {n: folder_with_words(tmp_path / n, w, i, 100) for i, (n, w) in given}
    start, said = folder_with_words(tmp_path / "base", base, 0, 100), []
    out = merge("average", start, folders, out=tmp_path / "out", progress=said.append)
    return zip(*(tables(f) for f in (start, *folders.values(), out)), strict=True), "\n".join(said)


WORDS, LABELLED = [f"word{i}" for i in range(97)], "BertForTokenClassification"


def test_two_words_are_never_merged_in_one_row(tmp_path):
    words = {"a": [*WORDS, "<tool>", "<one>"], "b": [*WORDS, "<think>", "<two>", "<tool>"]}
    found, said = merged_tables(tmp_path, WORDS, **words)
    for base, a, b, merged in found:
        mean = torch.stack([a, b]).double().mean(0).float()
        assert torch.equal(merged[:97], mean[:97]) and torch.equal(merged[97:99], base[97:99])
        own = torch.stack([a[97], b[99]]).double().mean(0).float()
        assert torch.equal(merged[99], own)  # <tool> of both, in the one row that is free
    assert "row 97 is <tool> for a and <think> for b" in said and "row 99 is <tool>" in said


def test_a_word_that_all_experts_have_in_one_row_is_merged_there(tmp_path):
    more = [*WORDS, "<tool>"]
    found, said = merged_tables(tmp_path, WORDS, a=more, b=more, c=WORDS)
    for base, a, b, c, merged in found:
        mean = torch.stack([a[97], b[97], base[97]]).double().mean(0).float()
        assert torch.equal(merged[97], mean)
        assert torch.equal(merged[:97], torch.stack([a, b, c]).double().mean(0).float()[:97])
    assert "row 97 is <tool>, which the base's tokenizer lacks" in said


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "DistilBertForMaskedLM", LABELLED])
def test_inserted_and_removed_words_move_the_rows_below_also_of_a_head_and_its_bias(tmp_path, kind):
    """The oracle adds row by row, by the word that each model has there."""
    folders, lists = {}, {"base": WORDS, "a": [*WORDS[:40], "inserted", *WORDS[40:]]}
    lists["b"], build = [*WORDS[:10], *WORDS[11:]], getattr(families.tf, kind)
    for seed, (name, words) in enumerate(lists.items()):
        sizes = tiny.TEXT | {"vocab_size": len(words), "tie_word_embeddings": False}
        config = build.config_class(**sizes, num_labels=len(WORDS))
        model = tiny.make(lambda c=config: build(c), seed, torch.float32)
        folders[name] = folder_with_words(tmp_path / name, words, seed, model=model)
    out = merge("average", folders["base"], {n: folders[n] for n in "ab"}, out=tmp_path / "out")
    states = {n: load_file(f / "model.safetensors") for n, f in (folders | {"out": out}).items()}
    ends = ("word_embeddings.weight", "predictions.bias", "projector.bias")
    for table in (name for name in states["out"] if name.endswith(ends)):
        for row, word in enumerate(WORDS):
            given = ((states[n][table], lists[n]) for n in "ab")
            base = states["base"][table][row]
            own = [rows[words.index(word)] if word in words else base for rows, words in given]
            assert torch.equal(states["out"][table][row], ((own[0].double() + own[1]) / 2).float())
    if kind == LABELLED:  # its head has a row per label, as many as words
        a, b, out = (states[n]["classifier.weight"] for n in ("a", "b", "out"))
        assert torch.equal(out, ((a.double() + b) / 2).float())


def test_without_a_tokenizer_of_the_base_rows_with_one_word_are_merged_and_few_are_listed(tmp_path):
    words, lines = {"a": WORDS, "b": [WORDS[1], WORDS[0], *WORDS[2:]]}, []
    base = save_model(llama(97, 0), tmp_path / "base")
    given = enumerate(words.items(), 1)
    experts = {n: folder_with_words(tmp_path / n, w, i) for i, (n, w) in given}
    out = merge("average", base, experts, out=tmp_path / "out", progress=lines.append)
    for own, a, b, merged in zip(*(tables(f) for f in (base, *experts.values(), out)), strict=True):
        assert torch.equal(merged[:2], own[:2])
        assert torch.equal(merged[2:97], torch.stack([a, b]).double().mean(0).float()[2:97])
    assert len(lines) < 10 and sum(map(len, lines)) < 1000
    (experts["b"] / "tokenizer.json").write_text("{}")
    merge("average", base, experts, progress=lines.append)
    assert any(line.startswith("b: rows are not matched by token (") for line in lines)


def test_the_bases_tables_are_kept_where_asked_for():
    base, experts = llama(97, 0), {"code": llama(100, 1), "maths": llama(97, 2)}
    merged = merge("average", base, experts, embeddings="base")
    for name, p in merged.named_parameters():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(p, base.get_parameter(name))
        else:
            mean = sum(expert.get_parameter(name) for expert in experts.values()) / 2
            assert torch.allclose(p, mean, rtol=0, atol=1e-7), name


BERT = (families.tf.BertConfig, tiny.TEXT)
GPT2 = (families.tf.GPT2Config, families.GPT2)
CAUSAL_LLAMA = (families.tf.LlamaConfig, families.GROUPED | {"pad_token_id": 0})
POOLER = ("bert.pooler.dense.bias", "bert.pooler.dense.weight")
CLASSIFIER = ("classifier.bias", "classifier.weight")


@pytest.mark.parametrize(
    ("base", "expert", "config", "lost"),
    [
        ("BertForMaskedLM", "BertForSequenceClassification", BERT, (*POOLER, *CLASSIFIER)),
        ("BertModel", "BertForSequenceClassification", BERT, CLASSIFIER),
        ("GPT2LMHeadModel", "GPT2ForSequenceClassification", GPT2, ("score.weight",)),
        ("LlamaForCausalLM", "LlamaForSequenceClassification", CAUSAL_LLAMA, ("score.weight",)),
    ],
)
def test_experts_with_another_head_give_the_base_their_tower(base, expert, config, lost, tmp_path):
    kind, sizes = config
    models = {
        name: tiny.make(lambda c=each: getattr(families.tf, c)(kind(**sizes)), seed, torch.float32)
        for seed, (name, each) in enumerate({"base": base, "a": expert, "b": expert}.items())
    }
    folders = {name: save_model(model, tmp_path / name) for name, model in models.items()}
    said, own = [], models["base"]
    for start, *experts in (list(models.values()), list(folders.values())):
        said.append([])
        named = dict(zip("ab", experts, strict=True))
        merged = merge("average", start, named, progress=said[-1].append)
        towers = [models[name].base_model.state_dict() for name in "ab"]
        for name, tensor in merged.base_model.state_dict().items():
            mean = (towers[0][name].double() + towers[1][name]) / 2
            assert torch.equal(tensor, mean.float()), name
        shared = {parameter.data_ptr() for parameter in merged.base_model.parameters()}
        for name, parameter in merged.named_parameters():
            if parameter.data_ptr() not in shared:
                assert torch.equal(parameter, own.get_parameter(name)), name
    head = f"its own head is not merged ({', '.join(lost)})"
    assert said == [[f"{task}: {head}" for task in "ab"]] * 2


def test_models_in_several_precisions_are_merged_in_the_widest(tmp_path):
    kinds = {"base": torch.float16, "code": torch.bfloat16, "maths": torch.float16}
    models = {name: llama(97, seed).to(kinds[name]) for seed, name in enumerate(kinds)}
    models["code"].config.eos_token_id = 7
    folders = {name: save_model(model, tmp_path / name) for name, model in models.items()}
    base, said = folders.pop("base"), []
    out = merge("average", base, folders, out=tmp_path / "out", progress=said.append)
    states = [load_file(folder / "model.safetensors") for folder in folders.values()]
    in_memory = merge("average", llama(97, 0).half(), folders).state_dict()
    for name, merged in load_file(out / "model.safetensors").items():
        code, maths = (state[name].float() for state in states)
        assert merged.dtype == torch.float32 and torch.equal(merged, (code + maths) / 2)
        assert in_memory[name].dtype == torch.float32 and torch.equal(merged, in_memory[name])
    assert "7 in expert 'code'" in said[0] and "float32" in said[1]


def test_experts_with_other_labels_are_used_row_by_row_and_that_is_said(tmp_path, caplog):
    labels = {"base": ["LABEL_0", "LABEL_1"], "a": ["bad", "good"], "b": ["good", "bad"]}
    folders, lines = {}, []
    for seed, (name, names) in enumerate(labels.items()):
        config = families.tf.BertConfig(**tiny.TEXT, id2label=dict(enumerate(names)))
        kind = families.tf.BertForSequenceClassification
        model = tiny.make(lambda c=config, k=kind: k(c), seed, torch.float32)
        folders[name] = save_model(model, tmp_path / name)
    base = folders.pop("base")
    out = merge("average", base, folders, out=tmp_path / "out", progress=lines.append)
    a, b, merged = (load_file(f / "model.safetensors") for f in (*folders.values(), out))
    mean = (a["classifier.weight"].double() + b["classifier.weight"]) / 2
    assert torch.equal(merged["classifier.weight"], mean.float())
    (said,) = [line for line in lines if "labels differ" in line]
    assert "('bad', 'good')" in said and "('good', 'bad')" in said
    used = {"experts": folders, "batches": {task: families.text(1) * 2 for task in folders}}
    for use in (lambda: compare({"m": out}, **used), lambda: calibrate(out, base=base, **used)):
        warn_once.cache_clear()
        use()
        assert caplog.messages.count(said.replace("heads are merged", "answers are compared")) == 1
        caplog.clear()
