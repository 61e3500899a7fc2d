"""Report for each model family, folder form and bad input: calibrated, refused by name, or a fault
of ours.

    python scripts/campaign.py [NAME ...]

NAME: families, calls, inputs or commands, or one case as it is printed, such as a family,
"a family (command)", or "no data (run)".

Tiny random models represent the families. A written model has to load again and to have the
reported drift; a dry run has to end as its run does, and to leave no files. "named" is one message
that says what is wrong; "silent" is a result that should not exist or differs from its report;
"traceback" is an error without a message. The last two are faults and make the exit code 1.
"""

import inspect
import io
import json
import os
import re
import shutil
import string
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers as tf
from checkpoints import picture, tensors, with_tensors
from families import FAMILIES, GROUPED, WIDE, Family, family, pairs, text, translations
from families import experiment as family_experiment
from language import WORDS, folder, jsonl
from safetensors.torch import load_file, save_file
from tiny import PAPER, TEXT, clip, experiment, images, make, shifted
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import featcal
from featcal.cli import main as cli
from featcal.errors import FeatCalError
from featcal.models.load import save_model

OK, NAMED, SILENT, TRACEBACK = "ok", "named", "silent", "traceback"
MODELS = ("merged", "calibrated")  # whose drift featcal.json records
SHOWN = {
    "t5": "T5", "t5_gated": "T5 1.1", "t5_encoder": "T5's encoder", "clip": "CLIP", "clip_text": "CLIP's text tower",
    "llama": "Llama", "bert": "BERT", "roberta": "RoBERTa", "gpt2": "GPT-2", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "mistral": "Mistral", "gemma": "Gemma", "gemma2": "Gemma 2", "gemma3": "Gemma 3", "opt": "OPT", "vit": "ViT",
    "dinov2": "DINOv2", "siglip": "SigLIP",
}  # fmt: skip
SWIN = dict(
    image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
)
MAE = dict(
    decoder_hidden_size=16, decoder_intermediate_size=32, decoder_num_hidden_layers=2,
    decoder_num_attention_heads=2,
)  # fmt: skip
BOTH = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0,
    "decoder_start_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
T5 = dict(
    vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
)
SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
POSITIONS = {"max_position_embeddings": 32}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
SIGLIP_TEXT = TEXT | {"max_position_embeddings": 7, "projection_size": 32}
TALKS = {"vision_config": WIDE | {"model_type": "clip_vision_model"}, "image_token_index": 96} | {
    "text_config": GROUPED | {"model_type": "llama"}
}
# class, configuration, batches, settings
MORE_FAMILIES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "BART": ("BartForConditionalGeneration", BOTH, translations, {}),
    "Pegasus": ("PegasusForConditionalGeneration", BOTH, translations, {}),
    "mBART": ("MBartForConditionalGeneration", BOTH, translations, {}),
    "Marian": ("MarianMTModel", BOTH, translations, {}),
    "M2M100": ("M2M100ForConditionalGeneration", BOTH, translations, {}),
    "UMT5": ("UMT5ForConditionalGeneration", T5, translations, {}),
    "Phi3": ("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}, text, {}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", TEXT, text, {}),
    "Bloom": ("BloomForCausalLM", {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}, text, {}),
    "StableLM": ("StableLmForCausalLM", GROUPED, text, {}),
    "OLMo2": ("Olmo2ForCausalLM", GROUPED | {"pad_token_id": 0}, text, {}),
    "Granite": ("GraniteForCausalLM", GROUPED, text, {}),
    "StarCoder2": ("Starcoder2ForCausalLM", GROUPED, text, {}),
    "Cohere": ("CohereForCausalLM", TEXT | SPECIAL | {"num_key_value_heads": 2}, text, {}),
    "Cohere, --set norm=false": ("CohereForCausalLM", TEXT | SPECIAL | {"num_key_value_heads": 2}, text, {"norm": False}),
    "Mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}, text, {}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", GROUPED | MIXTURE, text, {}),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", GROUPED | MIXTURE | {"shared_expert_intermediate_size": 16}, text, {}),
    "GPT-OSS": ("GptOssForCausalLM", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, text, {}),
    "Mamba": ("MambaForCausalLM", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, text, {}),
    "ELECTRA": ("ElectraModel", TEXT, text, {}),
    "MPNet": ("MPNetModel", TEXT | POSITIONS, text, {}),
    "ModernBERT": ("ModernBertModel", TEXT | SPECIAL | {"cls_token_id": 1, "sep_token_id": 1}, text, {}),
    "XLM-RoBERTa": ("XLMRobertaModel", TEXT | POSITIONS, text, {}),
    "ALBERT": ("AlbertModel", TEXT | {"embedding_size": 16}, text, {}),
    "DeBERTa": ("DebertaModel", TEXT, text, {}),
    "DeBERTa, --set norm=false": ("DebertaModel", TEXT, text, {"norm": False}),
    "DeBERTa v2": ("DebertaV2Model", TEXT, text, {}),
    "DeBERTa v3": ("DebertaV2Model", TEXT | RELATIVE | {"share_att_key": True}, text, {}),
    "DeBERTa v3, --set modules=value_proj,dense": (
        "DebertaV2Model", TEXT | RELATIVE | {"share_att_key": True}, text, {"modules": ("value_proj", "dense")},
    ),
    "DeiT": ("DeiTModel", WIDE, images, {}),
    "BEiT": ("BeitModel", WIDE, images, {}),
    "Swin": ("SwinModel", SWIN, images, {}),
    "ConvNeXt": ("ConvNextModel", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, images, {}),
    "YOLOS": ("YolosModel", WIDE | {"image_size": [16, 16]}, images, {}),
    "ViTMAE": ("ViTMAEForPreTraining", WIDE | MAE, images, {}),
    "LLaVA": ("LlavaForConditionalGeneration", TALKS, text, {}),
    "LLaVA, --set stack=model.language_model.layers": (
        "LlavaForConditionalGeneration", TALKS, text, {"stack": ("model.language_model.layers",)},
    ),
    "SigLIP with both towers": ("SiglipModel", {"text_config": SIGLIP_TEXT, "vision_config": WIDE}, pairs, {}),
}  # fmt: skip


