"""FLAN-T5 with experts or LoRA folders and Llama in shards, as transformers 4 wrote them."""

import json
from pathlib import Path

import torch
import transformers as tf
from huggingface_hub import save_torch_state_dict
from rehearsal_images import drawn, fine_tuned, made
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from reproduction.prepare.tasks import DOMAINS, GLUE

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = [chr(code) for code in range(33, 127)]
T5_IDS = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
T5_SIZES = {"base": (32, 2), "large": (48, 2)}  # width, blocks of the encoder and of the decoder
LORA = dict(r=16, lora_alpha=32, lora_dropout=0.1, bias="none", target_modules=["q", "v"])
LLAMAS = {  # width, blocks, shards, whether the head is the embedding
    "Llama-3.2-3B-Instruct": (32, 2, 2, True),
    "Llama-3.1-8B-Instruct": (48, 2, 4, False),
}
NAMED = "begin_of_text end_of_text start_header_id end_header_id eom_id eot_id"
SPECIAL = tuple(f"<|{name}|>" for name in NAMED.split())
CHAT = "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>{% endfor %}"
SHORT = 4.0  # how much likelier the end is than another token: answers of a few tokens


def text_models(folder: Path, sizes: tuple[str, ...], llamas: tuple[str, ...]) -> dict[str, Path]:
    """The FLAN-T5s of these sizes and the Llamas of these names, each with its experts."""
    parts = [*(_t5(folder, size) for size in sizes), *(_llama(folder, name) for name in llamas)]
    return {name: place for part in parts for name, place in part.items()}


def _t5(folder: Path, size: str) -> dict[str, Path]:
    """google/flan-t5-<size>; whole experts of the base, adapters of the large one."""
    base = t5_model(size)
    found = {f"google/flan-t5-{size}": t5_folder(folder / f"flan-t5-{size}", base)}
    for task in GLUE:
        if size == "base":
            name = f"tanganke/flan-t5-base_glue-{task}"
            found[name] = t5_folder(folder / name, fine_tuned(name, base))
        else:
            name = f"tanganke/flan-t5-{size}_glue-{task}_lora-16"
            found[name] = lora_folder(folder / name, name, base, f"google/flan-t5-{size}")
    return found


def t5_model(size: str) -> tf.T5ForConditionalGeneration:
    """Build a gated T5 with a head of its own and more rows than tokens."""
    width, blocks = T5_SIZES[size]
    config = dict(d_model=width, d_kv=8, d_ff=2 * width, num_heads=4, num_layers=blocks)
    config |= dict(num_decoder_layers=blocks, feed_forward_proj="gated-gelu", **T5_IDS)
    config |= dict(tie_word_embeddings=False, relative_attention_num_buckets=32)
    config |= dict(vocab_size=len(t5_tokenizer()) + 28)
    return made(f"flan-t5-{size}", lambda: tf.T5ForConditionalGeneration(tf.T5Config(**config)))


