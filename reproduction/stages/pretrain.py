"""Stage `pretrain`: the base of one role of the synthetic suite; its output ships with the package."""

from reproduction.results import project_root


def run(key: str) -> None:
    """Write reproduction/mini/models/<role>/, which ships with the package; an interrupted run
    continues.
    """
    root = project_root()
    out, state = root / "reproduction" / "mini" / "models" / key, root / ".featcal" / "pretrain"
    if key.startswith("llama"):
        from reproduction.mini.language.llama import pretrain_llama as pretrain
    elif key.startswith("flan_t5"):
        from reproduction.mini.language.t5 import pretrain_t5 as pretrain
    else:
        from reproduction.mini.pretrain import pretrain
    pretrain(key, out=out, state_folder=state)