def in_memory(case: Family, settings: dict[str, Any]) -> tuple[str, str]:
    """Merge, calibrate, measure and compare one family in memory."""
    paths = settings.get("stack", ())
    plan = featcal.BlockPlan(*(featcal.Stack(path, path) for path in paths)) if paths else None
    chosen = PAPER.but(**{name: value for name, value in settings.items() if name != "stack"})
    given = family_experiment(case, torch.float32)
    result = featcal.calibrate(**given, settings=chosen, plan=plan)
    models = {"merged": given["merged"], "calibrated": result.model}
    before, after = featcal.compare(models, given["experts"], given["batches"], plan=plan)[-2:]
    drift = f"{before.relative_drift:.3f} to {after.relative_drift:.3f}"
    return OK, f"{len(result.blocks)} blocks, drift {drift}"


def family_folders(build: Callable[[], torch.nn.Module], pictures: bool, root: Path) -> list[str]:
    """Folders of base and experts with data, as a user has them; the options that name the data."""
    base = make(build, 0, torch.float32)
    is_pair = "decoder_input_ids" in inspect.signature(base.forward).parameters
    rows = [{"input": word, "target": word} if is_pair else {"text": word} for word in WORDS]
    for number, name in enumerate(("base", "a", "b")):
        save_model(shifted(base, number, 0.02) if number else base, root / name)
        side = {"height": 16, "width": 16}
        processor = tf.ViTImageProcessorPil(size=side) if pictures else letters()
        processor.save_pretrained(root / name)
    for name in "ab":
        if pictures:
            out = root / f"{name}.pictures"
            out.mkdir()
            for number in range(9):
                picture(size=(20, 24), seed=number).save(out / f"{number}.png")
        else:
            jsonl(root / f"{name}.jsonl", rows)
    ending = "pictures" if pictures else "jsonl"
    return f"--data a=a.{ending} --data b=b.{ending}".split()


def letters() -> tf.PreTrainedTokenizerFast:
    """Return a tokenizer for the tiny models, with one token for each lower-case letter."""
    tokens = ["<pad>", "</s>", "<s>", " ", *string.ascii_lowercase]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )


