"""A vision tower as the paper's Eq. 1 sees it: the features before and behind every block, and the map of each block.

Layers are transformer blocks; what comes before the first one is the paper's x, which two models share only where fine-tuning
left the embeddings alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from featcal.blocks.capture import Arguments, block_outputs, first_inputs, model_call, module_inputs, module_outputs
from featcal.blocks.plan import Stack, blocks_of
from featcal.blocks.plans import plan_for
from featcal.blocks.replay import step
from featcal.core.precision import exact_products

BRANCH_ENDS = ("self_attn.out_proj", "mlp.fc2")  # whose outputs a CLIP block adds to what reaches it


@dataclass(frozen=True)
class Tower:
    """One model on n images.

    features: h_0 … h_L, each (n, tokens, d), from the model's own forward.   norm: behind the last block, on the class token.
    """

    blocks: nn.ModuleList
    stack: Stack
    arguments: Arguments
    features: list[Tensor]
    norm: nn.Module

    @property
    def maps(self) -> list[Callable[[Tensor], Tensor]]:
        """f_1 … f_L, one per block, each run by itself."""
        return [partial(self._map, block) for block in self.blocks]

    def _map(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return step(block, self.stack, hidden, self.arguments)[0]

    @torch.no_grad()
    def branches(self, index: int, hidden: Tensor) -> Tensor:
        """g(h) of Eq. 25 for one block: what its two residual branches add to h, taken where they end."""
        with module_outputs(self.blocks[index], BRANCH_ENDS) as seen:
            self._map(self.blocks[index], hidden)
        return sum((seen[name] for name in BRANCH_ENDS), torch.zeros_like(hidden))

    @torch.no_grad()
    def inputs(self, index: int, hidden: Tensor, names: list[str]) -> dict[str, Tensor]:
        """What reaches the named modules of one block when `hidden` reaches the block, as rows (tokens of all images, d)."""
        with module_inputs(self.blocks[index], names) as seen:
            self._map(self.blocks[index], hidden)
        return {name: x.flatten(0, -2) for name, x in seen.items()}


@torch.no_grad()
def tower(model: nn.Module, pixels: Tensor) -> Tower:
    """A vision model on images (n, 3, H, W), all at once, in the precision of its weights."""
    stack = plan_for(model).stacks[0]
    blocks, weight = blocks_of(model, stack), next(model.parameters())
    batch = {"pixel_values": pixels.to(weight.device, weight.dtype)}
    with exact_products():
        with block_outputs(model, blocks) as seen:
            model(**model_call(model, batch))
        _, arguments = first_inputs(model, list(blocks), batch)
    return Tower(blocks, stack, arguments, list(seen.values()), model.get_submodule("post_layernorm"))