def t5_folder(folder: Path, model: tf.T5ForConditionalGeneration) -> Path:
    """One safetensors file with the head of its own, and a configuration that says so."""
    folder.mkdir(parents=True)
    own = model.state_dict().items()
    state = {name: tensor.clone() for name, tensor in own if "embed_tokens" not in name}
    state["lm_head.weight"] = t5_head(folder.name, state["shared.weight"])
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    told = {"architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False}
    told |= {"output_past": True, "n_positions": 512, "dropout_rate": 0.1}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | told))
    generation = T5_IDS | {"_from_model_config": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    t5_tokenizer().save_pretrained(folder)
    return folder


def t5_head(name: str, like: torch.Tensor) -> torch.Tensor:
    """Weights of the head, drawn for a base and near its base's for an expert."""
    keys = (("flan-t5-base" if "_glue-" in name else name, "head"), (name, "head's change"))
    head, change = (drawn(*key).standard_normal(tuple(like.shape)) for key in keys)
    return torch.from_numpy(head).float() + 0.02 * torch.from_numpy(change).float()


def t5_tokenizer() -> tf.T5Tokenizer:
    """Return T5's own class on single characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0 - i / 100) for i, letter in enumerate(LETTERS)]
    return tf.T5Tokenizer(vocab=pieces, model_max_length=512)


def lora_folder(
    folder: Path, name: str, base: tf.T5ForConditionalGeneration, base_name: str
) -> Path:
    """Write adapters as PEFT does: a pair for every q and v."""
    folder.mkdir(parents=True)
    state = {}
    for key, module in base.named_modules():
        if key.rpartition(".")[2] in LORA["target_modules"]:
            shapes = {"A": (LORA["r"], module.in_features), "B": (module.out_features, LORA["r"])}
            for part, shape in shapes.items():
                values = torch.from_numpy(0.05 * drawn(name, key, part).standard_normal(shape))
                state[f"base_model.model.{key}.lora_{part}.weight"] = values.float()
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    told = LORA | dict(base_model_name_or_path=base_name, peft_type="LORA", inference_mode=True)
    told |= dict(task_type="SEQ_2_SEQ_LM", fan_in_fan_out=False, init_lora_weights=True)
    told |= dict.fromkeys(("modules_to_save", "auto_mapping", "revision"))
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def _llama(folder: Path, name: str) -> dict[str, Path]:
    """meta-llama/<name>, and MergeBench's experts of it for the three domains that are merged."""
    base = llama_model(name)
    found = {f"meta-llama/{name}": llama_folder(folder / name, base, LLAMAS[name][2])}
    for domain in DOMAINS:
        expert = f"MergeBench/{name}_{domain}"
        found[expert] = llama_folder(folder / expert, fine_tuned(expert, base), LLAMAS[name][2])
    return found


def llama_model(name: str) -> tf.LlamaForCausalLM:
    """Build a Llama 3 whose end token is likely everywhere, so that answers are short."""
    width, blocks, _, tied = LLAMAS[name]
    config = llama_config(width, blocks, tied)
    model = made(name, lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**config)))
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 4.0
        head = model.get_output_embeddings().weight
        head[:, 0] = 4.0
        head[len(BYTES) + SPECIAL.index("<|eot_id|>"), 0] += SHORT
    return model


def llama_config(width: int, blocks: int, tied: bool) -> dict:
    """Return config.json as published: flat rotary settings, several end tokens, torch_dtype."""
    rope = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"original_max_position_embeddings": 8192}
    first = len(BYTES)
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": blocks, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": first + 256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "rope_scaling": rope | {"rope_type": "llama3"}, "tie_word_embeddings": tied, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": first, "eos_token_id": [first + 1, first + 4, first + 5], "pretraining_tp": 1, "use_cache": True,
    }  # fmt: skip


def llama_folder(folder: Path, model: tf.LlamaForCausalLM, shards: int) -> Path:
    """Write bfloat16 shards with an index, a tokenizer without padding, and Meta's own copy."""
    folder.mkdir(parents=True)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    own = model.config
    if own.tie_word_embeddings:
        del state["lm_head.weight"]
    sizes = [tensor.nbytes for tensor in state.values()]
    save_torch_state_dict(state, folder, max_shard_size=sum(sizes) // shards + max(sizes) // 2)
    config = llama_config(own.hidden_size, own.num_hidden_layers, own.tie_word_embeddings)
    config |= {"torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0"}
    (folder / "config.json").write_text(json.dumps(config))
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    generation |= {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "original").mkdir()
    (folder / "original/consolidated.00.pth").write_bytes(b"a pickle, which is never fetched")
    llama_tokenizer().save_pretrained(folder)
    return folder


def llama_tokenizer() -> tf.PreTrainedTokenizerFast:
    """Every byte is a token; a text begins with its mark, and nothing pads."""
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(BYTES)}, []))
    inner.add_special_tokens(list(SPECIAL))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    begin = SPECIAL[0]
    special = [(begin, inner.token_to_id(begin))]
    around = {"single": f"{begin} $A", "pair": f"{begin} $A $B"}
    inner.post_processor = processors.TemplateProcessing(**around, special_tokens=special)
    names = {"bos_token": begin, "eos_token": "<|eot_id|>", "model_max_length": 131072}
    names |= {"model_input_names": ["input_ids", "attention_mask"], "chat_template": CHAT}
    return tf.PreTrainedTokenizerFast(tokenizer_object=inner, **names)