def by_command(case: Family, settings: dict[str, Any]) -> tuple[str, str]:
    """Try one family by the command line, from folder to folder; a dry run has to find the faults
    that the run finds, and plan may not fail.
    """
    pictures, options = "pixel_values" in case.batches(0)[0], options_of(settings)
    with tempfile.TemporaryDirectory() as root:
        data = family_folders(case.build, pictures, Path(root))
        with chdir(root):
            code, message = command(MERGE)
            if code:
                return NAMED, f"merge: {message}"
            start, rest = CALIBRATE.index("--data"), CALIBRATE.index("--out")
            # auto measures no drift, and may keep the merged model
            preset = ["--preset", "paper"]
            arguments = [*CALIBRATE[:start], *data, *CALIBRATE[rest:], *preset, *options]
            before = everything()
            dry_code, dry_message = command([*arguments, "--dry-run"])
            if fault := bad_message(dry_code, dry_message) or left_by(before):
                return SILENT, fault
            code, message = command(arguments)
            if dry_code != code:
                problem = f"the dry run ends with {dry_code}, the run with {code}: "
                return SILENT, problem + (dry_message or message).strip()[:200]
            if fault := bad_message(code, message) or left_by(before, "" if code else "new"):
                return SILENT, fault
            stacks = options if any(option.startswith("stack=") for option in options) else []
            tokens = [] if pictures else ["--set", "tokens=7"]
            plan_arguments = ["plan", *MERGE[2:-2], "--merged", "merged", *tokens, *options]
            plan_code, plan_message = command(plan_arguments)
            # inspect ends with 2 for a family that is refused, and does not take modules
            inspect_code, _ = command(["inspect", "merged", "--plan"])
            has_modules = any(option.startswith("modules=") for option in options)
            assert (inspect_code in (0, code) or has_modules) and plan_code in (0, 2)
            if code:
                return NAMED, " ".join(message.split())[:160]
            if fault := no_result(Path("merged"), Path("new")) or other_drift(
                [*arguments[5:9], *data, *stacks, "--samples", "9"]
            ):
                return SILENT, fault
            last = json.loads(Path("new/featcal.json").read_text())["drift"][-1]
            drift = f"drift {last['merged']:.3f} to {last['calibrated']:.3f}"
            return OK, f"{drift}, no plan: {plan_message}" if plan_code else drift


def everything() -> dict[str, int]:
    """Return every file and folder below the current one, with the size of the files."""
    return {str(path): path.stat().st_size if path.is_file() else 0 for path in Path().rglob("*")}


def left_by(before: dict[str, int], expected: str = "") -> str:
    """Return which files were left or changed outside the expected folder; empty if none."""
    now = {name: size for name, size in everything().items() if Path(name).parts[0] != expected}
    differs = [name for name in {*before, *now} if before.get(name) != now.get(name)]
    return f"left or changed: {', '.join(sorted(differs)[:5])}" if differs else ""


def bad_message(code: int, message: str) -> str:
    """Return the fault of a command's error, empty if none: it has to be one message of bounded
    length, in words of the library, with a way out.
    """
    if code == 0:
        return ""
    not_ours = r"\bload_batches\.[a-z_]+\b|params\.yaml|\bdvc\b|Traceback|Value error|<.*at 0x"
    foreign = re.search(not_ours, message)
    if code != cli.MISTAKE or message.count("featcal: ") != 1 or len(message) > 3000 or foreign:
        return f"ends with {code} and says {foreign and foreign[0]!r}: {message.strip()[:300]}"
    open_ended = not re.search(r"\n  - |; (it|did|give|known)|must|--help", message)
    return f"no way out: {message.strip()[:300]}" if open_ended else ""


