"""A small punkt_tab: the files with which nltk splits English sentences."""

from pathlib import Path

# file -> its lines: pairs of words and counts are separated by tabs
ENGLISH = {
    "abbrev_types.txt": ("dr", "e.g", "i.e", "mr", "mrs"),
    "collocations.tab": ("st\tlouis",),
    "sent_starters.txt": ("the", "they", "this"),
    "ortho_context.tab": (
        "a\t46",
        "ship\t32",
        "the\t46",
    ),  # cases and places a word was seen in, a sum of powers of two
}


def punkt_tab(folder: Path) -> dict[str, str]:
    """Write it below `folder`; return the variables by which nltk finds it."""
    place = folder / "tokenizers/punkt_tab/english"
    place.mkdir(parents=True)
    for name, lines in ENGLISH.items():
        (place / name).write_text("".join(f"{line}\n" for line in lines))
    return {"NLTK_DATA": str(folder)}
