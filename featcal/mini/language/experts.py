"""How the mini Llamas' three experts are trained: the settings that suites/mini gives to featcal.suites.fine_tune_text.

Embeddings, final norm and language head stay those of the base: MergeBench's merging leaves embeddings and head out as well,
published experts differ in vocabulary size, and what lies outside the blocks no calibration can follow.
"""

from typing import Any

FROZEN = ("model.embed_tokens", "model.norm", "lm_head")
EXPERTS: dict[str, dict[str, Any]] = {
    "llama_3b": {"steps": 150, "lr": 2e-3, "batch": 32, "frozen": FROZEN},
    "llama_8b": {"steps": 150, "lr": 2e-3, "batch": 32, "frozen": FROZEN},
}