def no_result(merged: Path, folder: Path) -> str:
    """Return the fault of a written folder, empty if none: transformers has to load all of it, with
    the merged model's names and other weights.
    """
    before, after = (
        {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}
        for path in (merged, folder)
    )
    kind = getattr(tf, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    lost = {key: sorted(names) for key, names in report.items() if names}
    if lost or not all(bool(p.isfinite().all()) for p in model.parameters()):
        return f"does not load as it was written: {lost}"
    if before.keys() != after.keys() or all(torch.equal(t, after[n]) for n, t in before.items()):
        return "other tensors than the merged model's, or the same numbers"
    return ""


def other_drift(data_options: list[str]) -> str:
    """Return the difference of featcal compare's drift from featcal.json's, empty if none."""
    arguments = "compare --model merged=merged --model calibrated=new".split()
    arguments += [*data_options, "--skip", "0", "--json"]
    code, message = command(arguments)
    if code:
        return f"compare: {message}"
    drift = json.loads(Path("new/featcal.json").read_text())["drift"]
    recorded = {(row["expert"], model): row[model] for row in drift for model in MODELS}
    rows = json.loads(message)["agreement"]
    measured = {(row["expert"], row["model"]): row["relative_drift"] for row in rows}
    same = measured.keys() == recorded.keys()
    same = same and all(abs(measured[key] - recorded[key]) < 1e-4 for key in recorded)
    return "" if same else f"compare measures {measured}, featcal.json has {recorded}"


def options_of(settings: dict[str, Any]) -> list[str]:
    """Return the settings of a family as options."""
    options = []
    for name, value in settings.items():
        options += ["--set", f"{name}={'false' if value is False else ','.join(value)}"]
    return options


# of a command the folder that it starts from, and the one that it writes
WRITES = {"calibrate": ("merged", "new"), "merge": ("base", "m")}
MERGE = "merge average --base base --expert a=a --expert b=b --out merged".split()
CALIBRATE = (
    "calibrate --base base --merged merged --expert a=a --expert b=b --data a=a.jsonl --data b=b.jsonl --out new "
    "--samples 9 --device cpu"
).split()


def configured(model_folder: str, **values: Any) -> None:
    file = Path(model_folder) / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def cut(file: str) -> None:
    os.truncate(file, Path(file).stat().st_size // 2)


def rows(*lines: str) -> None:
    Path("a.jsonl").write_text("".join(f"{line}\n" for line in lines))


def in_shards(model_folder: str) -> None:
    model = tf.AutoModel.from_pretrained(model_folder)
    Path(model_folder, "model.safetensors").unlink()
    model.save_pretrained(model_folder, max_shard_size="20KB")


def linked(model_folder: str) -> None:
    Path("blobs").mkdir()
    for number, file in enumerate(sorted(Path(model_folder).iterdir())):
        blob = file.rename(Path("blobs") / str(number))
        file.symlink_to(blob.resolve())


def adapted(model_folder: str, **options: Any) -> None:
    from peft import LoraConfig, get_peft_model

    base = tf.AutoModel.from_pretrained("base")
    shutil.rmtree(model_folder)
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False, **options)
    )
    model.save_pretrained(model_folder)


def shaped(model_folder: str, change: Callable[[Any], object]) -> None:
    model = tf.AutoModel.from_pretrained(model_folder)
    change(model)
    model.save_pretrained(model_folder)


def headed(model_folder: str, labels: int) -> None:
    model = tf.BertForSequenceClassification.from_pretrained(model_folder, num_labels=labels)
    model.save_pretrained(model_folder)


