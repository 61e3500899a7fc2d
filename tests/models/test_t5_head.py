"""A T5 whose head is not its embeddings, as the hub's FLAN-T5 has it, stays so through loading,
merging and saving.
"""

import json

import language
import pytest
import torch
from safetensors.torch import load_file, save_file

import featcal
from featcal.models.load import load_model
from featcal.models.save import save_model

HEAD, SHARED = "lm_head.weight", "shared.weight"
COPIES = (
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
)  # which older files hold beside the shared one


def untied(folder, seed):
    """A folder as the hub has it: the head and every copy of the embeddings as tensors of their own
    names.
    """
    language.folder(folder, "t5", seed)
    tensors = load_file(folder / "model.safetensors")
    embeddings = tensors.get(SHARED, tensors.get(HEAD))
    tensors[SHARED] = embeddings
    tensors |= {name: embeddings.clone() for name in COPIES}
    tensors[HEAD] = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(seed))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("t5")
    return place, {name: untied(place / name, seed) for seed, name in enumerate(("base", "expert"))}


def require(model, tensors):
    found = model.state_dict()
    assert torch.equal(found[HEAD], tensors[HEAD]) and torch.equal(found[SHARED], tensors[SHARED])
    assert not torch.equal(found[HEAD], found[SHARED])


def test_the_head_is_loaded_and_saved_apart_from_the_embeddings(folders, tmp_path):
    place, tensors = folders
    model = load_model(place / "base")
    require(model, tensors["base"])
    save_model(model, tmp_path / "copy", like=place / "base")
    require(load_model(tmp_path / "copy"), tensors["base"])


@pytest.mark.parametrize("streamed", [False, True])
def test_head_and_embeddings_are_merged_apart(folders, tmp_path, streamed):
    place, tensors = folders
    out = tmp_path / "merged" if streamed else None
    models = {
        name: place / name if streamed else load_model(place / name) for name in ("base", "expert")
    }
    merged = featcal.merge(
        "task_arithmetic", models["base"], {"cola": models["expert"]}, scale=0.5, out=out
    )
    found = (load_model(out) if streamed else merged).state_dict()
    for name in (HEAD, SHARED):
        base, expert = tensors["base"][name], tensors["expert"][name]
        assert torch.allclose(found[name], base + 0.5 * (expert - base), atol=1e-6), name
