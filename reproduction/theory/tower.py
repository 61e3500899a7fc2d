"""An encoder as the paper's Eq. 1 sees it: the features before and behind every block, and the map
of each block.

Layers are transformer blocks; what comes before the first one is the paper's x, which two models
share only where fine-tuning left the embeddings alone. Padding is no token: its features are zero,
and nothing reads them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from featcal.core.precision import exact_products
from featcal.models.batch import token_mean
from featcal.models.blocks import (
    Arguments,
    block_outputs,
    first_inputs,
    model_call,
    module_inputs,
    module_outputs,
    step,
)
from featcal.models.families import plan_for
from featcal.models.plan import Stack, blocks_of

Batch = Mapping[str, Tensor]
BRANCH_ENDS = (
    "self_attn.out_proj",
    "mlp.fc2",
)  # whose outputs a CLIP block adds to what reaches it


@dataclass(frozen=True)
class Tower:
    """One model on n images or texts.

    features: h_0 … h_L, each (n, tokens, d), from the model's own forward.   norm: behind the last
    block, on what is pooled.
    mask: 1 where a token counts, (n, tokens); None where all do and the class token is what is
    pooled.
    """

    blocks: nn.ModuleList
    stack: Stack
    arguments: Arguments
    features: list[Tensor]
    norm: nn.Module
    mask: Tensor | None = None

    @property
    def pooled(self) -> Tensor:
        """(n, d) of what the last block puts out: the class token, or of texts the mean over
        tokens.
        """
        return (
            self.features[-1][:, 0]
            if self.mask is None
            else token_mean(self.features[-1], self.mask)
        )

    @property
    def adds(self) -> bool:
        """Whether a block adds its branches to what reaches it, as Eq. 25 says; BERT's has a norm
        behind the sum.
        """
        return all(name in dict(self.blocks[0].named_modules()) for name in BRANCH_ENDS)

    @property
    def maps(self) -> list[Callable[[Tensor], Tensor]]:
        """f_1 … f_L, one per block, each run by itself."""
        return [partial(self._map, block) for block in self.blocks]

    def _map(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return counted(step(block, self.stack, hidden, self.arguments)[0], self.mask)

    @torch.no_grad()
    def branches(self, index: int, hidden: Tensor) -> Tensor:
        """g(h) of Eq. 25 for one block: what its two residual branches add to h, taken where they
        end.
        """
        with module_outputs(self.blocks[index], BRANCH_ENDS) as seen:
            self._map(self.blocks[index], hidden)
        return sum((seen[name] for name in BRANCH_ENDS), torch.zeros_like(hidden))

    @torch.no_grad()
    def inputs(self, index: int, hidden: Tensor, names: list[str]) -> dict[str, Tensor]:
        """What reaches the named modules of one block when `hidden` reaches the block, as rows
        (tokens of all images, d).
        """
        with module_inputs(self.blocks[index], names) as seen:
            self._map(self.blocks[index], hidden)
        return {
            name: x.flatten(0, -2) if self.mask is None else x[self.mask.bool()]
            for name, x in seen.items()
        }


@torch.no_grad()
def tower(model: nn.Module, batch: Batch) -> Tower:
    """An encoder on one batch of images or texts, all at once, in the precision of its weights."""
    stack = plan_for(model).stacks[0]
    blocks, weight = blocks_of(model, stack), next(model.parameters())
    batch = {
        name: x.to(weight.device, weight.dtype if x.is_floating_point() else None)
        for name, x in batch.items()
    }
    mask = batch.get("attention_mask")
    with exact_products():
        with block_outputs(model, blocks) as seen:
            model(**model_call(model, batch))
        _, arguments = first_inputs(model, list(blocks), batch)
    norm = model.get_submodule("post_layernorm") if mask is None else nn.Identity()
    return Tower(blocks, stack, arguments, [counted(h, mask) for h in seen.values()], norm, mask)


def counted(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """hidden (n, tokens, d) with zeros at padding."""
    return hidden if mask is None else hidden * mask.to(hidden)[..., None]