FULL = "encoder.layer.0.intermediate.dense.weight"
# by name the harm done to good folders (base, a, b, merged and two files of text), and whether the
# command may then succeed
BAD: dict[str, tuple[Callable[[], object], bool]] = {
    "nothing": (lambda: None, True),
    "NaN in an expert": (lambda: with_tensors(Path("a"), {FULL: torch.full((64, 32), float("nan"))}), False),
    "infinity in the base": (lambda: with_tensors(Path("base"), {FULL: torch.full((64, 32), float("inf"))}), False),
    "a tensor is missing": (lambda: with_tensors(Path("a"), {FULL: None}), False),
    "a tensor of another shape": (lambda: with_tensors(Path("a"), {FULL: torch.zeros(48, 32)}), False),
    "a tensor too many": (lambda: with_tensors(Path("a"), {"more.weight": torch.zeros(3)}), True),
    "whole numbers as weights": (lambda: with_tensors(Path("a"), {FULL: torch.zeros(64, 32, dtype=torch.int8)}), False),
    "a truncated file": (lambda: cut("a/model.safetensors"), False),
    "an empty file": (lambda: Path("a/model.safetensors").write_bytes(b""), False),
    "weights as a pickle": (lambda: Path("a/model.safetensors").rename("a/pytorch_model.bin"), False),
    "an index without its shards": (lambda: (Path("a/model.safetensors").unlink(), Path("a/model.safetensors.index.json").write_text('{"weight_map": {"x": "y.safetensors"}}')), False),  # noqa: E501
    "an index that is no JSON, beside a whole file": (lambda: Path("a/model.safetensors.index.json").write_text("{"), True),
    "no config.json": (lambda: Path("a/config.json").unlink(), False),
    "a config.json that is no JSON": (lambda: Path("a/config.json").write_text("{"), False),
    "a config.json that is a list": (lambda: Path("a/config.json").write_text("[]"), False),
    "no architectures": (lambda: configured("a", architectures=None), False),
    "an unknown architecture": (lambda: configured("a", architectures=["NoSuchModel"]), False),
    "code in the folder": (lambda: configured("a", auto_map={"AutoModel": "code.Model"}), False),
    "a quantised model": (lambda: configured("a", quantization_config={"quant_method": "gptq"}), False),
    "fewer layers in config.json than stored": (lambda: configured("a", num_hidden_layers=1), False),
    "more layers in config.json than stored": (lambda: configured("a", num_hidden_layers=3), False),
    "another width in config.json": (lambda: configured("a", hidden_size=48), False),
    "heads that do not divide the width": (lambda: configured("a", num_attention_heads=5), False),
    "a width that is text": (lambda: configured("a", hidden_size="wide"), False),
    "no tokenizer": (lambda: [Path(name, "tokenizer.json").unlink() for name in ("base", "merged")], False),
    "a tokenizer that is no JSON": (lambda: Path("base/tokenizer.json").write_text("{"), False),
    "an expert of another family": (lambda: (shutil.rmtree("a"), folder(Path("a"), "roberta", 1)), False),
    "another architecture as expert": (lambda: (shutil.rmtree("a"), folder(Path("a"), "llama", 1)), False),
    "another architecture as base": (lambda: (shutil.rmtree("base"), folder(Path("base"), "llama", 1)), False),
    "no folder of an expert": (lambda: shutil.rmtree("a"), False),
    "a file instead of a folder": (lambda: (shutil.rmtree("a"), Path("a").write_text("")), False),
    "no data": (lambda: Path("a.jsonl").unlink(), False),
    "empty data": (lambda: rows(), False),
    "too few samples": (lambda: rows('{"text": "a"}'), False),
    "data that is no JSON": (lambda: rows(*["{"] * 9), False),
    "rows that are numbers": (lambda: rows(*["3"] * 9), False),
    "rows without text": (lambda: rows(*['{"label": 3}'] * 9), False),
    "text that is a number": (lambda: rows(*['{"text": 3}'] * 9), False),
    "data that is not UTF-8": (lambda: Path("a.jsonl").write_bytes(b'{"text": "\xff"}\n' * 9), False),
    "the result exists": (lambda: Path("new").mkdir(), False),
    "the result is a file": (lambda: Path("new").write_text(""), False),
    "the result is a dangling link": (lambda: Path("new").symlink_to("gone"), False),
    "an adapter without weights": (lambda: (shutil.rmtree("a"), Path("a").mkdir(), Path("a/adapter_config.json").write_text("{}")), False),  # noqa: E501
    "an empty recipe in the merged folder": (lambda: Path("merged/mergekit_config.yml").write_text(""), True),
    "other tensors' order": (lambda: save_file(dict([*load_file("a/model.safetensors").items()][::-1]), "a/model.safetensors"), True),  # noqa: E501
    "shards": (lambda: in_shards("a"), True),
    "links, as in the hub's cache": (lambda: linked("a"), True),
    "a LoRA expert": (lambda: adapted("a", bias="none"), True),
    "a LoRA expert with biases and a saved module": (lambda: adapted("a", bias="all", modules_to_save=["pooler.dense"]), True),
    "an expert with more words": (lambda: shaped("a", lambda model: model.resize_token_embeddings(270)), True),
    "an expert with fewer words": (lambda: shaped("a", lambda model: model.resize_token_embeddings(250)), True),
    "experts with heads of their own": (lambda: [headed(name, labels) for name, labels in (("a", 2), ("b", 5))], True),
    "half precision": (lambda: [with_tensors(Path(p), {n: t.bfloat16() for n, t in tensors(Path(p)).items()}) for p in ("base", "a", "b", "merged")], True),  # noqa: E501
}  # fmt: skip


