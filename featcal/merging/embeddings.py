"""Experts whose vocabularies differ from the base's: their tables of words stay out of the merge,
the base's are kept.

Methods that run the experts then run them with the base's tables, so the data are to be tokenised
with the base's tokenizer.
"""

from dataclasses import dataclass

from featcal.merging.sources import Derived, Source
from featcal.merging.vocabulary import is_vocabulary


@dataclass
class Without(Derived):
    """A source that does not show some of its tensors."""

    hidden: frozenset[str]

    @property
    def names(self) -> list[str]:
        return [name for name in self.inner.names if name not in self.hidden]


def kept_embeddings(
    base: Source, experts: dict[str, Source], keep: bool, apart: frozenset[str] = frozenset()
) -> tuple[list[str], Source, dict[str, Source]]:
    """Names of the base's tables of words, which stay as is, and all models without theirs; with
    `keep` off all as it was.

    apart: further tensors that stay the base's.
    """
    hidden = apart | frozenset(
        n for s in (base, *experts.values()) for n in s.names if keep and is_vocabulary(n)
    )
    if not hidden:
        return [], base, experts
    kept = [name for name in base.names if name in hidden]
    return (
        kept,
        Without(base, hidden),
        {task: Without(expert, hidden) for task, expert in experts.items()},
    )