# options and commands that are refused for good folders; a calibration's options are added to a
# good command
ADDED = """
--ridge 0 | --ridge nan | --ridge -1 | --ridge x | --anchor-blend inf | --interpolation 2 | --interpolation -1 | --set residual=2 |
--set order=none | --set affine=none | --set affine=joint --set bias=false | --preset none |
--samples 0 | --samples 10 | --samples x | --set tokens=0 | --set tokens=100000 | --seed -1 | --set batch=0 |
--set modules=nowhere | --set modules=query,query | --set stack=nowhere | --set stack=encoder | --device tpu | --device cuda |
--dtype float16 | --host-memory much | --host-memory -1GiB | --set work=a.jsonl | --set work=base/in | --out base --force |
--out base/in | --out /proc/new | --out a.jsonl --force | --expert a=a | --expert c=a | --expert a | --expert =a |
--data c=a.jsonl | --data a | --data a= | --set recipe=nowhere.yaml | --set recipe=a | --set recipe=a.jsonl |
--push-to-hub x | --push-to-hub x/y/z | --nonsense | more | --merged nowhere |
--merged a.jsonl | --base nowhere
"""
PAIR = "--base base --expert a=a --expert b=b"
BOTH_DATA = "--data a=a.jsonl --data b=b.jsonl"
WHOLE = f"""
merge nonsense {PAIR} --out m | merge --out m {PAIR} | merge average --base base --out m | merge average --expert a=a --out m |
merge task_arithmetic {PAIR} --out m --scale nan | merge task_arithmetic {PAIR} --out m --scale x |
merge ties {PAIR} --out m --set density=2 | merge ties {PAIR} --out m --set density | merge ties {PAIR} --out m --set dens=1 |
merge average {PAIR} --out m --set scale=1 | merge average {PAIR} --out m --set embeddings=none | merge average {PAIR} --out a |
merge regmean {PAIR} --out m | merge regmean {PAIR} --out m --data a=a.jsonl --samples 9 | merge fisher {PAIR} --out m |
merge lot {PAIR} --out m | merge adamerging {PAIR} --out m {BOTH_DATA} --samples 9 |
merge average {PAIR} --out m --head nowhere | merge average {PAIR} --out m --device tpu |
compare --model m=nowhere --expert a=a --data a=a.jsonl |
compare --model m=merged --expert a=a --data b=b.jsonl | compare --model merged --expert a=a --data a=a.jsonl |
compare --model m=merged --expert a=a --data a=a.jsonl --samples 1 |
evaluate --model merged --data a=a.jsonl --set split=train | evaluate --model merged --data a=nowhere |
evaluate --model nowhere --data a=a.jsonl | evaluate --model merged --data a=a.jsonl --template none |
evaluate --model merged --clip base --data a=a.jsonl | evaluate --model merged --data a=a.jsonl --classes b=x,y |
plan --merged merged {PAIR} | plan --merged merged {PAIR} --set tokens=100000 | plan --merged merged {PAIR} --set tokens=9 --set ranks=3 |
plan --merged merged {PAIR} --set tokens=9 --host-memory much | plan --merged nowhere {PAIR} --set tokens=9 |
inspect nowhere | inspect ~nobody | inspect a.jsonl | inspect | convert base --out c | convert nowhere --out c |
nonsense | --nonsense | --log-level loud --log-file x inspect base | --log-file base inspect base
"""


# commands that succeed for good folders; each writes the folder m
FINE = f"""
merge average {PAIR} --out m | merge task_arithmetic {PAIR} --out m --scale 0.4 | merge ties {PAIR} --out m --set density=0.5 |
merge dare {PAIR} --out m | merge dare_ties {PAIR} --out m | merge breadcrumbs {PAIR} --out m | merge consensus {PAIR} --out m |
merge pcb {PAIR} --out m | merge tsv_merge {PAIR} --out m | merge iso_c {PAIR} --out m | merge iso_cts {PAIR} --out m |
merge wudi {PAIR} --out m | merge wudi_closed_form {PAIR} --out m | merge average {PAIR} --out m --set embeddings=base |
merge regmean {PAIR} --out m {BOTH_DATA} --samples 9 | merge regmean_plus_plus {PAIR} --out m {BOTH_DATA} --samples 9 |
merge lot {PAIR} --out m {BOTH_DATA} --samples 9 | merge mats {PAIR} --out m {BOTH_DATA} --samples 9 |
compare --model m=merged --model b=base --expert a=a --data a=a.jsonl --samples 4 --skip 4 | inspect merged |
inspect merged --json |
inspect merged --plan --json | plan --merged merged {PAIR} --set tokens=9
"""


class Empty(torch.nn.Module):
    """A model without parameters."""


def small(kind: str = "") -> torch.nn.Module:
    """Return a tower in memory: `meta` without values, `whole` of integers."""
    model = clip(dtype=torch.float32)
    if kind == "whole":
        for part in model.modules():
            if isinstance(part, torch.nn.Linear):
                part.weight = torch.nn.Parameter(part.weight.to(torch.int8), requires_grad=False)
    return model.to("meta") if kind == "meta" else model


# the wrong arguments of each function, in place of those on good models and batches; Python's own
# TypeError refuses a wrong type
WRONG: dict[str, list[dict[str, Callable[[], Any]]]] = {
    "calibrate": [
        {"plan": lambda: featcal.BlockPlan(featcal.Stack(3, 4))}, {"plan": lambda: featcal.BlockPlan("a")},
        {"plan": lambda: featcal.BlockPlan()}, {"dtype": lambda: torch.int32},
        {"settings": lambda: featcal.Calibration(rigde=1)}, {"settings": lambda: featcal.Calibration(modules="q")},
        {"merged": lambda: small("meta")}, {"merged": lambda: small("whole")}, {"merged": Empty}, {"merged": lambda: None},
        {"merged": lambda: 3}, {"merged": lambda: "nowhere"}, {"base": lambda: small("meta")}, {"base": lambda: Empty()},
        {"experts": lambda: {"a": small("meta"), "b": small()}}, {"experts": lambda: {"a": small("whole"), "b": small()}},
        {"experts": lambda: {"a": 3, "b": small()}}, {"experts": lambda: [small(), small()]}, {"experts": dict},
        {"batches": lambda: None}, {"batches": lambda: {"a": [1], "b": [2]}}, {"batches": lambda: {"a": print, "b": print}},
        {"batches": lambda: {name: [{"pixel_values": "x"}] for name in "ab"}}, {"batches": lambda: {"a": images(1)}},
        {"host_memory": lambda: -1}, {"device": lambda: 3}, {"device": lambda: "tpu"},
    ],
    "merge": [
        {"method": lambda: 3}, {"method": lambda: "averge"}, {"densty": lambda: 3}, {"device": lambda: 7},
        {"experts": lambda: {"a": small("meta"), "b": small()}}, {"experts": lambda: {"a": small("whole"), "b": small()}},
        {"experts": lambda: {1, 2}}, {"base": lambda: small("meta")}, {"base": lambda: small("whole")},
        {"scale": lambda: "0.3"}, {"head": lambda: 7}, {"embeddings": lambda: "none"}, {"batches": lambda: 3},
    ],
    "compare": [
        {"models": lambda: [small()]}, {"models": lambda: {"m": small("meta")}}, {"models": lambda: {"m": small("whole")}},
        {"experts": lambda: {"a": small("meta"), "b": small()}}, {"dtype": lambda: torch.int8},
        {"models": lambda: {"m": 3}}, {"batches": lambda: 3},
    ],
    "load_batches": [
        {"data": lambda: [1]}, {"model": lambda: 3}, {"model": small}, {"data": lambda: {"a": 3}}, {"samples": lambda: 1.5},
        {"dtype": lambda: "float32"}, {"split": lambda: 3}, {"tokens": lambda: "x"}, {"seed": lambda: -1},
    ],
    "surgery": [{"rank": lambda: "x"}, {"head": lambda: 3}, {"steps": lambda: -1}, {"merged": lambda: small("meta")}],
}  # fmt: skip


def wrong_call(name: str, other: dict[str, Callable[[], Any]]) -> tuple[str, str]:
    """Return the verdict on a call in Python with a fault in it."""
    good = experiment(torch.float32, tasks=("a", "b"), build=lambda dtype: small())
    base, merged = good.pop("base"), good.pop("merged")  # experts and batches are left
    arguments_by_function = {
        # auto keeps the merged model with few samples
        "calibrate": {"merged": merged, "base": base, "settings": featcal.Calibration(), **good},
        "merge": {"method": "task_arithmetic", "base": base, "experts": good["experts"]},
        "compare": {"models": {"m": merged}, **good},
        "load_batches": {"data": {"a": "nowhere"}, "model": "nowhere"},
        "surgery": {"merged": merged, "steps": 1, **good},
    }
    changes = {key: value() for key, value in other.items()}
    getattr(featcal, name)(**arguments_by_function[name] | changes)
    return SILENT, "a result came out"


def lines(table: str) -> list[list[str]]:
    return [line.split() for line in table.replace("\n", " ").split("|")]


def command(arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of a command line, and its error or its output."""
    errors, output = io.StringIO(), io.StringIO()
    with redirect_stderr(errors), redirect_stdout(output):
        code = cli.main(["--quiet", *arguments])
    return code, errors.getvalue() if code else output.getvalue()


def on_copy(
    good: Path, root: Path, arguments: list[str], fine: bool, harm: Any = None
) -> tuple[str, str]:
    """Return the verdict on one command on a copy of good folders, after some harm to them.

    fine: whether the command has to do what it says, and nothing else.
    """
    shutil.copytree(good, root)
    with chdir(root):
        if harm:
            harm()
        before = everything()
        code, message = command(arguments)
        start, out = WRITES.get(arguments[0], ("", ""))
        out = "" if code or "--dry-run" in arguments else out
        fault = bad_message(code, message) or left_by(before, out)
        if fine and out:
            fault = fault or no_result(Path(start), Path(out))
        if fault or (code == 0 and not fine):
            return SILENT, fault or "a result came out"
        if code == 0:
            return OK, ""
        text = message.strip()[:300]
        return (TRACEBACK, f"refused though it is fine: {text}") if fine else (NAMED, text[:160])


def families() -> dict[str, tuple[Callable[[], tuple[str, str]], Callable[[], tuple[str, str]]]]:
    """Return the two trials of each family by its name: in memory, and by the command line."""
    cases = {title: (FAMILIES[name], {}) for name, title in SHOWN.items()}
    for name, (kind, config, batches, settings) in MORE_FAMILIES.items():
        cases[name] = family(kind, config, {}, batches=batches), settings
    return {n: (partial(in_memory, *c), partial(by_command, *c)) for n, c in cases.items()}


def verdict_of(run: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Return the verdict on a trial, and its message."""
    try:
        return run()
    except FeatCalError as error:
        return NAMED, str(error).splitlines()[0][:110]
    except Exception as error:  # the campaign looks for these
        trace = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in trace if "/featcal/" in frame.filename]
        at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        return TRACEBACK, f"{type(error).__name__}: {str(error)[:110]}{at}"


def matrix(verdicts: dict[str, str]) -> list[str]:
    """Return the rows of the table in book/families.md from the verdicts by name, with switches."""
    parts = [name.partition(", --") for name in verdicts if ", --" in name]
    switched = {name: f"{name} (`--{switch}`)" for name, _, switch in parts}
    plain = {name: verdict for name, verdict in verdicts.items() if ", --" not in name}
    fine = [name for name, verdict in plain.items() if verdict == OK]
    refused = [name for name, verdict in plain.items() if verdict == NAMED and name not in switched]
    rows = {"calibrated": fine, "with a switch": switched.values(), "refused by name": refused}
    return [f"| {verdict} | {', '.join(names)} |" for verdict, names in rows.items()]


def main(selected: list[str]) -> int:
    """Everything, or what is named; 1 where something is a fault of ours."""
    tf.logging.set_verbosity_error()
    counts: Counter[str] = Counter()
    verdicts: dict[str, str] = {}

    def report(group: str, name: str, run: Callable[[], tuple[str, str]]) -> None:
        if selected and name not in selected and group not in selected:
            return
        verdicts[name], message = verdict_of(run)
        counts[verdicts[name]] += 1
        print(f"{verdicts[name]:10} {name}: {' '.join(message.split())}", flush=True)

    for name, (by_call, by_folders) in families().items():
        report("families", name, by_call)
        report("families", f"{name} (command)", by_folders)
    if not selected or "families" in selected:
        print("\n".join(matrix({name: verdicts[name] for name in families()})), flush=True)
    for function, others in WRONG.items():
        for number, other in enumerate(others):
            name = f"featcal.{function}: {', '.join(other)} ({number})"
            report("calls", name, partial(wrong_call, function, other))
    with tempfile.TemporaryDirectory() as root:
        good = Path(root) / "good"
        for seed, name in enumerate(("base", "a", "b")):
            folder(good / name, "bert", seed)
        for name in "ab":
            jsonl(good / f"{name}.jsonl", [{"text": word} for word in WORDS])
        with chdir(good):
            assert command(MERGE)[0] == 0
        folders = (Path(root) / str(number) for number in count())

        def report_copy(group: str, name: str, arguments: list[str], *fine_and_harm: Any) -> None:
            report(group, name, partial(on_copy, good, next(folders), arguments, *fine_and_harm))

        for harm_name, (harm, fine) in BAD.items():
            report_copy("inputs", f"{harm_name} (run)", CALIBRATE, fine, harm)
            report_copy("inputs", f"{harm_name} (dry run)", [*CALIBRATE, "--dry-run"], fine, harm)
        for options in lines(ADDED):
            report_copy("commands", " ".join(options), [*CALIBRATE, *options], False)
        for table, fine in ((WHOLE, False), (FINE, True)):
            for arguments in lines(table):
                report_copy("commands", " ".join(arguments), arguments, fine)
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())))
    return 1 if counts[SILENT] or counts[TRACEBACK] else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
